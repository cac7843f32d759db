"""The plan of a universal folder: for which stage and release, which states, and what is said.

Source: deepspeed 0.19.8 runtime/engine.py (`load_checkpoint`), runtime/base_optimizer.py
(`load_hp_checkpoint_state_from_checkpoint_dir`), runtime/zero/stage3.py
(`load_hp_checkpoint_state_from_checkpoint_dir_stage3`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckpt.dtypes import DType
from ckpt.errors import MissingPart, Unsupported
from ckpt.format import WriteOptions
from ckpt.formats._deepspeed import DATA_CLASSES, UNIVERSAL_FOLDER, model_file
from ckpt.formats._universal_files import (
    LATEST,
    OPTIMIZER_STATE,
    STAGE_3,
    STEP,
    SUFFIX,
    Target,
    module_only,
    parameter_files,
    same_options,
)
from ckpt.model import Checkpoint, InlineTensor, ParamGroup, StoredTensor
from ckpt.note import Note, NoteKind, summarise
from ckpt.optimizers import class_of, require_elementwise, translated
from ckpt.outgoing import plain_notes
from ckpt.plan import CommitFile, WritePlan
from ckpt.storage.torch_file import TorchFile
from ckpt.values import read_number

__all__ = ["plan_universal"]

STAGES = (1, 2, 3)
ADAM_STATES = ("exp_avg", "exp_avg_sq")
DEFAULT_VERSION = "0.19.8"
VERSION = re.compile(r"^(\d+)\.(\d+)(?:\.(\d+))?")
Release = tuple[int, ...]
FIRST_WITH_STEPS: Release = (0, 14, 1)  # universal_checkpoint.py (`load_hp_checkpoint_state`)
FIRST_WITH_STAGE_3: Release = (0, 14, 5)  # zero/stage3.py
FIRST_WITH_GROUPS: Release = (0, 18, 0)  # zero/stage3.py: more than the first sub-group
TITLE = "DeepSpeed universal checkpoint"


def plan_universal(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """A folder for one ZeRO stage, any world size, with `latest_universal` beside it.

    Raises:
        MissingPart: the source holds no weights, no param groups, or does not tell the stage.
        Unsupported: states or step counts that DeepSpeed's loading cannot take.
    """
    if not checkpoint.order or not checkpoint.has_optimizer:
        what = "param groups" if checkpoint.order else "weights"
        raise MissingPart(
            f"{checkpoint.origin.path}: holds no {what}; a universal checkpoint restores weights "
            "through the optimizer"
        )
    stage = _stage(checkpoint, options)
    require_elementwise(checkpoint, TITLE)
    own, translating = translated(checkpoint)
    states, steps, making = _states_and_steps(own, stage)
    target = Target(
        checkpoint=own,
        stage=stage,
        ds_version=options.ds_version or _version(checkpoint),
        dtype=options.dtype,
        names=_first_names(own),
        optimizer=class_of(own).found,
        steps=steps,
    )
    older = _notes_of_release(target, _release(options.ds_version))
    notes = (*translating, *making, *older, *_writing_notes(target), *plain_notes(target.job(), ()))
    commit = CommitFile(LATEST, lambda _spans: target.tag.encode())
    return WritePlan(files=tuple(_files(target, states)), notes=notes, commit=(commit,))


def _stage(checkpoint: Checkpoint, options: WriteOptions) -> int:
    """The stage that is to read the folder: as asked, or the source's."""
    config = checkpoint.objects.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    configured = zero.get("stage") if isinstance(zero, Mapping) else None
    by_format = {"zero1": 1, "zero2": 2, "zero3": 3}.get(checkpoint.origin.format)
    stage = options.stage or by_format or configured
    if stage not in STAGES:
        raise MissingPart(
            f"{checkpoint.origin.path}: does not tell the ZeRO stage of the job that will load "
            "the universal checkpoint, whose files differ; say --stage 1, 2 or 3"
        )
    return int(stage)


def _version(checkpoint: Checkpoint) -> str:
    """The DeepSpeed version to name; its loading asks for one and refuses those before 0.3.17."""
    name, _, version = (checkpoint.origin.writer or "").partition(" ")
    return version if name == "deepspeed" and version[:1].isdigit() else DEFAULT_VERSION


def _release(version: str | None) -> Release | None:
    """`--ds-version` in numbers.

    Raises:
        Unsupported: it is no version.
    """
    match = VERSION.match(version or "")
    if version is not None and match is None:
        raise Unsupported(f"--ds-version {version}: expected a release such as {DEFAULT_VERSION}")
    return tuple(int(number) for number in match.groups(default="0")) if match else None


def _notes_of_release(target: Target, release: Release | None) -> list[Note]:
    """What the job has to keep to so that an older release loads the folder.

    Raises:
        Unsupported: that release cannot load it.
    """
    if release is None:
        return []
    named = f"DeepSpeed {target.ds_version}"
    oldest = FIRST_WITH_STAGE_3 if target.stage == STAGE_3 else FIRST_WITH_STEPS
    if release < oldest:
        raise Unsupported(
            f"--ds-version {target.ds_version}: releases before {_dotted(oldest)} cannot load a "
            f"universal checkpoint with its optimizer into stage {target.stage}; convert to "
            f"zero{target.stage}"
        )
    if target.stage != STAGE_3 or release >= FIRST_WITH_GROUPS:
        return []
    groups = len(target.checkpoint.groups)
    if groups > 1:
        raise Unsupported(
            f"{target.checkpoint.origin.path}: {groups} param groups, of which stage 3 of {named} "
            f"loads the first only; convert to zero3, or load with {_dotted(FIRST_WITH_GROUPS)} "
            "or newer"
        )
    detail = f"stage 3 of {named} loads one; a job whose sub_group_size makes several fails"
    return [Note(NoteKind.UNVERIFIED, ("sub-groups",), detail, of_job=True)]


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))


def _first_names(checkpoint: Checkpoint) -> dict[str, str]:
    """The first name of each parameter in the model's order, by its owner's name."""
    first: dict[str, str] = {}
    for name in checkpoint.order:
        first.setdefault(checkpoint.ties.get(name, name), name)
    return {fqn: first.get(fqn, fqn) for fqn in checkpoint.params}


def _states_and_steps(
    checkpoint: Checkpoint, stage: int
) -> tuple[tuple[str, ...], list[float | int | None], list[Note]]:
    """Names of the states to write, the step of each group, and notes about what was made up.

    Raises:
        Unsupported: see `plan_universal`.
    """
    where = checkpoint.origin.path
    trained = [checkpoint.params[fqn] for group in checkpoint.groups for fqn in group.fqns]
    names = tuple(
        dict.fromkeys(
            name
            for param in trained
            for name, value in param.state.items()
            if isinstance(value, StoredTensor) and name != STEP
        )
    )
    if stage == STAGE_3 and not set(names) <= set(ADAM_STATES):
        odd = sorted(set(names) - set(ADAM_STATES))
        raise Unsupported(
            f"{where}: the optimizer states are {summarise(odd)}, and DeepSpeed's stage 3 reads "
            "exp_avg and exp_avg_sq only; choose --stage 1 or 2"
        )
    if stage == STAGE_3:
        names = ADAM_STATES
    steps = [_one_step(checkpoint, group) for group in checkpoint.groups]
    known = {step for step in steps if step is not None}
    if stage == STAGE_3 and len(known) > 1:
        raise Unsupported(f"{where}: param groups have taken {known} steps; stage 3 keeps one")
    if stage == STAGE_3:
        steps = [next(iter(known), 0)] * len(steps)
    lacking = tuple(
        fqn
        for group in checkpoint.groups
        for fqn in group.fqns
        if any(name not in checkpoint.params[fqn].state for name in names)
    )
    detail = "has no optimizer state in the source; zeros are written, as ZeRO itself begins with"
    made = [Note(NoteKind.SYNTHESISED, lacking, detail, of_job=True)] if lacking else []
    return names, steps, made


def _one_step(checkpoint: Checkpoint, group: ParamGroup) -> float | int | None:
    """The step of a group: DeepSpeed keeps one, so its members have to agree."""
    found = {read_number(checkpoint.params[fqn].state.get(STEP)) for fqn in group.fqns} - {None}
    if len(found) > 1:
        low, high = min(n for n in found if n is not None), max(n for n in found if n is not None)
        raise Unsupported(
            f"{checkpoint.origin.path}: parameters of one group have taken {low:g} to {high:g} "
            "steps, and DeepSpeed keeps one for all; put those that joined late in a group of "
            "their own, or convert to another format"
        )
    return next(iter(found), None)


def _files(target: Target, states: Sequence[str]) -> Iterator[TorchFile]:
    folder = f"{target.tag}/{UNIVERSAL_FOLDER}"
    parts = [parameter_files(target, states)]
    if target.stage != STAGE_3:
        parts.append(module_only(target))
    for part in parts:
        for name, stem, content in part:
            yield TorchFile(f"{folder}/{name}/{stem}{SUFFIX}", content)
    classes = DATA_CLASSES | {"torch.Size"}
    yield TorchFile(f"{folder}/{OPTIMIZER_STATE}", target.optimizer_state(), classes)
    model = model_file(0 if target.stage == STAGE_3 else None)
    yield TorchFile(f"{target.tag}/{model}", target.model_states(), classes)


def _writing_notes(target: Target) -> Iterator[Note]:
    """What DeepSpeed will not restore, and what changes on the way."""
    checkpoint = target.checkpoint
    unread = (*checkpoint.buffers, *checkpoint.frozen)
    if unread:
        detail = (
            "in the folder, but DeepSpeed's load_universal restores trained parameters only; "
            "load these by yourself"
        )
        yield Note(NoteKind.DROPPED, unread, detail)
    differing = dict.fromkeys(
        name
        for group in checkpoint.groups
        for name in group.options
        if name not in same_options(checkpoint.groups)
    )
    if target.stage == STAGE_3 and differing:
        detail = (
            "differ between param groups, and DeepSpeed's stage 3 would give the first group's to "
            "all; they are left out, so that the engine keeps what its configuration says"
        )
        yield Note(NoteKind.DROPPED, tuple(differing), detail, of_job=True)
    if target.stage == STAGE_3 and isinstance(target.step(0), InlineTensor):
        detail = (
            "DeepSpeed's stage 3 gives all sub-groups one step tensor, which torch's optimizers "
            "count up once for each: with several, bias corrections run ahead; zero3 has not this"
        )
        yield Note(NoteKind.UNVERIFIED, ("step",), detail, of_job=True)
    casts = {
        (tensor.dtype.torch_name, fqn)
        for group in checkpoint.groups
        for fqn in group.fqns
        for tensor in (checkpoint.params[fqn].weight, *checkpoint.params[fqn].state.values())
        if isinstance(tensor, StoredTensor) and tensor.shape and tensor.dtype is not DType.float32
    }
    if casts:
        names = tuple(dict.fromkeys(fqn for _, fqn in sorted(casts)))
        detail = "weights and optimizer states become fp32, which is what ZeRO keeps"
        yield Note(NoteKind.CAST, names, detail)
    if "scheduler" in checkpoint.objects and "scheduler" not in target.job():
        yield Note(NoteKind.RENAMED, ("scheduler -> lr_scheduler",), "as DeepSpeed asks for it")
