"""What an expression can be: the values that `flow` moves through a program."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from migrate.source import Source
from migrate.syntax import dotted, string_value


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


def is_decorated(function: Function, name: str) -> bool:
    """Whether a function stands under `@name`."""
    return any(dotted(item.decorator) == name for item in function.node.decorators)


def owner_name(value: Value) -> str | None:
    """What the result of a value's method is named after: its class, or how it was made.

    Nothing for long chains: `x = x.view(…)` in a loop would get a longer name for ever.
    """
    if isinstance(value, Instance):
        return value.cls.node.name.value
    if isinstance(value, Made):
        return value.name if value.name.count("()") < 3 else ""
    return None


def identity(value: Value) -> object:
    """What a value's attributes and elements are filed under."""
    match value:
        case Instance():
            return value.cls.node
        case Made() | Class() | Function():
            return value.node
        case _:
            return value


def subscript_keys(node: cst.Subscript) -> list[str]:
    """The slots a subscript means: the one of a constant key, and that of any key."""
    index = node.slice[0].slice if len(node.slice) == 1 else None
    if isinstance(index, cst.Index):
        text = string_value(index.value)
        if text is not None:
            return [f"[{text!r}]", "[*]"]
        if isinstance(index.value, cst.Integer):
            return [f"[{index.value.value}]", "[*]"]
    return ["[*]"]
