"""Which wrappers the script puts round its models, and how many of each."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

_made: dict[str, int] = {}


def watch() -> None:
    """Count DataParallel and DistributedDataParallel as they are made."""
    for kind in (nn.DataParallel, DistributedDataParallel):
        _count(kind)


def listed() -> dict[str, int]:
    """Number of wrappers by class."""
    return dict(_made)


def _count(kind: Any) -> None:
    start = kind.__init__

    @functools.wraps(start)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        _made[kind.__name__] = _made.get(kind.__name__, 0) + 1
        start(self, *args, **kwargs)

    kind.__init__ = made
