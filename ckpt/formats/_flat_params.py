"""FSDP1's flat parameters taken apart: LOCAL_STATE_DICT with the model's names and shapes.

A unit's flat parameter is its parameters in the model's order, tied ones once, cut evenly among
the ranks. With `use_orig_params=True` each parameter begins at a multiple of 16 bytes, the end is
padded to the number of ranks, and optimizer states are local runs of each parameter, by number;
else states are those of the flat parameters, the outermost unit's first.

Source: torch 2.13.0 torch/distributed/fsdp/_flat_param.py (`_init_flat_param_and_metadata`,
`_get_unpadded_shard`); torch 2.1 and 2.4 by their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from ckpt.chunks import Chunk
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint, MissingPart
from ckpt.formats._deepspeed import FlatPiece, cut_from_flat
from ckpt.formats._flat_units import units_below
from ckpt.meta_model import ModelNames
from ckpt.model import Plain, StoredChunk, StoredTensor
from ckpt.names import clean_names
from ckpt.param_order import Slot, match_given_order, match_names
from ckpt.training_dict import FLAT_PARAM

__all__ = ["Unit", "arrays_of", "gathered_states", "read_units", "taken_apart", "with_optimizer"]

ALIGNED_BYTES = 16  # _flat_param.py _get_aligned_numel


@dataclass(frozen=True, slots=True)
class Unit:
    """One FSDP unit.

    Attributes:
        flat: its flat parameter, all ranks' parts.
        offsets: where each parameter begins in it.
        world_size: ranks that it is cut among.
        named: saved with `use_orig_params=True`.
    """

    flat: StoredTensor
    offsets: Mapping[str, int]
    world_size: int
    named: bool

    @property
    def share(self) -> int:
        """Elements of a rank, the last ones padded."""
        return ceil(self.flat.numel / self.world_size)

    def run(self, name: str, numel: int, rank: int) -> tuple[int, int]:
        """The elements [begin, end) of a parameter that a rank has; equal where it has none."""
        low, high = rank * self.share, (rank + 1) * self.share
        start = self.offsets[name]
        begin = min(max(low - start, 0), numel)
        return begin, max(min(high - start, numel), begin)


def read_units(
    model: Mapping[str, StoredTensor], known: ModelNames, world_size: int, where: str
) -> dict[str, Unit]:
    """Units by the names of their modules, the outermost first.

    Raises:
        CorruptCheckpoint: a unit has another size than the model's parameters have.
    """
    names = clean_names(model)
    flats = {names[n].removesuffix(FLAT_PARAM): t for n, t in model.items() if FLAT_PARAM in n}
    named = any(names[name] in known.params for name in model)
    members = units_below(flats, list(known.params))
    if "" in members and "" not in flats:
        raise CorruptCheckpoint(
            f"{where}: {members[''][0]} is in none of the units; another --model?"
        )
    return {
        prefix: _unit(flats[prefix], members.get(prefix, []), known, world_size, named, where)
        for prefix in dict.fromkeys([*members, *flats])
    }


def _unit(
    flat: StoredTensor,
    members: Sequence[str],
    known: ModelNames,
    world_size: int,
    named: bool,
    where: str,
) -> Unit:
    """The unit whose parameters fill its flat parameter, in the dtype that it is aligned for."""
    numels = {name: prod(known.params[name]) for name in members}
    widths = {DType.float32.itemsize, DType.bfloat16.itemsize, flat.dtype.itemsize}
    layouts = [
        _offsets(numels, ALIGNED_BYTES // width if named else 0, world_size)
        for width in sorted(widths, reverse=True)
    ]
    fitting = [offsets for offsets, total in layouts if total == flat.numel]
    if not fitting or any(offsets != fitting[0] for offsets in fitting):
        raise CorruptCheckpoint(
            f"{where}: a flat parameter of {flat.numel} elements does not hold the parameters "
            f"{', '.join(members[:3])} and so on, of {sum(numels.values())} elements, in one way. "
            "Is --model the model that was saved?"
        )
    return Unit(flat, fitting[0], world_size, named)


def _offsets(
    numels: Mapping[str, int], aligned: int, world_size: int
) -> tuple[dict[str, int], int]:
    """Where parameters begin, and the length of all."""
    offsets, total = {}, 0
    for name, numel in numels.items():
        total = ceil(total / aligned) * aligned if aligned else total
        offsets[name] = total
        total += numel
    return offsets, ceil(total / world_size) * world_size if aligned else total


def taken_apart(
    model: Mapping[str, StoredTensor], units: Mapping[str, Unit], known: ModelNames, where: str
) -> dict[str, StoredTensor]:
    """The model's state dict; tied names hold the same object.

    Raises:
        MissingPart: a buffer of the model is not there.
    """
    names = clean_names(model)
    saved = {names[name]: tensor for name, tensor in model.items()}
    whole: dict[str, StoredTensor] = {}
    for unit in units.values():
        pieces = [_piece(chunk, unit.flat.dtype) for chunk in unit.flat.chunks]
        for name, offset in unit.offsets.items():
            shape = known.params[name]
            whole[name] = cut_from_flat(pieces, offset, shape, f"{where}: {name}")
    found = {}
    for name in known.state:
        owner = known.ties.get(name, name)
        if owner not in whole and owner not in saved:
            raise MissingPart(f"{where}: the model's {name} is not there. Is --model right?")
        found[name] = whole.get(owner) or saved[owner]
    return found


def _piece(chunk: StoredChunk, dtype: DType) -> FlatPiece:
    size = chunk.chunk.sizes
    tensor = StoredTensor(dtype, size, (StoredChunk(Chunk.whole(size), chunk.record, chunk.start),))
    return FlatPiece(chunk.chunk.offsets[0], tensor)


# --- the optimizer --------------------------------------------------------------------------------


def with_optimizer(
    ranks: Sequence[Mapping[str, Plain]],
    units: Mapping[str, Unit],
    known: ModelNames,
    order: Sequence[str] | None,
    where: str,
) -> dict[str, Plain]:
    """The optimizer's state by FQN, out of every rank's `optimizer.state_dict()`.

    Raises:
        CkptError: numbers that can stand for several parameters, or for none.
    """
    states = [rank["state"] for rank in ranks]
    groups: Sequence[Mapping[str, Plain]] = ranks[0]["param_groups"]
    named = all(unit.named for unit in units.values())
    slots = [[_slot(number, states) for number in group["params"]] for group in groups]
    candidates = _runs_of_names(units, known) if named else _runs_of_units(units)
    if order is not None and named:
        found = match_given_order(slots, order, candidates, where)
    else:
        found = match_names(slots, candidates, where)
    state: dict[str, Plain] = {}
    members: dict[int, list[str]] = {}
    for number, name in found.items():
        kept = [rank.get(number, {}) for rank in states]
        unit = units[name] if not named else next(u for u in units.values() if name in u.offsets)
        members[number] = [name] if named else list(unit.offsets)
        for fqn in members[number]:
            state[fqn] = _values(kept, unit, fqn, known.params[fqn], f"{where}: {fqn}")
    return {
        "state": {fqn: values for fqn, values in state.items() if values},
        "param_groups": [
            {**group, "params": [n for number in group["params"] for n in members[number]]}
            for group in groups
        ],
    }


def _slot(number: int, states: Sequence[Mapping[int, Mapping[str, Plain]]]) -> Slot:
    """A number, with how many elements each rank has of it; None where nobody has a state."""
    counts = tuple(
        max((v.numel for v in arrays_of(state.get(number, {})).values()), default=0)
        for state in states
    )
    return Slot(number, counts if any(counts) else None)


def _runs_of_names(units: Mapping[str, Unit], known: ModelNames) -> dict[str, tuple[int, ...]]:
    """For every trained parameter, how many elements each rank has of it."""
    runs = {}
    for name in (n for n in known.params if n in known.trainable):
        unit = next(unit for unit in units.values() if name in unit.offsets)
        parts = [unit.run(name, prod(known.params[name]), rank) for rank in range(unit.world_size)]
        runs[name] = tuple(end - begin for begin, end in parts)
    return runs


def _runs_of_units(units: Mapping[str, Unit]) -> dict[str, tuple[int, ...]]:
    return {name: (unit.share,) * unit.world_size for name, unit in units.items()}


def _values(
    kept: Sequence[Mapping[str, Plain]], unit: Unit, fqn: str, shape: tuple[int, ...], where: str
) -> dict[str, Plain]:
    """A parameter's states out of all ranks' parts of its own or of its flat parameter."""
    ranks = range(unit.world_size)
    if unit.named:
        begins = [unit.run(fqn, prod(shape), rank)[0] for rank in ranks]
        return gathered_states(kept, begins, 0, shape, where)
    begins = [rank * unit.share for rank in ranks]
    return gathered_states(kept, begins, unit.offsets[fqn], shape, where)


def gathered_states(
    kept: Sequence[Mapping[str, Plain]],
    begins: Sequence[int],
    offset: int,
    shape: tuple[int, ...],
    where: str,
) -> dict[str, Plain]:
    """A parameter's states out of the ranks' flat parts; those without dimensions from the first.

    Args:
        kept: what each rank has, in their order.
        begins: where each rank's parts begin in the flat whole.
        offset: where the parameter begins in it.
        shape: of the parameter.

    Raises:
        CorruptCheckpoint: parts that do not hold all of it, or have different dtypes.
    """
    found: dict[str, Plain] = {}
    for key in dict.fromkeys(key for values in kept for key in values):
        arrays = {r: arrays_of(values)[key] for r, values in enumerate(kept)
                  if key in arrays_of(values)}  # fmt: skip
        if not arrays:
            found[key] = next(values[key] for values in kept if key in values)
            continue
        dtypes = {tensor.dtype.torch_name for tensor in arrays.values()}
        if len(dtypes) > 1:
            raise CorruptCheckpoint(
                f"{where}: {key} is {' and '.join(sorted(dtypes))} on different ranks: files of "
                "two saves. Give those of one."
            )
        pieces = [FlatPiece(begins[r], tensor) for r, tensor in arrays.items()]
        found[key] = cut_from_flat(pieces, offset, shape, f"{where}: {key}")
    return found


def arrays_of(values: Mapping[str, Plain]) -> dict[str, StoredTensor]:
    """The states of a parameter that have dimensions."""
    return {k: v for k, v in values.items() if isinstance(v, StoredTensor) and v.shape}
