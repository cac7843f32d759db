"""The number of GPUs stands for the number that train.

Why it matters: DataParallel trains on all GPUs that a process sees. With one process per device
the number that trains is the number of processes, whatever each of them can see.

Safety: policy. Right if there is one process per device. Checks that a device is there at all,
loops over devices, and comparisons with other numbers stay.

Before::

    print("Let's use", torch.cuda.device_count(), "GPUs!")

After::

    print("Let's use", process_count(), "GPUs!")
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import replace
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._process import RANK, visible_devices
from migrate.source import Source
from migrate.syntax import literal

_HALF = (cst.If, cst.IfExp, cst.While, cst.Assert, cst.BooleanOperation, cst.UnaryOperation)


class GpuCount(Rule):
    """Finds `torch.cuda.device_count()`."""

    code = "MG104"
    title = "the number of GPUs stands for the number that train"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each count that means the GPUs that train."""
        chosen = {value for _, _, value in visible_devices(context.facts)}
        for source, call in context.facts.calls_of(r"^torch\.cuda\.device_count$"):
            inside = any(item in chosen for item in source.ancestors(call))
            if inside or not _means_training(context, source, call):
                continue
            name, need = context.helper(source, "process_count")
            yield self.finding(
                source, call, f"{source.code(call)} becomes the number of processes",
                [replace(source, call, f"{name}()"), need], Applicability.POLICY,
                assumption="there is one process for each device that trains",
            )  # fmt: skip


def _means_training(context: Context, source: Source, call: cst.Call) -> bool:
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
    return not (operation and RANK.search(source.code(operation)))


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
