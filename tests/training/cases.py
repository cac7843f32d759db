"""The table of training cases: what is trained, on how many processes, and how it is saved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.model import RICH, ModelOptions

PLAIN = ModelOptions()


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str
    kind: str  # deepspeed, ddp, fsdp1, fsdp2
    worlds: tuple[int, ...]
    save: str = "pt"  # pt, legacy, bare, whole, full, dcp, flat
    options: ModelOptions = PLAIN
    optimizer: str = "adamw"
    dtype: str = "fp32"
    stage: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)  # more of DeepSpeed's configuration
    compiled: str = ""  # inner: DDP(compile(net)); outer: compile(DDP(net))
    named: bool = False  # the optimizer is built from names too and saves param_names
    shard1: bool = False  # FSDP2 cuts some weights along dimension 1
    tensor_parallel: bool = False  # FSDP2 on a 2-D mesh, the second dimension is tensor parallel

    def data_parallel(self, world: int) -> int:
        """How many ranks see different rows."""
        return world // 2 if self.tensor_parallel else world


def _zero(name: str, stage: int, worlds: tuple[int, ...], **more: Any) -> Case:
    return Case(name, "deepspeed", worlds, "deepspeed", stage=stage, options=RICH, **more)


_ACC32 = {"data_types": {"grad_accum_dtype": "fp32"}}
_SUBGROUP = {
    "zero_optimization": {"sub_group_size": 500, "stage3_param_persistence_threshold": 0},
}

_DEEPSPEED = [
    _zero("zero1_fp32", 1, (2, 3)),
    _zero("zero2_fp32", 2, (2, 3)),
    _zero("zero3_fp32", 3, (2, 3)),
    _zero("zero1_bf16", 1, (2,), dtype="bf16"),
    _zero("zero1_bf16_acc32", 1, (2,), dtype="bf16", config=_ACC32),
    _zero("zero2_bf16", 2, (2,), dtype="bf16"),
    _zero("zero3_bf16", 3, (2,), dtype="bf16"),
    _zero("zero3_subgroup", 3, (3,), config=_SUBGROUP),
    _zero("zero2_sgd", 2, (2,), optimizer="sgd"),
    _zero("zero2_fp16", 2, (2,), dtype="fp16"),
]
_TORCH = [
    Case("ddp", "ddp", (2, 3)),
    Case("ddp_named", "ddp", (2,), options=RICH, named=True),
    Case("ddp_compiled", "ddp", (2,), compiled="inner"),
    Case("ddp_compiled_outer", "ddp", (2,), compiled="outer"),
    Case("ddp_legacy", "ddp", (2,), "legacy"),
    Case("ddp_dcp", "ddp", (2,), "dcp", options=RICH),
    Case("bare", "ddp", (2,), "bare", options=RICH),
    Case("whole", "ddp", (2,), "whole", options=RICH),
    Case("fsdp1_full", "fsdp1", (2,), "full", options=RICH),
    Case("fsdp1_dcp", "fsdp1", (2, 3), "dcp", options=RICH),
    Case("fsdp2_dcp", "fsdp2", (2, 3), "dcp", options=RICH),
    Case("fsdp2_flat", "fsdp2", (2, 3), "flat", options=RICH),
    Case("fsdp2_shard1", "fsdp2", (2, 3), "dcp", options=RICH, shard1=True),
    Case("fsdp2_tp", "fsdp2", (4,), "dcp", tensor_parallel=True),
]
CASES: dict[str, Case] = {case.name: case for case in (*_DEEPSPEED, *_TORCH)}
