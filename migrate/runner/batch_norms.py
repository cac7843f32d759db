"""The batch normalisation of the process: which kinds there are, and a digest of their buffers."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

_made: list[weakref.ref[_BatchNorm]] = []
_trained: dict[str, int] = {}


def watch() -> None:
    """Remember every layer; DataParallel's replicas and deep copies are not made by __init__."""
    start = _BatchNorm.__init__

    @functools.wraps(start)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        _made.append(weakref.ref(self))

    _BatchNorm.__init__ = made  # type: ignore[method-assign]
    torch.nn.modules.module.register_module_forward_pre_hook(_note_training)


def _note_training(module: torch.nn.Module, _inputs: Any) -> None:
    if isinstance(module, _BatchNorm) and module.training:
        kind = type(module).__name__
        _trained[kind] = _trained.get(kind, 0) + 1


def kinds() -> dict[str, int]:
    """How often layers of each class ran in training mode."""
    return dict(_trained)


def digest() -> float | None:
    """The sum over all running statistics, of whatever order the layers were made in."""
    total, found = 0.0, False
    for reference in _made:
        layer = reference()
        for buffer in (getattr(layer, "running_mean", None), getattr(layer, "running_var", None)):
            if buffer is not None:
                total, found = total + float(buffer.detach().double().abs().sum()), True
    return total if found else None
