"""Weights are changed between two steps, on some processes only or in one run only."""

from __future__ import annotations

from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison, Row
from migrate.verify.trace import Step


def find(c: Comparison) -> Iterator[Cause]:
    """The first step before which this happens."""
    last: dict[int, Row] = {}
    for row in c.rows:
        earlier = last.get(row.before.optimizer)
        last[row.before.optimizer] = row
        if earlier is None:
            continue
        original = _changed(earlier.before, row.before)
        ranks = [_changed(a, b) for a, b in zip(earlier.after, row.after, strict=True)]
        if any(ranks) and not _alike(c, row, ranks):
            yield _on_some(row, ranks)
            return
        if any(ranks) != original:
            yield _in_one(row, original)
            return


def _changed(earlier: Step, step: Step) -> bool:
    return earlier.after != step.before


def _alike(c: Comparison, row: Row, ranks: list[bool]) -> bool:
    """Whether all processes changed, and hold the same afterwards."""
    first = row.after[0].before
    return all(ranks) and all(
        c.close(step.before.whole[k], first.whole[k]) for step in row.after for k in (0, 1)
    )


def _on_some(row: Row, ranks: list[bool]) -> Cause:
    which = ", ".join(str(rank) for rank, changed in enumerate(ranks) if changed)
    return Cause(
        Place.LATE_CHANGE,
        "change-not-shared",
        "weights are changed on some processes only, and not broadcast",
        f"before step {row.number} ({row.before.at}), on process {which}",
        "change weights on every process alike, or broadcast them afterwards",
    )


def _in_one(row: Row, in_original: bool) -> Cause:
    which = "the original" if in_original else "the candidate"
    return Cause(
        Place.LATE_CHANGE,
        "other-change",
        f"weights are changed between two steps in {which} only",
        f"before step {row.number} ({row.before.at})",
        "look for a load, an initialisation or a clipping of weights that one of the two lacks",
    )
