"""What a name means in a file: Python's scopes and imports.

A name is resolved to a `Slot`, the variable it stands for. Which values a slot holds is `flow`'s
question.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import libcst as cst

from migrate.source import Source
from migrate.syntax import ASSIGNING, assigned_targets, dotted, flat_targets

Scope = cst.Module | cst.FunctionDef | cst.Lambda | cst.ClassDef
_SCOPES = frozenset({cst.Module, cst.FunctionDef, cst.Lambda, cst.ClassDef})
_BINDING = frozenset(
    {
        *ASSIGNING, cst.Import, cst.ImportFrom, cst.ExceptHandler,
        cst.FunctionDef, cst.ClassDef, cst.Lambda,
    }
)  # fmt: skip
"""The types of nodes that bind names, or open a scope."""


class Slot(NamedTuple):
    """A variable: a name in a scope, an attribute of something, an element of a container."""

    owner: object
    name: str


@dataclass(frozen=True, slots=True)
class Import:
    """A name bound by an import: `module`, and `name` in it unless the module itself is bound."""

    module: str
    level: int
    name: str | None


class Names:
    """The scopes of one file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._slots: dict[cst.CSTNode, Slot] = {}

    @cached_property
    def _scopes(self) -> dict[Scope, set[str]]:
        """The names that each scope binds."""
        module = self.source.module
        scopes: dict[Scope, set[str]] = {module: set()}
        inside: dict[cst.CSTNode, Scope] = {module: module}
        for node, parent in self.source.parents.items():  # a node comes after the one around it
            scope = inside[parent]
            inside[node] = self._enter(node, scope, scopes) if type(node) in _BINDING else scope
        for statement in self.source.all(cst.Global):
            function = self.source.function_of(statement)
            if function is not None:
                names = {item.name.value for item in statement.names}
                scopes[function] -= names
                scopes[module] |= names
        for outer in self.source.all(cst.Nonlocal):
            function = self.source.function_of(outer)
            if function is not None:
                scopes[function] -= {item.name.value for item in outer.names}
        return scopes

    def _enter(self, node: cst.CSTNode, scope: Scope, scopes: dict[Scope, set[str]]) -> Scope:
        """Notes what `node` binds in `scope`; gives the scope of what is in it."""
        for target in assigned_targets(node):
            for single in flat_targets(target):
                if isinstance(single, cst.Name):
                    scopes[scope].add(single.value)
        if isinstance(node, cst.Import | cst.ImportFrom):
            scopes[scope].update(name for name, _ in bindings(node))
        if isinstance(node, cst.ExceptHandler) and node.name is not None:
            scopes[scope].update(dotted(node.name.name) or "" for _ in (1,))
        if isinstance(node, cst.FunctionDef | cst.ClassDef):
            scopes[scope].add(node.name.value)
        if isinstance(node, cst.FunctionDef | cst.ClassDef | cst.Lambda):
            scopes[node] = {p.name.value for p in parameters(node)}
            return node
        return scope

    @cached_property
    def imports(self) -> dict[str, Import]:
        """Every imported name of the file, wherever the import stands."""
        found: dict[str, Import] = {}
        for kind in (cst.Import, cst.ImportFrom):
            for node in self.source.all(kind):
                found.update(bindings(node))  # type: ignore[arg-type]
        return found

    @cached_property
    def starred(self) -> list[Import]:
        """The modules of `from m import *`."""
        return [
            Import(dotted(node.module) or "", len(node.relative), None)
            for node in self.source.all(cst.ImportFrom)
            if isinstance(node.names, cst.ImportStar)
        ]

    @cached_property
    def bound(self) -> set[str]:
        """Every name that is bound anywhere in the file."""
        return set().union(*self._scopes.values())

    @property
    def module_names(self) -> set[str]:
        """The names that the module itself binds."""
        return self._scopes[self.source.module]

    def scopes_around(self, node: cst.CSTNode) -> Iterator[Scope]:
        """The scopes that a name at `node` is looked up in, the nearest first."""
        inner: cst.CSTNode = node
        first = True
        for item in self.source.ancestors(node):
            if type(item) in _SCOPES:
                is_hidden = isinstance(item, cst.ClassDef) and not first
                if isinstance(item, cst.Module) or (inner is item.body and not is_hidden):  # type: ignore[attr-defined]
                    yield item  # type: ignore[misc]
                    first = False
            inner = item

    def slot(self, node: cst.CSTNode, name: str) -> Slot:
        """The variable that `name`, used at `node`, stands for."""
        known = self._slots.get(node)
        if known is None or known.name != name:
            known = self._slots[node] = self._slot(node, name)
        return known

    def _slot(self, node: cst.CSTNode, name: str) -> Slot:
        around = self.source.parent(node)
        if isinstance(around, cst.Param) and around.name is node:
            function = self.source.around(node, cst.FunctionDef, cst.Lambda)
            return Slot(function, name)
        for scope in self.scopes_around(node):
            if name in self._scopes.get(scope, ()):
                return Slot(scope, name)
        return Slot(self.source.module, name)

    def is_visible(self, node: cst.CSTNode, name: str) -> bool:
        """Whether `name` can be used at `node`: bound in a scope around it."""
        return any(name in self._scopes.get(scope, ()) for scope in self.scopes_around(node))


def parameters(function: cst.CSTNode) -> list[cst.Param]:
    """All parameters of a function in order, `*args` and `**kwargs` last; none of a class."""
    if not isinstance(function, cst.FunctionDef | cst.Lambda):
        return []
    given = function.params
    stars = [p for p in (given.star_arg, given.star_kwarg) if isinstance(p, cst.Param)]
    return [*given.posonly_params, *given.params, *given.kwonly_params, *stars]


def bindings(node: cst.Import | cst.ImportFrom) -> Iterator[tuple[str, Import]]:
    """The names that an import statement binds; none for `import *`."""
    if isinstance(node.names, cst.ImportStar):
        return
    for alias in node.names:
        name = dotted(alias.name) or ""
        asname = dotted(alias.asname.name) if alias.asname else None
        if isinstance(node, cst.ImportFrom):
            module = dotted(node.module) or ""
            yield asname or name, Import(module, len(node.relative), name)
        elif asname:
            yield asname, Import(name, 0, None)
        else:
            top = name.partition(".")[0]
            yield top, Import(top, 0, None)
