"""A vocabulary for libcst nodes: pure questions that need no file and no scope."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import cache

import libcst as cst

_LAYOUT = ("whitespace", "lpar", "rpar", "comma", "semicolon", "leading_lines", "lines_after",
           "header", "footer", "trailing", "lbracket", "rbracket", "lbrace", "rbrace", "equal",
           "indent", "newline", "colon", "dot", "encoding", "default_", "has_trailing")  # fmt: skip
_ESCAPES = frozenset("\\\r")
"""What makes the value of a text another one than what stands between its quotes."""


@cache
def _child_fields(kind: type[cst.CSTNode]) -> tuple[str, ...]:
    """The fields that hold syntax, not layout."""
    return tuple(f.name for f in fields(kind) if not f.name.startswith(_LAYOUT))


def child_nodes(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The nodes directly below, without those that are only layout."""
    for name in _child_fields(type(node)):
        value = getattr(node, name)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, tuple | list):
            yield from (item for item in value if isinstance(item, cst.CSTNode))


def dotted(node: cst.CSTNode | None) -> str | None:
    """`a.b.c` for a chain of names; None for anything else."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return None
    return ".".join([node.value, *reversed(parts)])


def positional(call: cst.Call, index: int) -> cst.Arg | None:
    """The positional argument at `index`; None if it is not given, or hidden behind a `*`."""
    plain = [arg for arg in call.args if arg.keyword is None]
    if any(arg.star for arg in plain[: index + 1]):
        return None
    return plain[index] if 0 <= index < len(plain) else None


def argument(call: cst.Call, name: str, index: int | None = None) -> cst.Arg | None:
    """The argument given as keyword `name`, or at position `index`."""
    for arg in call.args:
        if arg.keyword is not None and arg.keyword.value == name:
            return arg
    return None if index is None else positional(call, index)


def has_star(call: cst.Call) -> bool:
    """Whether arguments are passed by `*` or `**`, so that not all can be seen."""
    return any(arg.star for arg in call.args)


def method_name(call: cst.Call) -> str | None:
    """`m` in `anything.m(...)`."""
    return call.func.attr.value if isinstance(call.func, cst.Attribute) else None


def receiver(call: cst.Call) -> cst.BaseExpression | None:
    """`x` in `x.m(...)`."""
    return call.func.value if isinstance(call.func, cst.Attribute) else None


def string_value(node: cst.CSTNode | None) -> str | None:
    """The value of a plain string literal."""
    if isinstance(node, cst.SimpleString) and not node.prefix and not _ESCAPES & set(node.value):
        return node.raw_value  # most are, and evaluating a text means parsing it
    if isinstance(node, cst.SimpleString | cst.ConcatenatedString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def literal(node: cst.CSTNode | None) -> object:
    """The value of a number, string, True, False or None; `...` for anything else."""
    if isinstance(node, cst.Integer | cst.Float):
        return node.evaluated_value
    if isinstance(node, cst.Name) and node.value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[node.value]
    value = string_value(node)
    return ... if value is None else value


_WITH_TARGET = (cst.AnnAssign, cst.AugAssign, cst.For, cst.CompFor, cst.NamedExpr)
ASSIGNING = (cst.Assign, *_WITH_TARGET, cst.WithItem)
"""The types of nodes that bind what `assigned_targets` gives."""


def assigned_targets(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """What an assignment, a loop, a `with` item or a walrus binds, tuples not taken apart."""
    if isinstance(node, cst.Assign):
        return [target.target for target in node.targets]
    if isinstance(node, _WITH_TARGET):
        return [node.target]
    if isinstance(node, cst.WithItem) and node.asname is not None:
        return [node.asname.name]
    return []


def flat_targets(target: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """The single targets in a target, tuples and lists taken apart."""
    if isinstance(target, cst.Tuple | cst.List):
        for element in target.elements:
            yield from flat_targets(element.value)
    else:
        yield target


def block_statements(block: cst.BaseSuite | cst.Module) -> list[cst.CSTNode]:
    """The statements of a block; those of `if x: a; b` as one."""
    if isinstance(block, cst.IndentedBlock | cst.Module):
        return list(block.body)
    return [block]


def expression_of(statement: cst.CSTNode) -> cst.BaseExpression | None:
    """`e` if a statement is just the expression `e`."""
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        small = statement.body[0]
        if isinstance(small, cst.Expr):
            return small.value
    return None


def is_docstring(statement: cst.CSTNode) -> bool:
    """Whether a statement is a lone string."""
    return isinstance(expression_of(statement), cst.SimpleString | cst.ConcatenatedString)
