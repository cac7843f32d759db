"""Only one process does what all of them have to do together.

Why it matters: `all_reduce`, `barrier`, and a forward of a parallel model wait for the other
processes. Under `if rank == 0:` they never come, and training hangs until a timeout. Scripts that
are half moved already have such places.

Safety: not edited. Conditions are recognised by their words: rank, is_main, is_master.

Before::

    import torch
    import torch.distributed as dist
    total = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.all_reduce(total)

Finding::

    MG801 dist.all_reduce(…) waits for all processes, but only one comes here
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, training
from migrate.source import Source
from migrate.syntax import dotted, method_name

_COLLECTIVE = re.compile(
    r"^torch\.distributed\.(barrier|monitored_barrier|all_reduce|all_gather\w*|broadcast\w*|reduce"
    r"|reduce_scatter\w*|gather\w*|scatter\w*|all_to_all\w*)$"
)
_OWN = ("wait_for_everyone", "from_main_process", "global_sum", "global_mean", "full_state",
        "on_any_process", "on_every_process", "share_weights")  # fmt: skip


class OneProcess(Rule):
    """Finds collective calls under a rank condition."""

    code = "MG801"
    title = "only one process does what all have to do together"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call."""
        know = training(context)
        own = _own_calls(context)
        for source, call in context.facts.calls():
            if not context.facts.main_process.only_main(source, call):
                continue
            what = _waits(context, know, source, call, own)
            if what is not None and not _has_counterpart(context, source, call):
                yield self.finding(
                    source, call, f"{source.code(call.func)}(…) {what}, but only one comes here",
                    effect=Effect.DIFFERENT,
                    advice="take it out of the condition, so that every process calls it; keep "
                    "only what prints or writes files under it",
                )  # fmt: skip


def _has_counterpart(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether the others call the same under another condition: the main process goes first."""
    room = context.facts.main_process
    name = context.facts.callee(source, call)
    function = source.function_of(call) or source.module
    return name is not None and any(
        context.facts.callee(source, other) == name
        and room.is_by_rank(source, other)
        and not room.only_main(source, other)
        for other in source.inside(function, cst.Call)
    )


def _own_calls(context: Context) -> set[cst.Call]:
    return {
        call
        for source in context.sources
        for name in _OWN
        if name in context.facts.definitions[source].available
        for call in context.facts.uses_own(source, name)
    }


def _waits(
    context: Context, know: Training, source: Source, call: cst.Call, own: set[cst.Call]
) -> str | None:
    """Why a call needs all processes; None if it does not."""
    direct = _direct(context, know, source, call, own)
    if direct is not None:
        return direct
    seen: set[cst.FunctionDef] = set()
    queue = list(context.flow.callees.get(call, ()))
    while queue:
        function = queue.pop()
        own_definition = context.facts.definitions[function.source].is_own(function.node)
        if function.node in seen or own_definition:
            continue
        seen.add(function.node)
        for inner in function.source.inside(function.node.body, cst.Call):
            if _direct(context, know, function.source, inner, own) is not None:
                line = function.source.line_of(inner)
                return f"waits for all processes in line {line} ({_short(function.source, inner)})"
            queue += context.flow.callees.get(inner, ())
    return None


def _short(source: Source, call: cst.Call) -> str:
    return f"{source.code(call.func)}(…)"


def _direct(
    context: Context, know: Training, source: Source, call: cst.Call, own: set[cst.Call]
) -> str | None:
    name = context.facts.callee(source, call) or ""
    if call in own or _COLLECTIVE.match(name):
        return "waits for all processes"
    models = know.model_of(source, call)
    if not models or method_name(call) == "module":
        return None
    if context.target.has_wrapper and not know.is_wrapper(source, _runs(call)):
        return None
    if dotted(call.func) == "self":
        return None
    return "runs a parallel model, which waits for all processes"


def _runs(call: cst.Call) -> cst.BaseExpression:
    """`model` in `model(x)` and `model.forward(x)`."""
    is_forward = method_name(call) == "forward" and isinstance(call.func, cst.Attribute)
    return call.func.value if is_forward else call.func  # type: ignore[attr-defined]
