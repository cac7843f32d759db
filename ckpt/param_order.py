"""Which parameter an integer in an optimizer's state stands for.

A plain `optimizer.state_dict()` numbers parameters in param-group order. Without `param_names` the
names are found again by order and exact shapes: inside a group, numbers follow the order of the
state dict, and a parameter's moments have its shape. Where the file does not keep the model's order
(safetensors), shapes alone have to tell. When more than one assignment fits, nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.errors import AmbiguousSource, CorruptCheckpoint
from ckpt.note import summarise

__all__ = ["Slot", "match_given_order", "match_names", "match_shapes"]

Shape = tuple[int, ...]
MAX_SEARCH_STATES = 2_000_000
WAYS_OUT = (
    "Give their order with --param-order FILE (one name a line, in the order of the optimizer's "
    "param groups) or --model package.module:factory, or convert with --weights-only."
)


@dataclass(frozen=True, slots=True)
class Slot:
    """One numbered parameter of an optimizer: its shape where its state shows it."""

    index: int
    shape: Shape | None


def match_given_order(
    groups: Sequence[Sequence[Slot]], order: Sequence[str], shapes: Mapping[str, Shape], where: str
) -> dict[int, str]:
    """Names by number for an order that the user gave, checked against the shapes.

    Raises:
        AmbiguousSource: another number of names, an unknown name, or a shape that disagrees.
    """
    slots = [slot for group in groups for slot in group]
    if len(order) != len(slots):
        raise AmbiguousSource(
            f"{where}: the optimizer has {len(slots)} parameters, the given order {len(order)}"
        )
    if len(set(order)) < len(order):
        twice = next(name for name in order if order.count(name) > 1)
        raise AmbiguousSource(f"{where}: the given order names {twice!r} twice")
    for slot, name in zip(slots, order, strict=True):
        if name not in shapes:
            raise AmbiguousSource(f"{where}: the given order names {name!r}, which is no parameter")
        if slot.shape is not None and slot.shape != shapes[name]:
            raise AmbiguousSource(
                f"{where}: the given order puts {name!r} {shapes[name]} at number {slot.index}, "
                f"whose state has shape {slot.shape}"
            )
    return {slot.index: name for slot, name in zip(slots, order, strict=True)}


def match_names(
    groups: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape], where: str
) -> dict[int, str]:
    """Names by number, when order and shapes leave one possibility.

    Args:
        groups: the slots of each param group, in the optimizer's order.
        shapes: candidate parameters in the order of the state dict.

    Raises:
        AmbiguousSource: several assignments fit; names the parameters that could be swapped.
        CorruptCheckpoint: none fits, so the optimizer belongs to another model.
    """
    names = list(shapes)
    layers = _reachable(groups, [shapes[name] for name in names], where)
    full = tuple(len(group) for group in groups)
    if full not in layers[-1]:
        raise CorruptCheckpoint(
            f"{where}: the optimizer's states fit the {len(names)} parameters of the model in no "
            "way that keeps their order: they are of another model, in another order, or not kept "
            "per parameter (LBFGS).",
            WAYS_OUT,
        )
    first, last = (
        {
            index: names[at]
            for index, at in _trace(groups, list(shapes.values()), layers, pick).items()
        }
        for pick in (0, -1)
    )
    if layers[-1][full] > 1:
        unclear = {
            name
            for index in first
            for name in (first[index], last[index])
            if first[index] != last[index]
        }
        raise AmbiguousSource(
            f"{where}: order and shapes do not tell which optimizer state belongs to "
            f"{summarise(name for name in names if name in unclear)}.",
            WAYS_OUT,
        )
    return first


def match_shapes(
    groups: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape], where: str, why: str = ""
) -> dict[int, str]:
    """Names by number, when shapes leave one possibility in whatever order the names are.

    Args:
        groups: the slots of each param group, in the optimizer's order.
        shapes: candidate parameters, in no order that means anything.
        why: why their order is not known, for the message.

    Raises:
        AmbiguousSource: several assignments fit; names the parameters that could be swapped.
        CorruptCheckpoint: none fits, so the optimizer belongs to another model.
    """
    names: dict[Shape, list[str]] = {}
    slots: dict[Shape | None, list[Slot]] = {}
    for name, shape in shapes.items():
        names.setdefault(shape, []).append(name)
    for slot in (slot for group in groups for slot in group):
        slots.setdefault(slot.shape, []).append(slot)
    free = slots.pop(None, [])
    shown = {
        shape: (some, names.get(shape, [])) for shape, some in slots.items() if shape is not None
    }
    taken = sum(len(some) for some, _ in shown.values())
    if taken + len(free) > len(shapes) or any(len(some) > len(of) for some, of in shown.values()):
        raise CorruptCheckpoint(
            f"{where}: the optimizer's states do not fit the {len(shapes)} parameters of the "
            "model: they are of another model, or not kept per parameter (LBFGS).",
            WAYS_OUT,
        )
    left = [name for shape, of in names.items() if shape not in shown for name in of]
    unclear = {name for _, of in shown.values() if len(of) > 1 for name in of}
    unclear |= {*left} if free and (len(free), len(left)) != (1, 1) else set()
    if unclear:
        raise AmbiguousSource(
            f"{where}: the weights' files do not keep the model's order{why and f', {why}'}, and "
            "shapes do not tell which optimizer state belongs to "
            f"{summarise(name for name in shapes if name in unclear)}.",
            WAYS_OUT,
        )
    found = {slot.index: of[0] for some, of in shown.values() for slot in some}
    return found | {slot.index: name for slot, name in zip(free, left, strict=False)}


Taken = tuple[int, ...]
"""How many slots of each group have a name so far."""


def _reachable(
    groups: Sequence[Sequence[Slot]], shapes: Sequence[Shape], where: str
) -> list[dict[Taken, int]]:
    """For every position in the names: the states that can be reached, with the number of ways
    there, counted up to 2. Each name is either nobody's or the next slot of a group."""
    total = sum(len(group) for group in groups)
    layers: list[dict[Taken, int]] = [{(0,) * len(groups): 1}]
    states = 0
    for at, shape in enumerate(shapes):
        following: dict[Taken, int] = {}
        for taken, ways in layers[-1].items():
            steps = [_advanced(taken, g) for g in _choices(groups, taken, shape)]
            if total - sum(taken) < len(shapes) - at:
                steps.append(taken)
            for step in steps:
                following[step] = min(following.get(step, 0) + ways, 2)
        states += len(following)
        if states > MAX_SEARCH_STATES:
            raise AmbiguousSource(f"{where}: too many possible orders of parameters.", WAYS_OUT)
        layers.append(following)
    return layers


def _trace(
    groups: Sequence[Sequence[Slot]],
    shapes: Sequence[Shape],
    layers: Sequence[Mapping[Taken, int]],
    pick: int,
) -> dict[int, int]:
    """One assignment, slot number -> position in the names: an extreme one, by `pick` 0 or -1."""
    taken, found = tuple(len(group) for group in groups), {}
    for at in range(len(shapes) - 1, -1, -1):
        before: list[tuple[Taken, int | None]] = [
            (_advanced(taken, g, -1), g)
            for g in range(len(groups))
            if taken[g] and _fits(groups[g][taken[g] - 1], shapes[at])
        ]
        before = [(t, g) for t, g in [*before, (taken, None)] if t in layers[at]]
        earlier, group = before[pick]
        if group is not None:
            found[groups[group][earlier[group]].index] = at
        taken = earlier
    return dict(sorted(found.items()))


def _fits(slot: Slot, shape: Shape) -> bool:
    return slot.shape is None or slot.shape == shape


def _choices(groups: Sequence[Sequence[Slot]], taken: Taken, shape: Shape) -> list[int]:
    """The groups whose next slot may have this shape."""
    return [
        g
        for g, group in enumerate(groups)
        if taken[g] < len(group) and _fits(group[taken[g]], shape)
    ]


def _advanced(taken: Taken, group: int, by: int = 1) -> Taken:
    return (*taken[:group], taken[group] + by, *taken[group + 1 :])
