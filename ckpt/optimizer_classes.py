"""Which hyper-parameters and states the optimizer classes have, and which class a state is of.

A checkpoint seldom says which class wrote it: `class_of` tells it by the names of its
hyper-parameters and states, and how sure that is.

Source: torch 2.13.0 torch/optim/{adam,adamw,sgd,adagrad}.py (`__init__`, `_init_group`,
`__setstate__`); deepspeed 0.19.8 ops/adam/{fused_adam,cpu_adam}.py, ops/lion/{fused_lion,
cpu_lion}.py, ops/adagrad/cpu_adagrad.py (`__init__`, `step`), runtime/engine.py
(`_configure_basic_optimizer`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from ckpt.dtypes import DType
from ckpt.model import Checkpoint, InlineTensor, Plain
from ckpt.note import summarise

__all__ = [
    "AMSGRAD",
    "BIAS_CORRECTION",
    "DECOUPLED",
    "DEEPSPEED",
    "FACTS",
    "STEP",
    "Facts",
    "Guess",
    "OptimizerClass",
    "Rule",
    "StepPlace",
    "class_of",
    "step_value",
    "torch_class",
]

STEP = "step"
AMSGRAD = "amsgrad"
DECOUPLED = "decoupled_weight_decay"
BIAS_CORRECTION = "bias_correction"  # only DeepSpeed's Adams (and apex's) have it


class OptimizerClass(Enum):
    """The classes whose hyper-parameters and states are known, by what their users call them."""

    ADAMW = "torch.optim.AdamW"
    ADAM = "torch.optim.Adam"
    SGD = "torch.optim.SGD"
    ADAGRAD = "torch.optim.Adagrad"
    FUSED_ADAM = "deepspeed FusedAdam"
    CPU_ADAM = "DeepSpeedCPUAdam"
    FUSED_LION = "deepspeed FusedLion"
    CPU_LION = "DeepSpeedCPULion"
    CPU_ADAGRAD = "DeepSpeedCPUAdagrad"


class Rule(Enum):
    """What an optimizer computes; states have a meaning only within one rule."""

    ADAM = "Adam"
    SGD = "SGD"
    ADAGRAD = "Adagrad"
    LION = "Lion"


class StepPlace(Enum):
    """Where a class keeps the number of steps taken."""

    NOWHERE = "nowhere"
    TENSOR = "a 0-dimensional fp32 tensor in each parameter's state"
    NUMBER = "an int in each parameter's state"


@dataclass(frozen=True, slots=True)
class Facts:
    """One class.

    Attributes:
        needed: hyper-parameters without which there is no training; never made up.
        extras: its other hyper-parameters and what they are when nobody sets them.
        states: its tensors of the parameter's shape, by what the rule calls them.
    """

    rule: Rule
    step: StepPlace
    needed: tuple[str, ...]
    extras: Mapping[str, Plain]
    states: Mapping[str, str]


_ADAM_NEEDS = ("lr", "betas", "eps", "weight_decay")
_ADAM_STATES = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_TORCH_ADAM = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
_AMSGRAD_STATE = {"max_exp_avg_sq": "max_exp_avg_sq"}
_TORCH_SGD = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
_LION = ("lr", "betas", "weight_decay")

FACTS: Mapping[OptimizerClass, Facts] = {
    OptimizerClass.ADAMW: Facts(
        Rule.ADAM,
        StepPlace.TENSOR,
        _ADAM_NEEDS,
        {**_TORCH_ADAM, DECOUPLED: True},
        _ADAM_STATES | _AMSGRAD_STATE,
    ),
    OptimizerClass.ADAM: Facts(
        Rule.ADAM,
        StepPlace.TENSOR,
        _ADAM_NEEDS,
        {**_TORCH_ADAM, DECOUPLED: False},
        _ADAM_STATES | _AMSGRAD_STATE,
    ),
    OptimizerClass.SGD: Facts(
        Rule.SGD,
        StepPlace.NOWHERE,
        ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
        _TORCH_SGD,
        {"momentum": "momentum_buffer"},
    ),
    OptimizerClass.ADAGRAD: Facts(
        Rule.ADAGRAD,
        StepPlace.TENSOR,
        ("lr", "eps", "weight_decay"),
        {"lr_decay": 0, "initial_accumulator_value": 0, **_TORCH_SGD},
        {"sum": "sum"},
    ),
    OptimizerClass.FUSED_ADAM: Facts(
        Rule.ADAM, StepPlace.NUMBER, _ADAM_NEEDS, {BIAS_CORRECTION: True}, _ADAM_STATES
    ),
    OptimizerClass.CPU_ADAM: Facts(
        Rule.ADAM,
        StepPlace.NUMBER,
        _ADAM_NEEDS,
        {BIAS_CORRECTION: True, "amsgrad": False},
        _ADAM_STATES,
    ),
    OptimizerClass.FUSED_LION: Facts(
        Rule.LION, StepPlace.NUMBER, _LION, {}, {"exp_avg": "exp_avg"}
    ),
    OptimizerClass.CPU_LION: Facts(  # allocates an exp_avg_sq that it never reads or writes
        Rule.LION, StepPlace.NUMBER, _LION, {}, {"exp_avg": "exp_avg", "unused": "exp_avg_sq"}
    ),
    OptimizerClass.CPU_ADAGRAD: Facts(
        Rule.ADAGRAD,
        StepPlace.NUMBER,
        ("lr", "eps", "weight_decay"),
        {"amsgrad": False},
        {"sum": "exp_avg_sq"},
    ),
}

DEEPSPEED = frozenset(
    {
        OptimizerClass.FUSED_ADAM,
        OptimizerClass.CPU_ADAM,
        OptimizerClass.FUSED_LION,
        OptimizerClass.CPU_LION,
        OptimizerClass.CPU_ADAGRAD,
    }
)


# --- which class it was -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Guess:
    """The class that an optimizer's state is of, as far as its names tell.

    Attributes:
        found: None for a class that is not known here.
        is_certain: the names leave no other class of the same rule.
        decouples: whether weight decay leaves the moments alone; None where nothing tells.
        why: what it was told by.
    """

    found: OptimizerClass | None
    is_certain: bool = False
    decouples: bool | None = None
    why: str = ""


def class_of(checkpoint: Checkpoint) -> Guess:
    """The class of the checkpoint's optimizer, by the names in its groups and states."""
    options = {name: value for group in checkpoint.groups for name, value in group.options.items()}
    states = {name for param in checkpoint.params.values() for name in param.state} - {STEP}
    if "betas" in options or {"exp_avg", "exp_avg_sq"} <= states:
        if states <= {"exp_avg", "exp_avg_sq"} and "betas" in options and "eps" not in options:
            return _lion(states)
        return _adam(checkpoint, options, states)
    if states <= {"momentum_buffer"} and (states or "dampening" in options):
        return Guess(OptimizerClass.SGD, True, None, "momentum and dampening")
    if states <= {"sum"} and (states or "initial_accumulator_value" in options):
        return Guess(OptimizerClass.ADAGRAD, True, None, "the state `sum`")
    if states <= {"exp_avg_sq"} and {"eps", "amsgrad"} <= options.keys():
        return Guess(OptimizerClass.CPU_ADAGRAD, True, None, "exp_avg_sq without betas")
    return Guess(None, why=f"its states are {summarise(sorted(states)) or 'none'}")


def _lion(states: set[str]) -> Guess:
    found = OptimizerClass.CPU_LION if "exp_avg_sq" in states else OptimizerClass.FUSED_LION
    return Guess(found, found is OptimizerClass.CPU_LION, True, "betas without eps")


def _adam(checkpoint: Checkpoint, options: Mapping[str, Plain], states: set[str]) -> Guess:
    """Adam in one of its four spellings, or some other rule with betas."""
    if not states <= {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
        return Guess(None, why=f"its states are {summarise(sorted(states))}")
    if BIAS_CORRECTION in options:
        is_cpu = "amsgrad" in options
        found = OptimizerClass.CPU_ADAM if is_cpu else OptimizerClass.FUSED_ADAM
        return Guess(found, True, _configured_mode(checkpoint), f"the option {BIAS_CORRECTION}")
    told = options.get(DECOUPLED)
    if isinstance(told, bool):
        found = OptimizerClass.ADAMW if told else OptimizerClass.ADAM
        return Guess(found, True, told, f"{DECOUPLED}={told}")
    return Guess(OptimizerClass.ADAMW, False, None, f"Adam's states without {DECOUPLED}")


def _configured_mode(checkpoint: Checkpoint) -> bool | None:
    """Whether DeepSpeed's configuration made a decoupled Adam; no file but it says so.

    Source: deepspeed 0.19.8 runtime/engine.py: type AdamW, or adam_w_mode, on by default.
    """
    config = checkpoint.objects.get("ds_config")
    section = config.get("optimizer") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return None
    parameters = section.get("params")
    mode = parameters.get("adam_w_mode", True) if isinstance(parameters, Mapping) else True
    return str(section.get("type", "")).lower() == "adamw" or bool(mode)


def torch_class(checkpoint: Checkpoint) -> OptimizerClass | None:
    """The class of torch.optim that computes what the checkpoint's optimizer does, if any."""
    guess = class_of(checkpoint)
    if guess.found in (OptimizerClass.FUSED_ADAM, OptimizerClass.CPU_ADAM):
        return OptimizerClass.ADAM if guess.decouples is False else OptimizerClass.ADAMW
    if guess.found is OptimizerClass.CPU_ADAGRAD:
        return OptimizerClass.ADAGRAD
    return None if guess.found in DEEPSPEED else guess.found


def step_value(number: float, target: OptimizerClass) -> InlineTensor | int:
    """A step count in the form that the class keeps it in a parameter's state.

    torch's Adams and Adagrad: a 0-dimensional fp32 tensor; DeepSpeed's own classes: an int. All
    of them keep it in each state; FusedAdam and FusedLion put a `step` into the group as well,
    which starts at 0 and never counts.
    """
    if FACTS[target].step is StepPlace.TENSOR:
        return InlineTensor(DType.float32, (), struct.pack("<f", number))
    return int(number)
