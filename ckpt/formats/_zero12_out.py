"""The files of ZeRO-1 and ZeRO-2: flat groups padded at their end and cut into equal partitions.

The flat group is a multiple of 2 x ranks long, so that partitions begin on 4 bytes in 16 bits.
Under round_robin_gradients parameter i belongs to rank i modulo the ranks. Partitions of the fp32
weights are saved without the padding (BF16_Optimizer: with), states with it.

Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py (`__init__`, `_round_robin_reorder`,
`_create_param_mapping`, `state_dict`), runtime/bf16_optimizer.py (`_setup_for_real_optimizer`,
`state_dict`), utils/tensor_fragment.py (`get_hp_fragment_mapping`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, prod

from ckpt.dtypes import DType
from ckpt.flat_ranges import FlatRange, flat_tensor
from ckpt.format import WriteOptions
from ckpt.formats._deepspeed import model_file, optim_file
from ckpt.formats._zero_groups import Flat, Group
from ckpt.formats._zero_out import DEEPSPEED_VERSION, Job, job_of, stage_of
from ckpt.formats._zero_settings import Settings
from ckpt.model import Checkpoint, Opaque, Plain
from ckpt.plan import FlatTensor, WritePlan

__all__ = ["FlatLayout", "flat_layout", "plan_stage"]

NCCL_START_ALIGNMENT = 2  # elements; stage_1_and_2.py nccl_start_alignment_factor
PARAMETER_ALIGNMENT_BYTES = 16
FRAGMENT = "deepspeed.utils.tensor_fragment.fragment_address"


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Where the parameters of a group lie in its flat tensor. Numbers are elements.

    Attributes:
        order: members in the order in which they lie, by their numbers in the group.
        offsets: first element of each, in that order; `gaps`: the padding behind each.
        used: elements up to the end of the last; `share`: elements of a rank's partition.
    """

    order: tuple[int, ...]
    offsets: tuple[int, ...]
    gaps: tuple[int, ...]
    used: int
    share: int

    def padding(self, rank: int) -> int:
        """Elements of a rank's partition that no parameter has."""
        return min(max((rank + 1) * self.share - self.used, 0), self.share)


def flat_layout(
    numels: Sequence[int], world_size: int, *, is_round_robin: bool = False, alignment: int = 1
) -> FlatLayout:
    """The layout of a group's parameters, given in the optimizer's order.

    Args:
        alignment: elements to a multiple of which each parameter but the last is padded.
    """
    count = len(numels)
    order = list(range(count))
    if is_round_robin:
        order = [i for rank in range(world_size) for i in range(rank, count, world_size)]
    offsets, gaps, at = [], [], 0
    for number, member in enumerate(order):
        offsets.append(at)
        at += numels[member]
        gaps.append(0 if number == count - 1 else -at % alignment)
        at += gaps[-1]
    whole = at + -at % (NCCL_START_ALIGNMENT * world_size)
    return FlatLayout(tuple(order), tuple(offsets), tuple(gaps), at, whole // world_size)


@dataclass(frozen=True, slots=True)
class _Part:
    """One group: what is flattened, and where it lies."""

    group: Group
    flat: Flat
    layout: FlatLayout


def plan_stage(checkpoint: Checkpoint, options: WriteOptions, stage: int) -> WritePlan:
    """The files of a save of stage 1 or 2."""
    job = job_of(checkpoint, options, stage)
    parts = [_part(job, group) for group in job.flattener.groups()]
    shapes = job.param_shapes([part.flat.fqns for part in parts])
    frozen = {job.names[fqn]: job.module[fqn] for fqn in job.frozen} if stage == 2 else None
    content = job.model_states(job.module, shapes, frozen, job.shared())
    ranks = [
        job.optim_file(optim_file(rank, is_bf16=job.settings.is_bf16), _partition(job, parts, rank))
        for rank in range(job.settings.world_size)
    ]
    return job.write_plan([job.file(model_file(None), content), *ranks])


def _part(job: Job, group: Group) -> _Part:
    settings, params = job.settings, job.checkpoint.params
    numels = [prod(params[fqn].shape) for fqn in group.fqns]
    layout = flat_layout(
        numels,
        settings.world_size,
        is_round_robin=settings.is_round_robin and not settings.is_bf16_optimizer,
        alignment=_alignment(settings),
    )
    lying = [group.fqns[member] for member in layout.order]
    return _Part(group, job.flattener.flat(group, lying), layout)


def _alignment(settings: Settings) -> int:
    """Elements of 16 bytes in the module's precision, or 1."""
    if not settings.is_aligned or settings.is_bf16_optimizer:
        return 1
    size = settings.precision.itemsize
    return PARAMETER_ALIGNMENT_BYTES // gcd(PARAMETER_ALIGNMENT_BYTES, size)


def _partition(job: Job, parts: Sequence[_Part], rank: int) -> dict[str, Plain]:
    """`optimizer_state_dict` of a rank's file."""
    settings = job.settings
    clip = {} if settings.clip_grad is None else {"clip_grad": settings.clip_grad}
    base = _base_state(job, parts, rank)
    counts = [settings.world_size] * len(parts)
    mappings = [_slices(job, part, rank) for part in parts]
    if settings.is_bf16_optimizer:
        last = rank == settings.world_size - 1
        return {
            **clip,
            "base_optimizer_state": base,
            "single_partition_of_fp32_groups": [
                _cut(job, part, rank, None, part.layout.share) for part in parts
            ],
            "group_paddings": [
                part.layout.share * settings.world_size - part.layout.used if last else 0
                for part in parts
            ],
            "partition_count": counts,
            "ds_version": DEEPSPEED_VERSION,
            "param_slice_mappings": mappings,
        }
    paddings = [part.layout.padding(rank) for part in parts]
    return {
        "loss_scaler": settings.loss_scaler,
        "dynamic_loss_scale": bool(settings.loss_scaler.state["dynamic"]),
        "overflow": False,
        **clip,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": [
            _cut(job, part, rank, None, part.layout.share - padding)
            for part, padding in zip(parts, paddings, strict=True)
        ],
        "zero_stage": stage_of(settings.stage),
        "group_paddings": paddings,
        "param_alignment_paddings": [list(part.layout.gaps) for part in parts],
        "partition_count": counts,
        "ds_version": DEEPSPEED_VERSION,
        "param_slice_mappings": mappings,
    }


def _base_state(job: Job, parts: Sequence[_Part], rank: int) -> dict[str, Plain]:
    state: dict[int, Plain] = {}
    for index, part in enumerate(parts):
        if part.flat.kinds:
            cut = {k: _cut(job, part, rank, k, part.layout.share) for k in part.flat.kinds}
            state[index] = {**part.flat.scalars, **cut}
    groups = [{**part.group.options, "params": [i]} for i, part in enumerate(parts)]
    return {"state": state, "param_groups": groups}


def _cut(job: Job, part: _Part, rank: int, kind: str | None, numel: int) -> FlatTensor:
    """A rank's partition of the weights or of a state."""
    begin = rank * part.layout.share
    ranges = []
    for fqn, offset in zip(part.flat.fqns, part.layout.offsets, strict=True):
        source = job.flattener.source(fqn, kind)
        size = job.checkpoint.params[fqn].weight.numel
        start, stop = max(begin, offset), min(begin + numel, offset + size)
        if source is not None and start < stop:
            ranges.append(FlatRange(start - begin, source, start - offset, stop - offset))
    return flat_tensor(DType.float32, numel, ranges)


def _slices(job: Job, part: _Part, rank: int) -> OrderedDict[str, Opaque]:
    """`param_slice_mappings` of a group: where parameters lie in a rank's partition.

    DeepSpeed computes it in the optimizer's own order even where the parameters lie round robin,
    unless there is padding between them.
    """
    layout, params = part.layout, job.checkpoint.params
    begin, slices = rank * layout.share, OrderedDict[str, Opaque]()
    lies_at = dict(zip(part.flat.fqns, layout.offsets, strict=True))
    at = 0
    for fqn in part.group.fqns:
        offset = lies_at[fqn] if any(layout.gaps) else at
        size = params[fqn].weight.numel
        at += size
        start, stop = max(begin, offset), min(begin + layout.share, offset + size)
        if start < stop:
            address = {"numel": stop - start, "start": start - begin}
            slices[job.names[fqn]] = Opaque(FRAGMENT, address)
    return slices
