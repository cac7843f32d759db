"""When `torch.cuda.device_count()` means the devices that train; two rules ask."""

from __future__ import annotations

import libcst as cst

from migrate.rule import Context
from migrate.rules._process import names_own_number, visible_devices
from migrate.source import Source
from migrate.syntax import literal

_HALF = (cst.If, cst.IfExp, cst.While, cst.Assert, cst.BooleanOperation, cst.UnaryOperation)


def becomes_process_count(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether a `torch.cuda.device_count()` is rewritten to the number of processes."""
    chosen = {value for _, _, value in visible_devices(context.facts)}
    inside = any(item in chosen for item in source.ancestors(call))
    return not inside and means_training(context, source, call)


def means_training(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether `torch.cuda.device_count()` stands for the number of devices that train."""
    wraps = {wrap.call for wrap in context.facts.wraps}
    if any(item in wraps for item in source.ancestors(call)):
        return False  # its argument goes with the wrap's rule
    comparison = source.parent(source.parent(call) or call)
    if not isinstance(comparison, cst.Comparison):
        comparison = source.parent(call)
    if isinstance(comparison, cst.Comparison):
        return _compares_with_one(source, comparison, call)
    if context.facts.process_groups or isinstance(source.parent(call), _HALF):
        return False
    if _counts_devices(source, call):
        return False
    operation = source.around(call, cst.BinaryOperation)
    return not (operation and names_own_number(source, operation))


def _compares_with_one(source: Source, node: cst.Comparison, call: cst.Call) -> bool:
    """Whether a comparison asks for more than one device, not for any at all."""
    other = node.comparisons[0].comparator
    operator = node.comparisons[0].operator
    if len(node.comparisons) != 1 or node.left is not call:
        return False
    number = literal(other)
    if isinstance(operator, cst.GreaterThanEqual | cst.LessThan):
        return isinstance(number, int) and number >= 2
    return isinstance(number, int) and number >= 1


def _counts_devices(source: Source, call: cst.Call) -> bool:
    """Whether a loop runs over the devices by number."""
    for item in source.ancestors(call):
        if isinstance(item, cst.For | cst.CompFor) and source.contains(item.iter, call):
            return True
        if isinstance(item, cst.BaseSmallStatement):
            return False
    return False
