"""What an expression can be: the values that `flow` moves through a program."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from migrate.source import Source


@dataclass(frozen=True, slots=True)
class External:
    """Something that is not the project's, by its full name: `torch.nn.DataParallel`."""

    name: str


@dataclass(frozen=True, slots=True)
class File:
    """A module of the project."""

    source: Source


@dataclass(frozen=True, slots=True)
class Function:
    """A function or method of the project."""

    source: Source
    node: cst.FunctionDef
    owner: cst.ClassDef | None


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the project."""

    source: Source
    node: cst.ClassDef


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a project class, by the call that made it; without it, any such object."""

    cls: Class
    source: Source
    node: cst.CSTNode | None


@dataclass(frozen=True, slots=True)
class Made:
    """What a call of something external gave, or a tuple, list or dict that was written out.

    `name` is what was called, with `()` after each call in it: `torch.load().get`.
    """

    source: Source
    node: cst.CSTNode
    name: str


@dataclass(frozen=True, slots=True)
class Method:
    """A method of the project, bound to an object."""

    function: Function
    instance: Instance


Value = External | File | Function | Class | Instance | Made | Method
Values = frozenset[Value]
NOTHING: Values = frozenset()
