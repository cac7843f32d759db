"""What a stand-in device is: names of CUDA devices, checked against how many there are, and CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass
class Fleet:
    """The pretended GPUs of this process."""

    count: int = 0
    current: int = 0


FLEET = Fleet()


def index_of(device: Any) -> int:
    """The index that a device, its name or a number means; the current one for none.

    Raises RuntimeError, as CUDA does, for an index that is not there.
    """
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    if index is None or index == -1:
        return FLEET.current
    if not 0 <= int(index) < FLEET.count:
        raise RuntimeError(
            f"CUDA error: invalid device ordinal: {device}, with {FLEET.count} devices"
        )
    return int(index)


def is_cuda(device: Any) -> bool:
    """True for whatever torch takes as a CUDA device, numbers included."""
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    if isinstance(device, str):
        return device.partition(":")[0] == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


def to_cpu(device: Any) -> Any:
    """The CPU for a CUDA device that is there, anything else as it came."""
    if not is_cuda(device):
        return device
    index_of(device)
    return CPU


def called_by_torch(depth: int = 2) -> bool:
    """Whether the caller's caller is code of torch itself, which must hear the truth."""
    name: str = sys._getframe(depth).f_globals.get("__name__", "")
    return name == "torch" or name.startswith("torch.")
