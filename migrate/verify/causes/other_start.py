"""Training starts from other weights than the original's, or from several."""

from __future__ import annotations

from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison, Row
from migrate.verify.trace import total


def find(c: Comparison) -> Iterator[Cause]:
    """Looked at before the first step of every optimizer."""
    seen: set[int] = set()
    for row in c.rows:
        if row.before.optimizer in seen:
            continue
        seen.add(row.before.optimizer)
        values = [step.before.whole for step in row.after]
        if any(not c.close(value, values[0][k]) for pair in values for k, value in enumerate(pair)):
            yield _several(row)
            return
        if not _same_start(c, row):
            yield _other(row)
            return


def _same_start(c: Comparison, row: Row) -> bool:
    before, after = total([row.before.before]), total([step.before for step in row.after])
    return c.close(before[1], after[1]) and c.close(before[0], after[0], 10 * before[1])


def _several(row: Row) -> Cause:
    norms = ", ".join(f"{step.before.norm:.6g}" for step in row.after)
    return Cause(
        Place.WEIGHTS,
        "ranks-start-apart",
        "the processes start from different weights",
        f"before step {row.number} the weights have the norms {norms}",
        "load or initialise before the model is wrapped, on every process, or broadcast what one "
        "process changes afterwards",
    )


def _other(row: Row) -> Cause:
    before, after = total([row.before.before])[1], total([step.before for step in row.after])[1]
    return Cause(
        Place.WEIGHTS,
        "other-start",
        "training starts from other weights than the original's",
        f"norm before step {row.number}: {before:.6g} in the original, {after:.6g} here",
        "use the original's seed for the model on every process; only data may be seeded by rank",
    )
