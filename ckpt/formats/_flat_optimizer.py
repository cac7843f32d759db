"""`optimizer.state_dict()` of FSDP1's ranks beside sharded weights: names and places for its parts.

With `use_orig_params=True` a rank's state of parameter n is the run of elements that it has of it,
or nothing; the runs in the order of the ranks are the whole parameter. With `use_orig_params=False`
n is a flat parameter, of which every rank has an equal share; which parameters it is made of is
told by its name (`param_names`), or inferred from the sizes (`_flat_units`).

Source: torch 2.13.0 torch/distributed/fsdp/_flat_param.py (`_get_shard`, `_use_sharded_views`),
torch/optim/optimizer.py (`state_dict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, prod

from ckpt.errors import AmbiguousSource, CorruptCheckpoint, Unsupported
from ckpt.formats._flat_params import arrays_of, gathered_states
from ckpt.formats._flat_units import Wrapping, fitting_wrappings, units_below
from ckpt.meta_model import ModelNames
from ckpt.model import Plain, StoredTensor
from ckpt.names import clean_names
from ckpt.note import Note, NoteKind, summarise
from ckpt.param_order import Slot, match_given_order, match_names
from ckpt.training_dict import FLAT_PARAM

__all__ = ["WAYS_OUT", "read_flat_optimizer", "saved_twice"]

WAYS_OUT = (
    "Save FSDP.optim_state_dict(model, optimizer), or convert the weights with --weights-only."
)
SUBJECT = "names of the optimizer's parameters"
MIN_DIMS_OF_TIES = 2  # vectors are often equal without being tied

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Flat:
    """What all ranks have of a numbered optimizer.

    Attributes:
        groups: param groups with numbers.
        states: of every rank that has a part of its own, by number.
        counts: elements on each rank, of the numbers that have states with dimensions.
    """

    groups: Sequence[Mapping[str, Plain]]
    states: Sequence[Mapping[int, Mapping[str, Plain]]]
    counts: Mapping[int, tuple[int, ...]]
    where: str

    @property
    def numbers(self) -> list[int]:
        return [number for group in self.groups for number in group["params"]]

    def fqns(self) -> dict[int, str]:
        """Names by number where the optimizer kept `param_names`, else none."""
        names = [name for group in self.groups for name in group.get("param_names") or ()]
        cleaned = clean_names(names)
        if len(names) != len(self.numbers):
            return {}
        return dict(zip(self.numbers, (cleaned[name] for name in names), strict=True))

    @property
    def is_even(self) -> bool:
        """Every rank has as much as the others, as of flat parameters."""
        return all(len(set(counts)) == 1 for counts in self.counts.values())

    def slots(self, of: int) -> list[list[Slot]]:
        """Numbers with their elements: `of` is how many ranks' parts to add."""
        return [[self._slot(number, of) for number in group["params"]] for group in self.groups]

    def _slot(self, number: int, of: int) -> Slot:
        counts = self.counts.get(number)
        return Slot(number, None if counts is None else (sum(counts[:of]),))


@dataclass(frozen=True, slots=True)
class _Place:
    """What a number stands for: where the ranks' parts begin, and where parameters begin."""

    begins: tuple[int, ...]
    offsets: Mapping[str, int]


Places = Mapping[int, _Place]


def read_flat_optimizer(
    ranks: Sequence[Mapping[str, Plain]],
    weights: Mapping[str, StoredTensor],
    known: ModelNames | None,
    order: Sequence[str] | None,
    where: str,
) -> tuple[dict[str, Plain], list[Note]]:
    """The optimizer's state with whole tensors: numbered with `param_names`, or by name.

    Args:
        ranks: `optimizer.state_dict()` of every rank that has a part of its own, in their order.
        weights: the sharded weights, in the model's order.
        known: the model, where the user gave it.
        order: names in the optimizer's order, where the user gave them.

    Raises:
        AmbiguousSource: names for the numbers that the sizes do not tell apart.
        CorruptCheckpoint: ranks that do not fit each other.
        Unsupported: states that are not kept by element, or units that the sizes do not tell.
    """
    flat = _flat(ranks, where)
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if known is not None:
        shapes = {name: shapes[name] for name in known.params if name in shapes}
    every = [shapes]
    twice = saved_twice(weights) if known is None else frozenset[str]()
    if twice:
        every.append({name: shape for name, shape in shapes.items() if name not in twice})
    places, notes = _spelled(flat, every) or _found(flat, every, known, order)
    states = dict(_states(flat, places, shapes))
    if all(len(place.offsets) == 1 for place in places.values()):
        return _by_number(flat, places, states), notes
    return _by_name(flat, places, states), notes


def saved_twice(weights: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Weights that have an earlier name too: the same ones, or matrices with the same checksums."""
    seen: dict[object, str] = {}
    return frozenset(
        name for name, tensor in weights.items() if seen.setdefault(_mark(tensor), name) != name
    )


def _mark(tensor: StoredTensor) -> object:
    """Equal for equal bits in equal boxes, as far as the files' checksums tell."""
    is_large = len(tensor.shape) >= MIN_DIMS_OF_TIES
    if not is_large or any(chunk.record.crc32 is None for chunk in tensor.chunks):
        return id(tensor)
    places = [
        (c.chunk.offsets, c.chunk.sizes, c.record.crc32, c.record.length, c.start, c.strides or ())
        for c in tensor.chunks
    ]
    return tensor.dtype, tensor.shape, tuple(sorted(places))


# --- what the ranks have --------------------------------------------------------------------------


def _flat(ranks: Sequence[Mapping[str, Plain]], where: str) -> _Flat:
    groups, states = ranks[0]["param_groups"], [rank.get("state", {}) for rank in ranks]
    numbers = [number for group in groups for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers):
        raise Unsupported(
            f"{where}: the ranks have different states under {numbers[0]!r}, and nothing tells "
            "their places.",
            WAYS_OUT,
        )
    counts = {
        number: tuple(_count(state.get(number, {}), number, where) for state in states)
        for number in numbers
    }
    stray = {number for state in states for number in state} - counts.keys()
    if stray:
        raise CorruptCheckpoint(f"{where}: a state of number {min(stray)}, which no group has")
    return _Flat(groups, states, {n: of for n, of in counts.items() if any(of)}, where)


def _count(values: Mapping[str, Plain], number: int, where: str) -> int:
    """How many elements a rank has of a number."""
    arrays = arrays_of(values)
    shapes = {tensor.shape for tensor in arrays.values()}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        listed = ", ".join(f"{key} {tensor.shape}" for key, tensor in arrays.items())
        raise Unsupported(
            f"{where}: the states of number {number} are not one flat run of elements each "
            f"({listed}), as those of elementwise optimizers under FSDP1 are.",
            WAYS_OUT,
        )
    return shapes.pop()[0] if shapes else 0


# --- what the numbers stand for -------------------------------------------------------------------


def _spelled(flat: _Flat, every: Sequence[Shapes]) -> tuple[Places, list[Note]] | None:
    """By `param_names`, which are those of parameters or of flat parameters."""
    fqns = flat.fqns()
    if not fqns:
        return None
    of_units = any(FLAT_PARAM in fqn for fqn in fqns.values())
    for shapes in reversed(every):
        if of_units:
            prefixes = {number: fqn.removesuffix(FLAT_PARAM) for number, fqn in fqns.items()}
            units = units_below(prefixes.values(), list(shapes))
            members = {number: tuple(units.get(p, ())) for number, p in prefixes.items()}
            places = {n: _place_of_unit(flat, n, of, shapes) for n, of in members.items()}
        else:
            places = {number: _place_of_run(flat, number, fqn) for number, fqn in fqns.items()}
        if all(_fits(flat, n, place, shapes, of_units) for n, place in places.items()):
            return places, []
    if of_units:  # other units have no number
        return None
    raise CorruptCheckpoint(
        f"{flat.where}: the states have other sizes than the parameters that they are named "
        f"after ({summarise(fqns.values())}): ranks of two saves, or another model's.",
        WAYS_OUT,
    )


def _fits(flat: _Flat, number: int, place: _Place, shapes: Shapes, is_unit: bool) -> bool:
    counts = flat.counts.get(number)
    if not place.offsets or not all(name in shapes for name in place.offsets):
        return False
    if counts is None:
        return True
    numel = sum(prod(shapes[name]) for name in place.offsets)
    return set(counts) == {ceil(numel / len(counts))} if is_unit else sum(counts) == numel


def _found(
    flat: _Flat, every: Sequence[Shapes], known: ModelNames | None, order: Sequence[str] | None
) -> tuple[Places, list[Note]]:
    """As runs of parameters or as flat parameters, whichever the counts and sizes leave."""
    trained = known.trainable if known is not None else None
    is_order_of_runs = order is not None and len(order) == len(flat.numbers)
    may_be_units = flat.is_even and not is_order_of_runs
    wrappings = _as_units(flat, every, trained) if may_be_units else []
    if order is not None and not wrappings:
        shapes = {name: (prod(shape),) for name, shape in every[0].items()}
        names = match_given_order(flat.slots(len(flat.states)), order, shapes, flat.where)
        return _places_of_runs(flat, names), [_note_of_runs("the names are those of --param-order")]
    runs, unclear = _as_runs(flat, every, trained) if order is None else (None, None)
    if runs is None and unclear is None:
        wrapping = _only(flat, wrappings)
        return _places_of_units(flat, wrapping, every[0]), [_note_of_units(wrapping)]
    same = [
        w.members is not None and _places_of_units(flat, w, every[0]) == runs for w in wrappings
    ]
    if not all(same):
        raise Unsupported(
            f"{flat.where}: the sizes of the optimizer's states fit parameters "
            f"(use_orig_params=True) and flat parameters ({wrappings[same.index(False)]}).",
            f"Give --param-order for the former. {WAYS_OUT}",
        )
    if runs is None:
        assert unclear is not None, "either was found"
        raise unclear
    source = "--model" if known is not None else "the state dict"
    return runs, [_note_of_runs(f"their sizes leave one way to name them in the order of {source}")]


def _as_runs(
    flat: _Flat, every: Sequence[Shapes], trained: frozenset[str] | None
) -> tuple[Places | None, AmbiguousSource | None]:
    """Every number as one parameter: the places, or why they are not clear, or neither."""
    unclear = None
    slots = flat.slots(len(flat.states))
    for shapes in every:
        numels = {name: (prod(shape),) for name, shape in shapes.items()}
        if trained is not None and len(trained & numels.keys()) == len(flat.numbers):
            numels = {name: numel for name, numel in numels.items() if name in trained}
        try:
            return _places_of_runs(flat, match_names(slots, numels, flat.where)), None
        except AmbiguousSource as problem:
            unclear = unclear or problem
        except CorruptCheckpoint:
            continue
    return None, unclear


def _as_units(
    flat: _Flat, every: Sequence[Shapes], trained: frozenset[str] | None
) -> list[Wrapping]:
    """Every number as a flat parameter: the ways to wrap that fit, each assignment once."""
    every_numel = [{name: prod(shape) for name, shape in shapes.items()} for shapes in every]
    named = flat.fqns()
    return [
        wrapping
        for wrapping in fitting_wrappings(flat.slots(1), every_numel, trained, len(flat.states))
        if all(
            name.startswith(named[number].removesuffix(FLAT_PARAM))
            for number, members in (wrapping.members or {}).items() if number in named
            for name in members
        )
    ]  # fmt: skip


def _only(flat: _Flat, wrappings: Sequence[Wrapping]) -> Wrapping:
    """The only way to wrap.

    Raises:
        Unsupported: none fits, or several do.
    """
    if len(wrappings) == 1 and wrappings[0].members is not None:
        return wrappings[0]
    about = f"{flat.where}: optimizer.state_dict() under FSDP1 holds flat local parts, and "
    if wrappings:
        raise Unsupported(
            f"{about}their sizes fit several ways to make flat parameters of the model's, such as "
            f"{' or '.join(map(str, wrappings))}. Where parts were frozen, --model tells which.",
            WAYS_OUT,
        )
    raise Unsupported(
        f"{about}those of {len(flat.states)} ranks add up neither to the weights one by one "
        "(use_orig_params=True), nor to units that some pattern of modules could have made: ranks "
        "of two saves, another --model, or modules wrapped one by one.",
        WAYS_OUT,
    )


def _places_of_runs(flat: _Flat, names: Mapping[int, str]) -> dict[int, _Place]:
    return {number: _place_of_run(flat, number, name) for number, name in names.items()}


def _place_of_run(flat: _Flat, number: int, name: str) -> _Place:
    counts = flat.counts.get(number, ())
    return _Place(tuple(accumulate(counts, initial=0))[: len(counts)], {name: 0})


def _places_of_units(flat: _Flat, wrapping: Wrapping, shapes: Shapes) -> dict[int, _Place]:
    members = wrapping.members or {}
    return {number: _place_of_unit(flat, number, of, shapes) for number, of in members.items()}


def _place_of_unit(flat: _Flat, number: int, members: Sequence[str], shapes: Shapes) -> _Place:
    counts = flat.counts.get(number, ())
    starts = accumulate((prod(shapes[name]) for name in members), initial=0)
    begins = tuple(rank * count for rank, count in enumerate(counts))
    return _Place(begins, dict(zip(members, starts, strict=False)))


def _note_of_runs(how: str) -> Note:
    return Note(NoteKind.SYNTHESISED, (SUBJECT,), f"the ranks' parts carry numbers only; {how}")


def _note_of_units(wrapping: Wrapping) -> Note:
    detail = f"the units of FSDP are not saved; their sizes fit {wrapping} alone"
    return Note(NoteKind.UNVERIFIED, (SUBJECT,), detail, of_job=True)


# --- the whole ------------------------------------------------------------------------------------


def _states(
    flat: _Flat, places: Places, shapes: Shapes
) -> Iterator[tuple[str, Mapping[str, Plain]]]:
    """Whole states by the names of parameters."""
    for number, place in places.items():
        kept = [state.get(number, {}) for state in flat.states]
        for name, offset in place.offsets.items():
            where = f"{flat.where}: {name}"
            yield name, gathered_states(kept, place.begins, offset, shapes[name], where)


def _by_number(
    flat: _Flat, places: Places, states: Mapping[str, Mapping[str, Plain]]
) -> dict[str, Plain]:
    """With the numbers kept, for they are those of the model that is not sharded."""
    names = {number: next(iter(place.offsets)) for number, place in places.items()}
    return {
        "state": {number: states[name] for number, name in names.items() if states[name]},
        "param_groups": [
            {**group, "param_names": [names[number] for number in group["params"]]}
            for group in flat.groups
        ],
    }


def _by_name(
    flat: _Flat, places: Places, states: Mapping[str, Mapping[str, Plain]]
) -> dict[str, Plain]:
    """By name: a flat parameter's number becomes many."""
    return {
        "state": {name: values for name, values in states.items() if values},
        "param_groups": [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [name for number in group["params"] for name in places[number].offsets],
            }
            for group in flat.groups
        ],
    }
