"""DeepSpeed ZeRO-3: every parameter cut over all ranks, fp32 weights and optimizer in flat groups.

Rank r holds the elements [r * P, (r + 1) * P) of each parameter, P = ceil(numel / ranks), the end
padded with uninitialised memory. A sub-group is the concatenation of such partitions, padding
included. `param_shapes` lists the parameters of each sub-group; `param_groups[i]["params"]` the
sub-groups of each param group. Frozen parameters lie in `frozen_param_fragments`, cut alike. No
16-bit weights are saved. Client states that differ between ranks, such as random number states, are
kept for all of them under `by_rank`; a job with as many ranks gets each its own again.

Written for the ranks of `--world-size`, with sub-groups as `--ds-config`, `--like` or the source's
own configuration says; padding is zero. `engine.load_checkpoint` takes the optimizer too; of
weights alone, with `load_optimizer_states=False`.

Source: deepspeed 0.19.8 runtime/zero/partition_parameters.py (`_partition_param`),
runtime/zero/stage3.py (`_rigid_state_dict`, `_create_fp16_sub_groups`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, prod
from pathlib import Path
from typing import Any

from ckpt.by_rank import gathered
from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.format import SHARD_OPTIONS, Format, Match, ReadOptions, WriteOptions
from ckpt.formats._deepspeed import (
    OPTIM,
    STAGE_3_MODEL,
    FlatPiece,
    Save,
    cut_from_flat,
    guess_kind,
    job_objects,
    locate,
    rank_files,
    read_file,
    require_same,
    shapes_by_group,
    stage_number,
    steps_of,
)
from ckpt.formats._zero import Trained, build, flat_states
from ckpt.formats._zero3_out import plan_stage_3
from ckpt.model import Checkpoint, Origin, Plain, StoredTensor
from ckpt.plan import WritePlan
from ckpt.values import read_number

Shapes = Mapping[str, tuple[int, ...]]
Rank = Mapping[str, Any]


def _matches(path: Path) -> Match:
    return Match.YES if guess_kind(path) == "zero3" else Match.NO


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in a ZeRO-3 checkpoint; metadata only."""
    save = locate(path, options.tag)
    first = read_file(next(iter(save.ranks(STAGE_3_MODEL).values())), "module")
    world_size = first.get("dp_world_size")
    model_files = rank_files(save, STAGE_3_MODEL, world_size)
    contents = [first, *(read_file(file, "module") for file in model_files[1:])]
    optim_files = rank_files(save, OPTIM, world_size)
    ranks = [read_file(file, "optimizer_state_dict") for file in optim_files]
    partitions = [rank["optimizer_state_dict"] for rank in ranks]
    for partition, file in zip(partitions, optim_files, strict=True):
        if stage_number(partition, file) != 3 or "fp32_flat_groups" not in partition:
            raise CorruptCheckpoint(f"{file}: expected optimizer states of ZeRO stage 3")
    shapes = shapes_by_group(first.get("param_shapes"), model_files[0])
    _require_one_save(save, contents, partitions)
    trained = _cut(partitions, shapes, save, options.need_optimizer)
    trained.frozen = _frozen(contents, save)
    origin = Origin(
        format="zero3",
        path=str(path),
        writer=f"deepspeed {first.get('ds_version')}",
        world_size=len(model_files),
    )
    scaler = partitions[0].get("loss_scaler")
    checkpoint = build(first, model_files[0], trained, scaler, origin)
    return gathered(checkpoint, [job_objects(content) for content in contents])


def _require_one_save(
    save: Save, contents: Sequence[Rank], partitions: Sequence[Mapping[str, Any]]
) -> None:
    for key in ("global_steps", "ds_version", "param_shapes", "dp_world_size"):
        require_same([content.get(key) for content in contents], key, save.folder)
    base = [partition["optimizer_state_dict"] for partition in partitions]
    steps = [steps_of(iter(b["state"].values())) for b in base]
    require_same(steps, "the optimizer's step", save.folder)
    require_same([b["param_groups"] for b in base], "the hyper-parameters", save.folder)
    counts = partitions[0].get("partition_count")
    for count in counts if isinstance(counts, list | tuple) else [counts]:
        if isinstance(count, int) and count != len(partitions):
            raise Unsupported(
                f"{save.folder}: parameters are cut in {count} over {len(partitions)} ranks "
                "(MiCS); only full partitioning can be converted"
            )


def _cut(
    partitions: Sequence[Mapping[str, Any]],
    shapes: Sequence[Shapes],
    save: Save,
    need_optimizer: bool,
) -> Trained:
    """Parameters and their states out of the sub-groups of all ranks."""
    trained = Trained()
    base = [partition["optimizer_state_dict"] for partition in partitions]
    flat = [partition["fp32_flat_groups"] for partition in partitions]
    if any(len(groups) != len(shapes) for groups in flat):
        raise CorruptCheckpoint(
            f"{save.folder}: {len(shapes)} sub-groups of shapes and {len(flat[0])} of weights; "
            "files of two different saves are mixed"
        )
    for index, group in enumerate(shapes):
        masters = [groups[index] for groups in flat]
        _check_length(masters, group, save)
        states = [b["state"].get(index, {}) for b in base]
        sizes = [(master.numel,) for master in masters]
        cut_alike, scalars = flat_states(states, sizes, str(save.folder), need_optimizer)
        kinds = {"": masters, **cut_alike}
        offset = 0
        for name, shape in group.items():
            share = ceil(prod(shape) / len(partitions))
            cut = {
                key: _gather(tensors, offset, share, shape, f"{save.folder}: {name}")
                for key, tensors in kinds.items()
            }
            trained.masters[name] = cut.pop("")
            trained.states[name] = cut | scalars
            offset += share
    _add_groups(trained, base[0]["param_groups"], shapes, save)
    return trained


def _gather(
    tensors: Sequence[StoredTensor], offset: int, share: int, shape: tuple[int, ...], where: str
) -> StoredTensor:
    """A parameter whose rank r share begins at `offset` of rank r's 1-D tensor."""
    numel, pieces = prod(shape), []
    for rank, tensor in enumerate(tensors):
        size = min(share, numel - rank * share)
        if size <= 0 and rank:
            break  # ranks beyond the last element hold only padding
        part = cut_from_flat([FlatPiece(0, tensor)], offset, (max(size, 0),), where)
        pieces.append(FlatPiece(rank * share, part))
    return cut_from_flat(pieces, 0, shape, where)


def _check_length(masters: Sequence[StoredTensor], group: Shapes, save: Save) -> None:
    expected = sum(ceil(prod(shape) / len(masters)) for shape in group.values())
    for rank, master in enumerate(masters):
        if master.numel != expected:
            raise CorruptCheckpoint(
                f"{save.folder}: rank {rank} holds {master.numel} elements of a sub-group, "
                f"expected {expected}; files of two different saves are mixed"
            )


def _add_groups(
    trained: Trained, groups: Sequence[Mapping[str, Plain]], shapes: Sequence[Shapes], save: Save
) -> None:
    """Param groups again out of the numbers of their sub-groups."""
    numbers = [number for group in groups for number in group["params"]]
    if sorted(numbers) != list(range(len(shapes))):
        raise CorruptCheckpoint(
            f"{save.folder}: the param groups list the sub-groups {numbers}, expected "
            f"0 to {len(shapes) - 1}"
        )
    for group in groups:
        members = [name for number in group["params"] for name in shapes[number]]
        options = {k: v for k, v in group.items() if k not in ("params", "step")}
        trained.groups.append((members, options))
        step = read_number(group.get("step"))
        for name in members:
            if step is not None and "step" not in trained.states[name]:
                trained.states[name] = {**trained.states[name], "step": step}


def _frozen(contents: Sequence[Rank], save: Save) -> dict[str, StoredTensor]:
    shapes = contents[0].get("frozen_param_shapes") or {}
    fragments = [content.get("frozen_param_fragments") or {} for content in contents]
    frozen = {}
    for name, size in shapes.items():
        shape = tuple(size)
        share = ceil(prod(shape) / len(contents))
        tensors = [t for rank in fragments if isinstance(t := rank.get(name), StoredTensor)]
        if len(tensors) != len(fragments):
            raise CorruptCheckpoint(f"{save.folder}: {name} is missing on some ranks")
        placeholder = contents[0]["module"].get(name)
        if isinstance(placeholder, StoredTensor) and tensors[0].dtype is not placeholder.dtype:
            raise Unsupported(
                f"{save.folder}: {name} is quantised (zero_quantized_nontrainable_weights), and "
                "DeepSpeed does not save the scale"
            )
        frozen[str(name)] = _gather(tensors, 0, share, shape, f"{save.folder}: {name}")
    return frozen


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """A folder with the save and `latest`."""
    return plan_stage_3(checkpoint, options)


FORMAT = Format(
    name="zero3",
    title="DeepSpeed ZeRO-3",
    matches=_matches,
    read=read,
    plan=plan,
    has_tags=True,
    takes=frozenset(SHARD_OPTIONS),
)
