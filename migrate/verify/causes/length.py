"""The number of optimizer steps is another one."""

from __future__ import annotations

from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison


def find(c: Comparison) -> Iterator[Cause]:
    """Counts over the whole runs; both stop at the same limit."""
    if not c.candidate.is_good:
        return
    before, after = len(c.original.steps), [len(rank.steps) for rank in c.ranks]
    if any(count != before for count in after):
        yield Cause(
            Place.LENGTH,
            "number-of-steps",
            "the number of optimizer steps differs",
            f"{before} in the original, {', '.join(map(str, after))} here by process",
            "with the same global batch, an epoch has the same number of steps",
        )
