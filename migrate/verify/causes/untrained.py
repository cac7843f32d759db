"""The optimizer holds parameters that are not the model's any more."""

from __future__ import annotations

from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison


def find(c: Comparison) -> Iterator[Cause]:
    """Looked at in the first step that shows it."""
    for row in c.rows:
        after = max(step.without_gradient for step in row.after)
        if after > row.before.without_gradient:
            yield Cause(
                Place.OPTIMIZER,
                "stale-optimizer",
                "the optimizer holds parameters that the model no longer has",
                f"at step {row.number} {after} of its parameters have no gradient, "
                f"{row.before.without_gradient} in the original",
                "make the optimizer after the model is wrapped or sharded",
            )
            return
