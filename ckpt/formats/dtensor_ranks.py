"""Files that every rank saved with torch.save: DTensors of FSDP2, ShardedTensors of FSDP1.

Read: a folder with one file a rank, such as `rank0.pt` with `{"model": model.state_dict(),
"optimizer": optimizer.state_dict()}`, verl's `model_world_size_N_rank_R.pt`,
`optim_world_size_N_rank_R.pt` and `extra_state_world_size_N_rank_R.pt`, or accelerate's
`pytorch_model_fsdp_0_rankR.bin` and `optimizer_0_rankR.bin`; of a folder with several saves, one
file of one. Every sharded tensor says itself where its part belongs: Shard on any dimension,
Replicate, meshes of several dimensions (hybrid sharding, tensor parallelism below FSDP2), uneven
and empty parts. Plain tensors and values are rank 0's, and it is said where ranks differ.

FSDP1's LOCAL_STATE_DICT holds flat parameters without names or shapes. With `--model
package.module:factory` they are taken apart, whatever `use_orig_params` was, and the ranks'
`optimizer.state_dict()` with them; the names of the flat parameters tell what was wrapped.

Not read: Partial placements, and FSDP1's `optimizer.state_dict()` beside sharded weights (verl
under FSDP1 saves it), whose flat local parts have no places; `--weights-only` takes the weights.

Source: torch 2.13.0 torch/distributed/tensor, torch/distributed/_shard/sharded_tensor/api.py; verl
verl/utils/checkpoint/fsdp_checkpoint_manager.py; accelerate 1.15 utils/fsdp_utils.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.by_rank import BY_RANK, gathered
from ckpt.errors import CorruptCheckpoint, MissingPart, UnknownFormat, Unsupported
from ckpt.format import Format, Match, ReadOptions
from ckpt.formats._flat_params import read_units, taken_apart, with_optimizer
from ckpt.formats._ranks import (
    EXTRA,
    Merged,
    RankFiles,
    by_own_rank,
    find_rank_files,
    has_shards,
    merge,
    rank_in_name,
)
from ckpt.formats._trainer_files import job_beside
from ckpt.meta_model import build_model
from ckpt.model import Checkpoint, Origin, Plain
from ckpt.note import Note, NoteKind, summarise
from ckpt.optimizer_dict import is_optimizer
from ckpt.storage import torch_file
from ckpt.storage.sharded_tensors import SHARDED_CLASSES
from ckpt.training_dict import FLAT_PARAM, read_training_dict

NAME = "fsdp-ranks"
OPTIMIZER = "optimizer"
FROM_MODEL = Note(
    NoteKind.SYNTHESISED,
    ("names and shapes",),
    "a LOCAL_STATE_DICT has none; they are those of --model, whose sizes fit the flat parameters",
)


def _matches(path: Path) -> Match:
    if path.is_file():
        named = rank_in_name(path) is not None and torch_file.is_torch_file(path)
        return Match.YES if named else Match.NO
    files = (file for file in path.iterdir() if rank_in_name(file) is not None)
    return Match.MAYBE if any(torch_file.is_torch_file(file) for file in files) else Match.NO


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in the files of all ranks; metadata only."""
    found = find_rank_files(path)
    tree: dict[str, Plain] = {}
    parts = dict[str, Merged]()
    for part, files in found.parts.items():
        value, parts[part] = _read_part(path, part, files, found, options)
        tree |= value if part in ("", EXTRA) else {part: value}
    count = max(len(files) for files in found.parts.values())
    is_local = options.model is not None and _is_local(tree)
    if is_local:
        tree = _without_flat_params(tree, parts, options, str(path))
        options = replace(options, param_order=None)
    if not any(merged.sharded for merged in parts.values()):
        origin = Origin("torch", str(path), None, count)
        checkpoint = gathered(read_training_dict(tree, options, origin), _jobs(found, parts))
        return _without_shards(checkpoint, parts)
    folder = path.parent if path.is_file() else path
    job, beside = job_beside(folder, taken=tree)
    origin = Origin(NAME, str(path), "torch.save by every rank", count)
    checkpoint = read_training_dict(tree | job, options, origin)
    checkpoint = gathered(checkpoint, _jobs(found, parts))
    notes = [note for part, merged in parts.items() for note in _notes(merged, part, checkpoint)]
    notes += [FROM_MODEL] if is_local else []
    return replace(checkpoint, notes=(*checkpoint.notes, *notes, *beside))


def _jobs(found: RankFiles, parts: Mapping[str, Merged]) -> list[Mapping[str, Plain]]:
    """What each rank saved beside the model and the optimizer."""
    ranks = range(max(len(files) for files in found.parts.values()))
    whole = [merged.trees for part, merged in parts.items() if part in ("", EXTRA)]
    return [
        {
            name: value
            for trees in whole
            for name, value in trees.get(rank, {}).items()
            if not has_shards(value)
        }
        for rank in ranks
    ]


def _read_part(
    path: Path, part: str, files: Mapping[int, Path], found: RankFiles, options: ReadOptions
) -> tuple[Mapping[str, Plain], Merged]:
    """One tree of what one kind of file holds for all ranks."""
    trees = {rank: torch_file.read(files[rank], SHARDED_CLASSES) for rank in sorted(files)}
    for rank, tree in trees.items():
        if not isinstance(tree, Mapping):
            raise UnknownFormat(f"{files[rank]}: holds no dict, expected a state dict or several")
    trees = by_own_rank(trees)
    value, merged = merge(trees, str(path), () if part in ("", EXTRA) else (part,))
    if merged.sharded:
        _require_all(path, trees.keys(), found.world_size or merged.world_size, files)
    merged.trees = trees
    if _is_local(value):  # read with --model, or refused with a reason of its own
        merged.flat, merged.local = [], []
    if merged.flat and options.need_optimizer:
        raise Unsupported(
            f"{path}: {'.'.join(merged.flat[0])} differs between ranks and says nothing of its "
            "place: optimizer.state_dict() under FSDP1 holds flat local parts. Save "
            "FSDP.optim_state_dict(model, optimizer), or convert with --weights-only."
        )
    if merged.flat:
        value = {} if part else {k: v for k, v in value.items() if not is_optimizer(v)}
    return value, merged


def _without_flat_params(
    tree: Mapping[str, Plain], parts: Mapping[str, Merged], options: ReadOptions, where: str
) -> dict[str, Plain]:
    """A LOCAL_STATE_DICT by the names of `--model`; everything else as it is."""
    places = [key for key, value in tree.items() if _is_local(value)]
    if len(places) != 1 or options.model is None:
        return dict(tree)
    known, model = build_model(options.model), tree[places[0]]
    ranks = [rank for merged in parts.values() for rank in merged.trees.values()]
    found = [
        inner
        for rank in ranks
        for inner in (rank, *rank.values())
        if isinstance(inner, Mapping) and is_optimizer(inner)
    ]
    world_size = max(merged.world_size for merged in parts.values())
    units = read_units(model, known, world_size, where)
    others = {key: value for key, value in tree.items() if not is_optimizer(value)}
    tree = {**others, places[0]: taken_apart(model, units, known, where)}
    if found and options.need_optimizer:
        tree[OPTIMIZER] = with_optimizer(found, units, known, options.param_order, where)
    return tree


def _is_local(tree: Plain) -> bool:
    """True for a LOCAL_STATE_DICT."""
    if not isinstance(tree, Mapping):
        return False
    return any(FLAT_PARAM in str(key) or _is_local(value) for key, value in tree.items())


def _require_all(
    path: Path, ranks: Collection[int], world_size: int, files: Mapping[int, Path]
) -> None:
    """Refuses a save whose files are not those of all its ranks."""
    missing = [str(rank) for rank in range(world_size) if rank not in ranks]
    if missing:
        raise MissingPart(
            f"{path}: {world_size} ranks saved, the files of ranks {summarise(missing)} are not "
            f"there (beside {files[min(files)].name}). Copy them from the machines that wrote them."
        )
    extra = [files[rank].name for rank in files if rank >= world_size]
    if len(files) > world_size and extra:
        raise CorruptCheckpoint(
            f"{path}: {world_size} ranks saved, but there is {summarise(sorted(extra))}: files of "
            "two saves. Take the other save's away."
        )


def _notes(merged: Merged, part: str, checkpoint: Checkpoint) -> list[Note]:
    """What every rank has in its own way and is not kept, and what was left out."""
    detail = "the ranks saved different values; those of rank 0 are taken"
    kept = checkpoint.objects.get(BY_RANK, {})
    known, other = (
        tuple(dict.fromkeys(".".join(path) for path in paths if path[0] not in kept))
        for paths in (merged.differing, merged.local)
    )
    notes = [
        Note(NoteKind.KEPT_ONE, names, detail, needs_consent=names is other)
        for names in (known, other)
        if names
    ]
    if merged.flat:
        detail = "flat local parts of FSDP1 without a place"
        notes.append(Note(NoteKind.DROPPED, (part or "optimizer",), detail))
    return notes


def _without_shards(checkpoint: Checkpoint, parts: Mapping[str, Merged]) -> Checkpoint:
    """Files of ranks that hold whole tensors, as some scripts save them under DDP.

    Raises:
        Unsupported: the ranks hold different tensors, of which nothing tells the place.
    """
    kept = checkpoint.objects.get(BY_RANK, {})
    local = [
        ".".join(place)
        for merged in parts.values()
        for place in merged.local
        if place[0] not in kept
    ]
    if local:
        raise Unsupported(
            f"{checkpoint.origin.path}: {summarise(local)} differs between ranks, and nothing "
            "tells which part of the whole a rank has. Save the sharded tensors themselves instead "
            "of to_local() of them, or with torch.distributed.checkpoint."
        )
    return checkpoint


FORMAT = Format(
    name=NAME,
    title="torch.save files of every rank (FSDP2 DTensor, FSDP1 ShardedTensor, verl)",
    matches=_matches,
    read=read,
)
