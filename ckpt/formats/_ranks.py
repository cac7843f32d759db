"""Files that every rank saved for itself: which belong together, and one tree made of all of them.

Source: verl verl/utils/checkpoint/fsdp_checkpoint_manager.py (`save_checkpoint`, file names);
accelerate 1.15 utils/fsdp_utils.py (`save_fsdp_model` with use_dcp=False, and LOCAL_STATE_DICT).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.by_rank import content_of
from ckpt.chunks import Chunk, coverage
from ckpt.errors import AmbiguousSource, CorruptCheckpoint, MissingPart
from ckpt.model import Opaque, Plain, StoredChunk, StoredTensor
from ckpt.names import is_buffer
from ckpt.note import summarise
from ckpt.optimizer_dict import is_optimizer
from ckpt.storage import torch_file
from ckpt.storage.sharded_tensors import ShardedPart, is_sharded, sharded_part
from ckpt.values import read_number

__all__ = [
    "EXTRA",
    "KeyPath",
    "Merged",
    "RankFiles",
    "by_own_rank",
    "find_rank_files",
    "has_shards",
    "merge",
    "rank_in_name",
    "shard_ranks",
]

RANK = re.compile(r"^(?P<stem>.*?)[-_.]?(?:rank|shard)[-_]?(?P<rank>\d+)$")
WORLD = re.compile(r"world_size_(\d+)")
EXTRA = "extra_state"
PARTS = {
    "pytorch_model_fsdp": "model",
    "model": "model",
    "optim": "optimizer",
    "optimizer": "optimizer",
    EXTRA: EXTRA,
}
_WORD = "|".join(sorted(PARTS, key=len, reverse=True))
LEADING_PART = re.compile(rf"^(?P<part>{_WORD})(?:[-_.](?P<rest>.*))?$")
TRAILING_PART = re.compile(rf"^(?P<rest>.*)[-_.](?P<part>{_WORD})$")
COUNTERS = ("epoch", "global_step", "global_steps", "iteration", "step", "last_epoch")
"""Keys whose numbers are the same on all ranks of one save."""

KeyPath = tuple[str, ...]


# --- which files ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files of one save.

    Attributes:
        parts: by what is in them (`model`, `optimizer`, `extra_state`, or "" for everything), the
            files by rank.
        stem: what their names have in common.
        world_size: what their names say about it.
    """

    parts: Mapping[str, Mapping[int, Path]]
    stem: str
    world_size: int | None


def rank_in_name(file: Path) -> int | None:
    """The rank in the name of a file that a rank saved for itself."""
    match = RANK.match(file.stem)
    return int(match["rank"]) if match else None


def find_rank_files(path: Path) -> RankFiles:
    """The files of one save: those of a folder, or those beside a file that belong to it.

    Raises:
        AmbiguousSource: the folder holds several saves.
    """
    folder = path.parent if path.is_file() else path
    saves: dict[str, dict[str, dict[int, Path]]] = {}
    for file in sorted(folder.iterdir()):
        rank = rank_in_name(file)
        if rank is None or not file.is_file() or not torch_file.is_torch_file(file):
            continue
        part, stem = _part_and_stem(file)
        saves.setdefault(stem, {}).setdefault(part, {})[rank] = file
    if path.is_file():
        stem = _part_and_stem(path)[1]
    elif len(saves) == 1:
        stem = next(iter(saves))
    else:
        firsts = [file.name for parts in saves.values() for file in _first(parts)]
        raise AmbiguousSource(
            f"{path}: holds the files of several saves; give one file of the save to convert: "
            f"{summarise(firsts)}"
        )
    match = WORLD.search(stem)
    return RankFiles(saves[stem], stem, int(match[1]) if match else None)


def _part_and_stem(file: Path) -> tuple[str, str]:
    match = RANK.match(file.stem)
    assert match is not None, "asked for files with a rank in their names"
    for pattern in (LEADING_PART, TRAILING_PART):
        found = pattern.match(match["stem"])
        if found:
            rest = found["rest"] or ""
            return PARTS[found["part"]], "" if rest == "0" else rest
    return "", match["stem"]


def _first(parts: Mapping[str, Mapping[int, Path]]) -> Iterator[Path]:
    files = next(iter(parts.values()))
    yield files[min(files)]


# --- one tree -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Merged:
    """What the ranks' trees become, and what was seen on the way.

    Attributes:
        differing: paths of plain values that every rank has in its own way; the first is taken.
        flat: paths of plain tensors in optimizers that differ: local parts without a place.
        local: paths of other plain tensors that differ and are not known to be buffers.
        sharded: paths of the sharded tensors.
        held: for every rank, the boxes that it has of each of them.
        world_size: of the ranks that the sharded tensors name.
        trees: what each rank saved.
        numbers: the number in the name of each rank's file.
    """

    where: str
    differing: list[KeyPath] = field(default_factory=list)
    flat: list[KeyPath] = field(default_factory=list)
    local: list[KeyPath] = field(default_factory=list)
    sharded: list[KeyPath] = field(default_factory=list)
    held: dict[int, list[tuple[Chunk, ...]]] = field(default_factory=dict)
    world_size: int = 0
    trees: Mapping[int, Mapping[str, Plain]] = field(default_factory=dict)
    numbers: Mapping[int, int] = field(default_factory=dict)
    _whole: dict[tuple[int, ...], StoredTensor] = field(default_factory=dict)

    def merge(
        self, values: Mapping[int, Plain], path: KeyPath, in_optimizer: bool = False
    ) -> Plain:
        """The value that the ranks have together.

        Raises:
            CorruptCheckpoint: ranks that are not of one save. MissingPart: a tensor with holes.
        """
        first = next(iter(values.values()))
        in_optimizer = in_optimizer or is_optimizer(first)
        if any(is_sharded(value) for value in values.values()):
            return self._tensor(values, path)
        if all(isinstance(value, Mapping) for value in values.values()):
            keys = dict.fromkeys(key for value in values.values() for key in value)
            return {
                key: self.merge(
                    {rank: value[key] for rank, value in values.items() if key in value},
                    (*path, str(key)),
                    in_optimizer,
                )
                for key in keys
            }
        if _are_lists(values):
            return type(first)(
                self.merge({r: v[i] for r, v in values.items()}, (*path, str(i)), in_optimizer)
                for i in range(len(first))
            )
        return self._plain(values, path, in_optimizer)

    def _plain(self, values: Mapping[int, Plain], path: KeyPath, in_optimizer: bool) -> Plain:
        rank, first = next(iter(values.items()))
        other = next((r for r, v in values.items() if content_of(v) != content_of(first)), None)
        if other is None:
            return first
        numbers = [read_number(v) for v in (first, values[other])]
        if path[-1] in COUNTERS and None not in numbers:
            if numbers[0] == numbers[1]:  # stored without checksums
                return first
            raise CorruptCheckpoint(
                f"{self.where}: {'.'.join(path)} is {numbers[0]:g} for rank {rank} and "
                f"{numbers[1]:g} for rank {other}: files of two saves. Give those of one."
            )
        if "param_groups" in path and in_optimizer:
            raise CorruptCheckpoint(
                f"{self.where}: ranks {rank} and {other} have different {'.'.join(path)}: files of "
                "two saves. Give those of one."
            )
        if not _is_array(first):
            self.differing.append(path)
        elif in_optimizer:
            self.flat.append(path)
        elif is_buffer(path[-1], first.dtype):
            self.differing.append(path)
        else:
            self.local.append(path)
        return first

    def _tensor(self, values: Mapping[int, Plain], path: KeyPath) -> StoredTensor:
        where = f"{self.where}: {'.'.join(path)}"
        plain = [rank for rank, value in values.items() if not is_sharded(value)]
        if plain:
            raise CorruptCheckpoint(
                f"{where}: sharded for some ranks and not for rank {plain[0]}: files of two saves"
            )
        parts = {rank: self._part(value, where, rank) for rank, value in values.items()}
        key = tuple(id(tensor) for part in parts.values() for tensor in part.local)
        self.sharded.append(path)
        for rank, part in parts.items():
            self.held.setdefault(rank, []).append(tuple(chunk.chunk for chunk in part.chunks))
        if key not in self._whole:
            self._whole[key] = _whole(parts, where)
        return self._whole[key]

    def _part(self, value: Opaque, where: str, rank: int) -> ShardedPart:
        part = sharded_part(value, f"{where}, rank {rank}")
        self.world_size = max(self.world_size, part.world_size)
        return part


def _is_array(value: Plain) -> bool:
    return isinstance(value, StoredTensor) and bool(value.shape)


def _are_lists(values: Mapping[int, Plain]) -> bool:
    """True for lists of one length."""
    if not all(isinstance(value, list | tuple) for value in values.values()):
        return False
    return len({len(value) for value in values.values()}) == 1


def has_shards(tree: Plain) -> bool:
    """True where a sharded tensor is in a tree."""
    if isinstance(tree, Mapping):
        return any(has_shards(value) for value in tree.values())
    if isinstance(tree, list | tuple):
        return any(has_shards(value) for value in tree)
    return is_sharded(tree)


def by_own_rank(trees: Mapping[int, Plain]) -> dict[int, Plain]:
    """The trees by the ranks that their sharded tensors name, where all do so and differently."""
    own = [_own_rank(tree) for tree in trees.values()]
    ranks = [rank for rank in own if rank is not None]
    if len(set(ranks)) < len(trees):
        return dict(trees)
    return dict(sorted(zip(ranks, trees.values(), strict=True)))


def _own_rank(tree: Plain) -> int | None:
    """The rank that the first sharded tensor names."""
    if is_sharded(tree):
        return sharded_part(tree, "").rank
    inner = tree.values() if isinstance(tree, Mapping) else ()
    return next((rank for value in inner if (rank := _own_rank(value)) is not None), None)


def shard_ranks(held: Mapping[int, Sequence[tuple[Chunk, ...]]]) -> list[int]:
    """The ranks that have everything once, in order: of hybrid sharding, the first replica's."""
    alike: dict[tuple[tuple[Chunk, ...], ...], list[int]] = {}
    for rank in sorted(held):
        alike.setdefault(tuple(held[rank]), []).append(rank)
    if len({len(ranks) for ranks in alike.values()}) == 1:
        return [ranks[0] for ranks in alike.values()]
    return sorted(held)


def merge(
    trees: Mapping[int, Plain], where: str, path: KeyPath = ()
) -> tuple[Mapping[str, Plain], Merged]:
    """One tree of all ranks' trees, which lies at `path` in the whole; see `Merged.merge`."""
    merged = Merged(where)
    return merged.merge(trees, path), merged


def _whole(parts: Mapping[int, ShardedPart], where: str) -> StoredTensor:
    """The tensor that the parts tile; a box that several ranks hold is taken once."""
    (first_rank, first), *others = parts.items()
    for rank, part in others:
        if (part.shape, part.dtype) != (first.shape, first.dtype):
            raise CorruptCheckpoint(
                f"{where}: {first.dtype.torch_name} {first.shape} for rank {first_rank}, "
                f"{part.dtype.torch_name} {part.shape} for rank {rank}: files of two saves"
            )
    boxes: dict[object, StoredChunk] = {}
    for part in parts.values():
        for chunk in part.chunks:
            boxes.setdefault(chunk.chunk, chunk)
    found = coverage(first.shape, [box.chunk for box in boxes.values()])
    if found.missing:
        world_size = max(part.world_size for part in parts.values())
        absent = [str(rank) for rank in range(world_size) if rank not in parts]
        reason = f"; the files of ranks {summarise(absent)} of {world_size} are not there"
        raise MissingPart(
            f"{where}: {found.missing} elements of {first.shape} lie in none of the files"
            f"{reason if absent else ''}. Copy the files of all ranks from the machines that wrote "
            "them."
        )
    if found.repeated:
        raise CorruptCheckpoint(
            f"{where}: ranks hold overlapping parts of {first.shape}: files of two saves"
        )
    return StoredTensor(first.dtype, first.shape, tuple(boxes.values()))
