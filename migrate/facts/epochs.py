"""Where the passes over a loader begin, and what counts them: the epoch variable in scope there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.facts.loading import ITERATION, Loader
from migrate.flow import call_arguments
from migrate.names import parameters
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import dotted
from migrate.values import Function, Instance, Made

_COUNTING = re.compile(r"(^|\.)(range|xrange|trange|count)$")
_EPOCH = re.compile(r"ep(och)?", re.I)


@dataclass(frozen=True, eq=False)
class Pass:
    """A place where a new iterator over a loader is made; `loader` is the loader's expression."""

    source: Source
    node: cst.CSTNode
    loader: cst.BaseExpression


class Epochs:
    """The passes of one program."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.facts = context.facts
        self.flow = context.flow

    # Where passes begin

    def passes(self, loader: Loader) -> list[Pass]:
        """The places at which training on a loader starts over."""
        found: dict[tuple[cst.CSTNode, str], Pass] = {}
        for loop in loader.loops:
            if loop.trains:
                for item in self._starts(loop.source, loop.iterable, loop.node, 0):
                    if loader.call in self.facts.loaders_of(item.source, item.loader):
                        found[item.node, item.source.code(item.loader)] = item
        return list(found.values())

    def _starts(
        self, source: Source, node: cst.BaseExpression, place: cst.CSTNode, depth: int
    ) -> Iterator[Pass]:
        if depth > 5:
            return
        if isinstance(node, cst.Call) and ITERATION.search(dotted(node.func) or ""):
            if not self._is_cycle(source, node) or self.repeats(source, place):
                for arg in node.args:
                    if self.facts.loaders_of(source, arg.value):
                        yield from self._starts(source, arg.value, place, depth + 1)
            return
        through = [v for v in self.flow.of(source, node) if self._is_iterator(v)]
        if not through:
            yield Pass(source, place, node)
        for value in through:
            yield from self._behind(source, value, place, depth)

    def _is_cycle(self, source: Source, call: cst.Call) -> bool:
        """`itertools.cycle` keeps its first pass and repeats that; a new cycle draws a new one."""
        return (self.flow.qualified(source, call.func) or "").endswith("itertools.cycle")

    def _is_iterator(self, value: object) -> bool:
        """Whether a value is an iterator, a generator or a prefetcher over something."""
        if isinstance(value, Instance):
            own = isinstance(value.node, cst.Call)
            return own and not self.facts.loading.is_loader(value.source, value.node)  # type: ignore[arg-type]
        if not isinstance(value, Made):
            return False
        is_generator = isinstance(value.node, cst.FunctionDef)
        return is_generator or bool(ITERATION.search(value.name))

    def _behind(
        self, source: Source, value: object, place: cst.CSTNode, depth: int
    ) -> Iterator[Pass]:
        """The passes behind a variable that holds an iterator."""
        assert isinstance(value, Instance | Made)
        inside = value.source.inside
        if isinstance(value.node, cst.FunctionDef):
            for loop in inside(value.node, cst.For):
                yield from self._starts(value.source, loop.iter, loop, depth + 1)
            for item in inside(value.node, cst.Yield):
                if isinstance(item.value, cst.From):
                    yield from self._starts(value.source, item.value.item, item, depth + 1)
            return
        call = value.node
        if not isinstance(call, cst.Call):
            return
        has_iter = isinstance(value, Instance) and self.flow.method(value.cls, "__iter__")
        is_cycle = isinstance(value, Made) and value.name.endswith("itertools.cycle")
        if is_cycle and not self.repeats(value.source, call):
            return
        for arg in call.args:
            if self.facts.loaders_of(value.source, arg.value):
                at = place if has_iter and source is value.source else call
                yield from self._starts(value.source, arg.value, at, depth + 1)

    def repeats(self, source: Source, node: cst.CSTNode, depth: int = 0) -> bool:
        """Whether a place can run more than once."""
        loops = [x for x in self.facts.loops_around(source, node) if source.contains(x.body, node)]
        function = source.function_of(node)
        if loops or depth > 4:
            return True
        if function is None:
            return False
        callers = self.facts.callers.get(function, [])
        return not callers or any(self.repeats(s, call, depth + 1) for s, call in callers)

    # What counts them

    def epoch_at(self, source: Source, node: cst.CSTNode, depth: int = 0) -> str | None:
        """The variable that has a new value in every pass that begins at `node`."""
        handler = source.around(node, cst.ExceptHandler)
        loops = [x for x in self.facts.loops_around(source, node) if source.contains(x.body, node)]
        if handler is not None and any(source.contains(x, handler) for x in loops):
            return None
        counting = []
        for loop in loops:
            if isinstance(loop, cst.While):
                name = _counted(source, loop, node)
                if name is None:
                    return None
                counting.append(name)
            elif self._counts(source, loop):
                counting.append(source.code(loop.target))
            elif self.facts.loaders_of(source, loop.iter):
                return None
        if len(counting) > 1:
            named = [name for name in counting if _EPOCH.search(name)]
            return counting[0] if named and named[0] == counting[0] else None
        if counting:
            return counting[0] if counting[0] != "_" else None
        return self._received(source, node, depth) if not loops or depth == 0 else None

    def _counts(self, source: Source, loop: cst.For) -> bool:
        """Whether a loop counts: `for epoch in range(…)`, with a progress bar or not."""
        if not isinstance(loop.target, cst.Name | cst.Attribute):
            return False
        for call in source.inside(loop.iter, cst.Call):
            if _COUNTING.search(dotted(call.func) or ""):
                return True
        values = self.flow.made_by(source, loop.iter)
        return any(_COUNTING.search(value.name) for value in values)

    def _received(self, source: Source, node: cst.CSTNode, depth: int) -> str | None:
        """A parameter that every caller gives its epoch variable."""
        function = source.function_of(node)
        callers = self.facts.callers.get(function, []) if function else []
        if not callers or depth > 2:
            return None
        for parameter in parameters(function) if function else ():
            if all(
                self._gives(s, call, function, parameter.name.value, depth) for s, call in callers
            ):
                return parameter.name.value
        return None

    def _gives(
        self,
        source: Source,
        call: cst.Call,
        function: cst.FunctionDef | None,
        name: str,
        depth: int,
    ) -> bool:
        callee = next(f for f in self.flow.callees[call] if f.node is function)
        arg = call_arguments(call, callee, name)
        epoch = self.epoch_at(source, call, depth + 1)
        if arg is None or epoch is None:
            return False
        value = arg.value
        if isinstance(value, cst.BinaryOperation) and isinstance(value.operator, cst.Add):
            value = value.left
        return source.code(value) == epoch

    # The same loader where a function is called

    def at_callers(self, item: Pass) -> list[tuple[Pass, str]]:
        """The pass as seen from its callers' epoch loops, with their epochs; empty if not seen."""
        function = item.source.function_of(item.node)
        found: list[tuple[Pass, str]] = []
        loops = self.facts.loops_around(item.source, item.node)
        if function is None or any(item.source.contains(x.body, item.node) for x in loops):
            return []
        for source, call in self.facts.callers.get(function, ()):
            callee = next(f for f in self.flow.callees[call] if f.node is function)
            loader = self._argument(item, source, call, callee)
            if loader is not None and not self._may_train(item, source, loader):
                continue
            epoch = self.epoch_at(source, call)
            if loader is None or epoch is None:
                return []
            found.append((Pass(source, call, loader), epoch))
        return found

    def _argument(
        self, item: Pass, source: Source, call: cst.Call, callee: Function
    ) -> cst.BaseExpression | None:
        names = [p.name.value for p in parameters(callee.node)]
        if isinstance(item.loader, cst.Name) and item.loader.value in names:
            arg = call_arguments(call, callee, item.loader.value)
            return arg.value if arg and is_simple(arg.value) else None
        return None

    def _may_train(self, item: Pass, source: Source, loader: cst.BaseExpression) -> bool:
        trained = {x.call for x in self.facts.loaders if x.trains}
        return bool(self.facts.loaders_of(source, loader) & trained)


def is_simple(node: cst.CSTNode) -> bool:
    """Whether an expression can be written again in another line: a name, attribute or element."""
    if isinstance(node, cst.Attribute):
        return is_simple(node.value)
    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        index = node.slice[0].slice
        kinds = cst.Name | cst.Integer | cst.SimpleString | cst.Attribute
        plain = isinstance(index, cst.Index) and isinstance(index.value, kinds)
        return plain and is_simple(node.value)
    return isinstance(node, cst.Name)


def _counted(source: Source, loop: cst.While, node: cst.CSTNode) -> str | None:
    """`epoch` in `while epoch < n:` with `epoch += 1` outside the loops that hold `node`."""
    for step in source.inside(loop.body, cst.AugAssign):
        name = dotted(step.target)
        within = [x for x in source.ancestors(step) if isinstance(x, cst.For | cst.While)]
        in_test = name is not None and name in re.findall(r"[\w.]+", source.code(loop.test))
        if within and within[0] is loop and (in_test or _EPOCH.search(name or "")):
            return name
    return None
