"""A training loop stops, or runs the model, by the clock or because a file exists.

Why it matters: two processes never read the same time, and need not see a file at the same moment.
One leaves the loop an iteration before the others, which then wait for it until a timeout.

Safety: safe. The main process decides for all, and each of them asks it, wherever every process
comes by. Conditions that only print or write a file are left alone: the main process does those by
itself.

Before::

    import time
    import torch
    start = time.time()
    for images in loader:
        model(images).sum().backward()
        if time.time() - start > 3600:
            break

After::

    import time
    import torch
    start = time.time()
    for images in loader:
        model(images).sum().backward()
        if from_main_process(time.time() - start > 3600):
            break
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import enclose
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, training, without_gradients
from migrate.source import Source
from migrate.syntax import method_name

_CLOCK = re.compile(r"^(time\.(time|perf_counter|monotonic|process_time)|timeit\.default_timer"
                    r"|datetime\.datetime\.(now|utcnow))$")  # fmt: skip
_FILE = re.compile(r"^os\.path\.(exists|isfile|isdir|lexists)$")
_LEAVES: tuple[type[cst.CSTNode], ...] = (cst.Break, cst.Return, cst.Continue)
_EXITS = re.compile(r"^(sys\.exit|exit|quit)$")


class StopCondition(Rule):
    """Finds conditions on the clock or on files in training loops."""

    code = "MG812"
    title = "training stops by the clock or by a file"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every condition."""
        know = training(context)
        for source in context.sources:
            for statement in source.all(cst.If):
                if know.runs_each_step(source, statement) and self._matters(
                    know, source, statement
                ):
                    yield from self._condition(context, know, source, statement.test)
            for loop in source.all(cst.While):
                if context.facts.reaches_backward(source, loop.body):
                    yield from self._condition(context, know, source, loop.test)

    def _condition(
        self, context: Context, know: Training, source: Source, test: cst.BaseExpression
    ) -> Iterator[Finding]:
        code = source.one_line(test)
        what = _what(context, know, source, test)
        if (
            what is None
            or "from_main_process" in code
            or context.facts.definitions[source].is_own(test)
        ):
            return
        name, need = context.helper(source, "from_main_process")
        inner: cst.CSTNode = source.parent(test) or test
        by_rank = context.facts.main_process.is_by_rank(source, test)
        for item in source.ancestors(inner):
            is_random = isinstance(item, cst.If) and know.batchwise.of(source, item.test).origins
            if isinstance(item, cst.FunctionDef):
                break
            if by_rank or is_random or isinstance(item, cst.ExceptHandler):
                yield self.finding(
                    source, test, f"{code} depends on {what}, and not every process asks",
                    effect=Effect.UNKNOWN,
                    advice=f"evaluate {name}({code}) where all processes come by, and use it here",
                )  # fmt: skip
                return
        message = f"the main process decides for all: {code} depends on {what}"
        yield self.finding(source, test, message, [*enclose(source, test, f"{name}(", ")"), need])

    @staticmethod
    def _matters(know: Training, source: Source, statement: cst.If) -> bool:
        """Whether it matters to the others what is done: the loop is left, or the model runs."""
        body = statement.body
        leaves = [source.inside(body, kind) for kind in _LEAVES]
        if any(leaves):
            return True
        calls = source.inside(body, cst.Call)
        if any(_EXITS.match(know.facts.callee(source, c) or source.code(c.func)) for c in calls):
            return True
        functions = know.called_by(source, body)
        homes = [(source, c) for c in calls]
        for function in functions:
            home = next(s for s in know.context.sources if function in s.parents)
            homes += [(home, c) for c in home.inside(function.body, cst.Call)]
        return any(_waits(know, home, c) for home, c in homes)


def _waits(know: Training, source: Source, call: cst.Call) -> bool:
    if know.model_of(source, call) and method_name(call) != "module":
        return not without_gradients(source, call) or know.context.target.shards
    gathers = know.context.target.shards and method_name(call) == "state_dict"
    return (
        gathers and isinstance(call.func, cst.Attribute) and know.is_model(source, call.func.value)
    )


def _what(
    context: Context, know: Training, source: Source, test: cst.BaseExpression, depth: int = 0
) -> str | None:
    """What a condition depends on that processes may see differently."""
    for call in source.inside(test, cst.Call):
        name = context.facts.callee(source, call) or ""
        if depth and not _is_part(source, call, test):
            continue
        if _CLOCK.match(name):
            return "the clock"
        if _FILE.match(name) or (method_name(call) == "exists" and not call.args):
            return "files"
    for node in source.inside(test, cst.Name) if depth < 3 else ():
        if not _is_part(source, node, test):
            continue
        for binding in know.reaching[source].of(node):
            value = getattr(binding.node, "value", None)
            is_plain = isinstance(binding.node, cst.Assign | cst.AnnAssign | cst.NamedExpr)
            if is_plain and value is not None and value is not test:
                what = _what(context, know, source, value, depth + 1)
                if what is not None and "from_main_process" not in source.code(value):
                    return what
    return None


def _is_part(source: Source, node: cst.CSTNode, whole: cst.CSTNode) -> bool:
    """Whether a value is computed with, not only handed to something: arithmetic, comparisons."""
    inner = node
    for item in source.ancestors(node):
        if inner is whole:
            return True
        is_conversion = isinstance(item, cst.Arg) or (
            isinstance(item, cst.Call)
            and source.code(item.func) in ("int", "float", "round", "abs")
        )
        kinds = (cst.BinaryOperation, cst.Comparison, cst.ComparisonTarget, cst.BooleanOperation,
                 cst.UnaryOperation)  # fmt: skip
        if not is_conversion and not isinstance(item, kinds) and item is not whole:
            return False
        inner = item
    return False
