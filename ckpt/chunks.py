"""Boxes inside tensors: intersections, flat ranges cut into boxes, and coverage.

All numbers are elements. No torch, no files. A chunk is the region of a tensor that one place
stores, in the words of torch.distributed.checkpoint's ChunkStorageMetadata.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

__all__ = [
    "Chunk",
    "Coverage",
    "chunks_of_flat_range",
    "coverage",
    "row_major_strides",
    "row_slabs",
]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box [offsets, offsets + sizes) of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Chunk:
        """The box that is the whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements in the box; 1 for the box of a 0-dimensional tensor."""
        return prod(self.sizes)

    def intersect(self, other: Chunk) -> Chunk | None:
        """The common box, or None when it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        stops = tuple(
            min(a + m, b + n)
            for a, m, b, n in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return None if any(size <= 0 for size in sizes) else Chunk(starts, sizes)

    def fits(self, shape: Sequence[int]) -> bool:
        """True when the box lies inside a tensor of this shape."""
        return len(shape) == len(self.offsets) and all(
            0 <= offset and 0 <= size and offset + size <= limit
            for offset, size, limit in zip(self.offsets, self.sizes, shape, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Coverage:
    """How well chunks tile a tensor: elements nobody stores, copies of elements stored already."""

    missing: int
    repeated: int


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides in elements of a contiguous tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def chunks_of_flat_range(shape: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """The boxes, in flat order, that together are the elements [start, stop) of a flat tensor.

    Each box is contiguous in the flattened tensor, and there are at most 2 * ndim - 1 of them.
    """
    if start >= stop:
        return []
    if not shape:
        return [Chunk((), ())]
    return list(_boxes(tuple(shape), start, stop))


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Chunk]:
    if len(shape) == 1:
        yield Chunk((start,), (stop - start,))
        return
    row = prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if head and first == last:
        yield from _in_row(first, shape, head, tail)
        return
    if head:
        yield from _in_row(first, shape, head, row)
        first += 1
    if last > first:
        yield Chunk((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]))
    if tail:
        yield from _in_row(last, shape, 0, tail)


def _in_row(index: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Chunk]:
    for box in _boxes(shape[1:], start, stop):
        yield Chunk((index, *box.offsets), (1, *box.sizes))


def row_slabs(shape: Sequence[int], itemsize: int, max_bytes: int) -> Iterator[Chunk]:
    """The tensor in boxes of whole rows, none larger than `max_bytes` if a row is not."""
    if not shape or prod(shape) * itemsize <= max_bytes:
        yield Chunk.whole(shape)
        return
    rows = max(max_bytes // (prod(shape[1:]) * itemsize), 1)
    for first in range(0, shape[0], rows):
        offsets = (first,) + (0,) * (len(shape) - 1)
        yield Chunk(offsets, (min(rows, shape[0] - first), *shape[1:]))


def coverage(shape: Sequence[int], chunks: Sequence[Chunk]) -> Coverage:
    """How many elements of a tensor the chunks leave out, and how many they store again.

    Sorts by the first dimension and compares only chunks that can meet, so that a tensor in
    thousands of slices along dimension 0 costs no more than the sorting.
    """
    boxes = sorted((c for c in chunks if c.numel), key=lambda c: c.offsets)
    distinct, reach = 0, list[Chunk]()
    for box in boxes:
        start = box.offsets[0] if box.offsets else 0
        reach = [b for b in reach if not b.offsets or b.offsets[0] + b.sizes[0] > start]
        fresh = [box]
        for other in reach:
            fresh = [part for piece in fresh for part in _outside(piece, other)]
        distinct += sum(part.numel for part in fresh)
        reach += fresh
    return Coverage(prod(shape) - distinct, sum(box.numel for box in boxes) - distinct)


def _outside(box: Chunk, other: Chunk) -> Iterator[Chunk]:
    """The parts of a box that lie outside of another, as disjoint boxes."""
    common = box if not box.sizes else box.intersect(other)
    if common is None:
        yield box
        return
    offsets, sizes = list(box.offsets), list(box.sizes)
    for dim, (start, size) in enumerate(zip(common.offsets, common.sizes, strict=True)):
        for first, count in (
            (offsets[dim], start - offsets[dim]),
            (start + size, offsets[dim] + sizes[dim] - start - size),
        ):
            if count:
                yield Chunk(
                    (*offsets[:dim], first, *offsets[dim + 1 :]),
                    (*sizes[:dim], count, *sizes[dim + 1 :]),
                )
        offsets[dim], sizes[dim] = start, size
