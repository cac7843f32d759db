"""A step is skipped, or training left, because of this process's part of the data.

Why it matters: a process that skips its `backward()`, or leaves the loop, leaves the others
waiting for its gradients until a timeout. With DataParallel the decision was made once, on the
whole batch.

Safety: a check for nan or inf is made of all processes together, which is exact: the whole batch's
loss is not finite if that of a part is not. Other conditions are not edited: whether they should
hold for any or for every process, only the author can tell. Numbers that are averaged over the
processes anyway (MG401), counters and settings are the same everywhere and not reported.

Before::

    loader = DataLoader(dataset, collate_fn=collate)
    for images, boxes in loader:
        if boxes is None:
            continue
        criterion(model(images), boxes).backward()

Finding::

    MG802 whether a process skips this step depends on its part of the data: boxes is None
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.kinds import Kind
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, training
from migrate.source import Source
from migrate.syntax import argument

_CHECK = re.compile(r"^(torch|math|numpy)\.(isnan|isinf|isfinite)$")
_RANDOM = re.compile(r"^(random|numpy\.random)\.\w+$|^torch\.(rand|randint|randn|bernoulli)$")
_TOGETHER = re.compile(
    r"from_main_process|on_(any|every)_process|global_(sum|mean)|all_reduce|all_gather|broadcast"
)
_LEAVES = (cst.Continue, cst.Break, cst.Return)


class SkippedStep(Rule):
    """Finds `continue`, `break` and `return` in training steps that depend on the data."""

    code = "MG802"
    title = "a step is skipped on one process's own data"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every condition."""
        know = training(context)
        seen: set[cst.CSTNode] = set()
        for source in context.sources:
            for kind in _LEAVES:
                for leaving in source.all(kind):
                    if not context.facts.definitions[source].is_own(leaving):
                        yield from self._leaving(context, know, source, leaving, seen)
            yield from self._around(context, know, source, seen)

    def _leaving(
        self, context: Context, know: Training, source: Source, node: cst.CSTNode,
        seen: set[cst.CSTNode],
    ) -> Iterator[Finding]:  # fmt: skip
        region = _region(know, source, node)
        if region is None:
            return
        inner = node
        for item in source.ancestors(node):
            if item is region:
                return
            if (
                isinstance(item, cst.If)
                and inner is item.body
                and item not in seen
                and _is_local(know, source, item.test)
            ):
                seen.add(item)
                yield self._report(context, know, source, item.test, node, positive=False)
            inner = item

    def _around(
        self, context: Context, know: Training, source: Source, seen: set[cst.CSTNode]
    ) -> Iterator[Finding]:
        """`if loss > 0: loss.backward()`."""
        for home, call in context.facts.backwards:
            inner: cst.CSTNode = call
            for item in source.ancestors(call) if home is source else ():
                if isinstance(item, cst.FunctionDef | cst.For | cst.While):
                    break
                lacks = isinstance(item, cst.If) and not (
                    item.orelse and context.facts.reaches_backward(source, item.orelse)
                )
                if (
                    lacks
                    and isinstance(item, cst.If)
                    and inner is item.body
                    and item not in seen
                    and _is_local(know, source, item.test)
                ):
                    seen.add(item)
                    yield self._report(context, know, source, item.test, call, positive=True)
                inner = item

    def _report(
        self, context: Context, know: Training, source: Source, test: cst.BaseExpression,
        node: cst.CSTNode, positive: bool,
    ) -> Finding:  # fmt: skip
        code = source.one_line(test)
        what = "skips this step" if isinstance(node, cst.Continue | cst.Call) else "leaves here"
        message = f"whether a process {what} depends on its part of the data: {code}"
        edits: list[Edit] = []
        sign = _finite_check(context, source, test)
        if sign is not None and sign is not positive and _everyone_comes(know, source, test):
            helper = "on_every_process" if positive else "on_any_process"
            name, need = context.helper(source, helper)
            edits = [*enclose(source, test, f"{name}(", ")"), need]
            return self.finding(source, test, f"{code} is decided by all processes together", edits)
        any_name, _ = context.helper(source, "global_sum")
        return self.finding(
            source, test, message, effect=Effect.DIFFERENT,
            advice=f"decide together, for example by {any_name}(int(...)) > 0 in all processes, or "
            "run the step all the same with the loss multiplied by 0",
        )  # fmt: skip


def _region(know: Training, source: Source, node: cst.CSTNode) -> cst.CSTNode | None:
    """The loop, or the training function, that a statement cuts short before its `backward()`."""
    loops = know.facts.loops_around(source, node)
    loop = loops[0] if loops else None
    if isinstance(node, cst.Return):
        function = source.function_of(node)
        if function not in know.facts.training_functions:
            return None
        root: cst.CSTNode | None = function
        training_loops = [x for x in loops if know.facts.reaches_backward(source, x.body)]
        if training_loops:
            return function
    else:
        root = loop
    if root is None or not know.facts.reaches_backward(source, root):
        return None
    if isinstance(node, cst.Break):
        return root
    points = know.facts.loading.points(source, root)
    last = max((source.span(p).start for p in points), default=0)
    return root if last > source.span(node).start else None


def _is_local(know: Training, source: Source, test: cst.BaseExpression) -> bool:
    """Whether a condition can hold in one process and not in another."""
    if _TOGETHER.search(source.code(test)):
        return False
    for call in source.inside(test, cst.Call):
        if _RANDOM.match(know.facts.callee(source, call) or ""):
            return True
    return any(_name_is_local(know, source, name) for name in source.inside(test, cst.Name))


def _name_is_local(know: Training, source: Source, name: cst.Name) -> bool:
    parent = source.parent(name)
    if isinstance(parent, cst.Attribute) and parent.attr is name:
        return False
    value = know.batchwise.of(source, name)
    is_data = value.kind in (Kind.DATA, Kind.SUM, Kind.MEAN, Kind.RATIO)
    if not is_data and not (value.kind is Kind.UNKNOWN and value.origins):
        return False
    if know.batchwise.is_whole(value):
        return False
    if any(item in know.reduced for item in (name, *source.ancestors(name))):
        return False
    if not _is_counted(know, source, name):
        return not _is_shared(source, name)
    return any(_collates(know, origin) for origin in value.origins)


def _is_shared(source: Source, name: cst.Name) -> bool:
    """`isinstance(x, …)`, `key in batch`, `x.shape[2]`: the same whatever the data."""
    parent = source.parent(name)
    if isinstance(parent, cst.Attribute) and parent.attr.value in (
        "shape",
        "ndim",
        "is_cuda",
        "dim",
    ):
        return True
    for item in source.ancestors(name):
        if isinstance(item, cst.Comparison):
            return isinstance(item.comparisons[0].operator, cst.In | cst.NotIn)
        if isinstance(item, cst.Call):
            return source.code(item.func) in ("isinstance", "hasattr", "torch.is_tensor")
        if isinstance(item, cst.If):
            break
    return False


def _is_counted(know: Training, source: Source, name: cst.Name) -> bool:
    """`len(x) == 0`, `x.size(0) < 2`, `x is None`, `not x`: the number of samples is looked at."""
    for item in source.ancestors(name):
        if know.batchwise.of(source, item).kind is Kind.COUNT:
            return True
        if isinstance(item, cst.Call):
            return source.code(item.func) == "len"
        if isinstance(item, cst.Comparison):
            return isinstance(item.comparisons[0].operator, cst.Is | cst.IsNot)
        if isinstance(item, cst.If):
            return item.test is name
    return False


def _collates(know: Training, origin: cst.CSTNode) -> bool:
    """Whether the loader of a loop puts batches together by a function of the script."""
    for loader in know.facts.loaders:
        if (
            any(loop.node is origin for loop in loader.loops)
            and argument(loader.call, "collate_fn", 6) is not None
        ):
            return True
    return False


def _finite_check(context: Context, source: Source, test: cst.BaseExpression) -> bool | None:
    """True for a test that a value is not finite, False that it is; None for anything else."""
    sign = True
    while isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        sign, test = not sign, test.expression
    while isinstance(test, cst.Call) and source.code(test.func).endswith((".any", ".all", ".item")):
        test = test.func.value  # type: ignore[attr-defined]
    if not isinstance(test, cst.Call):
        return None
    name = context.facts.callee(source, test) or ""
    if not _CHECK.match(name):
        return None
    return sign if not name.endswith("isfinite") else not sign


def _everyone_comes(know: Training, source: Source, test: cst.BaseExpression) -> bool:
    """Whether nothing around a test keeps a process from evaluating it."""
    inner: cst.CSTNode = source.parent(test) or test
    for item in source.ancestors(inner):
        if isinstance(item, cst.FunctionDef):
            return True
        if isinstance(item, cst.If) and _is_local(know, source, item.test):
            return False
        if isinstance(item, cst.ExceptHandler):
            return False
    return True
