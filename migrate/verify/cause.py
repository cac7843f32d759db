"""Why two trainings part: a cause is found by its signature in the two records.

One file in `causes/` knows one kind of cause; it has a function `find`, and adding a kind is adding
a file. The order of `Place` is the order of likelihood: what comes first explains what comes later.
"""

from __future__ import annotations

import enum
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from migrate.verify.comparison import Comparison


class Place(enum.IntEnum):
    """Where in a training something goes wrong, the earliest first."""

    PROCESSES = 0
    WEIGHTS = 1
    OPTIMIZER = 2
    SAMPLES = 3
    LATE_CHANGE = 4
    STATISTICS = 5
    GRADIENTS = 6
    RATE = 7
    EVALUATION = 8
    FILES = 9
    LENGTH = 10


@dataclass(frozen=True, slots=True)
class Cause:
    """What is wrong, how that shows, and what to do; a note is something that is as it should be.

    `name` is one word for programs that read the verdict.
    """

    place: Place
    name: str
    title: str
    evidence: str
    advice: str = ""
    is_note: bool = False


Find = Callable[[Comparison], Iterator[Cause]]


@cache
def finders() -> tuple[Find, ...]:
    """The `find` of every module in `causes/`."""
    package = importlib.import_module("migrate.verify.causes")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    return tuple(importlib.import_module(f"{package.__name__}.{name}").find for name in names)


def causes_of(comparison: Comparison) -> list[Cause]:
    """All causes that show, the most likely one first."""
    found = [cause for find in finders() for cause in find(comparison)]
    return sorted(found, key=lambda cause: (cause.is_note, cause.place))
