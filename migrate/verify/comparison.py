"""The two runs side by side: one row for each optimizer step, and what each pass gave to whom."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from migrate.verify.trace import Loader, Pass, Rank, Run, Step, total

SMALL = 0.01
"""Values below this share of the largest one are compared by their difference, not their ratio."""


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer step before and after.

    The loss after is the mean over the processes: what averaged gradients are the gradients of.
    """

    number: int
    before: Step
    after: tuple[Step, ...]
    loss_before: float
    loss_after: float
    norm_before: float
    norm_after: float
    weights_before: float
    weights_after: float


class Sharing(enum.Enum):
    """What the processes together got of what one process had got."""

    WHOLE = "every process got everything"
    SPLIT = "every process got its part"
    OTHER = "other samples"


@dataclass(frozen=True, slots=True)
class SharedPass:
    """One pass over a loader, in the original and in every process of the candidate."""

    loader: int
    number: int
    before: Pass
    after: tuple[Pass, ...]
    before_loader: Loader
    after_loaders: tuple[Loader, ...]

    @property
    def trains(self) -> bool:
        """Whether weights were changed with it, or would have been if it had not been the last."""
        passes = self.before_loader.passes
        is_last = self.number == len(passes) - 1
        return self.before.trains or (is_last and any(one.trains for one in passes))

    @property
    def is_stream(self) -> bool:
        """Whether its samples have no numbers."""
        return any(sample is None for sample in self.before.samples)

    @property
    def sharing(self) -> Sharing:
        """How the samples were divided, batch by batch."""
        if all(_same(one, self.before) for one in self.after):
            return Sharing.WHOLE
        count = max(len(one.sizes) for one in (self.before, *self.after))
        split = all(self.is_split_at(k) for k in range(count))
        return Sharing.SPLIT if split else Sharing.OTHER

    def is_split_at(self, k: int) -> bool:
        """Whether batch k was divided among the processes."""
        if self.is_stream:
            return sum(_size(one, k) for one in self.after) == _size(self.before, k)
        parts = Counter(str(sample) for one in self.after for sample in _batch(one, k))
        return parts == Counter(map(str, _batch(self.before, k)))

    @property
    def seen_twice(self) -> int:
        """Samples that the processes together got more often than the original did."""
        return sum((self._counted - Counter(map(str, self.before.samples))).values())

    @property
    def never_seen(self) -> int:
        """Samples of the original that no process got."""
        return sum((Counter(map(str, self.before.samples)) - self._counted).values())

    @property
    def _counted(self) -> Counter[str]:
        return Counter(str(sample) for one in self.after for sample in one.samples)


def _batch(one: Pass, k: int) -> Sequence[Any]:
    return one.batches[k] if k < len(one.batches) else ()


def _size(one: Pass, k: int) -> int:
    return one.sizes[k] if k < len(one.sizes) else 0


def _same(one: Pass, other: Pass) -> bool:
    return one.batches == other.batches and one.sizes == other.sizes


@dataclass(frozen=True)
class Comparison:
    """What the causes are looked for in.

    Attributes:
        tolerance: relative difference up to which numbers count as the same.
        final: what the comparison of weights and checkpoint files found, see `migrate/runner`.
    """

    original: Run
    candidate: Run
    tolerance: float
    data_parallel: str = "whole"
    final: FinalState | None = None

    @property
    def world_size(self) -> int:
        """Processes of the candidate."""
        return len(self.candidate.ranks)

    @cached_property
    def ranks(self) -> tuple[Rank, ...]:
        """The candidate's processes, in order."""
        return tuple(self.candidate.ranks[number] for number in sorted(self.candidate.ranks))

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The steps that both took."""
        together = zip(*(rank.steps for rank in self.ranks), strict=False)
        pairs = zip(self.original.steps, together, strict=False)
        return tuple(_row(number, one, others) for number, (one, others) in enumerate(pairs, 1))

    @cached_property
    def passes(self) -> tuple[SharedPass, ...]:
        """The passes that both made over loaders of the same kind and number."""
        return tuple(_passes(self.original.ranks[0], self.ranks)) if self.original.ranks else ()

    def close(self, one: float, other: float, scale: float = 0.0) -> bool:
        """Whether two numbers are the same within the tolerance; NaN equals NaN."""
        if math.isnan(one) or math.isnan(other) or math.isinf(one) or math.isinf(other):
            return one == other or (math.isnan(one) and math.isnan(other))
        return abs(one - other) <= self.tolerance * max(abs(one), abs(other), SMALL * scale) + 1e-12

    @cached_property
    def first_parting(self) -> Row | None:
        """The first step at which losses, gradients, rates or weights differ."""
        loss = max((abs(row.loss_before) for row in self.rows), default=0.0)
        norm = max((row.norm_before for row in self.rows), default=0.0)
        for row in self.rows:
            same = (
                self.close(row.loss_before, row.loss_after, loss)
                and self.close(row.norm_before, row.norm_after, norm)
                and self.close(row.weights_before, row.weights_after)
                and self.same_rate(row)
            )
            if not same:
                return row
        return None

    def same_rate(self, row: Row) -> bool:
        """Whether all processes use the original's learning rates."""
        return all(
            len(step.lr) == len(row.before.lr)
            and all(self.close(a, b) for a, b in zip(row.before.lr, step.lr, strict=True))
            for step in row.after
        )


@dataclass(frozen=True)
class FileState:
    """One file that both wrote with torch.save.

    `problem` says why one cannot stand for the other, `unread` why it was not compared.
    """

    path: str
    problem: str
    difference: float
    unread: str


@dataclass(frozen=True)
class FinalState:
    """Weights at the end: the largest difference, and the size of the numbers there."""

    difference: float
    scale: float
    where: str
    files: tuple[FileState, ...]


def _row(number: int, one: Step, others: tuple[Step, ...]) -> Row:
    return Row(
        number=number,
        before=one,
        after=others,
        loss_before=math.fsum(one.losses),
        loss_after=math.fsum(loss for step in others for loss in step.losses) / len(others),
        norm_before=total([one.gradients])[1],
        norm_after=total([step.gradients for step in others])[1],
        weights_before=total([one.after])[1],
        weights_after=total([step.after for step in others])[1],
    )


def _passes(one: Rank, others: Sequence[Rank]) -> list[SharedPass]:
    """Loaders are paired by their order, those that train and those that do not by themselves."""
    found = []
    for trains in (True, False):
        before = _loaders(one, trains)
        after = [_loaders(rank, trains) for rank in others]
        for (number, loader), *loaders in zip(before, *after, strict=False):
            each = zip(loader.passes, *(other.passes for _, other in loaders), strict=False)
            found += [
                SharedPass(number, k, p[0], p[1:], loader, tuple(other for _, other in loaders))
                for k, p in enumerate(each)
            ]
    return found


def _loaders(rank: Rank, trains: bool) -> list[tuple[int, Loader]]:
    return [
        (number, loader)
        for number, loader in enumerate(rank.loaders)
        if loader.passes and any(p.trains for p in loader.passes) == trains
    ]
