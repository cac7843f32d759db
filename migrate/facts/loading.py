"""Where DataLoaders are made, where batches are taken from them, and which of these places train.

One call can make the loaders of more than one phase, and one loop can read them: then the keys of a
dict, the arguments of a call and the tests around `backward()` tell the phases apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import libcst as cst

from migrate.facts.branches import Known, can_run, known_arguments
from migrate.flow import MADE_BY, call_arguments
from migrate.names import Slot, parameters
from migrate.source import Source
from migrate.syntax import dotted, method_name, receiver, string_value
from migrate.values import Class, External, Instance, Made

if TYPE_CHECKING:
    from migrate.facts.program import Facts

ITERATION = re.compile(
    r"(^|\.)(enumerate|iter|zip|cycle|islice|chain|from_iterable|reversed|t?qdm\w*|trange|track)$"
)
LOADER = re.compile(r"(^|\.)DataLoader$|^torch_geometric\..*\w*Loader$")
Case = tuple[Known, set[cst.Call]]
"""Some variables' values, and the loaders that an expression can then be."""


@dataclass(frozen=True, eq=False)
class Loop:
    """A place that takes batches from a loader: a `for`, a `yield from`, or a call of `next`."""

    source: Source
    node: cst.For | cst.CompFor | cst.Yield | cst.Call
    trains: bool

    @property
    def iterable(self) -> cst.BaseExpression:
        """What the batches are taken from."""
        if isinstance(self.node, cst.Call):
            of = receiver(self.node)
            return self.node.args[0].value if of is None or self.node.args else of
        if isinstance(self.node, cst.Yield):
            assert isinstance(self.node.value, cst.From)
            return self.node.value.item
        return self.node.iter


@dataclass(frozen=True, eq=False)
class Loader:
    """A call that makes a DataLoader, and the places that take batches from it."""

    source: Source
    call: cst.Call
    loops: tuple[Loop, ...]

    @property
    def trains(self) -> bool:
        """Whether weights are trained on its batches."""
        return any(loop.trains for loop in self.loops)


class Loading:
    """The loaders of one project and their loops."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.flow = facts.flow

    def is_loader(self, source: Source, call: cst.Call) -> bool:
        """Whether a call makes a DataLoader."""
        for callee in self.flow.of(source, call.func):
            names = {callee.name} if isinstance(callee, External) else set()
            if isinstance(callee, Class):
                names = self.flow.bases(callee)[1]
            if any(LOADER.search(name) for name in names):
                return True
        return False

    def loaders(self) -> list[Loader]:
        """Every call that makes a DataLoader, with its loops."""
        return [
            Loader(source, call, tuple(self.loops_of.get(call, ())))
            for source, call in self.facts.calls()
            if self.is_loader(source, call)
        ]

    @cached_property
    def loops_of(self) -> dict[cst.Call, list[Loop]]:
        """For each loader, and each call of a function that makes one, the loops over it."""
        found: dict[cst.Call, list[Loop]] = {}
        for loop in self.loops:
            training, other = self.split(loop)
            quiet = Loop(loop.source, loop.node, False) if loop.trains else loop
            for call in training:
                found.setdefault(call, []).append(loop)
            for call in other:
                found.setdefault(call, []).append(quiet)
        return found

    # Loops

    @cached_property
    def loops(self) -> list[Loop]:
        """Every loop of the program that takes batches, or anything else."""
        return [loop for source in self.facts.project.sources for loop in self._loops(source)]

    def _loops(self, source: Source) -> Iterator[Loop]:
        own = self.facts.definitions[source]
        kinds = (cst.For, cst.CompFor, cst.Yield, cst.Call)
        nodes = [node for kind in kinds for node in source.all(kind) if _takes(node)]
        for node in nodes:
            if own.is_own(node):
                continue
            trains = self._feeds_training(source, node)
            if isinstance(node, cst.For):
                trains = trains or self.facts.reaches_backward(source, node.body)
            elif isinstance(node, cst.Call):
                trains = self._next_trains(source, node)
            yield Loop(source, node, trains)  # type: ignore[arg-type]

    def _next_trains(self, source: Source, call: cst.Call) -> bool:
        """Whether the batch of a `next` call is trained on: not in a loop over another loader."""
        if _without_gradients(source, call):
            return False
        around = self.facts.loops_around(source, call)
        where: cst.CSTNode = around[0] if around else source.function_of(call) or call
        if around and isinstance(where, cst.For) and source.contains(where.iter, call):
            where = around[1] if len(around) > 1 else source.function_of(call) or call
        if isinstance(where, cst.Call):
            return False
        for point in self.points(source, where):
            inner = [loop for loop in self.facts.loops_around(source, point) if loop is not where]
            others = [loop for loop in inner if source.contains(where, loop)]
            others = [loop for loop in others if not source.contains(loop, call)]
            if not any(isinstance(x, cst.For) and self.loaders_of(source, x.iter) for x in others):
                return True
        return False

    def points(self, source: Source, node: cst.CSTNode) -> list[cst.Call]:
        """The calls in `node` that are `backward()`, or lead to one."""
        found = [c for s, c in self.facts.backwards if s is source and source.contains(node, c)]
        for call in source.inside(node, cst.Call):
            callees = self.flow.callees.get(call, ())
            if any(function.node in self.facts.training_functions for function in callees):
                found.append(call)
        return found

    def _feeds_training(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether a loop only yields batches, in a generator that a training loop iterates."""
        function = source.function_of(node)
        if function is None or not source.inside(node, cst.Yield):
            return False
        for user, call in self.facts.callers.get(function, ()):
            if any(
                self.facts.reaches_backward(user, x) for x in self.facts.loops_around(user, call)
            ):
                return True
            if user.function_of(call) in self.facts.training_functions:
                return True
        return False

    # Which loaders

    def loaders_of(self, source: Source, node: cst.CSTNode | None, depth: int = 0) -> set[cst.Call]:
        """The loaders whose batches an iterable gives, through enumerate, tqdm, iter …

        Each by the call that makes it, and by the calls of functions that return it.
        """
        found: set[cst.Call] = set()
        for value in self.flow.of(source, node) if depth < 7 else ():
            call = value.node if isinstance(value, Made | Instance) else None
            if isinstance(value, Made) and isinstance(call, cst.FunctionDef):
                inside = value.source.inside
                items: list[cst.BaseExpression] = [loop.iter for loop in inside(call, cst.For)]
                items += [
                    y.value.item for y in inside(call, cst.Yield) if isinstance(y.value, cst.From)
                ]
                for item in items:
                    found |= self.loaders_of(value.source, item, depth + 1)
            if not isinstance(call, cst.Call) or not isinstance(value, Made | Instance):
                continue
            is_made_by = isinstance(value, Made) and value.name == MADE_BY
            if is_made_by or self.is_loader(value.source, call):
                found.add(call)
            elif isinstance(value, Instance) or ITERATION.search(value.name):
                for arg in call.args:
                    found |= self.loaders_of(value.source, arg.value, depth + 1)
        return found

    def split(self, loop: Loop) -> tuple[set[cst.Call], set[cst.Call]]:
        """The loaders that a loop trains on, and those that it reads without; some are both."""
        training: set[cst.Call] = set()
        other: set[cst.Call] = set()
        points = self.points(loop.source, loop.node.body) if isinstance(loop.node, cst.For) else []
        for core in self.cores(loop.source, loop.iterable):
            for known, loaders in self.cases(loop.source, core, loop.trains):
                can_train = not points or any(can_run(loop.source, p, known) for p in points)
                into = training if loop.trains and can_train else other
                into |= loaders
        return training, other

    def cores(self, source: Source, node: cst.CSTNode, depth: int = 0) -> list[cst.CSTNode]:
        """What is inside `enumerate(tqdm(…))` and behind a local name for it."""
        inner: list[cst.CSTNode] = []
        if isinstance(node, cst.Call) and ITERATION.search(dotted(node.func) or ""):
            inner = [arg.value for arg in node.args if self.loaders_of(source, arg.value)]
        elif isinstance(node, cst.Name):
            function = source.function_of(node)
            slot = self.facts.slot(source, node)
            values = [
                value for target, value in _assignments(source, function) if target == node.value
            ]
            if len(values) == 1 and slot.owner is (function or source.module):
                is_call = isinstance(values[0], cst.Call) and ITERATION.search(
                    dotted(values[0].func) or ""
                )
                inner = [*values] if is_call or isinstance(values[0], cst.Subscript) else []
        if not inner or depth > 5:
            return [node]
        return [core for item in inner for core in self.cores(source, item, depth + 1)]

    def cases(
        self, source: Source, node: cst.CSTNode, split: bool = True, depth: int = 0
    ) -> list[Case]:
        """What an expression can be, told apart by the keys and arguments that decide it."""
        plain: list[Case] = [({}, self.loaders_of(source, node))]
        if not split or depth > 3 or len(plain[0][1]) == 0:
            return plain
        if isinstance(node, cst.Subscript):
            return self._by_key(source, node) or plain
        if isinstance(node, cst.Name):
            return self._by_call(source, node, depth) or plain
        return plain

    def _by_key(self, source: Source, node: cst.Subscript) -> list[Case]:
        index = node.slice[0].slice if len(node.slice) == 1 else None
        if not isinstance(index, cst.Index) or not isinstance(index.value, cst.Name):
            return []
        found: list[Case] = []
        for key in self.strings(source, index.value):
            values = self.flow.elements(self.flow.of(source, node.value), f"[{key!r}]")
            calls = {v.node for v in values if isinstance(v, Made | Instance)}
            loaders = {c for c in calls if isinstance(c, cst.Call)} & self.loaders_of(source, node)
            found.append(({index.value.value: key}, loaders))
        return found

    def _by_call(self, source: Source, node: cst.Name, depth: int) -> list[Case]:
        function = source.function_of(node)
        names = [p.name.value for p in parameters(function)] if function else []
        if function is None or node.value not in names:
            return []
        found: list[Case] = []
        for user, call in self.facts.callers.get(function, ()):
            callee = next(f for f in self.flow.callees[call] if f.node is function)
            arg = call_arguments(call, callee, node.value)
            for known, loaders in self.cases(user, arg.value, True, depth + 1) if arg else ():
                if loaders:
                    found.append((known_arguments(call, callee, known), loaders))
        return found

    def assigned(self, source: Source, node: cst.Name) -> list[cst.BaseExpression]:
        """The values that plain assignments give a variable, in the scope it belongs to."""
        owner = self.facts.slot(source, node).owner
        scope = owner if isinstance(owner, cst.FunctionDef) else None
        return [value for name, value in _assignments(source, scope) if name == node.value]

    def strings(self, source: Source, name: cst.Name) -> list[str]:
        """The strings that a name goes through: `for phase in ["train", "val"]`, or a parameter."""
        slot = self.facts.slot(source, name)
        found: list[str] = []
        loops: list[cst.For | cst.CompFor] = [*source.all(cst.For), *source.all(cst.CompFor)]
        for loop in loops:
            target = loop.target
            if not isinstance(target, cst.Name) or target.value != name.value:
                continue
            is_inside = isinstance(loop, cst.CompFor) or self._slot(source, target) == slot
            if is_inside and isinstance(loop.iter, cst.List | cst.Tuple):
                found += [string_value(e.value) or "" for e in loop.iter.elements]
        function = slot.owner if isinstance(slot.owner, cst.FunctionDef) else None
        for _, call in self.facts.callers.get(function, ()) if function else ():
            for callee in self.flow.callees[call]:
                value = known_arguments(call, callee, {}).get(name.value)
                found += [value] if isinstance(value, str) else []
        return list(dict.fromkeys(item for item in found if item))

    def _slot(self, source: Source, name: cst.Name) -> Slot:
        return self.facts.slot(source, name)


def _takes(node: cst.CSTNode) -> bool:
    """Whether a node can take batches from something."""
    if isinstance(node, cst.Yield):
        return isinstance(node.value, cst.From)
    if isinstance(node, cst.Call):
        is_builtin = dotted(node.func) == "next" and bool(node.args)
        return is_builtin or (method_name(node) in ("next", "__next__") and not node.args)
    return True


def _without_gradients(source: Source, node: cst.CSTNode) -> bool:
    """Whether a node stands under `with torch.no_grad():`."""
    return any(
        "no_grad" in source.code(item.item) or "inference_mode" in source.code(item.item)
        for block in source.ancestors(node)
        if isinstance(block, cst.With)
        for item in block.items
    )


def _assignments(
    source: Source, scope: cst.FunctionDef | None
) -> Iterator[tuple[str, cst.BaseExpression]]:
    """The names that a scope binds by plain assignments, with the values."""
    for assign in source.inside(scope or source.module, cst.Assign):
        if source.function_of(assign) is not scope:
            continue
        for target in assign.targets:
            if isinstance(target.target, cst.Name):
                yield target.target.value, assign.value
