"""What the ZeRO formats share once their flat partitions are cut: building the checkpoint.

Source: deepspeed 0.19.8 runtime/engine.py (`_common_checkpoint_state`, `_get_shared_params`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt.dtypes import DType
from ckpt.formats._deepspeed import job_objects, model_state
from ckpt.model import Checkpoint, Opaque, Origin, Param, ParamGroup, Plain, StoredTensor
from ckpt.names import CleanNames, clean_names
from ckpt.note import Note, NoteKind
from ckpt.training_dict import BUFFER_SUFFIXES, find_ties

__all__ = ["Trained", "build"]

State = Mapping[str, StoredTensor | Any]
PER_RANK_BUFFERS = (
    "every rank has its own, which DeepSpeed does not synchronise; those of rank 0 are taken"
)


@dataclass(slots=True)
class Trained:
    """What the optimizer files of all ranks hold, under the names as saved.

    Attributes:
        masters: fp32 weights of the trained parameters.
        states: their optimizer states.
        groups: members and hyper-parameters of each param group.
        frozen: weights of frozen parameters, where they are kept in fragments.
    """

    masters: dict[str, StoredTensor] = field(default_factory=dict)
    states: dict[str, State] = field(default_factory=dict)
    groups: list[tuple[list[str], Mapping[str, Plain]]] = field(default_factory=list)
    frozen: dict[str, StoredTensor] = field(default_factory=dict)


def build(
    content: Mapping[str, Any],
    path: Path,
    trained: Trained,
    loss_scaler: Plain,
    origin: Origin,
    notes: Sequence[Note] = (),
) -> Checkpoint:
    """The checkpoint of a model_states file and what the optimizer files hold."""
    module = model_state(content, path)
    aliases = _aliases(content, module)
    cleaned = clean_names([*module, *trained.masters, *trained.frozen, *aliases])
    frozen = _frozen(content, module, trained, aliases)
    buffers = _buffer_names(content, module) - trained.masters.keys() - frozen.keys()
    ties = aliases | _module_ties(module, trained.masters, aliases)
    unknown = [
        name
        for name in module
        if name not in trained.masters and name not in frozen
        and name not in buffers and name not in ties
    ]  # fmt: skip
    lp_dtypes = {name: tensor.dtype for name, tensor in module.items()}
    params = {
        cleaned[name]: _param(name, module, trained, frozen, lp_dtypes)
        for name in module
        if name in trained.masters or name in frozen
    }
    order = [name for name in module if name not in unknown]
    order += [name for name in ties if name not in module]
    return Checkpoint(
        params=params,
        buffers={cleaned[name]: module[name] for name in module if name in buffers},
        order=tuple(cleaned[name] for name in order),
        ties={cleaned[alias]: cleaned[owner] for alias, owner in ties.items()},
        groups=_groups(trained, cleaned),
        objects=_objects(content, loss_scaler),
        origin=_with_names(origin, cleaned),
        notes=(*notes, *_notes(unknown, buffers, module, content, trained, origin)),
    )


def _aliases(content: Mapping[str, Any], module: Mapping[str, StoredTensor]) -> dict[str, str]:
    """`shared_params`, without names under which the module holds weights of their own."""
    shared = {str(a): str(o) for a, o in (content.get("shared_params") or {}).items()}
    own = {name for name, tensor in module.items() if tensor.numel}
    return {
        alias: owner
        for alias, owner in shared.items()
        if alias not in own or module[alias] is module.get(owner)
    }


def _param(
    name: str,
    module: Mapping[str, StoredTensor],
    trained: Trained,
    frozen: Mapping[str, StoredTensor],
    lp_dtypes: Mapping[str, DType],
) -> Param:
    if name in frozen:
        return Param(frozen[name], lp_dtype=frozen[name].dtype, trainable=False)
    master, value = trained.masters[name], module[name]
    whole = value if value.shape == master.shape and value.numel else None
    return Param(whole, master, lp_dtypes[name], trained.states.get(name, {}))


def _frozen(
    content: Mapping[str, Any],
    module: Mapping[str, StoredTensor],
    trained: Trained,
    aliases: Mapping[str, str],
) -> dict[str, StoredTensor]:
    """Weights of parameters that no optimizer holds: fragments (stage 3) or the module's own."""
    buffers = _buffer_names(content, module)
    whole = {
        name: tensor
        for name, tensor in module.items()
        if name not in trained.masters and name not in buffers and name not in aliases
        and tensor.numel
    }  # fmt: skip
    owned = {id(module[name]) for name in trained.masters if name in module}
    tied = {name for name, tensor in whole.items() if id(tensor) in owned}
    return {n: t for n, t in whole.items() if n not in tied} | trained.frozen


def _buffer_names(content: Mapping[str, Any], module: Mapping[str, StoredTensor]) -> set[str]:
    listed = content.get("buffer_names")
    if listed is not None:
        return {name for name in map(str, listed) if name in module}
    return {
        name
        for name, tensor in module.items()
        if name.endswith(BUFFER_SUFFIXES) or not tensor.dtype.is_floating_point
    }


def _module_ties(
    module: Mapping[str, StoredTensor], masters: Iterable[str], aliases: Mapping[str, str]
) -> dict[str, str]:
    """Names in `module` that are one view of one storage; the trained one is the owner."""
    trained = set(masters)
    ties = {}
    for alias, owner in find_ties(module).items():
        if alias in trained and owner not in trained:
            alias, owner = owner, alias
        if alias not in aliases and alias not in aliases.values():
            ties[alias] = owner
    return ties


def _groups(trained: Trained, cleaned: CleanNames) -> tuple[ParamGroup, ...]:
    return tuple(
        ParamGroup(tuple(cleaned[name] for name in members), options)
        for members, options in trained.groups
    )


def _objects(content: Mapping[str, Any], loss_scaler: Plain) -> dict[str, Plain]:
    objects = job_objects(content)
    if isinstance(loss_scaler, Opaque) and loss_scaler.type_name.endswith("DynamicLossScaler"):
        objects["loss_scaler"] = loss_scaler
    return objects


def _with_names(origin: Origin, cleaned: CleanNames) -> Origin:
    return Origin(origin.format, origin.path, origin.writer, origin.world_size, cleaned.stripped)


def _notes(
    unknown: Sequence[str],
    buffers: set[str],
    module: Mapping[str, StoredTensor],
    content: Mapping[str, Any],
    trained: Trained,
    origin: Origin,
) -> list[Note]:
    notes = []
    if unknown:
        detail = (
            "the checkpoint has the name and no weights (a tied weight of DeepSpeed before 0.9.2?)"
        )
        notes.append(Note(NoteKind.DROPPED, tuple(unknown), detail, needs_consent=True))
    excluded = [
        str(name)
        for name in content.get("frozen_param_shapes") or ()
        if name not in module and name not in trained.frozen
    ]
    if excluded:
        detail = "saved with exclude_frozen_parameters; take these from the base model"
        notes.append(Note(NoteKind.DROPPED, tuple(excluded), detail))
    if buffers and (origin.world_size or 1) > 1:
        notes.append(Note(NoteKind.KEPT_ONE, tuple(sorted(buffers)), PER_RANK_BUFFERS))
    return notes
