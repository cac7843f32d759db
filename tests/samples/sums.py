"""A module whose output holds everything that DataParallel can gather."""

from collections import namedtuple
from typing import Any

import torch
from torch import Tensor, nn

Pair = namedtuple("Pair", "total rows")


class Sums(nn.Module):
    """Gives a scalar, the rows it saw, and both in every kind of container."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.calls = 0

    def forward(self, x: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        self.calls += 1
        rows = self.norm(x) * options["scale"]
        return {"total": x.sum(), "pair": Pair(x.sum(), rows), "list": [rows], "none": None}


def scripted(x: Tensor) -> Tensor:
    """The input plus zeros, which a scripted function makes by itself."""
    return torch.zeros(2) + x
