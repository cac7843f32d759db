"""The losses that the script computed: every value on which `backward()` was called."""

from __future__ import annotations

import functools
from typing import Any

import torch

LOSS = "_unscaled_by_runner"
"""On a loss that a GradScaler has scaled: what it was."""


class Losses:
    """Values since they were last taken, in the order of the calls."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def watch(self) -> None:
        """Hook into `torch.autograd.backward`, which `Tensor.backward` calls too."""
        backward = torch.autograd.backward

        @functools.wraps(backward)
        def seen(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            for tensor in [tensors] if isinstance(tensors, torch.Tensor) else list(tensors):
                loss = getattr(tensor, LOSS, tensor)
                self._values.append(float(loss.detach().double().sum()))
            return backward(tensors, *args, **kwargs)

        torch.autograd.backward = seen
        _watch_scalers()

    def taken(self) -> list[float]:
        """The values since the last call."""
        values, self._values = self._values, []
        return values


def _watch_scalers() -> None:
    scale = torch.amp.GradScaler.scale

    @functools.wraps(scale)
    def scaled(self: Any, outputs: Any) -> Any:
        result = scale(self, outputs)
        if isinstance(result, torch.Tensor):
            setattr(result, LOSS, outputs)
        return result

    torch.amp.GradScaler.scale = scaled  # type: ignore[method-assign]
