"""Which assignments a name can have its value from, by the order of execution in one function.

`flow` does not look at order; a number that is a local one on one line and the global one on the
next needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import libcst as cst

from migrate.names import Names, Slot, parameters
from migrate.source import Source
from migrate.syntax import assigned_targets

_BINDING = (
    cst.Assign,
    cst.AnnAssign,
    cst.AugAssign,
    cst.For,
    cst.CompFor,
    cst.NamedExpr,
    cst.WithItem,
)
_BLOCKS = frozenset(
    {cst.IndentedBlock, cst.Module, cst.SimpleStatementSuite, cst.SimpleStatementLine}
)
_SIMPLE = (cst.SimpleStatementLine, cst.BaseSmallStatement)


@dataclass(frozen=True, eq=False)
class Binding:
    """One place that gives a variable a value.

    Attributes:
        node: the assignment, loop, `with` item or parameter.
        name: what is bound, and its offset `start`.
        path: where in its (nested) tuple of targets the name is.
    """

    node: cst.CSTNode
    name: cst.CSTNode
    start: int
    path: tuple[int, ...] = ()


class Reaching:
    """The bindings of one file, and which of them a name can see."""

    def __init__(self, source: Source, names: Names) -> None:
        self.source = source
        self.names = names

    @cached_property
    def bindings(self) -> dict[Slot, list[Binding]]:
        """All bindings of each variable, in the order of the text."""
        found: defaultdict[Slot, list[Binding]] = defaultdict(list)
        for kind in _BINDING:
            for node in self.source.all(kind):
                for target in assigned_targets(node):
                    for name, path in _names(target):
                        slot = self.names.slot(name, name.value)
                        start = self.source.span(name).start
                        found[slot].append(Binding(node, name, start, path))
        for each in found.values():
            each.sort(key=lambda item: item.start)
        return dict(found)

    def of(self, read: cst.Name) -> list[Binding]:
        """The bindings whose value `read` can have; a parameter is one of them."""
        slot = self.names.slot(read, read.value)
        every = self.bindings.get(slot, [])
        generators = [b for b in every if isinstance(b.node, cst.CompFor)]
        if generators:
            for item in self.source.ancestors(read):
                for binding in generators:
                    if self.source.parent(binding.node) is item:
                        return [binding]
            every = [b for b in every if b not in generators]
        owner = self.source.function_of(read) or self.source.module
        return self._before(read, every) if slot.owner is owner else every

    def _before(self, read: cst.Name, every: list[Binding]) -> list[Binding]:
        found: dict[int, Binding] = {}
        node: cst.CSTNode = read
        for parent in self.source.ancestors(read):
            if type(parent) in _BLOCKS:
                if self._in_block(parent, node, every, found):
                    return list(found.values())
            else:
                own = [
                    b for b in every if b.node is parent and node is getattr(parent, "body", None)
                ]
                if own:
                    return [*found.values(), *own]
                if isinstance(parent, cst.For | cst.While):
                    found.update({id(b): b for b in self._inside(parent.body, every)})
            if isinstance(parent, cst.FunctionDef):
                break
            node = parent
        function = self.source.function_of(read)
        for parameter in parameters(function) if function else ():
            if parameter.name.value == read.value:
                start = self.source.span(parameter.name).start
                found[id(parameter)] = Binding(parameter, parameter.name, start)
        return list(found.values())

    def _in_block(
        self, block: cst.CSTNode, node: cst.CSTNode, every: list[Binding], found: dict[int, Binding]
    ) -> bool:
        """Adds what the statements before `node` bind; True if one of them always does."""
        start = self.source.span(node).start
        before = [b for b in every if b.start < start]
        statements = list(getattr(block, "body", ())) if before else []
        index = next((i for i, item in enumerate(statements) if item is node), 0)
        for statement in reversed(statements[:index]):
            inside = self._inside(statement, before)
            if not inside:
                continue
            if self._always(statement, inside):
                kept = inside[-1:] if isinstance(statement, _SIMPLE) else inside
                found.update({id(b): b for b in kept})
                return True
            found.update({id(b): b for b in inside})
        return False

    def _inside(self, node: cst.CSTNode, every: list[Binding]) -> list[Binding]:
        start, stop = self.source.span(node)
        return [binding for binding in every if start <= binding.start < stop]

    def _always(self, statement: cst.CSTNode, every: list[Binding]) -> bool:
        """Whether a statement binds the variable on every way through it."""
        if not self._inside(statement, every):
            return False
        match statement:
            case cst.With():
                in_items = any(b.node in statement.items for b in every)
                return in_items or self._block_always(statement.body, every)
            case cst.If():
                other = statement.orelse
                if other is None or not self._block_always(statement.body, every):
                    return False
                if isinstance(other, cst.If):
                    return self._always(other, every)
                return self._block_always(other.body, every)
            case cst.Try():
                return self._block_always(statement.body, every)
            case cst.For() | cst.While() | cst.FunctionDef() | cst.ClassDef():
                return False
            case _:
                return True

    def _block_always(self, block: cst.CSTNode, every: list[Binding]) -> bool:
        return any(self._always(item, every) for item in getattr(block, "body", ()))


def _names(
    target: cst.CSTNode, path: tuple[int, ...] = ()
) -> Iterator[tuple[cst.Name, tuple[int, ...]]]:
    if isinstance(target, cst.Name):
        yield target, path
    elif isinstance(target, cst.Tuple | cst.List):
        for index, element in enumerate(target.elements):
            yield from _names(element.value, (*path, index))
