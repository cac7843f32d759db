"""The batch size is written into the shape of a tensor in the training loop.

Why it matters: a process's batch is a part of the whole one. Noise, labels, hidden states or masks
that are made for the whole batch do not fit it, or are made once too often by every process.

Safety: policy, where a tensor is made with the loader's own batch size inside its loop, or a batch
is cut at it: the number becomes the process's part too. Where a batch is cut at a number that the
script's batch sampler was made with, nothing is edited: parts of such batches are mixed otherwise.

Before::

    def train(model, data, opt):
        loader = DataLoader(data, batch_size=opt.batch)
        for inputs in loader:
            noise = torch.randn(opt.batch, 16)
            model(inputs, noise).mean().backward()

After::

    def train(model, data, opt):
        loader = DataLoader(data, batch_size=opt.batch)
        for inputs in loader:
            noise = torch.randn(per_process(opt.batch), 16)
            model(inputs, noise).mean().backward()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.loader_plan import Plan, Way, plans
from migrate.finding import Applicability, Effect, Finding
from migrate.names import parameters
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted, method_name
from migrate.values import Function, Instance, Made, Method

_MAKES = re.compile(
    r"^torch\.(cuda\.)?(randn|rand|zeros|ones|full|empty|randint|eye|arange|normal|\w*Tensor)$"
)
_SHAPES = frozenset({"view", "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_full",
                     "new_empty", "split", "chunk", "resize_"})  # fmt: skip


class BatchShape(Rule):
    """Finds the loader's batch size in shapes and cuts inside its training loop."""

    code = "MG307"
    title = "the whole batch's size is the shape of a tensor"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every place."""
        if context.options.batch == "per-rank":
            return
        seen: set[cst.CSTNode] = set()
        for plan in plans(context):
            if plan.way is Way.BATCH_SAMPLER:
                yield from self._mixed_batches(context, plan)
            size = plan.argument("batch_size")
            if not plan.edited or size is None or dotted(size.value) is None:
                continue
            for node in _uses(context, plan, size.value):
                if node not in seen and _is_shape(context, plan.source, node):
                    seen.add(node)
                    yield self._split(context, plan, node)

    def _split(self, context: Context, plan: Plan, node: cst.BaseExpression) -> Finding:
        source = plan.source
        name, need = context.helper(source, "per_process")
        text = source.code(node)
        edits: list[Edit] = [need, *enclose(source, node, f"{name}(", ")")]
        return self.finding(
            source,
            node,
            f"a tensor has the size {text} of the whole batch",
            edits,
            Applicability.POLICY,
            assumption=f"{text} is here the number of samples in the batch of this loop",
            requires=("MG302",),
        )

    def _mixed_batches(self, context: Context, plan: Plan) -> Iterator[Finding]:
        """Cuts of a batch at numbers that its batch sampler was made with."""
        arg = plan.argument("batch_sampler")
        values = context.flow.of(plan.source, arg.value if arg else None)
        numbers = {
            value.source.code(given.value)
            for value in values
            if isinstance(value, Made | Instance) and isinstance(value.node, cst.Call)
            for given in value.node.args
            if dotted(given.value) is not None
        }
        for source, body in _bodies(plan):
            for cut in source.inside(body, cst.Slice):
                ends = [end for end in (cut.lower, cut.upper) if end is not None]
                for end in ends:
                    if source.code(end) in numbers:
                        yield self._cut(source, end)

    def _cut(self, source: Source, node: cst.BaseExpression) -> Finding:
        text = source.code(node)
        return self.finding(
            source,
            node,
            f"cuts a whole batch at {text}, but a process has a part of the batch",
            advice="make the batch sampler with each process's numbers of samples, from indices "
            f"that are its own, and divide {text} here as well",
            effect=Effect.DIFFERENT,
        )


def _bodies(plan: Plan) -> list[tuple[Source, cst.CSTNode]]:
    """The bodies of the training loops over a loader."""
    return [
        (loop.source, loop.node.body)
        for loop in plan.loader.loops
        if loop.trains and isinstance(loop.node, cst.For)
    ]


def _uses(context: Context, plan: Plan, size: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """The same number, by the same variable, in the training loops of the loader's file."""
    source = plan.source
    root = _root(size)
    for home, body in _bodies(plan):
        if home is not source or root is None:
            continue
        for node in source.inside(body, type(size)):
            other = _root(node)
            if other is None or source.code(node) != source.code(size):
                continue
            is_whole = not isinstance(source.parent(node), cst.Attribute)
            if is_whole and context.facts.slot(source, other) == context.facts.slot(source, root):
                yield node


def _root(node: cst.CSTNode) -> cst.Name | None:
    while isinstance(node, cst.Attribute):
        node = node.value
    return node if isinstance(node, cst.Name) else None


def _is_shape(context: Context, source: Source, node: cst.CSTNode) -> bool:
    """Whether a number is a size in a call that makes or shapes a tensor, or the end of a slice."""
    parent = source.parent(node)
    if isinstance(parent, cst.Slice):
        return True
    while isinstance(parent, cst.Tuple | cst.List | cst.Element):
        parent = source.parent(parent)
    call = source.parent(parent) if isinstance(parent, cst.Arg) else None
    if not isinstance(call, cst.Call) or not isinstance(parent, cst.Arg):
        return False
    if _MAKES.search(context.flow.qualified(source, call.func) or ""):
        return True
    callees = [
        v.function if isinstance(v, Method) else v for v in context.flow.of(source, call.func)
    ]
    functions = [v for v in callees if isinstance(v, Function)]
    if functions:
        return any(_makes_with(context, function, call, parent) for function in functions)
    return method_name(call) in _SHAPES


def _makes_with(context: Context, function: Function, call: cst.Call, arg: cst.Arg) -> bool:
    """Whether a function of the project makes a tensor with the parameter that `arg` becomes."""
    names = [p.name.value for p in parameters(function.node)]
    names = names[1:] if function.owner is not None else names
    index = next(i for i, item in enumerate(call.args) if item is arg)
    name = arg.keyword.value if arg.keyword else names[index] if index < len(names) else ""
    for inner in function.source.inside(function.node, cst.Call):
        made = context.flow.qualified(function.source, inner.func) or ""
        if _MAKES.search(made) or method_name(inner) in _SHAPES:
            used = function.source.inside(inner, cst.Name)
            if any(item.value == name for item in used):
                return True
    return False
