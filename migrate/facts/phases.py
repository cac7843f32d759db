"""Under which keys of a dict of loaders the training ones are: `loaders["train"]`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import libcst as cst

from migrate.facts.branches import Known, can_run, known_arguments
from migrate.facts.loading import Loop
from migrate.flow import call_arguments
from migrate.names import parameters
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import string_value
from migrate.values import Function

Trains = Callable[[Known], bool]
"""Whether the loop trains where some variables have those values."""


class Unknown(Exception):
    """The phases of a program cannot be told apart; the text says why."""


def trained_keys(context: Context, loops: Iterable[Loop]) -> set[str]:
    """The keys of a dict of loaders that the loops train on.

    Raises:
        Unknown: a loop's loader is not seen to come from a key.
    """
    found: set[str] = set()
    for loop in loops:
        loading = context.facts.loading
        inside = loop.node.body if isinstance(loop.node, cst.For) else loop.node
        points = loading.points(loop.source, inside)

        def trains(
            known: Known, source: Source = loop.source, points: list[cst.Call] = points
        ) -> bool:
            return not points or any(can_run(source, point, known) for point in points)

        for core in loading.cores(loop.source, loop.iterable):
            found |= _keys(context, loop.source, core, trains, 0)
    return found


def _keys(
    context: Context, source: Source, node: cst.CSTNode, trains: Trains, depth: int
) -> set[str]:
    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        index = node.slice[0].slice
        key = index.value if isinstance(index, cst.Index) else None
        text = string_value(key)
        if text is not None:
            return {text} if trains({}) else set()
        if isinstance(key, cst.Name):
            every = context.facts.loading.strings(source, key)
            if every:
                return {item for item in every if trains({key.value: item})}
    if isinstance(node, cst.Name) and depth < 4:
        return _keys_of_name(context, source, node, trains, depth)
    raise Unknown(f"the key of {source.code(node)} in the dict of loaders cannot be seen")


def _keys_of_name(
    context: Context, source: Source, node: cst.Name, trains: Trains, depth: int
) -> set[str]:
    """The keys behind a variable, or behind a parameter's arguments."""
    loading = context.facts.loading
    function = source.function_of(node)
    names = [p.name.value for p in parameters(function)] if function else []
    found: set[str] = set()
    if function is not None and node.value in names:
        for user, call in context.facts.callers.get(function, ()):
            callee = next(f for f in context.flow.callees[call] if f.node is function)
            arg = call_arguments(call, callee, node.value)
            if arg is None or not loading.loaders_of(user, arg.value):
                continue

            def inner(known: Known, call: cst.Call = call, callee: Function = callee) -> bool:
                return trains(known_arguments(call, callee, known))

            for core in loading.cores(user, arg.value):
                found |= _keys(context, user, core, inner, depth + 1)
        return found
    values = loading.assigned(source, node)
    if not values:
        raise Unknown(f"the key of {node.value} in the dict of loaders cannot be seen")
    for value in values:
        found |= _keys(context, source, value, trains, depth + 1)
    return found
