"""A checkpoint's parts on their way into files: weights in the chosen dtype, plain job data.

What two or more writers need: the state dict with tied names shared, the optimizer by number or
by FQN, and the rest of the job as data that every torch can load with weights_only=True.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckpt.dtypes import DType
from ckpt.format import WeightDType, WriteOptions
from ckpt.model import (
    Checkpoint,
    InlineTensor,
    Opaque,
    Param,
    Plain,
    Scalar,
    StoredTensor,
)
from ckpt.note import Note, NoteKind
from ckpt.plan import OutTensor

__all__ = [
    "attributes",
    "job_data",
    "named_objects",
    "optimizer_tree",
    "out_state",
    "plain_notes",
    "state_dict",
    "weight_notes",
]

STEP = "step"


def state_dict(checkpoint: Checkpoint, options: WriteOptions) -> dict[str, OutTensor]:
    """The model's state dict in its order; a tied name holds the same object as its owner."""
    owners: dict[str, OutTensor] = {
        fqn: _weight(param, options.dtype) for fqn, param in checkpoint.params.items()
    }
    owners |= {fqn: OutTensor.of(buffer) for fqn, buffer in checkpoint.buffers.items()}
    return {name: owners[checkpoint.ties.get(name, name)] for name in checkpoint.order}


def _weight(param: Param, choice: WeightDType | None) -> OutTensor:
    weight = param.weight
    if choice is None or not weight.dtype.is_floating_point:
        return OutTensor.of(weight)
    dtype = choice.dtype or (param.value.dtype if param.value else param.lp_dtype or weight.dtype)
    same = param.value is not None and param.value.dtype is dtype and dtype is not DType.float32
    return OutTensor.of(param.value if same and param.value else weight, dtype)


def weight_notes(checkpoint: Checkpoint, options: WriteOptions) -> list[Note]:
    """Notes about weights that change their dtype."""
    changes: dict[tuple[DType, DType], list[str]] = {}
    for fqn, param in checkpoint.params.items():
        out = _weight(param, options.dtype)
        if out.dtype is not param.weight.dtype:
            changes.setdefault((param.weight.dtype, out.dtype), []).append(fqn)
    return [
        Note(NoteKind.CAST, tuple(names), f"{before.torch_name} to {after.torch_name}, as asked")
        for (before, after), names in changes.items()
    ]


def optimizer_tree(
    checkpoint: Checkpoint, key: Callable[[str, int], Any], *, with_names: bool
) -> dict[str, Plain]:
    """`{"state": ..., "param_groups": [...]}` as torch's optimizers save it.

    Args:
        key: the key of a parameter's state, from its FQN and its number in group order.
        with_names: add `param_names` to each group.
    """
    state: dict[Any, Plain] = {}
    groups, number = [], 0
    for group in checkpoint.groups:
        keys = []
        for fqn in group.fqns:
            member = key(fqn, number)
            keys.append(member)
            number += 1
            values = checkpoint.params[fqn].state
            if values:
                state[member] = {name: out_state(name, value) for name, value in values.items()}
        names = {"param_names": list(group.fqns)} if with_names else {}
        options = {name: job_data(value) for name, value in group.options.items()}
        groups.append({**options, "params": keys, **names})
    return {"state": state, "param_groups": groups}


def out_state(name: str, value: StoredTensor | Scalar) -> Plain:
    """An optimizer state value for a torch optimizer: `step` becomes a 0-dim fp32 tensor."""
    if isinstance(value, StoredTensor):
        return OutTensor.of(value)
    if name == STEP and isinstance(value, int | float):
        return InlineTensor(DType.float32, (), struct.pack("<f", value))
    return value


def job_data(value: Plain) -> Plain:
    """Plain data with `Opaque` instances as dicts of their attributes, tensors ready to go."""
    if isinstance(value, Opaque):
        return job_data(attributes(value))
    if isinstance(value, StoredTensor):
        return OutTensor.of(value)
    if isinstance(value, Mapping):
        return {job_data(k): job_data(v) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(job_data(item) for item in value)
    if isinstance(value, list):
        return [job_data(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return value if isinstance(value, WEIGHTS_ONLY_TYPES) else str(value)


WEIGHTS_ONLY_TYPES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    type(None),
    DType,
    InlineTensor,
)
"""What torch.load(weights_only=True) gives back; a DType is written as torch's own."""


def attributes(value: Opaque) -> Plain:
    """What an instance holds, as plain data: its only argument, or its attributes."""
    state = value.state
    if isinstance(state, Mapping) and set(state) == {"args", "state"}:
        args: Sequence[Any] = state["args"]
        if value.type_name.startswith("pathlib."):
            return "/".join(str(arg) for arg in args).replace("//", "/")
        return args[0] if len(args) == 1 and not state["state"] else state
    return state


def plain_notes(objects: Mapping[str, Plain], taken: Sequence[str]) -> list[Note]:
    """Notes about job data that is written as something else than it was, or under another name."""
    notes = []
    changed = tuple(name for name, tree in objects.items() if _changes(tree))
    if changed:
        detail = (
            "objects of a class become dicts of their attributes, numpy arrays tensors, sets "
            "lists, others their text"
        )
        notes.append(Note(NoteKind.CAST, changed, detail))
    renamed = tuple(f"{o} -> {n}" for o, n in _job_names(objects, taken).items() if o != n)
    if renamed:
        notes.append(Note(NoteKind.RENAMED, renamed, "the name is taken in the output"))
    return notes


def _changes(tree: Plain) -> bool:
    """True when `job_data` gives something else than it got."""
    if isinstance(tree, Mapping):
        return any(_changes(key) or _changes(value) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return any(_changes(value) for value in tree)
    return not isinstance(tree, (*WEIGHTS_ONLY_TYPES, StoredTensor))


def named_objects(checkpoint: Checkpoint, taken: Sequence[str]) -> dict[str, Plain]:
    """The rest of the job by its own names, with underscores after those that are taken."""
    names = _job_names(checkpoint.objects, taken)
    return {names[name]: value for name, value in checkpoint.objects.items()}


def _job_names(objects: Mapping[str, Plain], taken: Sequence[str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name in objects:
        free = name
        while free in taken or free in names.values() or (free != name and free in objects):
            free += "_"
        names[name] = free
    return names
