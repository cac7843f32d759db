"""The strategies of the matrix: how each is set up, what it saves, and what it resumes from.

Needs no DeepSpeed: the side that starts processes and converts does not import it.
"""

from dataclasses import dataclass
from typing import Any

from training.model import GLOBAL_BATCH


@dataclass(frozen=True)
class Strategy:
    """One way of training in parallel.

    Attributes:
        kind: ddp, fsdp1, fsdp2 or deepspeed.
        target: the format it resumes from.
        sharding: FSDP1's strategy.
        stage: DeepSpeed's stage.
    """

    name: str
    title: str
    kind: str
    target: str
    sharding: str = ""
    stage: int = 0

    @property
    def scheduler_key(self) -> str:
        """Where its saves keep the scheduler."""
        return "lr_scheduler" if self.kind == "deepspeed" else "scheduler"


_ALL = (
    Strategy("ddp", "DDP", "ddp", "ddp"),
    Strategy("fsdp1_full", "FSDP1 FULL_SHARD", "fsdp1", "dcp", "FULL_SHARD"),
    Strategy("fsdp1_grad", "FSDP1 SHARD_GRAD_OP", "fsdp1", "fsdp-full", "SHARD_GRAD_OP"),
    Strategy("fsdp1_none", "FSDP1 NO_SHARD", "fsdp1", "fsdp-full", "NO_SHARD"),
    Strategy("fsdp2", "FSDP2", "fsdp2", "dcp"),
    Strategy("zero1", "ZeRO-1", "deepspeed", "zero1", stage=1),
    Strategy("zero2", "ZeRO-2", "deepspeed", "zero2", stage=2),
    Strategy("zero3", "ZeRO-3", "deepspeed", "zero3", stage=3),
)
STRATEGIES = {strategy.name: strategy for strategy in _ALL}


def deepspeed_config(strategy: Strategy, world_size: int, dtype: str) -> dict[str, Any]:
    """DeepSpeed's configuration of a job; its author gives the same one to the conversion."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # 1.0 when left out, in DeepSpeed 0.19
        "steps_per_print": 10000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": strategy.stage},
    }
    if strategy.stage == 3 and world_size != 2:  # another layout than where the sources come from
        small = {"sub_group_size": 500, "stage3_param_persistence_threshold": 0}
        config["zero_optimization"] |= small
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    return config
