"""Training and saving with torch's own means: DDP, FSDP1, FSDP2."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim import Optimizer

from training.cases import Case
from training.live import gather, group_meta, group_names, rank, step_plainly, world_size
from training.model import build, decay_groups
from training.wrap import make_optimizer, make_scheduler, wrap


@dataclass(frozen=True)
class Session:
    """A run in progress; every function is to be called on all ranks."""

    module: nn.Module
    scheduler: Any
    train_step: Callable[[int], float]
    gather: Callable[[], dict[str, Tensor]]
    param_groups: Callable[[], list[dict[str, Any]]]
    save: Callable[[Path, dict[str, Any]], None]
    meta: Callable[[], dict[str, Any]]


def open_torch(case: Case) -> Session:
    """The case's net, wrapped and ready to train."""
    net = build(case.options)
    groups = decay_groups(net)
    wrapped = wrap(
        net,
        case.kind,
        compiled=case.compiled,
        shard1=case.shard1,
        tensor_parallel=case.tensor_parallel,
    )
    optimizer = make_optimizer(wrapped, groups, case.optimizer, case.named)
    scheduler = make_scheduler(optimizer)
    copies = world_size() // case.data_parallel(world_size())

    def save(folder: Path, client: dict[str, Any]) -> None:
        extra = {**client, "scheduler": scheduler.state_dict()}
        if case.save in ("dcp", "flat"):
            content = _sharded(case, wrapped, optimizer)
            dcp_save({**content, **extra}, checkpoint_id=folder)
        elif case.save == "full":
            _save_fsdp1_full(wrapped, optimizer, extra, folder)
        elif rank() == 0:
            _save_ddp(case, wrapped, optimizer, extra, folder)

    return Session(
        module=wrapped,
        scheduler=scheduler,
        train_step=lambda step: step_plainly(wrapped, optimizer, scheduler, step, copies),
        gather=lambda: gather(wrapped, optimizer),
        param_groups=lambda: group_meta(optimizer, group_names(wrapped, optimizer)),
        save=save,
        meta=lambda: {"optimizer": type(optimizer).__name__},
    )


def _sharded(case: Case, wrapped: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    if isinstance(wrapped, FSDP):
        with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
            return {
                "model": wrapped.state_dict(),
                "optimizer": FSDP.optim_state_dict(wrapped, optimizer),
            }
    options = StateDictOptions(flatten_optimizer_state_dict=case.save == "flat")
    model, state = get_state_dict(wrapped, optimizer, options=options)
    return {"model": model, "optimizer": state}


def _save_fsdp1_full(
    wrapped: nn.Module, optimizer: Optimizer, extra: dict[str, Any], folder: Path
) -> None:
    """No offload: on CPU it made exp_avg and exp_avg_sq share memory in torch 2.13."""
    with FSDP.state_dict_type(
        wrapped,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True),
        FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False),
    ):
        content = {
            "model": wrapped.state_dict(),
            "optimizer": FSDP.optim_state_dict(wrapped, optimizer),
        }
    if rank() == 0:
        torch.save({**content, **extra}, folder / "checkpoint.pt")


def _save_ddp(
    case: Case, wrapped: nn.Module, optimizer: Optimizer, extra: dict[str, Any], folder: Path
) -> None:
    inner: Any = wrapped.module
    if case.save == "bare":
        torch.save(inner.state_dict(), folder / "model.pt")
    elif case.save == "whole":
        torch.save(inner, folder / "model.pt")
    else:
        content = {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict(), **extra}
        zipped = case.save != "legacy"
        torch.save(content, folder / "checkpoint.pt", _use_new_zipfile_serialization=zipped)
