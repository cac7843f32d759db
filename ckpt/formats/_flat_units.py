"""Which parameters FSDP1 flattened together: told by the names of units, or by their sizes alone.

An optimizer over flat parameters numbers them: the outermost unit first, then units in the order
of the modules. What was wrapped is saved nowhere. Here every way to wrap modules by a few patterns
(`layers.*`, `lm_head`) is tried, and those are kept whose units have just the sizes that were
saved. A share is a unit's elements by the number of ranks, rounded up, so that a way that fits is
right but for a few elements less than there are ranks; no module is that small as a rule.

Source: torch 2.13.0 torch/distributed/fsdp/_flat_param.py (`_get_unpadded_shard`), wrap.py
(`_recursive_wrap`), _runtime_utils.py (`_register_flat_param`: a unit's module owns it).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from math import ceil, comb

from ckpt.errors import AmbiguousSource, CorruptCheckpoint
from ckpt.param_order import Slot, match_names

__all__ = ["Wrapping", "fitting_wrappings", "units_below"]

MAX_PATTERNS = 4
MAX_PATTERNS_WITH_FROZEN = 2
MAX_WAYS = 40_000
CACHED = 20_000  # names; models that are wrapped by hand have fewer
ENOUGH = 3  # ways that fit: more need not be known to refuse

Members = tuple[str, ...]
Depths = tuple[int, ...]
"""For every kind of parameter name, how many segments of it name its unit."""


@dataclass(frozen=True, slots=True)
class Wrapping:
    """A way to wrap.

    Attributes:
        patterns: of modules, digits as `*`; none for one unit of everything.
        members: the parameters by number, in the unit's order; None where this way leaves several.
    """

    patterns: tuple[str, ...]
    members: Mapping[int, Members] | None

    def __str__(self) -> str:
        named = ", ".join(pattern.removesuffix(".") for pattern in self.patterns)
        return f"wrapping {named}" if named else "one unit of everything"


def units_below(prefixes: Iterable[str], names: Sequence[str]) -> dict[str, list[str]]:
    """Parameters by unit, in the order in which flat parameters are listed.

    Args:
        prefixes: of the wrapped modules, with the dot; the rest belongs to the root, which is "".
        names: all parameters in the model's order, tied ones once.
    """
    every = {*prefixes, ""}
    units: dict[str, list[str]] = {}
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        above = [prefix for prefix in _prefixes(name) if prefix in every]
        units.setdefault(above[-1], []).append(name)
        for prefix in above:
            first.setdefault(prefix, at)
    return {prefix: units[prefix] for prefix in sorted(units, key=lambda p: (first[p], len(p)))}


def fitting_wrappings(
    groups: Sequence[Sequence[Slot]],
    every: Sequence[Mapping[str, int]],
    trained: frozenset[str] | None,
    world_size: int,
) -> list[Wrapping]:
    """Ways to wrap whose units have the sizes of the slots, each assignment once, `ENOUGH` at most.

    Units without a number, as frozen ones may be, are thought of where nothing fits without.

    Args:
        groups: numbered flat parameters, with the share of a rank as their shape.
        every: elements by name in the model's order; several where it is not sure what is tied.
        trained: parameters that require gradients, where that is known; units are of one kind.
    """
    for has_frozen in (False, True):
        found: dict[object, Wrapping] = {}
        for numels in every:
            for wrapping in _fitting(groups, numels, trained, world_size, has_frozen):
                members = wrapping.members
                key = tuple(sorted(members.items())) if members is not None else wrapping.patterns
                found.setdefault(key, wrapping)
                if len(found) >= ENOUGH:
                    break
        if found:
            return list(found.values())
    return []


def _fitting(
    groups: Sequence[Sequence[Slot]],
    numels: Mapping[str, int],
    trained: frozenset[str] | None,
    world_size: int,
    has_frozen: bool,
) -> Iterator[Wrapping]:
    """Ways to wrap that fit, with or without further units that have no number."""
    names = list(numels)
    kinds = _Kinds.of(names, frozenset(names) if trained is None else trained)
    count = sum(len(group) for group in groups)
    for patterns, depths in kinds.ways(MAX_PATTERNS_WITH_FROZEN if has_frozen else MAX_PATTERNS):
        numbered, rest = (kinds.prefixes(depths, is_trained) for is_trained in (True, False))
        every = numbered | rest
        is_mixed = bool(numbered & rest)
        numbered = every if len(every) == count else numbered
        if is_mixed or len(numbered) < count or (len(numbered) > count) != has_frozen:
            continue
        units = units_below(every, names)
        sizes = {p: sum(numels[name] for name in units[p]) for p in units if p in numbered}
        shares = {prefix: (ceil(size / world_size),) for prefix, size in sizes.items()}
        for members in _assigned(groups, shares, units):
            yield Wrapping(patterns, members)


def _assigned(
    groups: Sequence[Sequence[Slot]],
    shares: Mapping[str, tuple[int, ...]],
    units: Mapping[str, Sequence[str]],
) -> Iterator[dict[int, Members] | None]:
    """The assignment of units to numbers, if there is one; None where there are several."""
    try:
        found = match_names(groups, shares, "")
    except CorruptCheckpoint:
        return
    except AmbiguousSource:
        yield None
    else:
        yield {number: tuple(units[prefix]) for number, prefix in found.items()}


# --- patterns -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kinds:
    """Parameter names that differ in their digits only are of one kind, if all train or none.

    Attributes:
        trained: for every kind, whether it trains.
        patterns: for every kind, the patterns of the modules around it, the outermost first.
        modules: for every kind and depth, the modules that have these patterns.
    """

    trained: tuple[bool, ...]
    patterns: tuple[tuple[str, ...], ...]
    modules: tuple[tuple[frozenset[str], ...], ...]

    @classmethod
    def of(cls, names: Sequence[str], trained: frozenset[str]) -> _Kinds:
        kinds: dict[tuple[bool, str], list[str]] = {}
        for name in names:
            kinds.setdefault((name in trained, _pattern(name)), []).append(name)
        return cls(
            tuple(is_trained for is_trained, _ in kinds),
            tuple(_prefixes(pattern) for _, pattern in kinds),
            tuple(
                tuple(frozenset(at) for at in zip(*map(_prefixes, of_kind), strict=True))
                for of_kind in kinds.values()
            ),
        )

    def ways(self, most: int) -> Iterator[tuple[tuple[str, ...], Depths]]:
        """Sets of patterns, small ones first, that cut the names in different ways."""
        every = list(dict.fromkeys(p for of_kind in self.patterns for p in of_kind[1:]))
        seen: set[Depths] = set()
        tried = 0
        for size in range(most + 1):
            tried += comb(len(every), size)
            if tried > MAX_WAYS:
                return
            for patterns in combinations(every, size):
                depths = tuple(self._depth(of_kind, patterns) for of_kind in self.patterns)
                if depths not in seen:
                    seen.add(depths)
                    yield patterns, depths

    @staticmethod
    def _depth(of_kind: Sequence[str], patterns: Sequence[str]) -> int:
        return max((at for at, pattern in enumerate(of_kind) if pattern in patterns), default=0)

    def prefixes(self, depths: Depths, is_trained: bool) -> frozenset[str]:
        """The prefixes, with the dot, of units with parameters that train, or that do not."""
        return frozenset().union(
            *(
                of_kind[depth]
                for of_kind, depth, trains in zip(self.modules, depths, self.trained, strict=True)
                if trains == is_trained
            )
        )


def _pattern(name: str) -> str:
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))


@lru_cache(maxsize=CACHED)
def _prefixes(name: str) -> tuple[str, ...]:
    """The root, which is empty, and `a.` and `a.b.` for a parameter a.b.c."""
    path = name.split(".")
    return tuple("".join(f"{segment}." for segment in path[:at]) for at in range(len(path)))
