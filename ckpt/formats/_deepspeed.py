"""What all DeepSpeed checkpoints share: folders, file names through the eras, classes, counters.

Source: deepspeed 0.19.8 runtime/engine.py (`_save_checkpoint`, `_get_zero_ckpt_name`,
`_common_checkpoint_state`), checkpoint/constants.py; older releases (0.9.5, 0.14.5) by their files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ckpt.chunks import Chunk, chunks_of_flat_range
from ckpt.errors import CorruptCheckpoint, MissingPart, Unsupported
from ckpt.model import Opaque, Plain, StoredChunk, StoredTensor
from ckpt.storage import torch_file
from ckpt.values import read_number

__all__ = [
    "DATA_CLASSES",
    "LATEST",
    "NOT_JOB",
    "FlatPiece",
    "Save",
    "cut_from_flat",
    "guess_kind",
    "job_objects",
    "kind_of",
    "locate",
    "model_file",
    "model_state",
    "optim_file",
    "rank_files",
    "read_file",
    "require_same",
    "shapes_by_group",
    "stage_number",
    "steps_of",
]

LATEST = "latest"
UNIVERSAL_FOLDER = "zero"
OFFLOADED_FOLDER = "offloaded_tensors"
STAGE_3_MODEL = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
MODEL = re.compile(r"mp_rank_(\d+)_model_states\.pt$")
OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt$")
EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt$")
PIPELINE = re.compile(r"layer_\d+-model_.*states\.pt$")


def model_file(rank: int | None) -> str:
    """The name of the file with the module: one a save, or one a rank under stage 3."""
    return f"{'' if rank is None else f'zero_pp_rank_{rank}_'}mp_rank_00_model_states.pt"


def optim_file(rank: int, *, is_bf16: bool) -> str:
    """The name of a rank's optimizer file; an fp16 engine's has no prefix."""
    return f"{'bf16_' if is_bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


DATA_CLASSES = frozenset(
    {
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.utils.tensor_fragment.fragment_address",
        "deepspeed.utils.fragment_address",
        "deepspeed.checkpoint.universal_checkpoint.SubparamShape",
    }
)
"""Source: deepspeed 0.9.5 to 0.19.8, by the pickles they write."""

NOT_JOB = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
        "ds_version",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "sparse_tensor_module_names",
    }
)
"""Keys of a model_states file that describe the layout and not the job."""


@dataclass(frozen=True, slots=True)
class Save:
    """One save of a DeepSpeed job: its tag folder and the files in it, by rank."""

    folder: Path
    names: tuple[str, ...]

    def ranks(self, pattern: re.Pattern[str]) -> dict[int, Path]:
        """Files whose name matches, by data-parallel rank (the first number in the name)."""
        found: dict[int, Path] = {}
        for name in self.names:
            match = pattern.match(name)
            if match:
                if int(match.groups()[-1]) != 0:
                    raise Unsupported(
                        f"{self.folder / name}: tensor or pipeline parallel (mp_rank "
                        f"{match.groups()[-1]}); only data-parallel checkpoints can be converted"
                    )
                rank = int(match.group(1))
                if rank in found:
                    raise CorruptCheckpoint(
                        f"{self.folder}: {found[rank].name} and {name} are both of rank {rank}; "
                        "files of two different saves are mixed"
                    )
                found[rank] = self.folder / name
        return dict(sorted(found.items()))


def _names(folder: Path) -> tuple[str, ...]:
    return tuple(sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else ()


def kind_of(names: Sequence[str]) -> str | None:
    """`zero3`, `zero12` or `zero0` by the names in a tag folder; None for another folder.

    A universal checkpoint has the same model_states files; its folder `zero` tells it.
    """
    if UNIVERSAL_FOLDER in names and not any(OPTIM.match(name) for name in names):
        return None
    if any(STAGE_3_MODEL.match(name) for name in names):
        return "zero3"
    if any(MODEL.match(name) for name in names):
        return "zero12" if any(OPTIM.match(name) for name in names) else "zero0"
    return "zero12" if any(OPTIM.match(name) for name in names) else None


def _tags(root: Path) -> list[str]:
    return [
        name for name in _names(root) if (root / name).is_dir() and kind_of(_names(root / name))
    ]


def guess_kind(path: Path) -> str | None:
    """The kind of the checkpoint at a root, a tag folder or a file, by names only."""
    folder = path.parent if path.is_file() else path
    if path.is_file() and path.name != LATEST and kind_of([path.name]) is None:
        return None
    here = kind_of(_names(folder))
    if here is not None:
        return here
    tags = _tags(folder)
    preferred = [tag for tag in tags if tag == _latest(folder)] or tags
    return kind_of(_names(folder / preferred[0])) if preferred else None


def _latest(root: Path) -> str | None:
    path = root / LATEST
    return path.read_text(errors="replace").strip() if path.is_file() else None


def locate(path: Path, tag: str | None) -> Save:
    """The save that a root folder, a tag folder or one of its files stands for.

    Raises:
        MissingPart: no `latest` and no tag, or a tag that is not there; lists the candidates.
        Unsupported: a mixture-of-experts or pipeline folder.
    """
    root = path.parent if path.is_file() else path
    folder = root if kind_of(_names(root)) else root / _choose_tag(root, tag)
    if tag is not None and folder.name != tag:
        raise MissingPart(f"{path}: is the save {folder.name!r}, not --tag {tag!r}")
    names = _names(folder)
    if OFFLOADED_FOLDER in names:
        raise Unsupported(
            f"{folder / OFFLOADED_FOLDER}: states offloaded to NVMe lie there in raw swap files; "
            "save without offload_optimizer device nvme, and convert that"
        )
    for pattern, what in ((EXPERT, "mixture-of-experts"), (PIPELINE, "pipeline-parallel")):
        found = next((name for name in names if pattern.match(name)), None)
        if found:
            raise Unsupported(f"{folder / found}: a {what} checkpoint; these cannot be converted")
    return Save(folder, names)


def _choose_tag(root: Path, tag: str | None) -> str:
    tags, latest = _tags(root), _latest(root)
    listed = ", ".join(tags) or "none"
    if tag is not None:
        if (root / tag / UNIVERSAL_FOLDER).is_dir():
            raise MissingPart(
                f"{root}: {tag!r} is a universal checkpoint; give {root / tag} itself"
            )
        if tag not in tags:
            raise MissingPart(f"{root}: no tag {tag!r}; the tags there are: {listed}")
        return tag
    if latest is None:
        raise MissingPart(
            f"{root}: no file `{LATEST}`, which DeepSpeed writes last; choose a save with --tag. "
            f"The tags there are: {listed}"
        )
    if latest not in tags:
        raise MissingPart(
            f"{root}: `{LATEST}` names {latest!r}, which is not there; choose a save with --tag. "
            f"The tags there are: {listed}"
        )
    return latest


def read_file(path: Path, key: str) -> Mapping[str, Any]:
    """The dict in a DeepSpeed file, which has to hold `key`."""
    content = torch_file.read(path, DATA_CLASSES)
    if not isinstance(content, Mapping) or key not in content:
        raise CorruptCheckpoint(f"{path}: no {key!r} inside; not a file that DeepSpeed wrote")
    return content


def rank_files(save: Save, pattern: re.Pattern[str], world_size: int | None) -> list[Path]:
    """The files of all ranks in order.

    Raises:
        MissingPart: a rank between 0 and the world size has no file.
    """
    found = save.ranks(pattern)
    count = world_size or max(found, default=-1) + 1
    missing = [rank for rank in range(count) if rank not in found]
    if missing or not found:
        what = "optim_states" if pattern is OPTIM else "model_states"
        raise MissingPart(
            f"{save.folder}: found {len(found)} of {max(count, 1)} *_{what}.pt files; missing "
            f"ranks {missing or [0]}. Copy the files of every rank into one folder."
        )
    if len(found) > count:
        raise CorruptCheckpoint(
            f"{save.folder}: {len(found)} files of ranks for a world size of {count}; files of "
            "two different saves are mixed"
        )
    return list(found.values())


def stage_number(optimizer: Mapping[str, Any], where: Path) -> int | None:
    """The ZeRO stage a file states, or None when it states none (BF16_Optimizer)."""
    stage = optimizer.get("zero_stage")
    if isinstance(stage, Opaque):
        args = stage.state["args"] if isinstance(stage.state, Mapping) else ()
        stage = args[0] if args else None
    if stage is not None and stage not in (0, 1, 2, 3):
        raise Unsupported(f"{where}: unknown ZeRO stage {stage!r}")
    return stage


def shapes_by_group(shapes: Plain, where: Path) -> list[dict[str, tuple[int, ...]]]:
    """`param_shapes` as a list of dicts, also where it was one dict (deepspeed before 0.5.4)."""
    listed = [shapes] if isinstance(shapes, Mapping) else shapes
    if not isinstance(listed, Sequence) or not all(isinstance(s, Mapping) for s in listed):
        raise Unsupported(
            f"{where}: no param_shapes inside; DeepSpeed before 0.3.14 did not save them"
        )
    return [{str(k): tuple(v) for k, v in group.items()} for group in listed]


@dataclass(frozen=True, slots=True)
class FlatPiece:
    """A 1-D tensor that is the elements [start, start + numel) of a flat group."""

    start: int
    tensor: StoredTensor


def cut_from_flat(
    pieces: Sequence[FlatPiece], offset: int, shape: tuple[int, ...], where: str
) -> StoredTensor:
    """The tensor of `shape` whose flattened elements begin at `offset` of a flat group.

    Raises:
        CorruptCheckpoint: the pieces do not hold all of it.
    """
    numel, chunks, stored = prod(shape), [], 0
    for piece in pieces:
        begin = max(offset, piece.start)
        end = min(offset + numel, piece.start + piece.tensor.numel)
        if begin >= end:
            continue
        source, at = piece.tensor.chunks[0], begin - piece.start
        for box in chunks_of_flat_range(shape, begin - offset, end - offset):
            chunks.append(StoredChunk(box, source.record, source.start + at))
            at += box.numel
        stored += end - begin
    if stored != numel:
        raise CorruptCheckpoint(
            f"{where}: {stored} of {numel} elements are in the shards; a shard is of another save"
        )
    if not numel:
        chunks = [StoredChunk(Chunk.whole(shape), pieces[0].tensor.chunks[0].record)]
    return StoredTensor(pieces[0].tensor.dtype, shape, tuple(chunks))


def require_same(values: Sequence[Plain], what: str, folder: Path) -> None:
    """Refuses shards that disagree about something that every rank saves alike."""
    seen = {repr(value) for value in values}
    if len(seen) > 1:
        raise CorruptCheckpoint(
            f"{folder}: the ranks' files disagree about {what} ({', '.join(sorted(seen)[:3])}); "
            "files of two different saves are mixed"
        )


def steps_of(states: Iterator[Mapping[str, Plain]]) -> list[float | int | None]:
    """The step of each flat state, as a number."""
    return [read_number(state.get("step")) for state in states]


def model_state(content: Mapping[str, Any], path: Path) -> dict[str, StoredTensor]:
    """`module` of a model_states file: names and tensors, empty ones for ZeRO-3 parameters."""
    module = content["module"]
    if not isinstance(module, Mapping):
        raise Unsupported(f"{path}: `module` is no state dict (pipeline or custom module)")
    return {str(k): v for k, v in module.items() if isinstance(v, StoredTensor)}


def job_objects(content: Mapping[str, Any]) -> dict[str, Plain]:
    """The rest of the job: scheduler, counters, config, and the user's client state."""
    return {
        str(key): value
        for key, value in content.items()
        if key not in NOT_JOB and value is not None
    }
