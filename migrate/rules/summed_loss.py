"""The loss is reduced over the processes before `backward()`.

Why it matters: the wrapper averages the gradients already. A loss that was all-reduced and divided
by the number of processes gives every gradient a second time divided by it: training is slower by
that factor, and nothing says so.

Safety: not edited. Where the reduced loss is only for printing, a copy has to be reduced.

Before::

    import torch
    import torch.nn as nn
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
    for images in loader:
        loss = model(images).mean()
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
        loss.backward()

Finding::

    MG904 loss is reduced over the processes before its backward()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import training
from migrate.source import Source
from migrate.syntax import argument, receiver

_REDUCE = re.compile(r"^torch\.distributed\.(all_reduce|reduce)$")


class SummedLoss(Rule):
    """Finds all-reduced losses that are trained."""

    code = "MG904"
    title = "the loss is reduced before backward()"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every reduction."""
        know = training(context)
        for source, call in context.facts.calls_of(_REDUCE.pattern):
            arg = argument(call, "tensor", 0)
            if arg is None or not isinstance(arg.value, cst.Name):
                continue
            for home, backward in context.facts.backwards:
                of = receiver(backward)
                if home is not source or of is None or not _is_below(source, call, backward):
                    continue
                if _depends(context, source, of, arg.value) and know.behind(source, arg.value):
                    yield self._report(source, call, arg.value)
                    break

    def _report(self, source: Source, call: cst.Call, loss: cst.Name) -> Finding:
        return self.finding(
            source, call, f"{loss.value} is reduced over the processes before its backward()",
            effect=Effect.DIFFERENT,
            advice=f"reduce a copy for printing, {loss.value}.detach().clone(): the gradients are "
            "averaged without it",
        )  # fmt: skip


def _is_below(source: Source, call: cst.Call, backward: cst.Call) -> bool:
    same = source.function_of(call) is source.function_of(backward)
    return same and source.span(call).start < source.span(backward).start


def _depends(
    context: Context, source: Source, node: cst.CSTNode, loss: cst.Name, depth: int = 0
) -> bool:
    """Whether a value is the variable itself, or computed from it, without `detach()`."""
    if depth > 4:
        return False
    know = training(context)
    slot = context.facts.slot(source, loss)
    for name in source.inside(node, cst.Name):
        parent = source.parent(name)
        if isinstance(parent, cst.Attribute) and parent.attr.value in ("detach", "item", "data"):
            continue
        if context.facts.slot(source, name) == slot:
            return not _is_made_again(context, source, name, loss)
        for binding in know.reaching[source].of(name):
            value = getattr(binding.node, "value", None)
            if (
                isinstance(binding.node, cst.Assign)
                and value is not None
                and _depends(context, source, value, loss, depth + 1)
            ):
                return True
    return False


def _is_made_again(context: Context, source: Source, read: cst.Name, loss: cst.Name) -> bool:
    """Whether the variable got a new value, not made of the old one, after the reduction."""
    for binding in training(context).reaching[source].of(read):
        value = getattr(binding.node, "value", None)
        if source.span(binding.name).start < source.span(loss).start:
            return False
        names = [n.value for n in source.inside(value, cst.Name)] if value is not None else []
        if loss.value in names or isinstance(binding.node, cst.AugAssign):
            return False
    return bool(training(context).reaching[source].of(read))
