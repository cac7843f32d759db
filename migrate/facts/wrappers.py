"""Where a script takes a model out of its wrapper, and what the names in its state then are.

`flow` does not tell a variable before a wrap from the same variable after it; the ways in which
scripts unwrap are few, and are recognised here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.state import bindings, is_wrapper
from migrate.names import Slot
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import dotted, literal
from migrate.values import Instance


def module_attributes(context: Context, source: Source, root: cst.CSTNode) -> list[cst.Attribute]:
    """The `.module` of wrapped models in a piece of code."""
    own = context.facts.definitions[source]
    return [
        node
        for node in source.inside(root, cst.Attribute)
        if node.attr.value == "module"
        and not own.is_own(node)
        and is_wrapper(context, source, node.value)
        and not _has_own(context, source, node.value)
    ]


def _has_own(context: Context, source: Source, model: cst.BaseExpression) -> bool:
    """Whether a class of the project has an attribute `module` itself."""
    flow = context.flow
    return any(
        flow.slots.get(Slot(cls.node, "module"))
        for value in flow.of(source, model)
        if isinstance(value, Instance)
        for cls in flow.bases(value.cls)[0]
    )


def chooses(context: Context, source: Source, choice: cst.IfExp | cst.If) -> bool:
    """Whether the branches of an `if` differ only in `.module`, or it does nothing but unwrap."""
    found = module_attributes(context, source, choice.body)
    if not found:
        return False
    body = _plain(source.code(choice.body))
    orelse: cst.CSTNode | None = choice.orelse
    if isinstance(orelse, cst.Else):
        orelse = orelse.body
    if orelse is None:
        return bool(re.fullmatch(r"([\w.]+)=\1\.module", body))
    model = _plain(source.code(found[0].value))
    other = _plain(source.code(orelse))
    return body.replace(f"{model}.module", model) == other or body == f"{other}.module"


def _plain(code: str) -> str:
    return re.sub(r"#.*|\s", "", code)


def is_unwrapped(
    context: Context, source: Source, node: cst.CSTNode | None, depth: int = 0
) -> bool:
    """Whether an expression is the model without its wrapper, because the script sees to it."""
    if node is None or depth > 6:
        return False
    if isinstance(node, cst.Attribute) and node.attr.value == "module":
        return True
    if _is_other_branch(context, source, node):
        return True
    parts: list[tuple[Source, cst.CSTNode]] = []
    if isinstance(node, cst.IfExp):
        parts = [(source, node.body), (source, node.orelse)]
    elif isinstance(node, cst.Call) and dotted(node.func) == "getattr" and len(node.args) > 1:
        return literal(node.args[1].value) == "module"
    elif isinstance(node, cst.Call):
        parts = list(_returned(context, node))
    elif isinstance(node, cst.Name):
        parts = [
            (home, value)
            for home, value in bindings(context, source, node)
            if not (home is source and _is_below(source, node, value))
        ]
    return any(is_unwrapped(context, home, part, depth + 1) for home, part in parts)


def _returned(context: Context, call: cst.Call) -> Iterator[tuple[Source, cst.CSTNode]]:
    for function in context.flow.callees.get(call, ()):
        for statement in function.source.inside(function.node, cst.Return):
            if statement.value is not None:
                yield function.source, statement.value


def _is_below(source: Source, use: cst.CSTNode, value: cst.CSTNode) -> bool:
    """Whether a binding comes after a use, and no loop brings it before."""
    if source.function_of(use) is not source.function_of(value):
        return False
    if source.span(value).start < source.span(use).start:
        return False
    loops = [item for item in source.ancestors(use) if isinstance(item, cst.For | cst.While)]
    return not any(source.contains(loop, value) for loop in loops)


def _is_other_branch(context: Context, source: Source, node: cst.CSTNode) -> bool:
    """Whether a model is named where it has no wrapper: in the `else` of a choice."""
    inner: cst.CSTNode = node
    for item in source.ancestors(node):
        if isinstance(item, cst.FunctionDef):
            return False
        is_else = isinstance(item, cst.IfExp | cst.If) and inner is item.orelse
        if is_else and chooses(context, source, item):  # type: ignore[arg-type]
            return True
        inner = item
    return False
