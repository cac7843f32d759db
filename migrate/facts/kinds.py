"""How a value depends on the batch, and what arithmetic makes of it.

A mean over equal parts is the whole batch's mean, a sum of sums its sum. Nothing here looks at a
program; `batchwise` does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

import libcst as cst

from migrate.syntax import literal


class Kind(Enum):
    """How a value depends on the batch."""

    PLAIN = "the same in every process"
    DATA = "one value per sample"
    MEAN = "a mean over the batch"
    RATIO = "a mean over a count that depends on the data"
    SUM = "a sum over the batch"
    COUNT = "the number of samples in the batch"
    INVERSE = "one over a number of samples"
    METRIC = "a number of the batch that is neither mean nor sum"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Batch:
    """What an expression has to do with the batch.

    Attributes:
        origins: the loops and calls of `next` that the batch comes from.
        number: it is a Python number, not a tensor.
        assumed: that it is a mean is likely, not proven.
        parts: a wrapped model gave one value for each device.
    """

    kind: Kind
    origins: frozenset[cst.CSTNode] = frozenset()
    number: bool = False
    assumed: bool = False
    parts: bool = False

    @property
    def is_mean(self) -> bool:
        """A mean over the process's part."""
        return self.kind in (Kind.MEAN, Kind.RATIO)

    @property
    def is_sum(self) -> bool:
        """A sum over the process's part, or the number of its samples."""
        return self.kind in (Kind.SUM, Kind.COUNT)

    @property
    def is_local(self) -> bool:
        """One number that can differ from process to process."""
        return self.is_mean or self.is_sum


PLAIN = Batch(Kind.PLAIN, number=True)
UNKNOWN = Batch(Kind.UNKNOWN)


def join(values: list[Batch]) -> Batch:
    """What may be any of `values`."""
    if not values:
        return PLAIN
    kinds = {value.kind for value in values}
    kinds -= {Kind.PLAIN} if len(kinds) > 1 else set()
    if kinds == {Kind.MEAN, Kind.RATIO}:
        kinds = {Kind.RATIO}
    if kinds == {Kind.SUM, Kind.COUNT}:
        kinds = {Kind.SUM}
    kind = kinds.pop() if len(kinds) == 1 else Kind.UNKNOWN
    relevant = [v for v in values if v.kind is not Kind.PLAIN] or values
    numbers = bool(relevant) and all(value.number for value in relevant)
    assumed, parts = any(v.assumed for v in values), any(v.parts for v in relevant)
    return Batch(kind, origins_of(values), numbers, assumed, parts)


def container(values: list[Batch]) -> Batch:
    """Several values together: not one number that could be reduced."""
    value = join(values)
    is_simple = value.kind in (Kind.PLAIN, Kind.DATA)
    return value if is_simple else Batch(Kind.UNKNOWN, value.origins)


def combine(operator: str, left: Batch, right: Batch) -> Batch:
    """The result of arithmetic; `operator` is `+`, `-`, `*`, `/`, or empty for any other."""
    kinds = (left.kind, right.kind)
    both = Batch(Kind.UNKNOWN, left.origins | right.origins, left.number and right.number,
                 left.assumed or right.assumed)  # fmt: skip
    if left.kind is Kind.PLAIN and right.is_local:
        both = replace(both, number=right.number)
    if right.kind is Kind.PLAIN and left.is_local:
        both = replace(both, number=left.number)
    if Kind.DATA in kinds:
        return replace(both, kind=Kind.DATA, number=False)
    if kinds == (Kind.PLAIN, Kind.PLAIN):
        return replace(both, kind=Kind.PLAIN)
    if operator in ("+", "-"):
        return replace(both, kind=_added(left, right))
    if operator == "*":
        return replace(both, kind=_multiplied(left.kind, right.kind))
    if operator == "/":
        return replace(both, kind=_divided(left.kind, right.kind))
    return both


def _added(left: Batch, right: Batch) -> Kind:
    if left.is_mean or right.is_mean:
        if left.is_sum or right.is_sum or Kind.METRIC in (left.kind, right.kind):
            return Kind.METRIC
        if Kind.UNKNOWN in (left.kind, right.kind):
            return Kind.UNKNOWN
        return Kind.RATIO if Kind.RATIO in (left.kind, right.kind) else Kind.MEAN
    if left.is_sum and right.is_sum:
        return Kind.COUNT if left.kind is right.kind is Kind.COUNT else Kind.SUM
    if Kind.METRIC in (left.kind, right.kind):
        return Kind.METRIC
    if Kind.COUNT in (left.kind, right.kind):
        return Kind.UNKNOWN
    return Kind.METRIC if left.is_sum or right.is_sum else Kind.UNKNOWN


def _multiplied(left: Kind, right: Kind) -> Kind:
    if Kind.PLAIN in (left, right):
        return left if right is Kind.PLAIN else right
    pair = {left, right}
    if pair == {Kind.MEAN, Kind.COUNT} or pair == {Kind.RATIO, Kind.COUNT}:
        return Kind.SUM
    if pair == {Kind.SUM, Kind.INVERSE}:
        return Kind.MEAN
    return Kind.PLAIN if pair == {Kind.COUNT, Kind.INVERSE} else Kind.UNKNOWN


def _divided(left: Kind, right: Kind) -> Kind:
    if right is Kind.PLAIN:
        return left
    if right is Kind.COUNT:
        return {Kind.SUM: Kind.MEAN, Kind.COUNT: Kind.PLAIN, Kind.PLAIN: Kind.INVERSE}.get(
            left, Kind.UNKNOWN
        )
    if right is Kind.SUM and left in (Kind.SUM, Kind.COUNT):
        return Kind.RATIO
    return Kind.UNKNOWN


def over_batch(call: cst.Call, name: str, base: Batch, skip: int) -> Batch:
    """`.mean()` and `.sum()`, over everything, over the batch, or over other dimensions."""
    if base.parts and base.is_local:
        return replace(base, kind=Kind.SUM if name == "sum" else Kind.MEAN, parts=False)
    if base.kind is not Kind.DATA:
        return base
    arg = next(
        (a for a in call.args[skip:] if a.keyword is None or a.keyword.value in ("dim", "axis")),
        None,
    )
    given = literal(arg.value) if arg is not None else 0
    if arg is not None and isinstance(arg.value, cst.Tuple | cst.List):
        given = 0 if any(literal(e.value) == 0 for e in arg.value.elements) else 1
    if given != 0 and given is not None:
        return base
    return replace(base, kind=Kind.SUM if name == "sum" else Kind.MEAN)


def elementwise(values: list[Batch]) -> Batch:
    """A function of unknown effect on some values."""
    origins = origins_of(values)
    if any(value.kind is Kind.DATA for value in values):
        return Batch(Kind.DATA, origins)
    if all(value.kind is Kind.PLAIN for value in values):
        return Batch(Kind.PLAIN)
    return Batch(Kind.UNKNOWN, origins)


def origins_of(values: Iterable[Batch]) -> frozenset[cst.CSTNode]:
    """Where the batches of all of them come from."""
    return frozenset().union(*(value.origins for value in values)) if values else frozenset()
