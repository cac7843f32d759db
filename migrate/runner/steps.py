"""A record of every optimizer step, and of the weights that the last one left."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from migrate.runner import batch_norms
from migrate.runner.batches import Batches
from migrate.runner.losses import Losses
from migrate.runner.record import Record, line_of

PATIENCE = 3
"""How often a script may catch the request to stop before its process is ended."""


class EnoughSteps(BaseException):
    """The script has taken the steps that were asked for."""


class Steps:
    """`limit` is the number of steps, of all optimizers together; 0 for all that there are.

    The script is stopped before the next one, so that what follows the last one is still done.
    """

    def __init__(self, record: Record, losses: Losses, batches: Batches, limit: int) -> None:
        self._record, self._losses, self._batches, self._limit = record, losses, batches, limit
        self._optimizers: list[Optimizer] = []
        self._asked = 0
        self._pid = os.getpid()

    def watch(self) -> None:
        """Hook into every optimizer."""
        register_optimizer_step_pre_hook(self._before)
        register_optimizer_step_post_hook(self._after)

    def save_weights(self) -> None:
        """Write what all optimizers hold: tensors, shards with the place they have in the whole."""
        if os.getpid() != self._pid or not self._optimizers:
            return
        weights = [[_piece(p) for p in _params(one)] for one in self._optimizers]
        torch.save(weights, self._record.folder / f"rank{self._record.rank}.pt")

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        if self._limit and len(self._record.steps) >= self._limit:
            self._stop()
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        params = _params(optimizer)
        self._step = {
            "at": line_of(sys._getframe(1)),
            "before": _sums(params),
            "gradients": _sums([p.grad for p in params if p.grad is not None]),
            "without_gradient": sum(p.grad is None for p in params if p.requires_grad),
            "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
        }

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        number = next(i for i, known in enumerate(self._optimizers) if known is optimizer)
        self._record.steps.append(
            {
                **self._step,
                "optimizer": number,
                "losses": self._losses.taken(),
                "samples": self._batches.taken(),
                "after": _sums(_params(optimizer)),
                "batch_norm": batch_norms.digest(),
            }
        )

    def _stop(self) -> None:
        self._asked += 1
        if self._asked > PATIENCE:
            self.save_weights()
            self._record.end("stopped", 0)
            sys.stdout.flush()
            os._exit(0)
        raise EnoughSteps


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _sums(tensors: list[torch.Tensor]) -> dict[str, list[float]]:
    """Sum and sum of squares: of whole tensors, and of this process's part of sharded ones.

    No other process is asked for its part: that could make the script hang.
    """
    totals = {"whole": [0.0, 0.0], "sharded": [0.0, 0.0]}
    for tensor in tensors:
        mine = local(tensor)
        value = mine.to_dense() if mine.is_sparse else mine
        value = torch.view_as_real(value) if value.is_complex() else value
        value = value.double()
        entry = totals["sharded" if is_split(tensor) else "whole"]
        entry[0] += float(value.sum())
        entry[1] += float(value.square().sum())
    return totals


def is_split(tensor: torch.Tensor) -> bool:
    """Whether the process holds only a part; DTensor is not imported, which takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(tensor, module.DTensor):
        return False
    return any(not placement.is_replicate() for placement in tensor.placements)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor, detached."""
    part = tensor.detach()
    return part.to_local() if hasattr(part, "to_local") else part


def _piece(tensor: Any) -> dict[str, Any]:
    """A tensor or this process's part of it, with its place in the whole."""
    part = local(tensor).cpu().clone()
    if not is_split(tensor):
        return {"part": part, "shape": tuple(part.shape), "offset": (0,) * part.dim()}
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return {"part": part, "shape": tuple(shape), "offset": tuple(offset)}
