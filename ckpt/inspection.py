"""What there is to know about a checkpoint without reading its tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckpt.checks import remarks, step_of
from ckpt.format import Part
from ckpt.model import Checkpoint, InlineTensor, Opaque, Plain, StoredTensor
from ckpt.note import summarise
from ckpt.values import read_number

__all__ = ["GroupSummary", "Inspection", "TensorSummary", "inspect", "kept", "list_tensors"]

SHOWN_VALUE_CHARS = 60


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """One param group: how many parameters and elements, and the hyper-parameters."""

    params: int
    numel: int
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One tensor: `pieces` is the number of places its elements lie in."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """A checkpoint's description; every field is plain data, ready for JSON."""

    path: str
    format: str
    writer: str | None
    world_size: int | None
    stripped: tuple[str, ...]
    params: int
    numel: int
    nbytes: Mapping[str, int]
    dtypes: Mapping[str, Mapping[str, int]]
    groups: tuple[GroupSummary, ...]
    step: float | int | None
    tied: Mapping[str, str]
    frozen: tuple[str, ...]
    buffers: tuple[str, ...]
    extras: Mapping[str, str]
    problems: tuple[str, ...]


def inspect(checkpoint: Checkpoint) -> Inspection:
    """The description of a checkpoint; reads nothing but step counters."""
    params, origin = checkpoint.params, checkpoint.origin
    return Inspection(
        path=origin.path,
        format=origin.format,
        writer=origin.writer,
        world_size=origin.world_size,
        stripped=origin.stripped,
        params=len(params),
        numel=sum(param.weight.numel for param in params.values()),
        nbytes=_bytes_by_kind(checkpoint),
        dtypes=_dtypes_by_kind(checkpoint),
        groups=tuple(_group(checkpoint, index) for index in range(len(checkpoint.groups))),
        step=step_of(checkpoint),
        tied=dict(checkpoint.ties),
        frozen=checkpoint.frozen,
        buffers=tuple(checkpoint.buffers),
        extras={name: _shortened(value) for name, value in checkpoint.objects.items()},
        problems=tuple(str(note) for note in (*checkpoint.notes, *remarks(checkpoint))),
    )


def list_tensors(checkpoint: Checkpoint, pattern: str) -> list[TensorSummary]:
    """The tensors whose label (`master/<fqn>`, `exp_avg/<fqn>`, ...) or FQN matches a glob."""
    return [
        TensorSummary(
            label, tensor.dtype.torch_name, tensor.shape, tensor.nbytes, len(tensor.chunks)
        )
        for label, tensor in checkpoint.tensors()
        if fnmatchcase(label, pattern) or fnmatchcase(label.partition("/")[2], pattern)
    ]


def kept(checkpoint: Checkpoint, parts: Collection[Part], dropped: Collection[str]) -> list[str]:
    """What of a checkpoint a target takes, in a few words each.

    Args:
        parts: what the target can hold.
        dropped: names that the conversion says it drops.
    """
    params = [fqn for fqn in checkpoint.params if fqn not in dropped]
    states = dict.fromkeys(
        name for fqn in params for name in checkpoint.params[fqn].state if name not in dropped
    )
    jobs = [name for name in checkpoint.objects if name not in dropped]
    groups = _count(len(checkpoint.groups), "param group") + (
        f" ({summarise(states)})" * bool(states)
    )
    said = {
        Part.WEIGHTS: _count(len(params), "parameter"),
        Part.BUFFERS: _count(sum(b not in dropped for b in checkpoint.buffers), "buffer"),
        Part.TIES: _count(len(checkpoint.ties), "tied name"),
        Part.GROUPS: groups if checkpoint.groups else "",
        Part.JOB: summarise(jobs),
    }
    return [words for part, words in said.items() if part in parts and words]


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}" if number else ""


KINDS = {"master": "master weights", "weight": "weights", "buffer": "buffers", "object": "other"}


def _kind(label: str) -> str:
    return KINDS.get(label.partition("/")[0], "optimizer")


def _bytes_by_kind(checkpoint: Checkpoint) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for label, tensor in checkpoint.tensors():
        sizes[_kind(label)] += tensor.nbytes
    return dict(sizes)


def _dtypes_by_kind(checkpoint: Checkpoint) -> dict[str, dict[str, int]]:
    """How many tensors of which dtype there are, by kind."""
    found: dict[str, Counter[str]] = {}
    for label, tensor in checkpoint.tensors():
        found.setdefault(_kind(label), Counter())[tensor.dtype.torch_name] += 1
    return {kind: dict(counts) for kind, counts in found.items()}


def _group(checkpoint: Checkpoint, index: int) -> GroupSummary:
    group = checkpoint.groups[index]
    numel = sum(checkpoint.params[fqn].weight.numel for fqn in group.fqns)
    return GroupSummary(len(group.fqns), numel, {k: plain(v) for k, v in group.options.items()})


def plain(value: Plain) -> Any:
    """A value for people and JSON: small tensors as numbers, everything else by its shape."""
    if isinstance(value, StoredTensor | InlineTensor):
        number = read_number(value)
        if number is not None:
            return number
        return f"tensor {value.dtype.torch_name} {list(value.shape)}"
    if isinstance(value, Opaque):
        return {"class": value.type_name, "state": plain(value.state)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [plain(inner) for inner in value]
    return value if isinstance(value, bool | int | float | str | None) else repr(value)


def _shortened(value: Plain) -> str:
    text = str(plain(value))
    return text if len(text) <= SHOWN_VALUE_CHARS else text[: SHOWN_VALUE_CHARS - 3] + "..."
