"""A file is opened for writing, and every process would open it.

Why it matters: each process truncates what another has written, and lines of all are mixed.

Safety: safe. The other processes open the null device, so that everything that is written to the
file needs no further guard, and what is computed for it is still computed by all.

Before::

    import os
    import torch
    with open("log.txt", "w") as log:
        log.write("epoch 0")

After::

    import os
    import torch
    with open("log.txt" if is_main_process() else os.devnull, "w") as log:
        log.write("epoch 0")
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.files import opened
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.rules._opening import is_for_main, main_path
from migrate.source import Source
from migrate.syntax import argument, method_name, receiver, string_value

_ARCHIVE = re.compile(
    r"^(h5py\.File|zipfile\.ZipFile|tarfile\.open|pandas\.(HDFStore|ExcelWriter))$"
)


class OpenForWriting(Rule):
    """Finds calls of `open` with a mode that writes."""

    code = "MG506"
    title = "every process opens the file for writing"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call that opens the same file in all processes."""
        for source, call in context.facts.calls():
            yield from self._archive(context, source, call)
            place = opened(context, source, call)
            if place is None or not re.search(r"[wax+?]", place[1]):
                continue
            by_rank = context.facts.main_process.is_by_rank(source, call)
            if not by_rank and not is_for_main(source, place[0]):
                yield from self._open(context, source, call, *place)

    def _archive(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        """Formats that the null device cannot stand in for."""
        name = context.facts.callee(source, call) or ""
        mode = argument(call, "mode", 1)
        written = (
            _ARCHIVE.match(name) and mode and re.search("[wax+]", string_value(mode.value) or "")
        )
        if written and call.args and not context.facts.main_process.is_by_rank(source, call):
            message = (
                f"every process opens {source.code(call.args[0].value)} with {name} for writing"
            )
            advice = "let the main process alone open and fill it"
            yield self.finding(source, call, message, advice=advice)

    def _open(
        self, context: Context, source: Source, call: cst.Call, path: cst.BaseExpression, modes: str
    ) -> Iterator[Finding]:
        shown = source.code(path)
        if "x" in modes:
            message = f"every process creates {shown}, which only the first one can"
            advice = "open it in the main process only"
            yield self.finding(source, call, message, advice=advice)
        elif "?" in modes:
            mode = source.code(call.args[-1].value)
            message = f"opens {shown} in the mode {mode}, which may be one that writes"
            advice = f"where it writes, open os.devnull instead of {shown} in other processes"
            if _may_write(context, source, call):
                yield self.finding(source, call, message, advice=advice)
        else:
            edits = main_path(context, source, call, path)
            message = f"only the main process opens {shown} for writing"
            yield self.finding(source, call, message, edits)


def _may_write(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether something is written to what a call opens, as far as can be seen."""
    around = source.around(call, cst.With)
    scope: cst.CSTNode = around or source.function_of(call) or source.module
    return any(
        method_name(item) in ("write", "writelines", "writerow")
        and call in {value.node for value in context.flow.made_by(source, receiver(item))}
        for item in source.inside(scope, cst.Call)
    )
