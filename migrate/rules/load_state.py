"""A model or an optimizer loads a state that was in a file.

Why it matters: a file may have been written with or without the wrapper, so with or without
`module.` before every name. Where the target shards, whole tensors cannot be copied into parts.

Safety: safe. Names that match already stay as they are; every process reads the file and takes its
part. Where the script edits the names itself, or loads with `strict=False`, it is left alone.

With `--save sharded`, `torch.load` becomes `load_sharded` where a sharded model or its optimizer
takes the state from, and where a folder is read that the script has written. It reads files, too.

Before::

    model = nn.DataParallel(nn.Linear(2, 2))
    model.load_state_dict(torch.load("model.pt"))

After::

    model = nn.DataParallel(nn.Linear(2, 2))
    model.load_state_dict(match_prefix(torch.load("model.pt"), model))
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, Text, enclose, replace
from migrate.facts.folders import folder_loads
from migrate.facts.state import (
    comes_from_file,
    is_parallel,
    is_sharded_optimizer,
    is_whole_in_memory,
)
from migrate.facts.wrappers import is_unwrapped
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, dotted, literal, method_name, receiver

_SURGERY = re.compile(r"""['"]module['".]|\[7:\]|removeprefix|consume_prefix""")


class LoadState(Rule):
    """Finds calls of `load_state_dict`."""

    code = "MG504"
    title = "a saved state is loaded"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every load that the target changes."""
        for source, call in context.facts.calls():
            if method_name(call) == "load_state_dict" and call.args:
                if context.target.shards:
                    yield from self._sharded(context, source, call)
                else:
                    yield from self._named(context, source, call)
        for source, call, path in folder_loads(context):
            name, need = context.helper(source, "load_sharded")
            message = f"reads {source.code(path)}, be it a file or a folder"
            yield self.finding(source, call, message, [replace(source, call.func, name), need])

    def _named(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        model, given = receiver(call), argument(call, "state_dict", 0)
        if model is None or given is None or not context.facts.may_be_wrapped(source, model):
            return
        strict = argument(call, "strict", 1)
        if strict is not None and literal(strict.value) is not True:
            return
        if is_unwrapped(context, source, model) or not comes_from_file(
            context, source, given.value
        ):
            return
        name, need = context.helper(source, "match_prefix")
        is_done = isinstance(given.value, cst.Call) and dotted(given.value.func) == name
        if is_done or _edits_names(source, call):
            return
        shown = source.code(model)
        edits: list[Edit] = [*enclose(source, given.value, f"{name}(", f", {shown})"), need]
        message = f"{shown} loads files with and without `module.` before the names"
        yield self.finding(source, call, message, edits)

    def _sharded(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        of, given = receiver(call), argument(call, "state_dict", 0)
        if of is None or given is None:
            return
        if is_sharded_optimizer(context, source, of):
            name, need = context.helper(source, "load_full_optimizer_state")
            message = f"every process takes its part of the saved state of {source.code(of)}"
        elif is_parallel(context, source, of) and _is_whole(context, source, given.value):
            name, need = context.helper(source, "load_full_state")
            message = f"every process takes its part of the saved weights of {source.code(of)}"
        else:
            return
        start, stop = source.span(of).start, source.span(of).stop
        opening = source.span(call.args[0]).start
        edits: list[Edit] = [
            Text(source, start, start, f"{name}(", order=(9, 0)),
            Text(source, stop, opening, ", "),
            need,
        ]
        yield self.finding(source, call, message, edits)


def _is_whole(context: Context, source: Source, node: cst.BaseExpression) -> bool:
    """Whether a state is that of a whole model, from a file or gathered."""
    return comes_from_file(context, source, node) or is_whole_in_memory(context, source, node)


def _edits_names(source: Source, call: cst.Call) -> bool:
    """Whether the function around a load takes `module.` off, or puts it on, itself."""
    scope: cst.CSTNode = source.function_of(call) or source.statement_of(call)
    return bool(_SURGERY.search(source.code(scope)))
