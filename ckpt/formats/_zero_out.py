"""What the files of all ZeRO stages share when they are written: module, counters, job, `latest`.

Source: deepspeed 0.19.8 runtime/engine.py (`_common_checkpoint_state`, `_save_checkpoint`,
`_save_zero_checkpoint`, `_get_zero_frozen_param_attributes`, `_get_shared_params`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import PurePath

import ckpt.by_rank as by_rank
from ckpt.checks import step_of
from ckpt.errors import MissingPart
from ckpt.format import WeightDType, WriteOptions
from ckpt.formats._deepspeed import DATA_CLASSES, LATEST, NOT_JOB
from ckpt.formats._trainer_files import carried, is_of_accelerate
from ckpt.formats._zero_groups import Flattener, arranged
from ckpt.formats._zero_settings import Settings, settings_of
from ckpt.model import Checkpoint, Opaque, Plain
from ckpt.note import Note, NoteKind
from ckpt.outgoing import job_data, named_objects, plain_notes, state_dict
from ckpt.plan import CommitFile, CopiedFile, OutputFile, OutTensor, WritePlan
from ckpt.storage.torch_file import TorchFile

__all__ = ["DEEPSPEED_VERSION", "Job", "job_of", "shape_of", "stage_of"]

DEEPSPEED_VERSION = "0.19.8"
"""The release whose layout is written, which its loading code asks for."""

TORCH_SIZE = "torch.Size"
ACCELERATE_TAG = "pytorch_model"  # accelerate 1.15 utils/constants.py MODEL_NAME
STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"
CLASSES = DATA_CLASSES | {TORCH_SIZE}
SCHEDULERS = ("lr_scheduler", "scheduler", "lr_schedulers")
"""Where jobs keep their scheduler's state: DeepSpeed, common scripts, Lightning (a list)."""
COUNTERS = ("skipped_steps", "global_steps", "global_samples")
OWN_KEYS = (*NOT_JOB, "data_sampler", "random_ltd", "lr_scheduler", *COUNTERS, "ds_config")
LAYOUT_OBJECTS = ("ds_config", "loss_scaler")


def shape_of(shape: Sequence[int]) -> Opaque:
    """A torch.Size, whose methods DeepSpeed's recovery scripts call."""
    return Opaque(TORCH_SIZE, {"args": (tuple(shape),), "state": None})


def stage_of(number: int) -> Opaque:
    """DeepSpeed's enum of stages."""
    return Opaque(STAGE, {"args": (number,), "state": None})


@dataclass(frozen=True)
class Job:
    """A checkpoint on its way into ZeRO files.

    Attributes:
        names: the name under which DeepSpeed knows each parameter: the first of tied ones.
        knows_frozen: whether the parameters that are not trained are known; else all are written
            as trained, and the engine takes them out of the module.
        copied: what HF Trainer or accelerate want beside the save.
    """

    checkpoint: Checkpoint
    settings: Settings
    flattener: Flattener
    names: Mapping[str, str]
    knows_frozen: bool
    notes: tuple[Note, ...]
    copied: tuple[CopiedFile, ...] = ()

    @cached_property
    def tag(self) -> str:
        """The folder of the save, as accelerate or others look for it."""
        is_accelerates = self.copied and is_of_accelerate(self.checkpoint.origin)
        return ACCELERATE_TAG if is_accelerates else f"global_step{self._steps}"

    @cached_property
    def _steps(self) -> int:
        return int(step_of_job(self.checkpoint) or 0)

    @cached_property
    def module(self) -> dict[str, OutTensor]:
        """The state dict in the engine's precision; tied names hold one object."""
        return state_dict(self.checkpoint, WriteOptions(dtype=_weight_dtype(self)))

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that the optimizer does not have, those without elements included."""
        trained = {fqn for group in self.flattener.groups() for fqn in group.fqns}
        return tuple(fqn for fqn in self.checkpoint.params if fqn not in trained)

    def frozen_shapes(self) -> OrderedDict[str, Opaque]:
        """`frozen_param_shapes`; empty where none are known to be frozen."""
        if not self.knows_frozen:
            return OrderedDict()
        shapes = {fqn: self.checkpoint.params[fqn].shape for fqn in self.frozen}
        return OrderedDict((self.names[fqn], shape_of(shape)) for fqn, shape in shapes.items())

    def param_shapes(self, groups: Sequence[Sequence[str]]) -> list[Plain]:
        """`param_shapes` of flat groups, in their order."""
        params = self.checkpoint.params
        return [
            OrderedDict((self.names[fqn], shape_of(params[fqn].shape)) for fqn in group)
            for group in groups
        ]

    def shared(self) -> dict[str, str]:
        """`shared_params`: the other names of parameters, and the first."""
        params, ties = self.checkpoint.params, self.checkpoint.ties
        return {
            name: self.names[owner]
            for name in self.checkpoint.order
            if (owner := ties.get(name, name)) in params and name != self.names[owner]
        }

    def model_states(
        self,
        module: Mapping[str, Plain],
        shapes: Sequence[Plain],
        frozen: Mapping[str, Plain] | None,
        shared: Mapping[str, str],
        rank: int | None = None,
    ) -> dict[str, Plain]:
        """The content of a model_states file: of a rank, or of all.

        An engine asks `frozen_param_fragments` for each of its frozen parameters, if there are any.
        """
        objects, settings = self.checkpoint.objects, self.settings
        shapes_of_frozen = None if frozen is None else self.frozen_shapes()
        if not self.knows_frozen:
            frozen = None
        samples = objects.get("global_samples")
        ties, buffers = self.checkpoint.ties, self.checkpoint.buffers
        return {
            "module": OrderedDict(module)
            | {name: job_data(value) for name, value in self.checkpoint.extra_state.items()},
            "buffer_names": [n for n in self.checkpoint.order if ties.get(n, n) in buffers],
            "optimizer": None,
            "param_shapes": list(shapes),
            "frozen_param_shapes": shapes_of_frozen,
            "shared_params": dict(shared),
            "frozen_param_fragments": None if frozen is None else OrderedDict(frozen),
            "lr_scheduler": job_data(_scheduler(self.checkpoint)[1]),
            "data_sampler": job_data(objects.get("data_sampler")),
            "random_ltd": job_data(objects.get("random_ltd")),
            "skipped_steps": _count(objects.get("skipped_steps")),
            "global_steps": self._steps,
            **({} if samples is None else {"global_samples": _count(samples)}),
            "dp_world_size": settings.world_size,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_config": job_data(settings.config),
            "ds_version": DEEPSPEED_VERSION,
            **self.client_state(rank),
        }

    def client_state(self, rank: int | None) -> dict[str, Plain]:
        """The rest of the job, which `load_checkpoint` hands back to the script."""
        rest = _client(self.checkpoint, self.copied)
        rest = rest if rank is None else by_rank.objects_of(rank, rest)
        named = named_objects(replace(self.checkpoint, objects=rest), OWN_KEYS)
        return {name: job_data(value) for name, value in named.items()}

    def file(self, name: str, content: Mapping[str, Plain]) -> TorchFile:
        """A file in the save's folder."""
        return TorchFile(f"{self.tag}/{name}", content, CLASSES)

    def optim_file(self, name: str, partition: Mapping[str, Plain]) -> TorchFile:
        """A rank's optimizer file."""
        content = {
            "optimizer_state_dict": partition,
            "ds_config": job_data(self.settings.config),
            "ds_version": DEEPSPEED_VERSION,
        }
        return self.file(name, content)

    def write_plan(self, files: Sequence[OutputFile]) -> WritePlan:
        """The files, with `latest` written last."""
        tag = self.tag
        latest = CommitFile(LATEST, lambda _spans: tag.encode())
        notes = (*self.notes, *self.flattener.notes(), *_job_notes(self.checkpoint, self.copied))
        return WritePlan(tuple(files), notes, (latest,), self.copied)


def job_of(checkpoint: Checkpoint, options: WriteOptions, stage: int) -> Job:
    """The checkpoint with what a job of that stage needs to load it.

    Raises:
        MissingPart: the source holds no weights. Unsupported: see `settings_of`, `arranged`.
    """
    if not checkpoint.order:
        raise MissingPart(f"{checkpoint.origin.path}: holds no weights to write")
    settings, notes = settings_of(checkpoint, options, stage)
    checkpoint, lost = by_rank.fitting(checkpoint, settings.world_size)
    of_job = checkpoint if options.like is None else options.like
    knows_frozen = checkpoint.has_optimizer or of_job.has_optimizer
    copied, left = carried(checkpoint.origin, settings.world_size)
    copied, left = (copied, left) if checkpoint.has_optimizer else ((), [])
    checkpoint, told = arranged(checkpoint, options.like, settings.optimizer, f"zero{stage}")
    if options.like is None and not checkpoint.origin.format.startswith("zero"):
        told += _frozen_notes(checkpoint)
    names = {fqn: fqn for fqn in checkpoint.params}
    for name in reversed(checkpoint.order):
        owner = checkpoint.ties.get(name, name)
        if owner in names:
            names[owner] = name
    said = (*notes, *lost, *left, *told)
    return Job(checkpoint, settings, Flattener(checkpoint), names, knows_frozen, said, copied)


def step_of_job(checkpoint: Checkpoint) -> float | int | None:
    """`global_steps` where the job counts them, else the optimizer's steps."""
    counted = checkpoint.objects.get("global_steps")
    return counted if isinstance(counted, int) else step_of(checkpoint)


def _weight_dtype(job: Job) -> WeightDType | None:
    """The engine's precision; None leaves an fp32 engine's frozen 16-bit weights as they are."""
    name = {"bfloat16": "bf16", "float16": "fp16"}.get(job.settings.precision.torch_name)
    if name is not None:
        return WeightDType(name)
    trained = (job.checkpoint.params[f] for g in job.checkpoint.groups for f in g.fqns)
    was_low = any(param.lp_dtype not in (None, job.settings.precision) for param in trained)
    return WeightDType.FP32 if was_low else None


def _count(value: Plain) -> int:
    return value if isinstance(value, int) else 0


def _scheduler(checkpoint: Checkpoint) -> tuple[str | None, Plain]:
    """Name and state of the learning rate scheduler."""
    for name in SCHEDULERS:
        found = checkpoint.objects.get(name)
        if isinstance(found, list) and len(found) == 1:
            found = found[0]
        if isinstance(found, Mapping):
            return name, found
    return None, None


def _client(checkpoint: Checkpoint, copied: Sequence[CopiedFile]) -> dict[str, Plain]:
    """Everything that has no key of its own in a model_states file, and no file beside it."""
    objects = checkpoint.objects
    taken = {*LAYOUT_OBJECTS, *COUNTERS, "data_sampler", "random_ltd", _scheduler(checkpoint)[0]}
    taken |= {f.path if f.path in objects else PurePath(f.path).stem for f in copied}
    return {name: value for name, value in objects.items() if name not in taken}


def _job_notes(checkpoint: Checkpoint, copied: Sequence[CopiedFile]) -> list[Note]:
    notes = plain_notes(_client(checkpoint, copied), OWN_KEYS)
    found, _ = _scheduler(checkpoint)
    if found is None and checkpoint.objects:
        detail = "none in the source: a job that has one needs load_lr_scheduler_states=False"
        notes.append(Note(NoteKind.UNVERIFIED, ("lr_scheduler",), detail, of_job=True))
    elif found not in (None, "lr_scheduler"):
        detail = "where DeepSpeed looks for it"
        subjects = (f"{found} -> lr_scheduler",)
        notes.append(Note(NoteKind.RENAMED, subjects, detail, of_job=True))
    return notes


def _frozen_notes(checkpoint: Checkpoint) -> list[Note]:
    if not checkpoint.frozen:
        return []
    detail = (
        "in no param group, so taken for frozen parameters; if they are buffers, say so with "
        "--model or --like"
    )
    return [Note(NoteKind.UNVERIFIED, checkpoint.frozen, detail)]
