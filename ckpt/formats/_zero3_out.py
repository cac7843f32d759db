"""The files of ZeRO-3: each parameter cut over all ranks, the shares laid into sub-groups.

Source: deepspeed 0.19.8 runtime/zero/stage3.py (`_create_fp16_sub_groups`, `_rigid_state_dict`),
runtime/zero/partition_parameters.py (`_partition_param`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.dtypes import DType
from ckpt.flat_ranges import FlatRange, FlatSource, flat_tensor
from ckpt.format import WriteOptions
from ckpt.formats._deepspeed import model_file, optim_file
from ckpt.formats._zero_groups import Flat
from ckpt.formats._zero_out import Job, job_of, stage_of
from ckpt.model import Checkpoint, InlineTensor, Plain
from ckpt.plan import FlatTensor, OutTensor, WritePlan

__all__ = ["plan_stage_3", "sub_groups"]


def sub_groups(shares: Sequence[int], size: int) -> list[range]:
    """Members of each sub-group, as ranges of their numbers in the param group.

    A sub-group is full with the member that reaches `size`; the shares are what one rank holds.
    """
    if size >= sum(shares):
        return [range(len(shares))]
    found, first, held = [], 0, 0
    for number, share in enumerate(shares):
        held += share
        if held >= size or number == len(shares) - 1:
            found.append(range(first, number + 1))
            first, held = number + 1, 0
    return found


@dataclass(frozen=True, slots=True)
class _Parts:
    """All sub-groups, and the numbers of each param group's."""

    flats: list[Flat]
    groups: list[Plain]


def plan_stage_3(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """The files of a save of stage 3."""
    job = job_of(checkpoint, options, 3)
    parts = _parts(job)
    shapes = job.param_shapes([flat.fqns for flat in parts.flats])
    settings = job.settings
    models, optims = [], []
    for rank in range(settings.world_size):
        shared = job.shared() if rank == 0 else {}  # only rank 0 looks for tied parameters
        content = job.model_states(_placeholders(job), shapes, _fragments(job, rank), shared, rank)
        models.append(job.file(model_file(rank), content))
        name = optim_file(rank, is_bf16=settings.is_bf16)
        optims.append(job.optim_file(name, _partition(job, parts, rank)))
    return job.write_plan([*models, *optims])


def _share(job: Job, numel: int) -> int:
    return -(-numel // job.settings.world_size)


def _parts(job: Job) -> _Parts:
    params, flats, groups = job.checkpoint.params, list[Flat](), list[Plain]()
    for group in job.flattener.groups():
        shares = [_share(job, params[fqn].weight.numel) for fqn in group.fqns]
        first = len(flats)
        for members in sub_groups(shares, job.settings.sub_group_size):
            flats.append(job.flattener.flat(group, [group.fqns[m] for m in members]))
        groups.append({**group.options, "params": list(range(first, len(flats)))})
    return _Parts(flats, groups)


def _placeholders(job: Job) -> dict[str, Plain]:
    """The module: parameters as empty tensors, buffers as they are."""
    checkpoint = job.checkpoint
    found: dict[str, Plain] = {}
    for name, tensor in job.module.items():
        owner = checkpoint.ties.get(name, name)
        is_param = owner in checkpoint.params
        found[name] = InlineTensor(tensor.dtype, (0,), b"") if is_param else tensor
    return found


def _fragments(job: Job, rank: int) -> dict[str, Plain]:
    """`frozen_param_fragments`: a rank's share of each frozen parameter, in its own dtype."""
    found: dict[str, Plain] = {}
    for fqn in job.frozen:
        tensor: OutTensor = job.module[fqn]
        part = (FlatSource(tensor.source), tensor.source.numel)
        found[job.names[fqn]] = _shares(job, [part], rank, tensor.dtype)
    return found


def _shares(
    job: Job, parts: Sequence[tuple[FlatSource | None, int]], rank: int, dtype: DType
) -> FlatTensor:
    """A rank's shares of parameters, one after another; zeros where there is no source.

    Args:
        parts: each parameter and its number of elements.
    """
    at, ranges = 0, []
    for source, numel in parts:
        share = _share(job, numel)
        start, stop = min(rank * share, numel), min((rank + 1) * share, numel)
        if source is not None and start < stop:
            ranges.append(FlatRange(at, source, start, stop))
        at += share
    return flat_tensor(dtype, at, ranges)


def _partition(job: Job, parts: _Parts, rank: int) -> dict[str, Plain]:
    """`optimizer_state_dict` of a rank's file."""
    settings = job.settings
    state: dict[int, Plain] = {}
    for number, flat in enumerate(parts.flats):
        if flat.kinds:
            cut = {kind: _flat(job, flat, rank, kind) for kind in flat.kinds}
            state[number] = {**flat.scalars, **cut}
    return {
        "zero_stage": stage_of(3),
        "loss_scaler": settings.loss_scaler,
        "dynamic_loss_scale": bool(settings.loss_scaler.state["dynamic"]),
        "overflow": False,
        "partition_count": settings.world_size,
        "optimizer_state_dict": {"state": state, "param_groups": parts.groups},
        "fp32_flat_groups": [_flat(job, flat, rank, None) for flat in parts.flats],
    }


def _flat(job: Job, flat: Flat, rank: int, kind: str | None) -> FlatTensor:
    """A rank's part of a sub-group: its weights, or a state."""
    parts = [
        (job.flattener.source(fqn, kind), job.checkpoint.params[fqn].weight.numel)
        for fqn in flat.fqns
    ]
    return _shares(job, parts, rank, DType.float32)
