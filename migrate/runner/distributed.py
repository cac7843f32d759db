"""torch.distributed under the stand-in for CUDA: NCCL is gloo, and meshes are of the CPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from migrate.runner.devices import index_of


def install() -> None:
    """Let scripts written for NCCL run over gloo; call it only with the stand-in for CUDA."""
    _replace("init_process_group", _with_gloo(distributed_c10d.init_process_group))
    _replace("new_group", _with_gloo(distributed_c10d.new_group))
    _replace("barrier", _without(distributed_c10d.barrier, "device_ids"))
    _replace("all_reduce", _averaging(distributed_c10d.all_reduce))
    _replace("is_nccl_available", lambda: True)
    _wrap_meshes()
    _wrap_ddp()


def _replace(name: str, new: Callable[..., Any]) -> None:
    """Under both of its names; `from torch.distributed import …` in torch keeps the old one."""
    for module in (distributed_c10d, dist):
        setattr(module, name, new)


def _gloo(backend: str | None) -> str:
    return "gloo" if backend is None or "nccl" in backend else backend


def _with_gloo(start: Callable[..., Any]) -> Callable[..., Any]:
    """Both functions that make groups; `backend` is the first argument of one of them only."""
    backend_first = start.__name__ == "init_process_group"

    @functools.wraps(start)
    def over_gloo(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.pop("device_id", None)
        if device is not None:
            index_of(device)
        if args and backend_first:
            args = (_gloo(args[0]), *args[1:])
        elif len(args) < 3 or backend_first:
            kwargs["backend"] = _gloo(kwargs.get("backend"))
        return start(*args, **kwargs)

    return over_gloo


def _without(function: Callable[..., Any], argument: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def bare(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop(argument, None)
        return function(*args, **kwargs)

    return bare


def _averaging(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """NCCL can average, gloo cannot."""

    @functools.wraps(all_reduce)
    def reduce(
        tensor: Any, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        if op != dist.ReduceOp.AVG or async_op:
            return all_reduce(tensor, op, group, async_op)
        all_reduce(tensor, dist.ReduceOp.SUM, group)
        tensor.div_(dist.get_world_size(group))
        return None

    return reduce


def _wrap_meshes() -> None:
    make, start = device_mesh.init_device_mesh, device_mesh.DeviceMesh.__init__

    @functools.wraps(make)
    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    @functools.wraps(start)
    def on_cpu(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        start(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    device_mesh.DeviceMesh.__init__ = on_cpu  # type: ignore[method-assign]
    for module in list(sys.modules.values()):
        if vars(module).get("init_device_mesh") is make:
            module.init_device_mesh = init_device_mesh  # type: ignore[attr-defined]


def _wrap_ddp() -> None:
    """DDP on the CPU refuses device_ids, and SyncBatchNorm, which is replaced elsewhere."""
    start = DistributedDataParallel.__init__

    @functools.wraps(start)
    def on_cpu(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        for device in device_ids or []:
            index_of(device)
        start(self, module, None, None, *args, **kwargs)

    ddp: Any = DistributedDataParallel
    ddp.__init__ = on_cpu
    ddp._passing_sync_batchnorm_handle = lambda self, module: None
