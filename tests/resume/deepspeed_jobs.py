"""Jobs under DeepSpeed's stages, trained, saved and resumed by its engine."""

import logging
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from training.cases import Case
from training.deepspeed_runs import gather_whole
from training.live import gather_buffers, group_meta, mean_over_ranks, rank, world_size
from training.model import batch, decay_groups
from training.wrap import make_optimizer, make_scheduler

from resume.nets import build
from resume.strategies import Strategy, deepspeed_config


class DeepSpeedJob:
    """An engine."""

    def __init__(
        self, strategy: Strategy, net: str, dtype: str, seed: int, device: torch.device
    ) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        self.device = device
        self.case = Case(strategy.name, "deepspeed", (), dtype=dtype, stage=strategy.stage)
        made = build(net, seed)
        groups = decay_groups(made)
        self.members = [names for names, _ in groups]
        self.base = make_optimizer(made, groups)
        self.scheduler = make_scheduler(self.base)
        self.engine, self.zero, _, _ = deepspeed.initialize(
            model=made,
            optimizer=self.base,
            lr_scheduler=self.scheduler,
            config=deepspeed_config(strategy, world_size(), dtype),
            dist_init_required=False,
        )
        self.module: Any = self.engine

    def loss(self, step: int) -> Tensor:
        """Of this rank's rows."""
        rows = [part.to(self.device) for part in batch(step, rank(), world_size())]
        found: Tensor = self.engine(*rows)
        return found

    def train_step(self, step: int) -> float:
        """One step; returns the loss of all rows."""
        loss = self.loss(step)
        self.engine.backward(loss)
        self.engine.step()
        return mean_over_ranks(loss)

    def gather(self) -> dict[str, Tensor]:
        """Whole weights, states and buffers."""
        tensors = gather_whole(self.case, self.engine.module, self.zero, self.base)
        return tensors | gather_buffers(self.engine.module)

    def describe(self) -> dict[str, Any]:
        """Param groups, and where the schedule is."""
        groups = group_meta(self.base, self.members)
        return {"param_groups": groups, "last_epoch": self.scheduler.last_epoch}

    def save(self, folder: Path) -> None:
        """A save of the engine."""
        self.engine.save_checkpoint(str(folder), client_state={"epoch": 1})

    def load(self, path: Path, scheduler_key: str) -> None:
        """The engine's own loading, scheduler included."""
        found, client = self.engine.load_checkpoint(str(path))
        if found is None or client.get("epoch") != 1:
            raise RuntimeError(f"DeepSpeed loaded {found} with {client}")
