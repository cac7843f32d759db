"""The dict a training script saves: which part is the model, which the optimizer, which the rest.

People call the parts `model`, `state_dict`, `net`, `optim`, `optimizer_states`, ...; so they are
found by structure and not by name. Torch files and DCP folders both come through here: what
differs between them is only where the tensors lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ckpt.errors import AmbiguousSource, CorruptCheckpoint, UnknownFormat, Unsupported
from ckpt.format import ReadOptions
from ckpt.meta_model import ModelNames, build_model
from ckpt.model import Checkpoint, Origin, Param, ParamGroup, Plain, StoredTensor
from ckpt.names import clean_names, is_buffer
from ckpt.note import Note, NoteKind
from ckpt.optimizer_dict import (
    FLAT_GROUPS,
    FLAT_STATE,
    OptimizerDict,
    is_optimizer,
    read_optimizer,
)
from ckpt.param_order import match_given_order, match_names, match_shapes

__all__ = [
    "NameOrder",
    "TrainingDict",
    "as_in_model",
    "buffers_among",
    "find_parts",
    "find_ties",
    "read_training_dict",
]

Path = tuple[str, ...]
MAX_DEPTH = 5
FLAT_PARAM = "_flat_param"  # torch 2.13.0 torch/distributed/fsdp/_flat_param.py


@dataclass(frozen=True, slots=True)
class TrainingDict:
    """The parts of a training dict, with the paths they were found at.

    Attributes:
        is_chosen: there are other state dicts, and the user named this one.
    """

    model: Mapping[str, StoredTensor]
    extra_state: Mapping[str, Plain]
    model_path: Path
    optimizers: Mapping[Path, Mapping[str, Plain]]
    rest: Mapping[str, Plain]
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class NameOrder:
    """What tells in which order the model has its parameters, which numbers of an optimizer mean.

    Attributes:
        model: its names, where somebody knows them.
        told_by: who knows the order, in words.
        is_kept: without a model: the state dict is in the model's order.
        why: why the order is not known, where it is not.
    """

    model: ModelNames | None = None
    told_by: str = "the state dict"
    is_kept: bool = True
    why: str = ""


AS_SAVED = NameOrder()


def read_training_dict(
    tree: Mapping[str, Plain], options: ReadOptions, origin: Origin, order: NameOrder = AS_SAVED
) -> Checkpoint:
    """The checkpoint in a training dict.

    Args:
        tree: plain data with `StoredTensor` leaves.
        origin: where the tree came from; the stripped wrapper names are added to it.
        order: what the source itself tells about the order of names; `--model` knows better.

    Raises:
        UnknownFormat: no state dict inside. AmbiguousSource: several, or an optimizer whose
            parameters cannot be told apart.
    """
    parts = find_parts(tree, options.key, origin.path)
    cleaned = clean_names([*parts.model, *parts.extra_state])
    tensors = {cleaned[name]: tensor for name, tensor in parts.model.items()}
    if any(FLAT_PARAM in name for name in tensors):
        raise Unsupported(
            f"{origin.path}: a LOCAL_STATE_DICT of FSDP holds flat parameters without names or "
            "shapes. Convert the folder of all ranks with --model package.module:factory, or save "
            "with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT."
        )
    if options.model:
        order = NameOrder(build_model(options.model), "--model", order.is_kept)
    tensors, notes = as_in_model(tensors, order)
    ties = find_ties(tensors)
    buffers = buffers_among(tensors, order.model)
    keeps_order = order.model is not None or order.is_kept
    origin = replace(origin, stripped=cleaned.stripped, keeps_order=keeps_order)
    params = {
        name: Param(value=tensor)
        for name, tensor in tensors.items()
        if name not in buffers and name not in ties
    }
    checkpoint = Checkpoint(
        params=params,
        buffers={name: tensors[name] for name in tensors if name in buffers - ties.keys()},
        order=tuple(tensors),
        ties=ties,
        groups=(),
        objects=parts.rest,
        origin=origin,
        notes=notes,
        extra_state={cleaned[name]: value for name, value in parts.extra_state.items()},
    )
    return _with_optimizer_if_clear(checkpoint, parts, options, order)


# --- finding ------------------------------------------------------------------------------------


def find_parts(tree: Mapping[str, Plain], key: str | None, where: str) -> TrainingDict:
    """The model's state dict, the optimizers and the rest, found by structure.

    Raises:
        UnknownFormat: no state dict. AmbiguousSource: several, and no `--key`, or a wrong one.
    """
    tree, flat = _without_flat_optimizer(tree)
    optimizers = {**dict(_optimizers(tree, ())), **flat}
    candidates = dict(_state_dicts(tree, ()))
    if not candidates:
        loose = {k: v for k, v in tree.items() if isinstance(v, StoredTensor)}
        if _is_state_dict(loose):  # torchtitan: the model's tensors beside `optimizer` and others
            candidates = {(): loose}
    path = _choose(candidates, key, where)
    model = {k: v for k, v in candidates[path].items() if isinstance(v, StoredTensor)}
    extra = {k: v for k, v in candidates[path].items() if k not in model}
    used = {(*path, name) for name in candidates[path]} | optimizers.keys()
    rest = _rest(tree, (), used)
    return TrainingDict(model, extra, path, optimizers, rest, len(candidates) > 1)


def _without_flat_optimizer(
    tree: Mapping[str, Plain],
) -> tuple[Mapping[str, Plain], dict[Path, Mapping[str, Plain]]]:
    """A tree into which a flattened optimizer was merged at the top, taken apart again."""
    flat = {k: v for k, v in tree.items() if str(k).startswith((FLAT_STATE, FLAT_GROUPS))}
    if not is_optimizer(flat) or len(flat) == len(tree):
        return tree, {}
    return {k: v for k, v in tree.items() if k not in flat}, {("(top level)",): flat}


def _choose(candidates: Mapping[Path, Mapping[str, Plain]], key: str | None, where: str) -> Path:
    listed = ", ".join(".".join(path) or "(top level)" for path in candidates)
    if key is not None:
        wanted = tuple(key.split(".")) if key else ()
        for path in candidates:
            if path == wanted or ".".join(path) == key:
                return path
        raise AmbiguousSource(
            f"{where}: --key {key}: no state dict there; state dicts are at: {listed or 'none'}"
        )
    if not candidates:
        raise UnknownFormat(
            f"{where}: no model state dict inside: expected a dict of tensors by name, at the top "
            "or under a key"
        )
    if len(candidates) > 1:
        raise AmbiguousSource(
            f"{where}: holds several state dicts; choose one with --key: {listed}"
        )
    return next(iter(candidates))


def _is_state_dict(value: Plain) -> bool:
    if not isinstance(value, Mapping) or not value:
        return False
    if not all(isinstance(key, str) for key in value):
        return False
    tensors = [v for k, v in value.items() if not k.endswith("_extra_state")]
    return all(isinstance(v, StoredTensor) for v in tensors) and any(
        v.shape and (v.dtype.is_floating_point or v.dtype.is_complex) for v in tensors
    )


def _state_dicts(tree: Plain, path: Path) -> Iterator[tuple[Path, Mapping[str, Plain]]]:
    if is_optimizer(tree) or len(path) > MAX_DEPTH:
        return
    if _is_state_dict(tree):
        yield path, tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _state_dicts(value, (*path, str(key)))


def _optimizers(tree: Plain, path: Path) -> Iterator[tuple[Path, Mapping[str, Plain]]]:
    if is_optimizer(tree):
        yield path, tree
    elif len(path) <= MAX_DEPTH and isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _optimizers(value, (*path, str(key)))
    elif len(path) <= MAX_DEPTH and isinstance(tree, list | tuple):
        for index, value in enumerate(tree):
            yield from _optimizers(value, (*path, str(index)))


def _rest(tree: Mapping[str, Plain], path: Path, used: set[Path]) -> dict[str, Plain]:
    """The tree without the used parts; a dict or list that becomes empty goes with them."""
    kept = {}
    for key, value in tree.items():
        left = _left(value, (*path, str(key)), used)
        if left is not _USED:
            kept[str(key)] = left
    return kept


_USED = object()


def _left(value: Plain, path: Path, used: set[Path]) -> Plain:
    if path in used:
        return _USED
    if not any(other[: len(path)] == path for other in used):
        return value
    if isinstance(value, Mapping):
        return _rest(value, path, used) or _USED
    items = [_left(item, (*path, str(index)), used) for index, item in enumerate(value)]
    return [item for item in items if item is not _USED] or _USED


def find_ties(tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Aliases by name: tensors that are one and the same view of one storage."""
    owners: dict[int, str] = {}
    return {
        name: owner
        for name, tensor in tensors.items()
        if tensor.numel and (owner := owners.setdefault(id(tensor), name)) != name
    }


def as_in_model(
    tensors: dict[str, StoredTensor], order: NameOrder
) -> tuple[dict[str, StoredTensor], tuple[Note, ...]]:
    """With tied names that a file leaves out, and in the model's order where the file has another.

    A file of safetensors holds a tied weight under one of its names, which need not be the one
    that the model's optimizer knows.
    """
    known = order.model
    if known is None:
        return tensors, ()
    names: dict[str, list[str]] = {owner: [owner] for owner in known.ties.values()}
    for alias, owner in known.ties.items():
        names[owner].append(alias)
    found: dict[str, StoredTensor] = {}
    for same in names.values():
        there = {id(tensors[name]): tensors[name] for name in same if name in tensors}
        found |= dict.fromkeys(same, *there.values()) if len(there) == 1 else {}
    added = found.keys() - tensors.keys()
    if not added and order.is_kept:
        return tensors, ()
    every = tensors | found
    ordered = {name: every[name] for name in (*known.state, *every) if name in every}
    if not added:
        return ordered, ()
    pairs = tuple(
        f"{alias} = {known.ties[alias]}"
        for alias in known.ties
        if added & {alias, known.ties[alias]}
    )
    detail = f"one weight in {order.told_by}, saved under one name"
    return ordered, (Note(NoteKind.TIED, pairs, detail),)


def buffers_among(tensors: Mapping[str, StoredTensor], known: ModelNames | None) -> frozenset[str]:
    """Which of a state dict's tensors are buffers: as the model says, else by name and dtype."""
    if known is not None:
        return known.buffers & tensors.keys()
    return frozenset(name for name, tensor in tensors.items() if is_buffer(name, tensor.dtype))


# --- the optimizer ------------------------------------------------------------------------------


def _with_optimizer_if_clear(
    checkpoint: Checkpoint, parts: TrainingDict, options: ReadOptions, order: NameOrder
) -> Checkpoint:
    """With the optimizer; without it and with a note where it is unclear and not needed."""
    if not parts.optimizers:
        return checkpoint
    try:
        return _with_optimizer(checkpoint, parts, options, order)
    except (AmbiguousSource, CorruptCheckpoint) as problem:
        if options.need_optimizer:
            raise
        paths = tuple(".".join(path) for path in parts.optimizers)
        detail = problem.problem.removeprefix(f"{checkpoint.origin.path}: ")
        note = Note(NoteKind.DROPPED, paths, detail)
        return replace(checkpoint, notes=(*checkpoint.notes, note))


def _with_optimizer(
    checkpoint: Checkpoint, parts: TrainingDict, options: ReadOptions, order: NameOrder
) -> Checkpoint:
    where = checkpoint.origin.path
    path = _own_optimizer(parts, where)
    optimizer = read_optimizer(parts.optimizers[path], f"{where}: {'.'.join(path)}")
    others = {".".join(p): tree for p, tree in parts.optimizers.items() if p != path}
    checkpoint = replace(checkpoint, objects={**checkpoint.objects, **others})
    if parts.is_chosen:
        detail = f"is taken to be that of {'.'.join(parts.model_path)}"
        note = Note(NoteKind.UNVERIFIED, (f"optimizer {'.'.join(path)}",), detail)
        checkpoint = replace(checkpoint, notes=(*checkpoint.notes, note))
    names = _fqns(checkpoint, optimizer, options, order)
    checkpoint = _owned_by_members(checkpoint, set(names.values()))
    unknown = [name for name in names.values() if name not in checkpoint.params]
    if unknown:
        raise CorruptCheckpoint(
            f"{where}: the optimizer has states for {unknown[0]!r}, which the model does not have"
        )
    states = {fqn: optimizer.states.get(member, {}) for member, fqn in names.items()}
    params = {
        fqn: replace(param, state=states.get(fqn, {})) for fqn, param in checkpoint.params.items()
    }
    groups = tuple(
        ParamGroup(tuple(names[m] for m in group), options_)
        for group, options_ in zip(optimizer.members, optimizer.options, strict=True)
    )
    checkpoint = replace(checkpoint, params=params, groups=groups)
    if order.model is None and not order.is_kept:
        checkpoint = _in_group_order(checkpoint)
    if not optimizer.is_numbered:  # a full or sharded state dict of FSDP: gathered name by name
        origin = replace(checkpoint.origin, repeats_ties=True)
        return _in_model_order(replace(checkpoint, origin=origin))
    if optimizer.names:
        return checkpoint
    note = Note(
        NoteKind.SYNTHESISED, ("names of the optimizer's parameters",), _how(options, order)
    )
    return replace(checkpoint, notes=(*checkpoint.notes, note))


def _how(options: ReadOptions, order: NameOrder) -> str:
    """How numbered optimizer states got their names."""
    if options.param_order is not None:
        return "the states carry numbers only; the names are those of --param-order"
    if order.model is None and not order.is_kept:
        return "the states carry numbers only; the shapes leave one way to name them"
    return (
        "the states carry numbers only; each param group is taken to be in the order of "
        f"{order.told_by}, and the shapes leave one way to do that"
    )


def _in_group_order(checkpoint: Checkpoint) -> Checkpoint:
    """With names in the order of the param groups, one after the other, then the rest.

    The model's own order is not known. In this one every group keeps its order through formats
    that list its members as a set.
    """
    members = [fqn for group in checkpoint.groups for fqn in group.fqns]
    order = tuple(dict.fromkeys([*members, *checkpoint.order]))
    params = {fqn: checkpoint.params[fqn] for fqn in order if fqn in checkpoint.params}
    return replace(checkpoint, params=params, order=order)


def _in_model_order(checkpoint: Checkpoint) -> Checkpoint:
    """With each param group in the model's order, and a note where that changes it.

    FSDP1 with flat parameters lists a group unit by unit. Its frameworks match by name; a plain
    torch optimizer matches by position, and its positions are those of the model.
    """
    position = {fqn: at for at, fqn in enumerate(checkpoint.params)}
    groups = tuple(
        replace(group, fqns=tuple(sorted(group.fqns, key=position.__getitem__)))
        for group in checkpoint.groups
    )
    if groups == checkpoint.groups:
        return checkpoint
    moved = tuple(
        f"param group {index}"
        for index, (new, old) in enumerate(zip(groups, checkpoint.groups, strict=True))
        if new != old
    )
    detail = "listed unit by unit, as FSDP1 with flat parameters does; put in the model's order"
    note = Note(NoteKind.SYNTHESISED, moved, detail)
    return replace(checkpoint, groups=groups, notes=(*checkpoint.notes, note))


def _own_optimizer(parts: TrainingDict, where: str) -> Path:
    """The only optimizer, or the one that lies in the same dict as the model.

    Raises:
        AmbiguousSource: several, none of them nearer to the model than the others.
    """
    beside = [path for path in parts.optimizers if path[:-1] == parts.model_path[:-1]]
    for paths in (list(parts.optimizers), beside):
        if len(paths) == 1:
            return paths[0]
    listed = ", ".join(".".join(path) for path in parts.optimizers)
    raise AmbiguousSource(
        f"{where}: holds several optimizers ({listed}) and nothing tells which is the model's.",
        "Convert with --weights-only.",
    )


def _owned_by_members(checkpoint: Checkpoint, members: set[str]) -> Checkpoint:
    """The checkpoint with tied weights under the name that the optimizer knows them by."""
    swaps = {
        owner: alias
        for alias, owner in checkpoint.ties.items()
        if alias in members and owner not in members
    }
    return replace(
        checkpoint,
        params={swaps.get(fqn, fqn): param for fqn, param in checkpoint.params.items()},
        ties={
            owner if swaps.get(owner) == alias else alias: swaps.get(owner, owner)
            for alias, owner in checkpoint.ties.items()
        },
    )


def _fqns(
    checkpoint: Checkpoint,
    optimizer: OptimizerDict,
    options: ReadOptions,
    order: NameOrder,
) -> dict[int | str, str]:
    """Clean FQN of every member of the optimizer's groups."""
    where, shapes = checkpoint.origin.path, {k: p.shape for k, p in checkpoint.params.items()}
    spelled = optimizer.spelled_names()
    if spelled is not None and options.param_order is None:
        cleaned = clean_names(spelled.values())
        return {member: cleaned[name] for member, name in spelled.items()}
    slots = optimizer.slots()
    if options.param_order is not None:
        given = match_given_order(slots, options.param_order, shapes, where)
    elif order.model is not None:
        given = _match_model(checkpoint, optimizer, order.model)
    elif order.is_kept:
        given = match_names(slots, shapes, where)
    else:
        given = match_shapes(slots, shapes, where, order.why)
    return {slot.index: given[slot.index] for group in slots for slot in group}


def _match_model(
    checkpoint: Checkpoint, optimizer: OptimizerDict, known: ModelNames
) -> dict[int, str]:
    """By the names of a known model: its trained parameters, or all where the count says so."""
    where = checkpoint.origin.path
    slots = optimizer.slots()
    candidates = {n: s for n, s in known.params.items() if n not in checkpoint.ties}
    trained = {n: s for n, s in candidates.items() if n in known.trainable}
    count = sum(len(group) for group in slots)
    return match_names(slots, trained if len(trained) == count else candidates, where)
