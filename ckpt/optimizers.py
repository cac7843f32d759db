"""One optimizer's hyper-parameters, states and step counts as another class saves them.

`translated` gives a checkpoint as a class of the same rule (Adam, SGD, Adagrad, Lion) saves it.
What is dropped or made up is a note, what would change the training needs the user's consent, and
Adam's states never become SGD's. Which names the classes have: `ckpt.optimizer_classes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.errors import MissingPart, Unsupported
from ckpt.model import Checkpoint, Param, ParamGroup, Plain, Scalar, StoredTensor
from ckpt.note import Note, NoteKind
from ckpt.optimizer_classes import (
    AMSGRAD,
    BIAS_CORRECTION,
    DECOUPLED,
    DEEPSPEED,
    FACTS,
    STEP,
    Guess,
    OptimizerClass,
    Rule,
    StepPlace,
    class_of,
    step_value,
    torch_class,
)
from ckpt.values import read_number

__all__ = [
    "Guess",
    "OptimizerClass",
    "class_of",
    "for_torch",
    "require_elementwise",
    "step_value",
    "torch_class",
    "translated",
]

MAXIMIZE = "maximize"
IMPLEMENTATION = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "initial_accumulator_value", STEP}
)
"""Options that choose how the same is computed, or that matter only when a state is made."""

NEUTRAL: Mapping[str, Plain] = {AMSGRAD: False, MAXIMIZE: False, BIAS_CORRECTION: True} | {
    "lr_decay": 0
}
"""Options, and the value with which a class that lacks them computes the same."""

KNOWN_OPTIONS = frozenset(
    name for facts in FACTS.values() for name in (*facts.needed, *facts.extras)
) | {STEP}
COUNTS_IN_LAST = frozenset({OptimizerClass.FUSED_ADAM, OptimizerClass.FUSED_LION})
"""Classes that, stepping several parameters of a group, count in the last one's state only.
Source: deepspeed 0.19.8 ops/adam/fused_adam.py, ops/lion/fused_lion.py `step`."""


@dataclass(slots=True)
class _Told:
    """What has to be said about options, collected over the groups; ordered sets."""

    dropped: dict[str, None] = field(default_factory=dict)
    changed: dict[str, None] = field(default_factory=dict)
    added: dict[str, None] = field(default_factory=dict)


class _Steps:
    """Step counts as numbers; a tensor that parameters share is read once."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[object, float | int | None]] = {}

    def of(self, param: Param) -> float | int | None:
        """The steps that a parameter's state has seen; None when it does not say."""
        value = param.state.get(STEP)
        if id(value) not in self._read:  # the value is kept, so that its id stays its own
            self._read[id(value)] = (value, read_number(value))
        return self._read[id(value)][1]


def translated(
    checkpoint: Checkpoint, to: OptimizerClass | None = None, *, lenient: bool = False
) -> tuple[Checkpoint, list[Note]]:
    """The checkpoint with the groups, states and steps that an optimizer of class `to` saves.

    Options that no class here knows (`initial_lr` of a scheduler, one's own) stay. Step counts
    become plain numbers; `step_value` gives them in the form that the class keeps.

    Args:
        to: None for the checkpoint's own class, as `class_of` finds it, whose options are
            completed; an unknown class then stays as it is.
        lenient: keep the options that `to` has not got beside its own, and let those be missing
            that cannot be made up: for a target that is read by name.

    Raises:
        Unsupported: another rule's states, such as SGD's for Adam; `maximize` for a class that
            lacks it; an unknown class, when `to` is given.
        MissingPart: a hyper-parameter that cannot be made up, such as lr, when `to` is given.
    """
    guess = class_of(checkpoint)
    target = to or guess.found
    if not checkpoint.has_optimizer or target is None:
        return checkpoint, []
    source = _of_one_rule(checkpoint, guess, target)
    told = _Told()
    tells_decay = to is not None or guess.is_certain
    groups = tuple(
        replace(group, options=_options(group.options, target, told, tells_decay, lenient))
        for group in checkpoint.groups
    )
    if to is not None and not lenient:
        _require_needed(checkpoint, groups, target)
    steps = _Steps()
    counted, notes = _counted(checkpoint, source, steps)
    renamed = _state_names(source, target)
    params = {f: _param(param, renamed, target, steps) for f, param in counted.params.items()}
    notes += [
        *_decay_notes(guess, target, groups, to),
        *_option_notes(told, target),
        *_state_notes(counted, renamed, source, target, steps),
    ]
    return replace(checkpoint, params=params, groups=groups), notes


def for_torch(checkpoint: Checkpoint) -> tuple[Checkpoint, list[Note]]:
    """The checkpoint with what torch's class of the same rule has, beside what it has already.

    For `dcp.load`, which fails on a key that an optimizer has and the folder lacks and ignores
    others. A torch before `decoupled_weight_decay` saved neither Adam nor AdamW, so nothing is
    written for it: a wrong value would change the training without an error.
    """
    found = class_of(checkpoint).found
    if found not in DEEPSPEED:
        return translated(checkpoint, lenient=True)
    to = torch_class(checkpoint)
    return translated(checkpoint, to, lenient=True) if to else (checkpoint, [])


def _of_one_rule(checkpoint: Checkpoint, guess: Guess, target: OptimizerClass) -> OptimizerClass:
    """The source's class, when its states mean something to the target."""
    if guess.found is not None and FACTS[guess.found].rule is FACTS[target].rule:
        return guess.found
    was = guess.found.value if guess.found else f"an unknown optimizer ({guess.why})"
    raise Unsupported(
        f"{checkpoint.origin.path}: the optimizer state is that of {was}, which {target.value} "
        "cannot go on with; choose another optimizer, or convert with --weights-only"
    )


def _options(
    options: Mapping[str, Plain],
    target: OptimizerClass,
    told: _Told,
    tells_decay: bool,
    lenient: bool,
) -> dict[str, Plain]:
    """A group's options as the target has them; what happens to the others is told."""
    facts = FACTS[target]
    done: dict[str, Plain] = {}
    for name in (*facts.needed, *facts.extras):
        fixed = name == DECOUPLED or (name == AMSGRAD and target in DEEPSPEED)
        if name == DECOUPLED and not tells_decay:
            continue
        if name in options and not fixed:
            done[name] = options[name]
        elif name in facts.extras:
            done[name] = facts.extras[name]
        if name in done and name not in options:
            told.added[name] = None
        if name == AMSGRAD and fixed and options.get(AMSGRAD):
            told.changed[f"{AMSGRAD}=True"] = None
    for name, value in options.items():
        if name in done or name == DECOUPLED:
            continue
        if name in KNOWN_OPTIONS:
            _tell(name, value, target, told, lenient)
        if lenient or name not in KNOWN_OPTIONS:
            done[name] = value
    return done


def _tell(name: str, value: Plain, target: OptimizerClass, told: _Told, lenient: bool) -> None:
    """Note an option that the target has not got."""
    if name == MAXIMIZE and value:
        raise Unsupported(f"the source maximises (maximize=True), and {target.value} minimises")
    if name in IMPLEMENTATION or value == NEUTRAL.get(name, value):
        if not lenient:
            told.dropped[f"{name}={value!r}"] = None
    else:
        told.changed[f"{name}={value!r}"] = None


def _require_needed(
    checkpoint: Checkpoint, groups: Sequence[ParamGroup], target: OptimizerClass
) -> None:
    needed = FACTS[target].needed
    missing = [name for name in needed if any(name not in group.options for group in groups)]
    if missing:
        raise MissingPart(
            f"{checkpoint.origin.path}: the param groups have no {', '.join(missing)}, which "
            f"{target.value} needs and nobody can make up; convert with --weights-only"
        )


def _counted(
    checkpoint: Checkpoint, source: OptimizerClass, steps: _Steps
) -> tuple[Checkpoint, list[Note]]:
    """The checkpoint with every parameter's own step count, where the class counts in one."""
    if source not in COUNTS_IN_LAST:
        return checkpoint, []
    params, behind = dict(checkpoint.params), []
    for group in checkpoint.groups:
        counts = {fqn: steps.of(params[fqn]) for fqn in group.fqns}
        largest = max((count for count in counts.values() if count is not None), default=None)
        for fqn, count in counts.items():
            if count is not None and count != largest:
                behind.append(fqn)
                params[fqn] = replace(params[fqn], state={**params[fqn].state, STEP: largest})
    if not behind:
        return checkpoint, []
    detail = f"{source.value} counts steps in the last parameter of a group only; its count is used"
    note = Note(NoteKind.SYNTHESISED, tuple(f"step of {fqn}" for fqn in behind), detail)
    return replace(checkpoint, params=params), [note]


def _state_names(source: OptimizerClass, target: OptimizerClass) -> dict[str, str]:
    """The target's name of each of the source's states that it has."""
    theirs = FACTS[target].states
    return {
        name: theirs[meaning] for meaning, name in FACTS[source].states.items() if meaning in theirs
    }


def _param(
    param: Param, renamed: Mapping[str, str], target: OptimizerClass, steps: _Steps
) -> Param:
    if not param.state:
        return param
    facts, state = FACTS[target], dict[str, StoredTensor | Scalar]()
    step = steps.of(param)
    if step is None and facts.rule is Rule.LION:
        step = 0  # counted and never used
    if step is not None and facts.step is not StepPlace.NOWHERE:
        state[STEP] = int(step) if step == int(step) else step
    state |= {renamed[name]: v for name, v in param.state.items() if name in renamed}
    return replace(param, state=state)


# --- what is said -------------------------------------------------------------------------------


def _decay_notes(
    guess: Guess, target: OptimizerClass, groups: Sequence[ParamGroup], to: OptimizerClass | None
) -> list[Note]:
    """Notes about the class and its weight decay: Adam's is part of the gradient, AdamW's not."""
    if FACTS[target].rule is not Rule.ADAM:
        return []
    decays = any(group.options.get("weight_decay") for group in groups)
    does = guess.decouples
    if does is None and guess.found not in DEEPSPEED:
        return [_unsure(guess, target, decays, to)]
    if not decays:
        return []
    if does is None and target is OptimizerClass.ADAM:
        detail = (
            "DeepSpeed's Adams decouple it unless made with adam_w_mode=False, which no file "
            f"tells; {target.value} does not"
        )
        return [_decay_note(NoteKind.UNVERIFIED, detail, changes=True)]
    if does is False and target in DEEPSPEED:
        detail = f"part of the gradient in the source: make {target.value} with adam_w_mode=False"
        return [_decay_note(NoteKind.UNVERIFIED, detail, changes=False)]
    if does is not None and does is not (target is not OptimizerClass.ADAM):
        how = "decoupled" if does else "part of the gradient"
        detail = f"{how} in the source, the other way in {target.value}: the training changes"
        return [_decay_note(NoteKind.CAST, detail, changes=True)]
    return []


def _decay_note(kind: NoteKind, detail: str, *, changes: bool) -> Note:
    return Note(kind, ("weight decay",), detail, needs_consent=changes, of_job=True)


def _unsure(guess: Guess, target: OptimizerClass, decays: bool, to: OptimizerClass | None) -> Note:
    """A torch before the option saved neither Adam nor AdamW."""
    if to is None:
        detail = "not in the source, so none is written and the optimizer keeps its own"
        return Note(NoteKind.UNVERIFIED, (DECOUPLED,), detail)
    detail = f"the source does not tell Adam from AdamW ({guess.why}); written for {target.value}"
    if decays:
        detail += ", which has to be the one that was trained with: their weight decays differ"
    return Note(NoteKind.UNVERIFIED, ("optimizer class",), detail, of_job=True)


def _option_notes(told: _Told, target: OptimizerClass) -> Iterator[Note]:
    if told.added:
        detail = (
            f"{target.value} has these options and the source does not; its defaults are written"
        )
        yield Note(NoteKind.SYNTHESISED, tuple(sorted(told.added)), detail)
    if told.dropped:
        detail = f"{target.value} has no such options; the training is the same without"
        yield Note(NoteKind.DROPPED, tuple(told.dropped), detail, of_job=True)
    if told.changed:
        detail = f"{target.value} has no such options; the training changes"
        yield Note(NoteKind.DROPPED, tuple(told.changed), detail, needs_consent=True, of_job=True)


def _state_notes(
    checkpoint: Checkpoint,
    renamed: Mapping[str, str],
    source: OptimizerClass,
    target: OptimizerClass,
    steps: _Steps,
) -> Iterator[Note]:
    states = [param.state for param in checkpoint.params.values() if param.state]
    names = dict.fromkeys(name for state in states for name in state)
    moved = tuple(f"{name} -> {renamed[name]}" for name in names if renamed.get(name, name) != name)
    if moved:
        yield Note(NoteKind.RENAMED, moved, f"as {target.value} calls it", of_job=True)
    counts = FACTS[target].step is not StepPlace.NOWHERE
    gone = tuple(name for name in names if name not in renamed and not (counts and name == STEP))
    if gone:
        lossy = source is not OptimizerClass.CPU_LION
        why = "" if lossy else ", and DeepSpeedCPULion never uses it"
        detail = f"{target.value} has no such state{why}"
        yield Note(NoteKind.DROPPED, gone, detail, needs_consent=lossy, of_job=True)
    if counts and any(p.state and steps.of(p) is None for p in checkpoint.params.values()):
        is_lion = FACTS[target].rule is Rule.LION
        detail = "not in the source; " + (
            "Lion counts steps and does not use them, so 0 is written"
            if is_lion
            else f"{target.value} cannot go on without it"
        )
        kind = NoteKind.SYNTHESISED if is_lion else NoteKind.UNVERIFIED
        yield Note(kind, (STEP,), detail, needs_consent=not is_lion, of_job=True)


def require_elementwise(checkpoint: Checkpoint, target: str) -> None:
    """Refuses states that cannot be cut with their parameters, for a target that cuts them.

    Raises:
        Unsupported: a state of another shape (Adafactor's rows and columns, Muon's, quantised
            ones) or in a dtype of no floating point; names it and its parameter.
    """
    for fqn, param in checkpoint.params.items():
        for name, value in param.state.items():
            if name == STEP or not isinstance(value, StoredTensor):
                continue
            if value.shape != param.shape or not value.dtype.is_floating_point:
                raise Unsupported(
                    f"{checkpoint.origin.path}: the optimizer state {name!r} of {fqn} is not one "
                    f"number an element, so {target} cannot cut it with its parameter; convert to "
                    "a format that keeps tensors whole, or with --weights-only"
                )
