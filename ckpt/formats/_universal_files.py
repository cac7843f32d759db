"""What goes into the files of a universal checkpoint, for the ZeRO stage that is to read them.

Source: deepspeed 0.19.8 checkpoint/ds_to_universal.py, runtime/engine.py (`load_checkpoint`,
`_load_checkpoint`, `_common_checkpoint_state`), runtime/base_optimizer.py
(`load_hp_checkpoint_state_from_checkpoint_dir`), runtime/zero/stage3.py
(`load_hp_checkpoint_state_from_checkpoint_dir_stage3`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.checks import step_of
from ckpt.dtypes import DType
from ckpt.flat_ranges import FlatRange, FlatSource, flat_tensor
from ckpt.format import WeightDType
from ckpt.model import Checkpoint, InlineTensor, Opaque, Param, ParamGroup, Plain, StoredTensor
from ckpt.optimizers import OptimizerClass, step_value
from ckpt.outgoing import job_data, named_objects
from ckpt.plan import FlatTensor, OutTensor

__all__ = [
    "LATEST",
    "MASTER",
    "OPTIMIZER_STATE",
    "PARAM",
    "STAGE_3",
    "STEP",
    "SUFFIX",
    "Target",
    "module_only",
    "parameter_files",
    "same_options",
]

STAGE_3 = 3
LATEST, OPTIMIZER_STATE, SUFFIX = "latest_universal", "optimizer_state.pt", ".pt"
MASTER, STEP, PARAM, CAT_DIM = "fp32", "step", "param", "cat_dim"  # checkpoint/constants.py
SCALER, SCHEDULER = "loss_scaler", "lr_scheduler"
RESERVED = (
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "frozen_param_fragments",
    "shared_params",
    "ds_version",
    "dp_world_size",
    "mp_world_size",
    "checkpoint_parallel_dimensions",
)
"""Keys of a model_states file that a job's own objects may not have."""

ALWAYS: Mapping[str, Plain] = {
    SCHEDULER: None,
    "data_sampler": None,
    "random_ltd": None,
    "skipped_steps": 0,
}
"""Keys that the engine asks for, and what they are where the source has none."""


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint on its way into a universal folder.

    Attributes:
        names: the name of each parameter there: the first of those it is tied under, as in
            `named_parameters()`, by which DeepSpeed looks for it.
        optimizer: the class in whose form steps are written; None to leave them as they are.
        steps: of each param group; None where there is none.
    """

    checkpoint: Checkpoint
    stage: int
    ds_version: str
    dtype: WeightDType | None
    names: Mapping[str, str]
    optimizer: OptimizerClass | None
    steps: Sequence[float | int | None]

    @property
    def tag(self) -> str:
        """The folder's name; HF's Trainer looks for `global_step*`."""
        return f"global_step{self.global_steps}_universal"

    @property
    def global_steps(self) -> int:
        """The job's counter, else the optimizer's."""
        counter = self.checkpoint.objects.get("global_steps")
        return int(counter if isinstance(counter, int) else step_of(self.checkpoint) or 0)

    def step(self, index: int) -> Plain:
        """The step of a param group as its optimizer keeps it."""
        number = self.steps[index]
        if number is None or self.optimizer is None:
            return number
        return step_value(number, self.optimizer)

    # --- files ----------------------------------------------------------------------------------

    def model_states(self) -> dict[str, Plain]:
        """The model_states file of the only rank there is."""
        checkpoint = self.checkpoint
        frozen = {self.names[fqn]: checkpoint.params[fqn] for fqn in checkpoint.frozen}
        has_fragments = self.stage > 1  # engine.py: saved where gradients are partitioned
        shapes = OrderedDict((name, _size(param.shape)) for name, param in frozen.items())
        owners = {alias: checkpoint.ties[alias] for alias in checkpoint.ties}
        return {
            "module": self._module(),
            "buffer_names": list(checkpoint.buffers),
            "optimizer": None,
            "param_shapes": [self._shapes(group) for group in checkpoint.groups],
            "frozen_param_shapes": shapes if has_fragments else None,
            "shared_params": {
                name: self.names[owner]
                for owner in owners.values()
                if owner in self.names
                for name in (owner, *(a for a, o in owners.items() if o == owner))
                if name != self.names[owner]
            },
            "frozen_param_fragments": OrderedDict(
                (name, self._fragment(param)) for name, param in frozen.items()
            )
            if has_fragments
            else None,
            **ALWAYS,
            "global_steps": self.global_steps,
            **{name: job_data(value) for name, value in self.job().items()},
            "dp_world_size": 1,
            "mp_world_size": 1,
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
            "ds_version": self.ds_version,
        }

    def job(self) -> dict[str, Plain]:
        """The rest of the job; a script's `scheduler` under the name that the engine asks for."""
        objects = named_objects(self.checkpoint, RESERVED)
        objects.pop(SCALER, None)
        if SCHEDULER not in objects and isinstance(objects.get("scheduler"), Mapping):
            objects[SCHEDULER] = objects.pop("scheduler")
        return objects

    def optimizer_state(self) -> dict[str, Plain]:
        """`optimizer_state.pt`: what is not cut, and the param groups."""
        groups = [
            {**{k: job_data(v) for k, v in group.options.items()}, "params": [index]}
            for index, group in enumerate(self.checkpoint.groups)
        ]
        enum = "deepspeed.runtime.zero.config.ZeroStageEnum"
        state: dict[str, Plain] = {
            "zero_stage": Opaque(enum, {"args": (self.stage,), "state": None}),
            "overflow": False,
        }
        scaler = self.checkpoint.objects.get(SCALER)
        if isinstance(scaler, Opaque):
            state |= {SCALER: scaler, "dynamic_loss_scale": True}
        if self.stage == STAGE_3:
            same = same_options(self.checkpoint.groups)
            agreed = [{k: v for k, v in g.items() if k in (*same, "params")} for g in groups]
            steps = {index: {STEP: self.step(index)} for index in range(len(groups))}
            inner = {"state": steps, "param_groups": agreed}
            return {**state, "partition_count": 1, "optimizer_state_dict": inner} | {
                "param_groups": groups
            }
        sizes = [len(group.fqns) for group in self.checkpoint.groups]
        return {
            **state,
            "group_paddings": [0] * len(groups),
            "param_alignment_paddings": [[0] * size for size in sizes],
            "partition_count": [1] * len(groups),
            "ds_version": self.ds_version,
            "param_groups": groups,
        }

    # --- weights as the model computes with them --------------------------------------------------

    def _module(self) -> OrderedDict[str, Plain]:
        checkpoint = self.checkpoint
        owners: dict[str, Plain] = {f: self._weight(p) for f, p in checkpoint.params.items()}
        owners |= {fqn: OutTensor.of(buffer) for fqn, buffer in checkpoint.buffers.items()}
        module = OrderedDict((n, owners[checkpoint.ties.get(n, n)]) for n in checkpoint.order)
        module.update((name, job_data(value)) for name, value in checkpoint.extra_state.items())
        return module

    def _weight(self, param: Param) -> Plain:
        """The 16-bit weight; under stage 3 the empty tensor that DeepSpeed leaves in its place."""
        dtype = self._dtype(param)
        if self.stage == STAGE_3:
            return InlineTensor(dtype, (0,), b"")
        if param.value is not None and param.value.dtype is dtype:
            return OutTensor.of(param.value)
        return OutTensor.of(param.weight, dtype)

    def _dtype(self, param: Param) -> DType:
        if not param.weight.dtype.is_floating_point:
            return param.weight.dtype
        own = param.value.dtype if param.value else param.lp_dtype
        return (self.dtype.dtype if self.dtype else None) or own or param.weight.dtype

    def _fragment(self, param: Param) -> Plain:
        if self.stage != STAGE_3:
            return self._weight(param)
        return flattened(param.weight, self._dtype(param))

    def _shapes(self, group: ParamGroup) -> OrderedDict[str, Opaque]:
        params = self.checkpoint.params
        return OrderedDict((self.names[fqn], _size(params[fqn].shape)) for fqn in group.fqns)


def parameter_files(target: Target, states: Sequence[str]) -> Iterator[tuple[str, str, Plain]]:
    """Name, file stem and content of every file of the trained parameters.

    Args:
        states: the optimizer states to write; zeros stand for those that a parameter lacks.
    """
    for index, group in enumerate(target.checkpoint.groups):
        step = target.step(index)
        for fqn in group.fqns:
            param, name = target.checkpoint.params[fqn], target.names[fqn]
            yield name, MASTER, _content(target, param.weight, param)
            for state in states:
                value = param.state.get(state)
                tensor = value if isinstance(value, StoredTensor) else None
                yield name, state, _content(target, tensor, param)
            if target.stage != STAGE_3 and step is not None:
                yield name, STEP, step


def _content(target: Target, tensor: StoredTensor | None, param: Param) -> Plain:
    """A parameter's file: bare and flat for stage 3, else a dict around the whole tensor."""
    if tensor is None:
        zeros: Any = FlatTensor(DType.float32, param.weight.numel, ())
        return zeros if target.stage == STAGE_3 else {CAT_DIM: 0, PARAM: zeros}
    if target.stage == STAGE_3:
        return flattened(tensor, DType.float32)
    return {CAT_DIM: 0, PARAM: OutTensor.of(tensor, DType.float32)}


def module_only(target: Target) -> Iterator[tuple[str, str, Plain]]:
    """Files of what no optimizer holds (frozen, buffers, second names), as stages 1 and 2 get.

    As ds_to_universal makes them: out of the weights as the model computes with them.
    """
    checkpoint = target.checkpoint
    trained = {target.names[fqn] for group in checkpoint.groups for fqn in group.fqns}
    for name in checkpoint.order:
        owner = checkpoint.ties.get(name, name)
        tensor = checkpoint.buffers.get(owner)
        if name not in trained:
            param = checkpoint.params.get(owner)
            weight = tensor if param is None else param.value or param.weight
            assert weight is not None, "a name in the order is a parameter's or a buffer's"
            yield name, MASTER, {PARAM: OutTensor.of(weight, DType.float32)}


def flattened(tensor: StoredTensor, dtype: DType) -> FlatTensor:
    """The whole tensor as one flat one."""
    whole = FlatRange(0, FlatSource(tensor), 0, tensor.numel)
    return flat_tensor(dtype, tensor.numel, [whole])


def same_options(groups: Sequence[ParamGroup]) -> tuple[str, ...]:
    """The hyper-parameters that all groups have alike.

    DeepSpeed's stage 3 gives those of the first group to all; one that is left out stays what the
    engine's own configuration made it, group by group.
    """
    first, *others = groups
    return tuple(
        name
        for name, value in first.options.items()
        if all(name in other.options and other.options[name] == value for other in others)
    )


def _size(shape: Sequence[int]) -> Opaque:
    return Opaque("torch.Size", {"args": (tuple(shape),), "state": None})
