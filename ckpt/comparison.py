"""Whether two checkpoints, of any formats, hold the same training state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ckpt.assemble import compare
from ckpt.model import Checkpoint, InlineTensor, Opaque, Plain, Scalar, StoredTensor
from ckpt.outgoing import attributes
from ckpt.values import is_small, read_bytes, read_number

__all__ = ["DiffItem", "diff"]

IMPLEMENTATION_OPTIONS = frozenset(
    {"foreach", "fused", "capturable", "differentiable", "initial_lr", "decoupled_weight_decay"}
)
"""Options that choose an implementation, or that a scheduler or optimizer sets for itself."""


@dataclass(frozen=True, slots=True)
class DiffItem:
    """One difference: which kind of thing, its name, and how it differs."""

    kind: str
    name: str
    detail: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.detail}"


def diff(
    a: Checkpoint,
    b: Checkpoint,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    weights_only: bool = False,
) -> Iterator[DiffItem]:
    """The differences between two training states, weights first, found as they are read.

    Weights are the fp32 master weights where there are any. Tied names are looked up through their
    owners, wrapper prefixes do not count, nor do options that choose an implementation.

    Args:
        rtol, atol: elements differ when |a - b| > atol + rtol * |b|; with both 0, dtypes have to
            agree too.
        weights_only: compare parameters and buffers only.
    """
    exact = not rtol and not atol
    ours, theirs = _state_dict(a), _state_dict(b)
    yield from _one_sided("weight", ours, theirs)
    for name in ours:
        if name in theirs:
            yield from _tensors("weight", name, ours[name], theirs[name], rtol, atol, exact)
    if weights_only:
        return
    yield from _one_sided("extra state", a.extra_state, b.extra_state)
    if a.has_optimizer != b.has_optimizer:
        side = "the first" if a.has_optimizer else "the second"
        yield DiffItem("optimizer", "state", f"only in {side}")
    elif a.has_optimizer:
        yield from _optimizers(a, b, rtol, atol, exact)
    yield from _one_sided("job", a.objects, b.objects)
    for name in a.objects:
        if name in b.objects and not _same(a.objects[name], b.objects[name]):
            yield DiffItem("job", name, "differs")


def _state_dict(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    tensors = {fqn: param.weight for fqn, param in checkpoint.params.items()}
    tensors |= checkpoint.buffers
    return {name: tensors[checkpoint.ties.get(name, name)] for name in checkpoint.order}


def _one_sided(kind: str, a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[DiffItem]:
    for name in a:
        if name not in b:
            yield DiffItem(kind, name, "only in the first")
    for name in b:
        if name not in a:
            yield DiffItem(kind, name, "only in the second")


def _tensors(
    kind: str,
    name: str,
    a: StoredTensor,
    b: StoredTensor,
    rtol: float,
    atol: float,
    exact: bool,
) -> Iterator[DiffItem]:
    if a.shape != b.shape:
        yield DiffItem(kind, name, f"shape {list(a.shape)} against {list(b.shape)}")
        return
    found = compare(a, b, rtol, atol)
    if exact and a.dtype is not b.dtype:
        values = f", values differ by up to {found.largest:.3g}" if found else ", values equal"
        detail = f"{a.dtype.torch_name} against {b.dtype.torch_name}{values}"
        yield DiffItem(kind, name, detail)
    elif found:
        yield DiffItem(
            kind,
            name,
            f"{found.count} of {a.numel} elements differ, by up to {found.largest:.3g}, "
            f"first at {list(found.first)}",
        )


def _optimizers(
    a: Checkpoint, b: Checkpoint, rtol: float, atol: float, exact: bool
) -> Iterator[DiffItem]:
    ours, names = _options_by_fqn(a), _names_in(a, b)
    theirs = {names[fqn]: options for fqn, options in _options_by_fqn(b).items()}
    spelled = {name: fqn for fqn, name in names.items()}
    yield from _one_sided("param group member", ours, theirs)
    yield from _groups(a, theirs)
    for fqn in ours:
        if fqn not in theirs:
            continue
        states = a.params[fqn].state, b.params[spelled[fqn]].state
        yield from _one_sided(f"state of {fqn}:", *states)
        for name in states[0].keys() & states[1].keys():
            x, y = states[0][name], states[1][name]
            yield from _state_values(f"{name} of", fqn, x, y, rtol, atol, exact)


def _state_values(
    kind: str,
    fqn: str,
    a: StoredTensor | Scalar,
    b: StoredTensor | Scalar,
    rtol: float,
    atol: float,
    exact: bool,
) -> Iterator[DiffItem]:
    numbers = read_number(a), read_number(b)
    if None not in numbers:
        if numbers[0] != numbers[1]:
            yield DiffItem(kind, fqn, f"{numbers[0]:g} against {numbers[1]:g}")
    elif isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        yield from _tensors(kind, fqn, a, b, rtol, atol, exact)
    elif a != b:
        yield DiffItem(kind, fqn, f"{a!r} against {b!r}")


def _options_by_fqn(checkpoint: Checkpoint) -> dict[str, Mapping[str, Plain]]:
    return {fqn: group.options for group in checkpoint.groups for fqn in group.fqns}


def _names_in(a: Checkpoint, b: Checkpoint) -> dict[str, str]:
    """The second optimizer's members by the first's names, where a tied weight has two."""
    known = _options_by_fqn(a)
    names = {}
    for fqn in _options_by_fqn(b):
        aliases = [alias for alias, owner in b.ties.items() if owner == fqn]
        others = [name for name in (a.ties.get(fqn), *aliases) if name in known]
        names[fqn] = fqn if fqn in known or not others else str(others[0])
    return names


def _groups(a: Checkpoint, theirs: Mapping[str, Mapping[str, Plain]]) -> Iterator[DiffItem]:
    """Hyper-parameters, group by group of the first checkpoint, as its members have them."""
    for index, group in enumerate(a.groups):
        seen = set()
        for fqn in group.fqns:
            others = theirs.get(fqn, group.options)
            for name in dict.fromkeys([*group.options, *others]):
                value, other = group.options.get(name), others.get(name)
                if name in IMPLEMENTATION_OPTIONS or name in seen or _alike(value, other):
                    continue
                seen.add(name)
                detail = f"{value!r} against {other!r}, as for {fqn}"
                yield DiffItem("param group", f"{index} {name}", detail)


def _alike(a: Plain, b: Plain) -> bool:
    """The same value; an option that is off may as well be absent."""
    return _same(a, b) or (a in (None, False) and b in (None, False))


def _same(a: Plain, b: Plain) -> bool:
    a, b = (attributes(side) if isinstance(side, Opaque) else side for side in (a, b))
    numbers = read_number(a), read_number(b)
    if None not in numbers:
        return numbers[0] == numbers[1] or (numbers[0] != numbers[0] and numbers[1] != numbers[1])
    if isinstance(a, StoredTensor) and isinstance(b, StoredTensor):
        return a.shape == b.shape and compare(a, b, 0.0, 0.0) is None
    if isinstance(a, InlineTensor):
        return _same_as_array(b, a)
    if isinstance(b, InlineTensor):
        return _same_as_array(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        keys = {str(key): value for key, value in b.items()}
        return len(a) == len(b) and all(
            str(key) in keys and _same(value, keys[str(key)]) for key, value in a.items()
        )
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _same_as_array(value: Plain, array: InlineTensor) -> bool:
    """Whether a tensor has the bytes of a numpy array, which are at hand."""
    if not isinstance(value, StoredTensor | InlineTensor):
        return False
    if (value.dtype, value.shape) != (array.dtype, array.shape):
        return False
    if isinstance(value, StoredTensor) and not is_small(value, len(array.data)):
        return False
    return read_bytes(value, len(array.data)) == array.data
