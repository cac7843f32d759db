"""A gradient, a weight, or the norm that clipping returns, is read where these are sharded.

Why it matters: each process holds a shard of every gradient and weight. The norm or the check of a
shard is not that of the whole, and a number read from it differs between processes.

Safety: safe where every process comes by: the whole gradient is gathered for the read. Changing
gradients in place, as clipping by value does, is right on shards.

Before::

    model = nn.DataParallel(nn.Linear(2, 2))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    print(norm.item())

After::

    model = nn.DataParallel(nn.Linear(2, 2))
    loss.backward()
    norm = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    print(norm.item())
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.facts.obstacles import Obstacles
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted, method_name

_LOOKING = frozenset(
    [
        "norm",
        "sum",
        "mean",
        "max",
        "min",
        "item",
        "std",
        "var",
        "isnan",
        "isinf",
        "isfinite",
        "any",
        "all",
        "cpu",
        "numpy",
        "tolist",
        "abs",
    ]
)
_CLIP = r"^torch\.nn\.utils(\.clip_grad)?\.clip_grad_norm_?$"


class GradientReads(Rule):
    """Finds reads of gradients, for targets that shard them."""

    code = "MG406"
    title = "a sharded gradient or weight is read"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every norm that is used and every gradient that is looked at."""
        if not context.target.shards:
            return
        obstacles = Obstacles(context.facts, shared_batchwise(context.facts))
        for source, call in context.facts.calls_of(_CLIP):
            if _is_used(context, source, call) and _of_wrapped(context, source, call):
                yield self._read(context, source, call, obstacles)
        for source in context.sources:
            for node in source.all(cst.Attribute):
                is_part = node.attr.value in ("grad", "data")
                is_read = is_part and _is_looked_at(context, source, node)
                if is_read and _is_weight_of_wrapped(context, source, node.value):
                    yield self._read(context, source, node, obstacles)

    def _read(
        self, context: Context, source: Source, node: cst.BaseExpression, obstacles: Obstacles
    ) -> Finding:
        name, need = context.helper(source, "whole")
        code = source.one_line(node)
        obstacle = obstacles.obstacle(source, node)
        if obstacle:
            return self.finding(
                source,
                node,
                f"{code} is a shard, {obstacle}",
                effect=Effect.SAME,
                advice=f"read {name}({code}) where every process comes by",
            )
        edits: list[Edit] = [*enclose(source, node, f"{name}(", ")"), need]
        return self.finding(source, node, f"{code} is sharded: gathered to be read", edits)


def _is_used(context: Context, source: Source, call: cst.Call) -> bool:
    parent = source.parent(call)
    is_whole = isinstance(parent, cst.Attribute) and parent.attr.value == "full_tensor"
    is_gathered = any(source.contains(own, call) for own in context.facts.uses_own(source, "whole"))
    return not isinstance(parent, cst.Expr) and not is_whole and not is_gathered


def _of_wrapped(context: Context, source: Source, call: cst.Call) -> bool:
    models = {
        model for arg in call.args[:1] for model in context.facts.models_in(source, arg.value)
    }
    if not models and call.args and isinstance(call.args[0].value, cst.Name):
        for value in context.flow.made_by(source, call.args[0].value):
            models |= context.facts.models_in(value.source, value.node)
    return bool(models & context.facts.wrapped)


def _is_weight_of_wrapped(context: Context, source: Source, node: cst.BaseExpression) -> bool:
    """A variable of a loop over a wrapped model's parameters; a parameter of it."""
    if not isinstance(node, cst.Name):
        text = dotted(node) or ""
        return text.endswith((".weight", ".bias")) and context.facts.may_be_wrapped(
            source, _first(node)
        )
    loops: list[cst.For | cst.CompFor] = [*source.all(cst.For), *source.all(cst.CompFor)]
    for loop in loops:
        names = {item.value for item in source.inside(loop.target, cst.Name)}
        body = loop.body if isinstance(loop, cst.For) else source.parent(loop) or loop
        if node.value in names and source.contains(body, node):
            return bool(context.facts.models_in(source, loop.iter) & context.facts.wrapped)
    return False


def _first(node: cst.BaseExpression) -> cst.BaseExpression:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node


def _is_looked_at(context: Context, source: Source, node: cst.Attribute) -> bool:
    """Whether a number is made of a gradient: `p.grad.data.norm()`, `torch.isnan(p.grad)`."""
    gathered = context.facts.uses_own(source, "whole")
    for item in source.ancestors(node):
        match item:
            case cst.Attribute(attr=cst.Name(value="full_tensor" | "to_local")):
                return False
            case cst.Call() if item in gathered:
                return False
            case cst.Attribute(attr=cst.Name(value=name)) if name in _LOOKING:
                return True
            case cst.Call() if method_name(item) in _LOOKING or (
                (context.facts.callee(source, item) or "").rpartition(".")[2] in _LOOKING
            ):
                return True
            case cst.Attribute() | cst.Call() | cst.Arg():
                continue
            case _:
                return False
    return False
