"""DeepSpeed ZeRO-1 and ZeRO-2: whole 16-bit weights, optimizer and fp32 weights cut flat.

Each param group is one flat fp32 tensor, the group's parameters one after another, padded at the
end and cut into one partition per rank. `mp_rank_00_model_states.pt` holds the module as it
computed; `*zero_pp_rank_R_mp_rank_00_optim_states.pt` hold rank R's partitions. fp32 partitions
are saved without padding (BF16_Optimizer: with), the optimizer's states with it.

Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py (`state_dict`), runtime/bf16_optimizer.py
(`state_dict`); eras by checkpoints of 0.9.5, 0.14.5 and 0.19.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from ckpt.errors import CorruptCheckpoint, MissingPart
from ckpt.format import Format, Match, ReadOptions
from ckpt.formats._deepspeed import (
    MODEL,
    OPTIM,
    FlatPiece,
    Save,
    cut_from_flat,
    guess_kind,
    locate,
    rank_files,
    read_file,
    require_same,
    shapes_by_group,
    stage_number,
    steps_of,
)
from ckpt.formats._zero import Trained, build, flat_states
from ckpt.model import Checkpoint, Opaque, Origin, Plain, StoredTensor
from ckpt.note import Note, NoteKind

Partition = Mapping[str, Any]
"""`optimizer_state_dict` of one rank's file."""


def _matches(path: Path) -> Match:
    return Match.YES if guess_kind(path) == "zero12" else Match.NO


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in a ZeRO-1 or ZeRO-2 checkpoint; metadata only."""
    save = locate(path, options.tag)
    model_path = save.ranks(MODEL).get(0)
    if model_path is None:
        raise MissingPart(f"{save.folder}: mp_rank_00_model_states.pt is missing")
    content = read_file(model_path, "module")
    files = rank_files(save, OPTIM, content.get("dp_world_size"))
    ranks = [read_file(file, "optimizer_state_dict") for file in files]
    partitions = [rank["optimizer_state_dict"] for rank in ranks]
    stage = _stage(partitions, files)
    _require_one_save(save, content, ranks, partitions)
    shapes = shapes_by_group(
        content.get("param_shapes") or ranks[0].get("param_shapes"), model_path
    )
    trained = _cut(partitions, shapes, save, options.need_optimizer)
    if not _slices_agree(partitions, shapes, save, must=not _is_round_robin(content)):
        trained.groups = [
            (_before_round_robin(names, len(files)), hyper) for names, hyper in trained.groups
        ]
    origin = Origin(
        format=f"zero{stage}",
        path=str(path),
        writer=f"deepspeed {content.get('ds_version') or ranks[0].get('ds_version')}",
        world_size=len(files),
    )
    notes = _elastic_note(partitions[0])
    scaler = partitions[0].get("loss_scaler")
    return build(content, model_path, trained, scaler, origin, notes)


def _stage(partitions: Sequence[Partition], files: Sequence[Path]) -> int:
    """The stage; BF16_Optimizer states none and belongs to stage 1."""
    stages = [stage_number(p, f) for p, f in zip(partitions, files, strict=True)]
    require_same(stages, "the ZeRO stage", files[0].parent)
    for partition, file in zip(partitions, files, strict=True):
        if "single_partition_of_fp32_groups" not in partition:
            raise CorruptCheckpoint(f"{file}: no fp32 partitions inside; expected ZeRO-1 or ZeRO-2")
    return stages[0] or 1


def _require_one_save(
    save: Save,
    content: Mapping[str, Any],
    ranks: Sequence[Mapping[str, Any]],
    partitions: Sequence[Partition],
) -> None:
    require_same([rank.get("ds_version") for rank in ranks], "the DeepSpeed version", save.folder)
    states = [_states(partition) for partition in partitions]
    require_same([len(s) for s in states], "the number of param groups", save.folder)
    require_same([steps_of(iter(s)) for s in states], "the optimizer's step", save.folder)
    require_same([_options(p) for p in partitions], "the hyper-parameters", save.folder)
    require_same([p.get("partition_count") for p in partitions], "the partitioning", save.folder)
    counts = partitions[0].get("partition_count")
    expected = max(counts) if isinstance(counts, list | tuple) and counts else counts
    if isinstance(expected, int) and expected != len(partitions):
        raise MissingPart(
            f"{save.folder}: optimizer states were cut in {expected} and {len(partitions)} files "
            "of ranks are there. Copy the files of every rank into one folder."
        )


def _states(partition: Partition) -> list[Mapping[str, Plain]]:
    """The base optimizer's state by group; elastic checkpoints keep a list."""
    base = partition["base_optimizer_state"]
    count = len(partition["single_partition_of_fp32_groups"])
    if isinstance(base, Mapping):
        return [base["state"].get(index, {}) for index in range(count)]
    step = partition.get("base_optimizer_state_step")
    return [dict(state) | ({} if step is None else {"step": step}) for state in base]


def _options(partition: Partition) -> list[dict[str, Plain]]:
    base = partition["base_optimizer_state"]
    count = len(partition["single_partition_of_fp32_groups"])
    if not isinstance(base, Mapping):
        return [{} for _ in range(count)]
    return [{k: v for k, v in g.items() if k != "params"} for g in base["param_groups"]]


def _elastic_note(partition: Partition) -> list[Note]:
    if isinstance(partition["base_optimizer_state"], Mapping):
        return []
    detail = "an elastic checkpoint does not save hyper-parameters; set them in the new optimizer"
    return [Note(NoteKind.DROPPED, ("lr, betas, weight_decay",), detail)]


def _cut(
    partitions: Sequence[Partition],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    save: Save,
    need_optimizer: bool,
) -> Trained:
    """Parameters and their states out of the flat partitions of all ranks."""
    trained = Trained()
    options = _options(partitions[0])
    if not len(shapes) == len(options) == len(partitions[0]["single_partition_of_fp32_groups"]):
        raise CorruptCheckpoint(
            f"{save.folder}: {len(shapes)} groups of parameter shapes and {len(options)} param "
            "groups; files of two different saves are mixed"
        )
    for index, group in enumerate(shapes):
        masters = [p["single_partition_of_fp32_groups"][index] for p in partitions]
        full = max(master.numel for master in masters)
        sizes = [
            (m.numel, m.numel + _padding(p, index, full - m.numel))
            for m, p in zip(masters, partitions, strict=True)
        ]
        states = [_states(partition)[index] for partition in partitions]
        flat, scalars = flat_states(states, sizes, str(save.folder), need_optimizer)
        if "step" in options[index]:
            scalars.setdefault("step", options[index]["step"])
        bounds = _bounds(partitions[0], index, group, save)
        _cut_group(trained, masters, flat, scalars, group, bounds, save)
        hyper = {k: v for k, v in options[index].items() if k != "step"}
        trained.groups.append((list(group), hyper))
    return trained


def _padding(partition: Partition, index: int, default: int) -> int:
    """Elements that a rank's states have beyond its fp32 partition.

    Args:
        default: what it lacks to the fullest rank's, for deepspeed before 0.7.0.
    """
    paddings = partition.get("group_paddings")
    return int(paddings[index]) if paddings else default


def _cut_group(
    trained: Trained,
    masters: Sequence[StoredTensor],
    flat: Mapping[str, Sequence[StoredTensor]],
    scalars: Mapping[str, Plain],
    group: Mapping[str, tuple[int, ...]],
    bounds: Sequence[int],
    save: Save,
) -> None:
    starts = [sum(m.numel for m in masters[:rank]) for rank in range(len(masters))]
    for (name, shape), offset in zip(group.items(), bounds, strict=False):
        where = f"{save.folder}: {name}"
        trained.masters[name] = cut_from_flat(_pieces(starts, masters), offset, shape, where)
        trained.states[name] = {
            key: cut_from_flat(_pieces(starts, tensors), offset, shape, where)
            for key, tensors in flat.items()
        } | dict(scalars)
    _check_length(sum(m.numel for m in masters), bounds[-1], len(masters), save)


def _pieces(starts: Sequence[int], tensors: Sequence[StoredTensor]) -> list[FlatPiece]:
    return [FlatPiece(start, tensor) for start, tensor in zip(starts, tensors, strict=True)]


def _bounds(
    partition: Partition, index: int, group: Mapping[str, tuple[int, ...]], save: Save
) -> list[int]:
    """Where each parameter of a flat group begins, and at last where the group ends."""
    gaps = _alignment(partition, index, len(group), save)
    sizes = (prod(shape) + gap for shape, gap in zip(group.values(), gaps, strict=True))
    return list(accumulate(sizes, initial=0))


def _alignment(partition: Partition, index: int, count: int, save: Save) -> Sequence[int]:
    """Padding after each parameter (zero_optimization.parameter_alignment, deepspeed >= 0.19.7)."""
    paddings = partition.get("param_alignment_paddings")
    if not paddings:
        return [0] * count
    if len(paddings[index]) != count:
        raise CorruptCheckpoint(
            f"{save.folder}: {len(paddings[index])} paddings for the {count} parameters of a group"
        )
    return list(paddings[index])


def _is_round_robin(content: Mapping[str, Any]) -> bool:
    zero = (content.get("ds_config") or {}).get("zero_optimization")
    return isinstance(zero, Mapping) and bool(zero.get("round_robin_gradients"))


def _before_round_robin(names: Sequence[str], world_size: int) -> list[str]:
    """A group in the optimizer's own order: parameter i went to rank i modulo the world size.

    Source: deepspeed 0.19.8 stage_1_and_2.py `_round_robin_reorder`.
    """
    order = [i for rank in range(world_size) for i in range(rank, len(names), world_size)]
    original = dict(zip(order, names, strict=True))
    return [original[index] for index in range(len(names))]


def _slices_agree(
    partitions: Sequence[Partition],
    shapes: Sequence[Mapping[str, tuple[int, ...]]],
    save: Save,
    *,
    must: bool,
) -> bool:
    """Whether parameters lie where the rank files say (`param_slice_mappings`, >= 0.7.4).

    Under round_robin_gradients the mappings are those of the order before it, or, with padding
    between the parameters, list them in that order; so a disagreement tells that it was in effect.
    The setting alone does not (stage 1 ignored it in some releases).

    Raises:
        CorruptCheckpoint: they lie elsewhere and `must` not.
    """
    if not all(partition.get("param_slice_mappings") for partition in partitions):
        return must
    for index, group in enumerate(shapes):
        offsets = dict(zip(group, _bounds(partitions[0], index, group, save), strict=False))
        start = 0
        for rank, partition in enumerate(partitions):
            slices = partition["param_slice_mappings"][index]
            wrong = _first_elsewhere(slices, offsets, start)
            if wrong and must:
                raise CorruptCheckpoint(
                    f"{save.folder}: {wrong} lies elsewhere in rank {rank}'s partition than its "
                    "file says; the order of the parameters is not the one that was saved"
                )
            listed = [offsets[name] for name in slices if name in offsets]
            if wrong or (not must and listed != sorted(listed)):
                return False
            start += partition["single_partition_of_fp32_groups"][index].numel
    return True


def _first_elsewhere(
    slices: Mapping[str, Plain], offsets: Mapping[str, int], start: int
) -> str | None:
    """The first parameter whose stated place in a partition is not the computed one."""
    for name, address in slices.items():
        stated = address.state.get("start") if isinstance(address, Opaque) else None
        if stated not in (None, max(offsets.get(name, -1) - start, 0)):
            return name
    return None


def _check_length(stored: int, used: int, world_size: int, save: Save) -> None:
    """The flat group is as long as its parameters, but for padding to a multiple of 2 x ranks.

    Source: deepspeed 0.19.8 stage_1_and_2.py nccl_start_alignment_factor = 2.
    """
    if not used <= stored <= used + 2 * world_size:
        raise CorruptCheckpoint(
            f"{save.folder}: the shards hold {stored} elements of a group of {used}; files of two "
            "different saves are mixed"
        )


FORMAT = Format(
    name="zero12",
    title="DeepSpeed ZeRO-1 and ZeRO-2",
    matches=_matches,
    read=read,
    has_tags=True,
)
