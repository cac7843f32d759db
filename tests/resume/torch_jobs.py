"""Jobs under DDP, FSDP1 and FSDP2: trained, saved and resumed by torch's own means."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from training import fsdp_loads
from training.live import (
    gather,
    gather_buffers,
    group_meta,
    group_names,
    mean_over_ranks,
    rank,
    world_size,
)
from training.model import batch, decay_groups
from training.resume import load_fsdp1, load_fsdp2, make_blank_state
from training.wrap import make_optimizer, make_scheduler

from resume.nets import BLOCKS, build
from resume.strategies import Strategy

EPOCH = {"epoch": 1}


class TorchJob:
    """A net, wrapped, with its optimizer and scheduler."""

    def __init__(
        self, strategy: Strategy, net: str, dtype: str, seed: int, device: torch.device
    ) -> None:
        self.strategy, self.device, self.dtype = strategy, device, dtype
        made = build(net, seed).to(device)
        groups = decay_groups(made)
        self.module = wrap(made, strategy, dtype, device)
        self.optimizer = make_optimizer(self.module, groups)
        self.scheduler = make_scheduler(self.optimizer)

    def loss(self, step: int) -> Tensor:
        """Of this rank's rows."""
        rows = [part.to(self.device) for part in batch(step, rank(), world_size())]
        casts = self.dtype == "bf16" and self.strategy.kind == "ddp"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=casts):
            found: Tensor = self.module(*rows)
        return found

    def train_step(self, step: int) -> float:
        """One step; returns the loss of all rows."""
        loss = self.loss(step)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return mean_over_ranks(loss)

    def gather(self) -> dict[str, Tensor]:
        """Whole weights, states and buffers."""
        return gather(self.module, self.optimizer) | gather_buffers(self.module)

    def describe(self) -> dict[str, Any]:
        """Param groups, and where the schedule is."""
        groups = group_meta(self.optimizer, group_names(self.module, self.optimizer))
        return {"param_groups": groups, "last_epoch": self.scheduler.last_epoch}

    def save(self, folder: Path) -> None:
        """By the strategy's own means."""
        rest = {**EPOCH, "scheduler": self.scheduler.state_dict()}
        if self.strategy.target == "dcp":
            dcp_save({**self._sharded(), **rest}, checkpoint_id=folder)
            return
        content = self._plain() if self.strategy.kind == "ddp" else self._full()
        if rank() == 0:
            torch.save({**content, **rest}, folder / "checkpoint.pt")

    def _plain(self) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def _sharded(self) -> dict[str, Any]:
        if not isinstance(self.module, FSDP):
            model, state = get_state_dict(self.module, self.optimizer)
            return {"model": model, "optimizer": state}
        with FSDP.state_dict_type(self.module, StateDictType.SHARDED_STATE_DICT):
            return {
                "model": self.module.state_dict(),
                "optimizer": FSDP.optim_state_dict(self.module, self.optimizer),
            }

    def _full(self) -> dict[str, Any]:
        """No offload: on CPU it made exp_avg and exp_avg_sq share memory in torch 2.13."""
        with FSDP.state_dict_type(
            self.module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True),
            FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False),
        ):
            return {
                "model": self.module.state_dict(),
                "optimizer": FSDP.optim_state_dict(self.module, self.optimizer),
            }

    def load(self, path: Path, scheduler_key: str) -> None:
        """By the strategy's own means, over infinite optimizer states."""
        make_blank_state(self.optimizer)
        if self.strategy.target == "dcp":
            if self.strategy.kind == "fsdp2":
                load_fsdp2(self.module, self.optimizer, path, flat=False)
            else:
                load_fsdp1(self.module, self.optimizer, path)
            content: dict[str, Any] = {scheduler_key: self.scheduler.state_dict()}
            dcp_load(content, checkpoint_id=path)
        else:
            content = torch.load(path, weights_only=True, map_location="cpu")
            if self.strategy.kind == "ddp":
                self.module.load_state_dict(content["model"], strict=True)
                self.optimizer.load_state_dict(content["optimizer"])
            else:
                fsdp_loads.load_fsdp1(self.module, self.optimizer, path)
        self.scheduler.load_state_dict(content[scheduler_key])


def wrap(net: nn.Module, strategy: Strategy, dtype: str, device: torch.device) -> nn.Module:
    """The net as the strategy trains it."""
    if strategy.kind == "ddp":
        return DistributedDataParallel(net)
    if strategy.kind == "fsdp1":
        warnings.filterwarnings("ignore")  # of mixed frozen, old age, and what NO_SHARD saves
        return FSDP(
            net,
            auto_wrap_policy=ModuleWrapPolicy(BLOCKS),
            sharding_strategy=ShardingStrategy[strategy.sharding],
            use_orig_params=True,
            device_id=device,
        )
    mesh = init_device_mesh(device.type, (world_size(),))
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*(m for m in net.modules() if type(m) in BLOCKS), net):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return net
