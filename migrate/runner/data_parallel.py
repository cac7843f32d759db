"""A stand-in for nn.DataParallel on the CPU, under torch's own class and nesting rules.

`replicas` computes every chunk on a replica, one after another, as GPUs would. `dealt` does so with
samples dealt out in turn, as DistributedSampler does: replicas and processes then see the same
samples. `whole` gives the whole batch to the first replica: what the rewrite should reproduce with
synchronised batch norm.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import scatter_gather

from migrate.runner.devices import CPU

MODES = ("replicas", "dealt", "whole")


def install(mode: str) -> None:
    """Let nn.DataParallel work on the CPU; call it only with the stand-in for CUDA."""
    if mode not in MODES:
        raise ValueError(f"no way to run DataParallel: {mode!r}, expected one of {MODES}")
    parts: Any = scatter_gather
    parts.Scatter, parts.Gather = (_Deal, _Collect) if mode == "dealt" else (_Scatter, _Gather)
    scatter = scatter_gather.scatter_kwargs

    @functools.wraps(scatter)
    def first_only(inputs: Any, kwargs: Any, target_gpus: Any, dim: int = 0) -> Any:
        return scatter(inputs, kwargs, target_gpus[:1], dim)

    module: Any = importlib.import_module("torch.nn.parallel.data_parallel")  # not its function
    module.scatter_kwargs = first_only if mode == "whole" else scatter
    module.parallel_apply = nn.parallel.parallel_apply = _one_after_another
    nn.parallel.data_parallel = module.data_parallel = _functional
    replicas: Any = importlib.import_module("torch.nn.parallel.replicate")
    replicas._broadcast_coalesced_reshape = _copies
    _wrap_start()


class _Scatter:
    """torch.nn.parallel._functions.Scatter, without devices."""

    @staticmethod
    def apply(target_gpus: Sequence[Any], _sizes: None, dim: int, whole: Tensor) -> Any:
        # Copies, as on other devices: a replica may write into its input.
        return tuple(chunk.clone() for chunk in whole.chunk(len(target_gpus), dim))


class _Gather:
    """torch.nn.parallel._functions.Gather, without devices."""

    @staticmethod
    def apply(_target_device: Any, dim: int, *parts: Tensor) -> Tensor:
        if all(part.dim() == 0 for part in parts) and dim == 0:
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; "
                "will instead unsqueeze and return a vector.",
                stacklevel=4,
            )
            return torch.stack(parts)
        return torch.cat(parts, dim)


class _Deal:
    """Samples in turn: replica r gets r, r + n, r + 2 n …"""

    @staticmethod
    def apply(target_gpus: Sequence[Any], _sizes: None, dim: int, whole: Tensor) -> Any:
        count = len(target_gpus)
        turns = [torch.arange(rank, whole.size(dim), count) for rank in range(count)]
        return tuple(whole.index_select(dim, turn) for turn in turns if turn.numel())


class _Collect:
    """The order that the samples had before they were dealt."""

    @staticmethod
    def apply(target_device: Any, dim: int, *parts: Tensor) -> Tensor:
        joined = _Gather.apply(target_device, dim, *parts)
        if any(part.dim() == 0 for part in parts):
            return joined
        total = joined.size(dim)
        dealt = torch.cat([torch.arange(rank, total, len(parts)) for rank in range(len(parts))])
        return joined.index_select(dim, dealt.argsort())


def _copies(
    tensors: Sequence[Tensor], devices: Sequence[Any], detach: bool = False
) -> list[list[Tensor]]:
    """Tensors of each replica: the first one's share memory with the module's, others' do not."""
    first = [t.detach() if detach else t.view_as(t) for t in tensors]
    others = [[t.detach().clone() if detach else t.clone() for t in tensors] for _ in devices[1:]]
    return [first, *others] if tensors else []


def _one_after_another(
    modules: Sequence[Any], inputs: Sequence[Any], kwargs_tup: Any = None, devices: Any = None
) -> list[Any]:
    results = []
    for module, args, kwargs in zip(
        modules, inputs, kwargs_tup or [{}] * len(modules), strict=True
    ):
        positional = args if isinstance(args, list | tuple) else (args,)
        results.append(module(*positional, **kwargs))
    return results


def _functional(
    module: nn.Module,
    inputs: Any,
    device_ids: Sequence[Any] | None = None,
    output_device: Any = None,
    dim: int = 0,
    module_kwargs: Any = None,
) -> Any:
    wrapped = nn.DataParallel(module, device_ids, output_device, dim)
    if not isinstance(inputs, tuple):
        inputs = (inputs,) if inputs is not None else ()
    return nn.DataParallel.forward(wrapped, *inputs, **(module_kwargs or {}))


def _wrap_start() -> None:
    start = nn.DataParallel.__init__

    @functools.wraps(start)
    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.src_device_obj = CPU

    nn.DataParallel.__init__ = on_cpu  # type: ignore[method-assign]
