"""What the ZeRO formats share once their flat partitions are cut: building the checkpoint.

Source: deepspeed 0.19.8 runtime/engine.py (`_common_checkpoint_state`, `_get_shared_params`,
`_get_zero_frozen_param_attributes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from ckpt.errors import Unsupported
from ckpt.formats._deepspeed import job_objects, model_state
from ckpt.formats._trainer_files import job_beside, trainer_files
from ckpt.model import Checkpoint, Opaque, Origin, Param, ParamGroup, Plain, StoredTensor
from ckpt.names import clean_names, is_buffer
from ckpt.note import Note, NoteKind
from ckpt.training_dict import find_ties

__all__ = ["Trained", "build", "flat_states"]

PLACEHOLDER = (0,)  # the shape that stage 3 leaves in the module for every parameter

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

    def under(self, names: Mapping[str, str]) -> Trained:
        """The same under other names."""
        return Trained(
            {names[name]: tensor for name, tensor in self.masters.items()},
            {names[name]: state for name, state in self.states.items()},
            [([names[name] for name in members], options) for members, options in self.groups],
            {names[name]: tensor for name, tensor in self.frozen.items()},
        )


def flat_states(
    states: Sequence[Mapping[str, Plain]],
    sizes: Sequence[tuple[int, ...]],
    where: str,
    need_optimizer: bool,
) -> tuple[dict[str, list[StoredTensor]], dict[str, Plain]]:
    """The optimizer's flat states by name, a tensor a rank, and its scalars such as `step`.

    Args:
        states: the flat parameter's state on each rank.
        sizes: the numbers of elements that a state cut like the parameter may have on each rank.

    Raises:
        Unsupported: a state is not cut like the parameter (Muon's momentum), and is needed.
    """
    scalars = {
        name: value
        for name, value in states[0].items()
        if value is not None and not (isinstance(value, StoredTensor) and value.shape)
    }
    flat = {}
    for name in dict.fromkeys(name for state in states for name in state if name not in scalars):
        tensors = [state.get(name) for state in states]
        if all(value is None for value in tensors):
            continue
        cut = [t for t in tensors if isinstance(t, StoredTensor)]
        fits = len(cut) == len(sizes) and all(
            tensor.numel in allowed for tensor, allowed in zip(cut, sizes, strict=True)
        )
        if fits:
            flat[name] = cut
        elif need_optimizer:
            raise Unsupported(
                f"{where}: the optimizer state {name!r} is not cut like its parameters, so it "
                "cannot be converted; --weights-only takes the weights"
            )
    return flat, scalars


def build(
    content: Mapping[str, Any],
    path: Path,
    trained: Trained,
    loss_scaler: Plain,
    origin: Origin,
    notes: Sequence[Note] = (),
) -> Checkpoint:
    """The checkpoint of a model_states file and what the optimizer files hold."""
    raw = model_state(content, path)
    names = clean_names(raw)
    module = _under(raw, names.by_original)
    own = clean_names([*trained.masters, *trained.frozen])
    trained = trained.under(own.by_original)
    aliases = _aliases(content, module)
    buffers = _buffers(content, raw, names.by_original) - trained.masters.keys()
    ties = aliases | _module_ties(module, trained.masters, aliases)
    frozen = _frozen(module, trained, buffers, ties, has_placeholders=origin.format == "zero3")
    every = dict.fromkeys([*module, *trained.masters, *frozen, *ties])
    owners = [name for name in every if name in trained.masters or name in frozen]
    params = {name: _param(name, module, trained, frozen) for name in owners}
    ties = {alias: owner for alias, owner in ties.items() if owner in params or owner in buffers}
    known = params.keys() | buffers | ties.keys()
    lost = [name for name in every if name not in known]
    root = path.parent.parent
    objects, left_out = _objects(content, loss_scaler, root)
    stripped = tuple(dict.fromkeys([*names.stripped, *own.stripped]))
    return Checkpoint(
        params=params,
        buffers={name: module[name] for name in module if name in buffers},
        order=tuple(name for name in every if name in known),
        ties=ties,
        groups=tuple(ParamGroup(tuple(members), options) for members, options in trained.groups),
        objects=objects,
        origin=replace(origin, stripped=stripped, trainer_files=trainer_files(root)),
        notes=(*notes, *_notes(lost, sorted(buffers), content, origin), *left_out),
    )


T = TypeVar("T")


def _under(tensors: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    return {names[name]: tensor for name, tensor in tensors.items()}


def _aliases(content: Mapping[str, Any], module: Mapping[str, StoredTensor]) -> dict[str, str]:
    """`shared_params`, but for names under which the module holds something of its own.

    DeepSpeed takes parameters without elements for tied, since their addresses are all 0.
    """
    shared = {str(a): str(o) for a, o in (content.get("shared_params") or {}).items()}
    clean = clean_names([*shared, *shared.values()])
    pairs = {clean[alias]: clean[owner] for alias, owner in shared.items()}
    return {
        alias: owner
        for alias, owner in pairs.items()
        if alias not in module
        or module[alias] is module.get(owner)
        or module[alias].shape == PLACEHOLDER
    }


def _param(
    name: str,
    module: Mapping[str, StoredTensor],
    trained: Trained,
    frozen: Mapping[str, StoredTensor],
) -> Param:
    if name in frozen:
        return Param(frozen[name], lp_dtype=frozen[name].dtype)
    master, value = trained.masters[name], module.get(name)
    whole = value if value is not None and value.shape == master.shape and value.numel else None
    return Param(whole, master, value.dtype if value else None, trained.states.get(name, {}))


def _frozen(
    module: Mapping[str, StoredTensor],
    trained: Trained,
    buffers: set[str],
    ties: Mapping[str, str],
    *,
    has_placeholders: bool,
) -> dict[str, StoredTensor]:
    """Weights of parameters that no optimizer holds: fragments (stage 3) or the module's own.

    Args:
        has_placeholders: empty tensors in the module stand for parameters (stage 3).
    """
    whole = {
        name: tensor
        for name, tensor in module.items()
        if name not in trained.masters and name not in buffers and name not in ties
    }
    return {n: t for n, t in whole.items() if t.numel or not has_placeholders} | trained.frozen


def _buffers(
    content: Mapping[str, Any], raw: Mapping[str, StoredTensor], names: Mapping[str, str]
) -> set[str]:
    listed = content.get("buffer_names")
    if listed is not None:
        return {names[name] for name in map(str, listed) if name in raw}
    return {names[name] for name, tensor in raw.items() if is_buffer(name, tensor.dtype)}


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


def _objects(
    content: Mapping[str, Any], loss_scaler: Plain, root: Path
) -> tuple[dict[str, Plain], tuple[Note, ...]]:
    """The rest of the job, a trainer's files at the root included, and a note about the others."""
    objects = job_objects(content)
    if isinstance(loss_scaler, Opaque) and loss_scaler.type_name.endswith("DynamicLossScaler"):
        objects["loss_scaler"] = loss_scaler
    beside, left_out = job_beside(root, taken=objects)
    return objects | beside, left_out


def _notes(
    lost: Sequence[str], buffers: Sequence[str], content: Mapping[str, Any], origin: Origin
) -> list[Note]:
    notes = []
    if lost:
        detail = (
            "the checkpoint has the name and no weights (a tied weight of DeepSpeed before 0.9.2?)"
        )
        notes.append(Note(NoteKind.DROPPED, tuple(lost), detail, needs_consent=True))
    if origin.format != "zero1" and content.get("frozen_param_shapes", ()) is None:
        detail = "not saved (exclude_frozen_parameters); if there are any, the base model has them"
        notes.append(Note(NoteKind.DROPPED, ("frozen parameters",), detail))
    if buffers and (origin.world_size or 1) > 1:
        notes.append(Note(NoteKind.KEPT_ONE, tuple(buffers), PER_RANK_BUFFERS))
    return notes
