"""What is evaluated is another set of samples, or one process's part of it."""

from __future__ import annotations

from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison, SharedPass, Sharing


def find(c: Comparison) -> Iterator[Cause]:
    """One cause for each loader that no step was taken with."""
    wrong: set[int] = set()
    for one in c.passes:
        if one.trains or one.loader in wrong or one.sharing is Sharing.WHOLE:
            continue
        cause = _cause(c, one)
        if cause is not None:
            wrong.add(one.loader)
            yield cause


def _cause(c: Comparison, one: SharedPass) -> Cause | None:
    where = f"loader {one.loader + 1}, pass {one.number + 1}"
    if not _is_reduced(c, one):
        return Cause(
            Place.EVALUATION,
            "evaluation-not-reduced",
            "each process evaluates its part, and the results are not put together",
            f"{where}: {', '.join(str(len(p.samples)) for p in one.after)} of "
            f"{len(one.before.samples)} samples by process, and no reduction follows",
            "reduce sums and counts over all processes, or let each evaluate everything",
        )
    if one.seen_twice or one.never_seen:
        return Cause(
            Place.EVALUATION,
            "evaluation-samples",
            "the evaluation counts samples twice, or leaves some out",
            f"{where}: {one.seen_twice} samples are counted twice, {one.never_seen} never",
            "DistributedSampler fills up with samples from the start; evaluate without it, or "
            "leave those out again",
        )
    return None


def _is_reduced(c: Comparison, one: SharedPass) -> bool:
    """Whether every process makes a collective call in the pass, or before the next one."""
    return all(
        any(part.begin < call.batches <= part.end for call in rank.collectives)
        for rank, part in zip(c.ranks, one.after, strict=True)
    )
