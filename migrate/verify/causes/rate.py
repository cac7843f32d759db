"""The learning rate is another one, from the start or from some step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison, Row


def find(c: Comparison) -> Iterator[Cause]:
    """The first step that uses another learning rate."""
    row = next((row for row in c.rows if not c.same_rate(row)), None)
    if row is None:
        return
    before, after = _rate(row.before.lr), _rate(row.after[0].lr)
    rates = {_rate(step.lr) for step in row.after}
    where = f"at step {row.number} it is {before:.6g} in the original, {after:.6g} here"
    if len(rates) > 1:
        yield _apart(where)
    elif row.number == 1 and before and _is_constant(c, after / before):
        yield _scaled(where, after / before)
    else:
        yield _schedule(c, row, where)


def _rate(rates: Sequence[float]) -> float:
    return rates[0] if rates else 0.0


def _is_constant(c: Comparison, factor: float) -> bool:
    return all(
        c.close(_rate(row.before.lr) * factor, _rate(row.after[0].lr)) for row in c.rows
    ) and not c.close(factor, 1.0)


def _apart(where: str) -> Cause:
    return Cause(
        Place.RATE,
        "rates-apart",
        "the processes use different learning rates",
        where,
        "decide on the learning rate by numbers that are the same on every process",
    )


def _scaled(where: str, factor: float) -> Cause:
    return Cause(
        Place.RATE,
        "rate-scaled",
        f"the learning rate is {factor:.4g} times the original's",
        where,
        "keep it where the global batch stays the same",
    )


def _schedule(c: Comparison, row: Row, where: str) -> Cause:
    speed = _speed(c, row)
    return Cause(
        Place.RATE,
        "schedule",
        f"the learning rate's schedule is {speed}"
        if speed
        else "the learning rate's schedule differs",
        f"{where}; the rates before were the same" if row.number > 1 else where,
        "compute its length from the number of steps that are really taken: len(loader) counts the "
        "steps of one process",
    )


def _speed(c: Comparison, row: Row) -> str:
    """Whether a rate comes so many times too early or too late."""
    rates = [_rate(one.before.lr) for one in c.rows]
    k, after = row.number - 1, _rate(row.after[0].lr)
    if k * c.world_size < len(rates) and c.close(after, rates[k * c.world_size]):
        return f"{c.world_size} times too fast"
    if k and c.close(after, rates[k // c.world_size]):
        return f"{c.world_size} times too slow"
    return ""
