"""A function is tested instead of called: `if is_main_process:`.

Why it matters: a function is always true, so that every process prints and writes the same files.

Safety: safe. The call is added where the condition is a function of the script, or of torch, that
needs no argument and tells which process this is.

Before::

    import torch
    import torch.distributed as dist
    def is_main_process():
        return dist.get_rank() == 0
    if is_main_process:
        torch.save({}, "log.pt")

After::

    import torch
    import torch.distributed as dist
    def is_main_process():
        return dist.get_rank() == 0
    if is_main_process():
        torch.save({}, "log.pt")
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Text
from migrate.facts.main_process import is_rank_name
from migrate.finding import Effect, Finding
from migrate.names import parameters
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.values import External, Function

_TELLS = re.compile(
    r"^torch\.distributed\.(is_initialized|is_available|get_rank|get_world_size)$"
    r"|^torch\.cuda\.is_available$"
)
_HAS_GROUP = re.compile(r"is_dist|is_initialized", re.I)


class UncalledCondition(Rule):
    """Finds functions that stand alone in a condition."""

    code = "MG903"
    title = "a function is tested instead of called"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every condition."""
        for source in context.sources:
            tests = [item.test for item in source.all(cst.If)]
            tests += [item.test for item in source.all(cst.IfExp)]
            tests += [item.test for item in source.all(cst.While)]
            for node in (part for test in tests for part in _parts(test)):
                if _is_uncalled(context, source, node):
                    yield self._call(source, node)

    def _call(self, source: Source, node: cst.BaseExpression) -> Finding:
        stop = source.span(node).stop
        message = f"{source.code(node)} is a function, always true: it is called now"
        edit = Text(source, stop, stop, "()")
        return self.finding(source, node, message, [edit], effect=Effect.BETTER)


def _parts(test: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """The single conditions of `not a and b or c`."""
    if isinstance(test, cst.BooleanOperation):
        yield from _parts(test.left)
        yield from _parts(test.right)
    elif isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        yield from _parts(test.expression)
    elif isinstance(test, cst.Name | cst.Attribute):
        yield test


def _is_uncalled(context: Context, source: Source, node: cst.BaseExpression) -> bool:
    values = context.flow.of(source, node)
    if len(values) != 1:
        return False
    value = next(iter(values))
    if isinstance(value, External):
        return bool(_TELLS.match(value.name))
    if not isinstance(value, Function):
        return False
    name = value.node.name.value
    if not is_rank_name(name) and not _HAS_GROUP.search(name):
        return False
    return all(p.default is not None or p.star for p in parameters(value.node))
