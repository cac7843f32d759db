"""Gradients that are too large or too small by the number of processes, or not averaged."""

from __future__ import annotations

import math
from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison, Row

FACTOR_TOLERANCE = 0.02


def find(c: Comparison) -> Iterator[Cause]:
    """Looked at in the first step that parts, in which the weights are still the same."""
    apart = next((row for row in c.rows if _ranks_differ(c, row)), None)
    if apart is not None:
        yield _not_averaged(apart)
        return
    row = c.first_parting
    if row is None or c.world_size == 1 or not row.norm_before:
        return
    factor = row.norm_after / row.norm_before
    for power, wrong in ((c.world_size, "large"), (1 / c.world_size, "small")):
        if math.isclose(factor, power, rel_tol=FACTOR_TOLERANCE):
            yield _scaled(c, row, factor, wrong)


def _ranks_differ(c: Comparison, row: Row) -> bool:
    first = row.after[0].gradients.whole
    return any(
        not c.close(step.gradients.whole[1], first[1], row.norm_before**2) for step in row.after
    )


def _not_averaged(row: Row) -> Cause:
    norms = ", ".join(f"{step.gradients.norm:.6g}" for step in row.after)
    return Cause(
        Place.GRADIENTS,
        "gradients-not-averaged",
        "gradients are not averaged: every process takes steps of its own",
        f"at step {row.number} ({row.before.at}) they have the norms {norms}",
        "call the wrapped model, not model.module, and give the wrapper every model that trains",
    )


def _scaled(c: Comparison, row: Row, factor: float, wrong: str) -> Cause:
    loss = row.loss_after / row.loss_before if row.loss_before else math.nan
    summed = math.isclose(loss, factor, rel_tol=FACTOR_TOLERANCE)
    evidence = (
        f"at step {row.number} ({row.before.at}) the gradient's norm is {factor:.3g} times the "
        f"original's, the loss {loss:.3g} times, with {c.world_size} processes"
    )
    advice = (
        "a loss that is summed over the batch must be multiplied by the world size, because "
        "gradients are averaged"
        if wrong == "small"
        else "a mean over the batch must not be multiplied by the world size; gradients are "
        "averaged, not summed"
    )
    return Cause(
        Place.GRADIENTS,
        "loss-reduction",
        f"gradients are too {wrong} by the number of processes: the loss's reduction"
        if summed
        else f"gradients are too {wrong} by the number of processes",
        evidence,
        advice,
    )
