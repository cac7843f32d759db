"""What the comparison of two trainings comes to, and everything a report needs to say it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from migrate.verify.cause import Cause, Place, causes_of
from migrate.verify.comparison import Comparison

FAILS = "does-not-run"
"""The name of the cause of a run that failed by itself."""


@dataclass(frozen=True)
class Verdict:
    """The answer, with what it rests on.

    Attributes:
        causes: why the two part, the most likely cause first; empty if they train the same.
        notes: what is different as it should be.
        conditions: sentences on how the two were run.
    """

    comparison: Comparison
    causes: tuple[Cause, ...]
    notes: tuple[Cause, ...]
    conditions: tuple[str, ...] = field(default=())

    @property
    def is_same(self) -> bool:
        """Whether nothing was found that differs."""
        return not self.causes

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        c = self.comparison
        steps = f"{len(c.rows)} step{'s' * (len(c.rows) != 1)}"
        if self.is_same:
            return f"trains the same: {steps} compared, largest relative difference {_largest(c)}"
        if c.first_parting is not None:
            return f"trains differently: parts at step {c.first_parting.number} of {len(c.rows)}"
        if self.causes[0].place is Place.PROCESSES:
            return f"does not train to the end: {self.causes[0].title}"
        return f"takes the same {steps}, but {self.causes[0].title}"


def judge(comparison: Comparison, conditions: Sequence[str] = ()) -> Verdict:
    """The verdict on two runs.

    A cause that is only likely if the trainings part is not held against trainings that do not.
    """
    found = causes_of(comparison)
    causes = [cause for cause in found if not cause.is_note]
    run = comparison.candidate
    if not run.is_good and not any(cause.place is Place.PROCESSES for cause in causes):
        error = next((rank.error for rank in run.ranks.values() if rank.error), "no error is known")
        causes.insert(0, Cause(Place.PROCESSES, FAILS, "the candidate does not run", error))
    if not causes and not _is_equal(comparison):
        causes = [_unknown(comparison)]
    notes = tuple(cause for cause in found if cause.is_note)
    return Verdict(comparison, tuple(causes), notes, tuple(conditions))


def _is_equal(c: Comparison) -> bool:
    final = c.final
    return c.first_parting is None and (
        final is None or final.difference <= c.tolerance * max(1.0, final.scale)
    )


def _unknown(c: Comparison) -> Cause:
    row = c.first_parting
    if row is None:
        assert c.final is not None
        evidence = f"{c.final.difference:.3g} at {c.final.where}, of magnitude {c.final.scale:.3g}"
        return Cause(Place.LENGTH, "other-weights", "the weights at the end differ", evidence)
    return Cause(
        Place.LENGTH,
        "unknown",
        "the cause shows no signature that is known",
        f"at step {row.number} ({row.before.at}): same learning rate, same numbers of samples",
        "look for random numbers in the training step, and for numbers that depend on the size of "
        "a batch, such as a contrastive loss or a mean over tokens",
    )


def _largest(c: Comparison) -> str:
    worst = 0.0
    for row in c.rows:
        for a, b in ((row.loss_before, row.loss_after), (row.norm_before, row.norm_after)):
            worst = max(worst, abs(a - b) / max(abs(a), abs(b), 1e-9))
    return f"{worst:.1g}"
