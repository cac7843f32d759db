"""Processes wait for each other in different places: a collective call under a condition."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import zip_longest

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison
from migrate.verify.trace import Rank

_LOST_PEER = re.compile(r"closed by peer|connection reset|gloo|nccl|process ?group", re.I)
ADVICE = (
    "call barriers, reductions and whatever averages gradients on every process; only prints and "
    "files belong under a condition on the rank"
)


def find(c: Comparison) -> Iterator[Cause]:
    """A run that stalled or lost a process, or different calls that happened to fit."""
    if _parted(c):
        places = "; ".join(f"process {rank.rank} {_place(rank)}" for rank in c.ranks)
        yield Cause(
            Place.PROCESSES, "processes-apart", "processes wait for each other in different places",
            places, ADVICE,
        )  # fmt: skip
        return
    for number, calls in enumerate(zip_longest(*(rank.collectives for rank in c.ranks)), 1):
        if len({call and call.name for call in calls}) > 1:  # lines may differ: both branches call
            each = "; ".join(
                f"process {rank.rank} calls {call.name} at {call.at}" if call else
                f"process {rank.rank} makes no further call"
                for rank, call in zip(c.ranks, calls, strict=True)
            )  # fmt: skip
            yield Cause(
                Place.PROCESSES, "processes-apart", "processes make different collective calls",
                f"call {number}: {each}", ADVICE,
            )  # fmt: skip
            return


def _parted(c: Comparison) -> bool:
    if c.candidate.ended == "stall":
        return True
    lost = any(_LOST_PEER.search(rank.error) for rank in c.ranks if rank.status == "raised")
    return lost and any(rank.status != "raised" or rank.waiting for rank in c.ranks)


def _place(rank: Rank) -> str:
    if rank.waiting:
        return f"waits in {rank.waiting['call']} at {rank.waiting['at']}"
    if rank.status == "running":
        return f"is at {rank.at}" if rank.at else "is running"
    return f"has ended ({rank.error})" if rank.error else "has ended"
