"""Wraps the net for DDP, FSDP1 or FSDP2 and makes the optimizer, for training and resuming."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import StepLR

from training.live import clean, world_size
from training.model import Block, Net

LEARNING_RATE = 1e-2
BETAS = (0.9, 0.95)


def wrap(
    net: Net,
    kind: str,
    *,
    compiled: str = "",
    shard1: bool = False,
    tensor_parallel: bool = False,
) -> nn.Module:
    """The net as the named way of data parallelism trains it; `plain` leaves it as it is."""
    if kind == "plain":
        return net
    if kind == "ddp":
        return _ddp(net, compiled)
    if kind == "fsdp1":
        warnings.filterwarnings("ignore", module=r"torch\.distributed")  # of mixed frozen, old age
        policy = ModuleWrapPolicy({Block})
        cpu = torch.device("cpu")
        return FSDP(net, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu)
    if kind == "fsdp2":
        return _fsdp2(net, shard1, tensor_parallel)
    raise ValueError(f"unknown kind of data parallelism: {kind}")


def _ddp(net: Net, compiled: str) -> nn.Module:
    inner: Any = torch.compile(net, backend="eager") if compiled == "inner" else net
    outer: Any = DistributedDataParallel(inner)
    wrapped: Any = torch.compile(outer, backend="eager") if compiled == "outer" else outer
    assert isinstance(wrapped, nn.Module)
    return wrapped


def _fsdp2(net: Net, shard1: bool, tensor_parallel: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (world_size(),))
    if tensor_parallel:
        mesh = _tensor_parallel(net)

    def placement(parameter: nn.Parameter) -> Shard | None:
        even = parameter.ndim > 1 and parameter.shape[1] % world_size() == 0
        return Shard(1) if shard1 and even else None

    for block in net.blocks:
        fully_shard(block, mesh=mesh, shard_placement_fn=placement)
    fully_shard(net, mesh=mesh, shard_placement_fn=placement)
    return net


def _tensor_parallel(net: Net) -> DeviceMesh:
    mesh = init_device_mesh("cpu", (world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return mesh["dp"]


def make_optimizer(
    wrapped: nn.Module,
    groups: list[tuple[list[str], float]],
    kind: str = "adamw",
    named: bool = False,
) -> Optimizer:
    """AdamW or SGD with the groups that were taken from the unwrapped net."""
    found = {clean(name): p for name, p in wrapped.named_parameters()}
    param_groups: list[dict[str, Any]] = []
    for names, decay in groups:
        members = [(n, found[n]) if named else found[n] for n in names]
        param_groups.append({"params": members, "weight_decay": decay})
    if kind == "sgd":
        return torch.optim.SGD(param_groups, lr=LEARNING_RATE, momentum=0.9)
    return torch.optim.AdamW(param_groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8)


def make_scheduler(optimizer: Optimizer) -> StepLR:
    """Halves the rate every second step, so that the rate at saving is not the first one."""
    return StepLR(optimizer, step_size=2, gamma=0.5)
