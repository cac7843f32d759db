"""Training sees other samples than the original did."""

from __future__ import annotations

from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison, SharedPass, Sharing


def find(c: Comparison) -> Iterator[Cause]:
    """One cause for each loader: of the first pass that shows something."""
    wrong: set[int] = set()
    for one in c.passes:
        if one.trains and one.loader not in wrong:
            cause = _cause(c, one)
            if cause is not None:
                wrong.add(one.loader)
                yield cause
    if c.first_parting is not None and not any(one.trains for one in c.passes):
        yield from _by_count(c)


def _cause(c: Comparison, one: SharedPass) -> Cause | None:
    seeds = {loader.seed for loader in one.after_loaders}
    if len(seeds) > 1:
        return _seeds(one, seeds)
    if c.world_size == 1 or one.sharing is Sharing.SPLIT:
        return None
    if one.sharing is Sharing.WHOLE:
        return _undivided_work(c, one)
    if _sizes(one) == c.world_size * one.before.sizes[0]:
        return _undivided(one)
    earlier = [p for p in c.passes if p.loader == one.loader and p.number < one.number]
    if any(p.after == one.after or _samples(p) == _samples(one) for p in earlier):
        return _repeated(one)
    return _different(one)


def _samples(one: SharedPass) -> list[tuple[tuple[object, ...], ...]]:
    return [each.batches for each in one.after]


def _sizes(one: SharedPass) -> int:
    return sum(each.sizes[0] for each in one.after if each.sizes)


def _where(one: SharedPass) -> str:
    return f"loader {one.loader + 1}, pass {one.number + 1}"


def _undivided_work(c: Comparison, one: SharedPass) -> Cause | None:
    """Every process may read every batch, if it takes its part of it later: losses then differ."""
    if any(step.losses != row.after[0].losses for row in c.rows for step in row.after):
        return None
    return Cause(
        Place.SAMPLES,
        "samples-not-shared",
        "every process trains on all samples",
        f"{_where(one)}: all {c.world_size} processes get the original's batches of "
        f"{one.before.sizes[0]}",
        "give the training loader a DistributedSampler and divide its batch size",
    )


def _undivided(one: SharedPass) -> Cause:
    return Cause(
        Place.SAMPLES,
        "batch-not-divided",
        "the batch size is not divided by the number of processes",
        f"{_where(one)}: the first global batch has {_sizes(one)} samples, the original's "
        f"{one.before.sizes[0]}",
        "divide it by the world size, or adapt the learning rate and say that you did",
    )


def _seeds(one: SharedPass, seeds: set[int | None]) -> Cause:
    return Cause(
        Place.SAMPLES,
        "sampler-seeds",
        "the processes shuffle with different seeds",
        f"{_where(one)}: seeds {', '.join(map(str, sorted(seeds, key=str)))}; "
        "in an epoch some samples are seen twice and others never",
        "give every DistributedSampler the same seed",
    )


def _repeated(one: SharedPass) -> Cause:
    return Cause(
        Place.SAMPLES,
        "no-set-epoch",
        "every epoch has the same order: set_epoch is not called",
        f"{_where(one)} repeats the samples of an earlier pass, batch by batch",
        "call sampler.set_epoch(epoch) at the head of the epoch loop",
    )


def _different(one: SharedPass) -> Cause:
    first = next((k for k in range(len(one.before.sizes)) if not one.is_split_at(k)), 0)
    return Cause(
        Place.SAMPLES,
        "other-samples",
        "training sees other samples than the original",
        f"{_where(one)}, from batch {first + 1} on: {one.seen_twice} samples are seen more often, "
        f"{one.never_seen} less often",
        "compare the samplers, `shuffle` and `drop_last` of the two loaders",
    )


def _by_count(c: Comparison) -> Iterator[Cause]:
    """Loaders that cannot be paired: the numbers of samples must do."""
    for row in c.rows:
        count = sum(step.samples for step in row.after)
        if c.world_size > 1 and row.before.samples and count == c.world_size * row.before.samples:
            yield Cause(
                Place.SAMPLES,
                "batch-not-divided",
                "the batch size is not divided by the number of processes",
                f"step {row.number}: {count} samples, {row.before.samples} in the original",
                "divide it by the world size, or adapt the learning rate and say that you did",
            )
            return
