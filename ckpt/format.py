"""What a format is: how to recognise it, read it, write it, and what it can hold.

A format is one file under `ckpt/formats/` that ends in `FORMAT = Format(...)`. The registry finds
it there; the command line, `ckpt formats` and the table in the docs are made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from pathlib import Path

from ckpt.dtypes import DType
from ckpt.model import Checkpoint, Plain
from ckpt.plan import WritePlan

__all__ = [
    "SHARD_OPTIONS",
    "WORLD_OPTIONS",
    "Format",
    "Match",
    "Part",
    "ReadOptions",
    "WeightDType",
    "WriteOptions",
]

DEFAULT_SHARD_BYTES = 5_000_000_000
SHARD_OPTIONS = ("world_size", "ds_config", "like")
"""Fields of `WriteOptions` about the job that will load an output cut for its ranks."""

WORLD_OPTIONS = (*SHARD_OPTIONS, "stage", "ds_version")
"""The same, and those that decide the layout of an output for any number of ranks."""


class Part(Enum):
    """A part of a training state that a format may or may not hold."""

    WEIGHTS = "weights"
    BUFFERS = "buffers"
    TIES = "tied names"
    OPTIMIZER = "optimizer state"
    GROUPS = "param groups"
    JOB = "scheduler, counters, client state"


class Match(IntEnum):
    """How sure a format is that a path is its own, from names and first bytes only."""

    NO = 0
    MAYBE = 1
    YES = 2


class WeightDType(Enum):
    """The `--dtype` choices. KEEP is the dtype the model computed in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    KEEP = "keep"

    @property
    def dtype(self) -> DType | None:
        """The dtype to cast to; None for KEEP."""
        return {
            WeightDType.FP32: DType.float32,
            WeightDType.BF16: DType.bfloat16,
            WeightDType.FP16: DType.float16,
        }.get(self)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What a user may have to tell about a source.

    Attributes:
        tag: the DeepSpeed tag, when not the one in `latest`.
        key: dotted path of the model's state dict inside a dict that holds several.
        param_order: FQNs in the optimizer's order, for integer-keyed optimizer states.
        model: `package.module:factory`, built on the meta device for names and order.
        need_optimizer: False when the weights are enough, so that an optimizer whose parameters
            cannot be told apart is left out with a note instead of an error.
    """

    tag: str | None = None
    key: str | None = None
    param_order: tuple[str, ...] | None = None
    model: str | None = None
    need_optimizer: bool = True


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a user may choose about an output.

    Attributes:
        dtype: dtype of the floating-point parameters; None keeps the fp32 master weights where
            the source has them, and every other weight as it is.
        max_shard_bytes: largest safetensors file.
        hf_config: folder with config, generation config and tokenizer files to go along.
        world_size: ranks of the job that will load it; None for the source's.
        ds_config: DeepSpeed's configuration of that job.
        like: a DeepSpeed checkpoint of that job, for what the source does not tell.
        stage: ZeRO stage of that job, where the format does not imply it; None for the source's.
        ds_version: DeepSpeed's release there, such as "0.16.9", where its loading differs.
    """

    dtype: WeightDType | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES
    hf_config: Path | None = None
    world_size: int | None = None
    ds_config: Mapping[str, Plain] | None = None
    like: Checkpoint | None = field(default=None, repr=False)
    stage: int | None = None
    ds_version: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        name: the word after `--to`, and the one `inspect` shows.
        title: what people call it.
        matches: recognises a path by names and first bytes; never reads tensor data.
        read: metadata in, model out; None for a format that is only written.
        plan: model in, plan out; None for a format that is only read.
        keeps: the parts an output holds; what a checkpoint has beyond that is lost and said.
        aliases: other words for `--to`.
        has_tags: a path holds several saves, of which `--tag` chooses one.
        output_suffix: how the default output name ends, such as `.pt`; empty for folders.
        outputs: patterns of the names that an output folder may hold; with `--overwrite` only
            a folder of nothing else is replaced.
        takes: the options among `WORLD_OPTIONS` that have a meaning for its output.
    """

    name: str
    title: str
    matches: Callable[[Path], Match]
    read: Callable[[Path, ReadOptions], Checkpoint] | None = None
    plan: Callable[[Checkpoint, WriteOptions], WritePlan] | None = None
    keeps: frozenset[Part] = frozenset(Part)
    aliases: tuple[str, ...] = ()
    has_tags: bool = False
    output_suffix: str = ""
    outputs: tuple[str, ...] = ()
    takes: frozenset[str] = frozenset()
