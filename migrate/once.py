"""Facts that several rules ask for are found once for each program."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar
from weakref import WeakKeyDictionary

Key = TypeVar("Key")
Result = TypeVar("Result")


def once(function: Callable[[Key], Result]) -> Callable[[Key], Result]:
    """`function` of one argument, whose result is kept as long as the argument lives."""
    results: WeakKeyDictionary[Key, Result] = WeakKeyDictionary()

    @wraps(function)
    def kept(key: Key) -> Result:
        if key not in results:
            results[key] = function(key)
        return results[key]

    return kept
