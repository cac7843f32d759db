"""nn.SyncBatchNorm on the CPU, with statistics and gradients summed over the process group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


def install() -> None:
    """Let nn.SyncBatchNorm train on the CPU; call it only with the stand-in for CUDA."""
    layer: Any = nn.SyncBatchNorm
    layer.forward = _forward


class _Summing(torch.autograd.Function):
    """The sum over the ranks; its gradient is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


_sum: Any = _Summing.apply


def _forward(self: nn.SyncBatchNorm, batch: Tensor) -> Tensor:
    """torch/nn/modules/batchnorm.py, SyncBatchNorm.forward, torch 2.13."""
    self._check_input_dim(batch)
    self._check_non_zero_input_channels(batch)
    share = self.momentum if self.momentum is not None else 0.0
    if self.training and self.track_running_stats:
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            share = 1.0 / self.num_batches_tracked.item()
    by_batch = self.training or (self.running_mean is None and self.running_var is None)
    tracked = not self.training or self.track_running_stats
    mean, var = (self.running_mean, self.running_var) if tracked else (None, None)
    group = self.process_group or (dist.group.WORLD if dist.is_initialized() else None)
    if self.training and group is not None and dist.get_world_size(group) > 1:
        return _normalize(self, batch, mean, var, share, group)
    return F.batch_norm(batch, mean, var, self.weight, self.bias, by_batch, share, self.eps)


def _normalize(
    layer: nn.SyncBatchNorm,
    batch: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    share: float,
    group: Any,
) -> Tensor:
    """In float64 and two passes, so that the result is that of the whole batch, rounded once."""
    x = batch.double()
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    count = x.new_tensor([x.numel() / x.size(1)])
    totals = _sum(torch.cat([x.sum(dims), count]), group)
    count, mean = totals[-1].detach(), totals[:-1] / totals[-1].detach()
    centred = x - mean.view(shape)
    var = _sum(centred.square().sum(dims), group) / count
    if running_mean is not None and running_var is not None:
        unbiased = var.detach() * count / (count - 1)
        with torch.no_grad():
            running_mean.lerp_(mean.detach().to(running_mean.dtype), share)
            running_var.lerp_(unbiased.to(running_var.dtype), share)
    y = centred * (var + layer.eps).rsqrt().view(shape)
    if layer.weight is not None:
        y = y * layer.weight.view(shape) + layer.bias.view(shape)
    normalised: Tensor = y.to(batch.dtype)
    return normalised
