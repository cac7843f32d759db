"""Which elements of a tensor a rank holds, out of how the tensor is placed on a mesh of ranks.

A tensor is cut mesh dimension by mesh dimension; each cut takes what the earlier ones left of one
dimension of the tensor. Numbers are elements. No torch, no files.

Source: torch 2.13.0 torch/distributed/tensor/_utils.py (`_compute_local_shape_and_global_offset`),
placement_types.py (`Shard._custom_chunk`, `_StridedShard._split_tensor`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from ckpt.chunks import Chunk

__all__ = ["Cut", "HeldBox", "held_boxes", "held_shape"]

Run = tuple[int, int]
"""First index and number of indices of a dimension that lie side by side."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension's cut.

    Attributes:
        dim: the tensor's dimension that is cut.
        parts: ranks along the mesh dimension.
        index: which of them this rank is.
        split_factor: the dimension is cut in so many pieces first, and each piece among the ranks
            (tensor parallelism below FSDP); 1 cuts the dimension itself.
    """

    dim: int
    parts: int
    index: int
    split_factor: int = 1


@dataclass(frozen=True, slots=True)
class HeldBox:
    """A box of the whole tensor, and where it begins in what the rank holds."""

    chunk: Chunk
    local_offsets: tuple[int, ...]


def held_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape of what a rank holds.

    Raises:
        ValueError: a cut of a dimension that the tensor does not have.
    """
    return tuple(sum(count for _, count in runs) for runs in _runs(shape, cuts))


def held_boxes(shape: Sequence[int], cuts: Sequence[Cut]) -> list[HeldBox]:
    """The boxes that a rank holds, none of them empty; most cuts leave one box or none.

    Raises:
        ValueError: a cut of a dimension that the tensor does not have.
    """
    placed = [list(_placed(runs)) for runs in _runs(shape, cuts)]
    boxes = []
    for choice in product(*placed):
        chunk = Chunk(tuple(run[0] for run, _ in choice), tuple(run[1] for run, _ in choice))
        boxes.append(HeldBox(chunk, tuple(at for _, at in choice)))
    return boxes


def _placed(runs: Sequence[Run]) -> Iterator[tuple[Run, int]]:
    """Runs with the places at which they begin in what the rank holds."""
    return zip(runs, accumulate((count for _, count in runs), initial=0), strict=False)


def _runs(shape: Sequence[int], cuts: Sequence[Cut]) -> list[list[Run]]:
    """For each dimension, the indices that a rank holds."""
    held = [[(0, size)] if size else [] for size in shape]
    for cut in cuts:
        if not 0 <= cut.dim < len(shape) or not 0 <= cut.index < cut.parts or cut.split_factor < 1:
            raise ValueError(f"{cut} of a tensor of shape {tuple(shape)}")
        pieces = _chunked(held[cut.dim], cut.split_factor)
        held[cut.dim] = [run for piece in pieces for run in _chunk(piece, cut.parts, cut.index)]
    return held


def _chunked(runs: Sequence[Run], parts: int) -> list[list[Run]]:
    return [_chunk(runs, parts, index) for index in range(parts)]


def _chunk(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """One part as torch.chunk cuts: all parts of equal size, the last ones smaller or empty."""
    total = sum(count for _, count in runs)
    size = -(-total // parts)
    start, stop = min(size * index, total), min(size * (index + 1), total)
    found = []
    for (first, count), at in _placed(runs):
        low, high = max(start, at), min(stop, at + count)
        if low < high:
            found.append((first + low - at, high - low))
    return found
