"""Files that every rank saved with torch.save: DTensors of FSDP2, ShardedTensors of FSDP1.

Read: a folder with one file a rank, such as `rank0.pt` with `{"model": model.state_dict(),
"optimizer": optimizer.state_dict()}`, verl's `model_world_size_N_rank_R.pt`,
`optim_world_size_N_rank_R.pt` and `extra_state_world_size_N_rank_R.pt`, or accelerate's
`pytorch_model_fsdp_0_rankR.bin` and `optimizer_0_rankR.bin`; of a folder with several saves, one
file of one. Every sharded tensor says itself where its part belongs: Shard on any dimension,
Replicate, meshes of several dimensions (hybrid sharding, tensor parallelism below FSDP2), uneven
and empty parts. Plain tensors are rank 0's, and it is said where ranks differ. What ranks have
beside model and optimizer in their own way, such as random number states, is kept for all of them
under `by_rank`.

FSDP1's `optimizer.state_dict()` beside sharded weights (verl, hand-made scripts) holds flat parts.
With `use_orig_params=True` they are runs of the parameters, in the order of the ranks, and get
names as every numbered optimizer does: `--param-order`, `--model`, or sizes alone. With
`use_orig_params=False` they are shares of flat parameters; what was wrapped is saved nowhere but
in `param_names`, and is inferred from their sizes: all ways to wrap by up to four patterns of
modules (`model.layers.*`) are tried, the one that fits is told, none and several are refused. Tied
weights are known by their checksums, hybrid sharding by what the ranks have of the weights.

FSDP1's LOCAL_STATE_DICT holds flat parameters without names or shapes. With `--model
package.module:factory` they are taken apart, whatever `use_orig_params` was, and the ranks'
`optimizer.state_dict()` with them; the names of the flat parameters tell what was wrapped. Under
hybrid sharding torch 2.13 cannot save one (ValueError: Global rank 1 does not exist).

Not read: Partial placements; flat parts of optimizers that are not kept by element (Adafactor, 8
bits), of modules that were wrapped one by one, or of several optimizers; `--weights-only` takes the
weights.

Source: torch 2.13.0 torch/distributed/tensor, torch/distributed/_shard/sharded_tensor/api.py; verl
verl/utils/checkpoint/fsdp_checkpoint_manager.py; accelerate 1.15 utils/fsdp_utils.py.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.by_rank import BY_RANK, gathered
from ckpt.errors import CkptError, CorruptCheckpoint, MissingPart, UnknownFormat, Unsupported
from ckpt.format import Format, Match, ReadOptions
from ckpt.formats._flat_optimizer import WAYS_OUT, read_flat_optimizer
from ckpt.formats._flat_params import read_units, taken_apart, with_optimizer
from ckpt.formats._ranks import (
    EXTRA,
    KeyPath,
    Merged,
    RankFiles,
    by_own_rank,
    find_rank_files,
    has_shards,
    merge,
    rank_in_name,
    shard_ranks,
)
from ckpt.formats._trainer_files import job_beside
from ckpt.meta_model import build_model
from ckpt.model import Checkpoint, Origin, Plain
from ckpt.names import clean_names
from ckpt.note import Note, NoteKind, summarise
from ckpt.storage import torch_file
from ckpt.storage.sharded_tensors import SHARDED_CLASSES
from ckpt.training_dict import FLAT_PARAM, find_parts, read_training_dict

NAME = "fsdp-ranks"
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
        value, parts[part] = _read_part(path, part, files, found)
        tree |= value if part in ("", EXTRA) else {part: value}
    count = max(len(files) for files in found.parts.values())
    flat = _flat_paths(parts)
    tree, told, options = _whole(tree, parts, options, str(path))
    if not any(merged.sharded for merged in parts.values()):
        origin = Origin("torch", str(path), None, count)
        checkpoint = gathered(read_training_dict(tree, options, origin), _jobs(found, parts))
        return _without_shards(checkpoint, parts)
    folder = path.parent if path.is_file() else path
    job, beside = job_beside(folder, taken=tree)
    writer = "torch.save by every rank"
    origin = Origin(NAME, str(path), writer, count, repeats_ties=bool(flat))
    checkpoint = read_training_dict(tree | job, options, origin)
    checkpoint = gathered(checkpoint, _jobs(found, parts))
    notes = [note for merged in parts.values() for note in _notes(merged, checkpoint)]
    return replace(checkpoint, notes=(*checkpoint.notes, *notes, *told, *beside))


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
    path: Path, part: str, files: Mapping[int, Path], found: RankFiles
) -> tuple[Mapping[str, Plain], Merged]:
    """One tree of what one kind of file holds for all ranks."""
    trees = {rank: torch_file.read(files[rank], SHARDED_CLASSES) for rank in sorted(files)}
    for rank, tree in trees.items():
        if not isinstance(tree, Mapping):
            raise UnknownFormat(f"{files[rank]}: holds no dict, expected a state dict or several")
    numbers = {id(tree): number for number, tree in trees.items()}
    trees = by_own_rank(trees)
    value, merged = merge(trees, str(path), () if part in ("", EXTRA) else (part,))
    if merged.sharded:
        _require_all(path, trees.keys(), found.world_size or merged.world_size, files)
    merged.trees = trees
    merged.numbers = {rank: numbers[id(tree)] for rank, tree in trees.items()}
    if _is_local(value):  # read with --model, or refused with a reason of its own
        merged.local = []
    return value, merged


# --- flat parts of FSDP1 --------------------------------------------------------------------------


def _flat_paths(parts: Mapping[str, Merged]) -> list[KeyPath]:
    return [path for merged in parts.values() for path in merged.flat]


def _whole(
    tree: dict[str, Plain], parts: Mapping[str, Merged], options: ReadOptions, where: str
) -> tuple[dict[str, Plain], list[Note], ReadOptions]:
    """The tree with whole tensors by name for FSDP1's flat parts, and what that leaves to do.

    Raises:
        CkptError: an optimizer whose flat parts have no places, where it is needed.
    """
    settled = replace(options, param_order=None)
    if _is_local(tree):
        if options.model is None:  # refused when it is read
            return tree, [], options
        return _without_flat_params(tree, parts, options, where), [FROM_MODEL], settled
    if not _flat_paths(parts):
        return tree, [], options
    try:
        tree, told = _with_whole_states(tree, parts, options, where)
    except CkptError as problem:
        if options.need_optimizer:
            raise
        detail = problem.problem.removeprefix(f"{where}: ")
        paths = [path for path in find_parts(tree, options.key, where).optimizers
                 if _is_above(path, _flat_paths(parts))]  # fmt: skip
        for path in paths:
            tree = _replaced(tree, path, {})
        dropped = Note(NoteKind.DROPPED, tuple(".".join(path) for path in paths), detail)
        return tree, [dropped], options
    return tree, told, settled


def _with_whole_states(
    tree: dict[str, Plain], parts: Mapping[str, Merged], options: ReadOptions, where: str
) -> tuple[dict[str, Plain], list[Note]]:
    """The tree with the optimizer of all ranks in place of rank 0's."""
    found = find_parts(tree, options.key, where)
    flat = _flat_paths(parts)
    paths = [path for path in found.optimizers if _is_above(path, flat)]
    weights, _ = _part_of(found.model_path, parts)
    ranks = _of_ranks(paths[0], parts, weights, where) if len(paths) == 1 else []
    if not ranks or any(map(has_shards, ranks)):
        raise Unsupported(
            f"{where}: {'.'.join(flat[0])} differs between ranks, and nothing says which part of "
            "the whole a rank has: it is not of one FSDP1 optimizer beside sharded weights.",
            WAYS_OUT,
        )
    cleaned, sharded = clean_names([*found.model, *found.extra_state]), {*weights.sharded}
    known = build_model(options.model) if options.model else None
    optimizer, notes = read_flat_optimizer(
        ranks,
        {
            cleaned[name]: tensor
            for name, tensor in found.model.items()
            if (*found.model_path, name) in sharded
        },
        known,
        options.param_order,
        f"{where}: {'.'.join(paths[0])}",
    )
    return _replaced(tree, paths[0], optimizer), notes


def _without_flat_params(
    tree: dict[str, Plain], parts: Mapping[str, Merged], options: ReadOptions, where: str
) -> dict[str, Plain]:
    """A LOCAL_STATE_DICT by the names of `--model`, with its optimizer."""
    assert options.model is not None, "asked for with a model only"
    known, found = build_model(options.model), find_parts(tree, options.key, where)
    if len(found.optimizers) > 1 and options.need_optimizer:
        raise Unsupported(
            f"{where}: several optimizers beside a LOCAL_STATE_DICT; convert with --weights-only"
        )
    weights, _ = _part_of(found.model_path, parts)
    units = read_units(found.model, known, len(shard_ranks(weights.held)), where)
    for path in found.optimizers:
        ranks = _of_ranks(path, parts, weights, where) if options.need_optimizer else []
        whole = with_optimizer(ranks, units, known, options.param_order, where) if ranks else {}
        tree = _replaced(tree, path, whole)
    apart = taken_apart(found.model, units, known, where)
    if found.model_path:
        return _replaced(tree, found.model_path, apart)
    return {key: value for key, value in tree.items() if key not in found.model} | apart


def _of_ranks(
    path: KeyPath, parts: Mapping[str, Merged], weights: Merged, where: str
) -> list[Mapping[str, Plain]]:
    """What the ranks that have parts of their own saved at a path, in the order of these parts."""
    part, inner = _part_of(path, parts)
    own = part is weights
    values = [
        _at(part.trees.get(rank if own else weights.numbers[rank]), inner)
        for rank in shard_ranks(weights.held)
    ]
    if None in values:
        rank = shard_ranks(weights.held)[values.index(None)]
        raise MissingPart(
            f"{where}: {'.'.join(path)} of rank {rank} is not there. Copy the files of all ranks "
            "from the machines that wrote them."
        )
    return values


def _part_of(path: KeyPath, parts: Mapping[str, Merged]) -> tuple[Merged, KeyPath]:
    """The files in which a path of the tree lies, and the path in each of them."""
    if path and path[0] in parts and path[0] != EXTRA:
        return parts[path[0]], path[1:]
    return parts.get("") or parts[EXTRA], path


def _at(tree: Plain, path: KeyPath) -> Plain:
    """What lies at a path; None where nothing does."""
    for key in path:
        items = enumerate(tree) if isinstance(tree, list | tuple) else tree.items()
        tree = next((value for name, value in items if str(name) == key), {})
    return tree or None


def _replaced(tree: Mapping[str, Plain], path: KeyPath, value: Plain) -> dict[str, Plain]:
    """The tree with another value at a path; without it where the value is empty."""
    key, *rest = path
    if rest and isinstance(tree[key], list | tuple):
        listed = dict(enumerate(tree[key]))
        inner = {str(at): item for at, item in listed.items()}
        value = list(_replaced(inner, tuple(rest), value).values())
    elif rest:
        value = _replaced(tree[key], tuple(rest), value)
    return {**tree, key: value} if value else {k: v for k, v in tree.items() if k != key}


def _is_above(path: KeyPath, others: Collection[KeyPath]) -> bool:
    return any(other[: len(path)] == path for other in others)


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


def _notes(merged: Merged, checkpoint: Checkpoint) -> list[Note]:
    """What every rank has in its own way and is not kept."""
    detail = "the ranks saved different values; those of rank 0 are taken"
    kept = checkpoint.objects.get(BY_RANK, {})
    known, other = (
        tuple(dict.fromkeys(".".join(path) for path in paths if path[0] not in kept))
        for paths in (merged.differing, merged.local)
    )
    return [
        Note(NoteKind.KEPT_ONE, names, detail, needs_consent=names is other)
        for names in (known, other)
        if names
    ]


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
