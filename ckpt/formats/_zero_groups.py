"""A checkpoint's param groups on their way into flat ones: members, order, states, step counts.

DeepSpeed's optimizer sees one flat parameter where the checkpoint has many, so a flat group has
one step count and every state for all of its elements.

Source: deepspeed 0.19.8 runtime/utils.py (`is_optimized_parameter`), runtime/zero/stage3.py
(`_get_trainable_parameter_groups`), runtime/zero/stage_1_and_2.py (`__init__`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.dtypes import DType
from ckpt.errors import MissingPart, Unsupported
from ckpt.flat_ranges import FlatSource
from ckpt.model import Checkpoint, ParamGroup, Plain, StoredTensor
from ckpt.note import Note, NoteKind
from ckpt.optimizers import (
    OptimizerClass,
    class_of,
    require_elementwise,
    step_value,
    translated,
)
from ckpt.outgoing import job_data
from ckpt.values import read_number

__all__ = ["Flat", "Flattener", "Group", "arranged"]

STEP = "step"
WITHOUT_OPTIMIZER = "load with load_optimizer_states=False and load_lr_scheduler_states=False"


def arranged(
    checkpoint: Checkpoint, like: Checkpoint | None, optimizer: OptimizerClass | None, target: str
) -> tuple[Checkpoint, list[Note]]:
    """The checkpoint with groups, members, order and options as the target job has them.

    Raises:
        Unsupported: states that cannot be cut, or groups that `--like` contradicts.
        MissingPart: no hyper-parameters, neither in the checkpoint nor in `like`.
    """
    require_elementwise(checkpoint, target)
    notes: list[Note] = []
    if checkpoint.has_optimizer:
        checkpoint, notes = _with_options(checkpoint, like)
        checkpoint, told = translated(checkpoint, optimizer)
        notes += told
    if like is None or not like.has_optimizer:
        return _with_a_group(checkpoint, notes)
    members = {fqn for group in like.groups for fqn in group.fqns}
    _require_members(checkpoint, members)
    groups = tuple(replace(group, options=_options_of(checkpoint, group)) for group in like.groups)
    if not checkpoint.has_optimizer:
        notes.append(_note_of_groups(like))
    buffers = {
        name: param.weight
        for name, param in checkpoint.params.items()
        if name in like.buffers and name not in members
    }
    params = {name: p for name, p in checkpoint.params.items() if name not in buffers}
    checkpoint = replace(
        checkpoint, params=params, buffers={**checkpoint.buffers, **buffers}, groups=groups
    )
    return checkpoint, notes


def _with_a_group(checkpoint: Checkpoint, notes: list[Note]) -> tuple[Checkpoint, list[Note]]:
    """One group of all parameters and no hyper-parameters, where the source has no optimizer."""
    if checkpoint.has_optimizer:
        return checkpoint, notes
    detail = (
        f"not in the source: {WITHOUT_OPTIMIZER}; --like CHECKPOINT gives groups and "
        "hyper-parameters for a new optimizer, which loads with the second alone"
    )
    if not checkpoint.origin.keeps_order:
        detail += (
            "; any other load goes by position, and the names are not in the model's order, which "
            "--model gives"
        )
    note = Note(NoteKind.UNVERIFIED, ("optimizer",), detail, of_job=True)
    group = ParamGroup(tuple(checkpoint.params), {})
    return replace(checkpoint, groups=(group,)), [*notes, note]


def _note_of_groups(like: Checkpoint) -> Note:
    """About the groups of a checkpoint that has none of its own."""
    if not all(group.options for group in like.groups):
        detail = f"not in the source, and --like has no hyper-parameters: {WITHOUT_OPTIMIZER}"
        return Note(NoteKind.UNVERIFIED, ("optimizer",), detail, of_job=True)
    detail = "the source has none; those of --like, without any state"
    subjects = ("param groups and hyper-parameters",)
    return Note(NoteKind.SYNTHESISED, subjects, detail, of_job=True)


def _with_options(checkpoint: Checkpoint, like: Checkpoint | None) -> tuple[Checkpoint, list[Note]]:
    """Hyper-parameters of `--like` for groups that have none: elastic checkpoints save none."""
    theirs = {f: group.options for group in (like.groups if like else ()) for f in group.fqns}
    bare = [group.fqns for group in checkpoint.groups if group.fqns and not group.options]
    if not bare:
        return checkpoint, []
    if not theirs:
        raise MissingPart(
            f"{checkpoint.origin.path}: no hyper-parameters in the param groups, and no "
            "optimizer goes on without; --like CHECKPOINT, another of the job, gives them, or "
            "convert with --weights-only"
        )
    for fqns in bare:
        if len({repr(theirs.get(fqn)) for fqn in fqns}) > 1:
            raise Unsupported(
                f"--like: has {fqns[0]} and others, which are one param group of the source, in "
                "groups with different hyper-parameters; give a checkpoint with the same groups"
            )
    groups = tuple(
        replace(group, options=group.options or theirs.get(next(iter(group.fqns), ""), {}))
        for group in checkpoint.groups
    )
    detail = "the source has none; those of --like"
    note = Note(NoteKind.SYNTHESISED, ("hyper-parameters",), detail, of_job=True)
    return replace(checkpoint, groups=groups), [note]


def _require_members(checkpoint: Checkpoint, members: set[str]) -> None:
    missing = sorted(members - checkpoint.params.keys())
    ours = {fqn for group in checkpoint.groups for fqn in group.fqns}
    stray = sorted(f for f in ours - members if checkpoint.params[f].state)
    if missing or stray:
        where = "is not in the source" if missing else "has an optimizer state in the source only"
        raise Unsupported(
            f"--like: {(missing or stray)[0]} {where}; expected a checkpoint of the same model "
            "with the same trained parameters"
        )


def _options_of(checkpoint: Checkpoint, group: ParamGroup) -> Mapping[str, Plain]:
    """The source's hyper-parameters of the members; those of `--like` where it has none."""
    if not checkpoint.has_optimizer:
        return group.options
    of = {fqn: index for index, item in enumerate(checkpoint.groups) for fqn in item.fqns}
    found = {of[fqn] for fqn in group.fqns if fqn in of}
    if len({repr(checkpoint.groups[index].options) for index in found}) > 1:
        raise Unsupported(
            f"--like: has {group.fqns[0]} and {group.fqns[-1]} in one param group, and the source "
            "in groups with different hyper-parameters; give a checkpoint with the same groups"
        )
    return checkpoint.groups[min(found)].options if found else group.options


@dataclass(frozen=True, slots=True)
class Group:
    """One param group: its members that have elements, and its hyper-parameters as saved."""

    fqns: tuple[str, ...]
    options: Mapping[str, Plain]


@dataclass(frozen=True, slots=True)
class Flat:
    """What is flattened alike: fp32 weights and states of some parameters.

    Attributes:
        kinds: the states that are cut like the weights.
        scalars: the others, such as `step`; empty without a state.
    """

    fqns: tuple[str, ...]
    kinds: tuple[str, ...]
    scalars: Mapping[str, Plain]


@dataclass(slots=True)
class Flattener:
    """Flat groups out of a checkpoint whose groups are `arranged`; collects what has to be said."""

    checkpoint: Checkpoint
    sources: dict[tuple[str, str], FlatSource] = field(default_factory=dict)
    without_state: list[str] = field(default_factory=list)
    other_steps: list[str] = field(default_factory=list)

    def groups(self) -> list[Group]:
        """The param groups; parameters without elements are not optimized and not in them."""
        params = self.checkpoint.params
        found = []
        for group in self.checkpoint.groups:
            fqns = tuple(fqn for fqn in group.fqns if params[fqn].weight.numel)
            if fqns:
                found.append(Group(fqns, {k: job_data(v) for k, v in group.options.items()}))
        return found

    def source(self, fqn: str, kind: str | None = None) -> FlatSource | None:
        """A parameter's fp32 weights, or one of its states; None for a state that it has not."""
        param = self.checkpoint.params[fqn]
        tensor = param.weight if kind is None else param.state.get(kind)
        if not isinstance(tensor, StoredTensor):
            return None
        return self.sources.setdefault((fqn, kind or ""), FlatSource(tensor))

    def flat(self, group: Group, fqns: Sequence[str]) -> Flat:
        """The members `fqns` of a group as one flat parameter."""
        kinds = self._kinds(group)
        if not kinds:
            return Flat(tuple(fqns), (), {})
        params = self.checkpoint.params
        self.without_state += [fqn for fqn in fqns if not params[fqn].state]
        return Flat(tuple(fqns), kinds, self._step(group, fqns))

    def _kinds(self, group: Group) -> tuple[str, ...]:
        """States of a group; those of the others where none of its members got a gradient yet."""
        own = self._states_of(group.fqns)
        if own or not group.options.get("momentum", True):  # SGD keeps none without momentum
            return own
        return self._states_of(fqn for other in self.checkpoint.groups for fqn in other.fqns)

    def _states_of(self, fqns: Iterable[str]) -> tuple[str, ...]:
        names = (
            name
            for fqn in fqns
            for name, value in self.checkpoint.params[fqn].state.items()
            if isinstance(value, StoredTensor) and name != STEP
        )
        return tuple(dict.fromkeys(names))

    def _step(self, group: Group, fqns: Sequence[str]) -> dict[str, Plain]:
        counts = self._counts(fqns)
        known = counts or self._counts(group.fqns) or self._counts(self.checkpoint.params)
        if not known:
            return {}
        step = max(known.values())
        self.other_steps += [fqn for fqn, count in counts.items() if count != step]
        found = class_of(self.checkpoint).found
        if found is None:
            return {STEP: int(step) if step == int(step) else step}
        return {STEP: step_value(step, found)}

    def _counts(self, fqns: Iterable[str]) -> dict[str, float]:
        """Step counts by name; a tensor that parameters share is read once."""
        values = {fqn: self.checkpoint.params[fqn].state.get(STEP) for fqn in fqns}
        numbers = {id(value): read_number(value) for value in values.values()}
        return {f: n for f, v in values.items() if (n := numbers[id(v)]) is not None}

    def notes(self) -> list[Note]:
        """What the flattening made up or gave up."""
        notes = []
        if self.without_state:
            detail = (
                "no optimizer state in the source (never got a gradient, or frozen: then give "
                "--like); zeros are written, as DeepSpeed has them"
            )
            subjects = tuple(self.without_state)
            notes.append(Note(NoteKind.SYNTHESISED, subjects, detail, of_job=True))
        if self.other_steps:
            detail = "a flat group has one step count; its largest is written for these"
            subjects = tuple(f"step of {fqn}" for fqn in self.other_steps)
            notes.append(Note(NoteKind.KEPT_ONE, subjects, detail, needs_consent=True, of_job=True))
        narrowed = {
            f"{source.tensor.dtype.torch_name} {kind or 'weights'}"
            for (_, kind), source in self.sources.items()
            if source.tensor.dtype is not DType.float32
        }
        if narrowed:
            detail = "to float32, in which DeepSpeed keeps weights and states"
            notes.append(Note(NoteKind.CAST, tuple(sorted(narrowed)), detail, of_job=True))
        return notes
