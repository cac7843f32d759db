"""The collective calls that the script itself makes, in their order, and the one it waits in."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from migrate.runner.record import line_of

NAMES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all",
    "all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather",
    "gather_object", "monitored_barrier", "reduce", "reduce_scatter", "reduce_scatter_tensor",
    "scatter", "scatter_object_list",
)  # fmt: skip
MAX_CALLS = 5000


class Collectives:
    """The first calls that do not come from torch itself: name, file:line, and `clock` then."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._calls: list[tuple[str, str, int]] = []
        self._waiting: list[tuple[str, str]] = []

    def listed(self) -> list[tuple[str, str, int]]:
        """For the record."""
        return self._calls

    def waiting(self) -> dict[str, Any] | None:
        """The outermost call that has begun and not ended."""
        for name, site in self._waiting[:1]:
            return {"call": name, "at": site}
        return None

    def seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its calls noted."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            item = (function.__name__, line_of(frame))
            inner = str(frame.f_globals.get("__name__")).startswith(("torch.", "migrate.runner"))
            if not inner and len(self._calls) < MAX_CALLS:
                self._calls.append((*item, self._clock()))
            self._waiting.append(item)
            try:
                return function(*args, **kwargs)
            finally:
                self._waiting.pop()

        return call


def watch(clock: Callable[[], int]) -> Collectives:
    """Hook into torch.distributed, under both names that its functions have.

    `clock` tells how many batches have been given out.
    """
    calls = Collectives(clock)
    for name in NAMES:
        seen = calls.seen(getattr(dist, name))
        for module in (distributed_c10d, dist):
            setattr(module, name, seen)
    return calls
