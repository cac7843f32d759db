"""How a file is opened for writing by the main process alone; two rules ask."""

from __future__ import annotations

import libcst as cst

from migrate.edit import Edit, Text
from migrate.facts.main_process import names_rank
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import method_name, receiver


def is_for_main(source: Source, path: cst.BaseExpression) -> bool:
    """Whether a path is chosen by rank already; told by the words in it."""
    return names_rank(source, path) or "devnull" in source.code(path)


def main_path(
    context: Context, source: Source, call: cst.Call, path: cst.BaseExpression
) -> list[Edit]:
    """The edits after which a call opens `path` in the main process, elsewhere the null device."""
    name, need = context.helper(source, "is_main_process")
    choice = f" if {name}() else os.devnull"
    edits: list[Edit] = [need]  # which imports `os`, too
    start, stop = source.span(path)
    if method_name(call) == "open" and receiver(call) is path:
        first = source.span(call.args[0]).start
        edits.append(Text(source, start, start, "open(", order=(9, 0)))
        edits.append(Text(source, stop, first, f"{choice}, "))
        return edits
    if isinstance(path, cst.IfExp | cst.Lambda | cst.NamedExpr) and not path.lpar:
        edits.append(Text(source, start, start, "(", order=(9, 0)))
        choice = ")" + choice
    for paren in path.rpar:
        stop = max(stop, source.span(paren).stop)
    edits.append(Text(source, stop, stop, choice, order=(-9, 0)))
    return edits
