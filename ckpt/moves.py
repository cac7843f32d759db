"""Which bytes go where: the moves that assemble output tensors out of stored chunks.

Pure geometry. A move takes a box from a record to a box of an output tensor; where both sides are
contiguous it is one run of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from ckpt.chunks import Chunk, row_major_strides
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint
from ckpt.model import Record, StoredChunk
from ckpt.plan import OutTensor, Placement

__all__ = ["Move", "Run", "moves_of", "run_numel", "runs_of"]


@dataclass(frozen=True, slots=True)
class Move:
    """A box of elements on its way from a record into a file.

    Attributes:
        record: the bytes it comes from.
        dtype: of the record; `out_dtype` of the output.
        start: first element in the record; `strides` its strides there, in elements.
        path: output file; `base` the byte where the output tensor begins.
        out_start: first element in the output tensor; `out_strides` its strides there.
        sizes: sizes of the box.
    """

    record: Record
    dtype: DType
    start: int
    strides: tuple[int, ...]
    path: str
    base: int
    out_dtype: DType
    out_start: int
    out_strides: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that arrive in the output."""
        return prod(self.sizes) * self.out_dtype.itemsize


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous elements: `numel` from `start` in the record to `out_start` in the output."""

    start: int
    out_start: int
    numel: int


def moves_of(path: str, placements: Iterable[Placement]) -> Iterator[Move]:
    """The moves that fill the tensors placed in one output file.

    Raises:
        CorruptCheckpoint: the chunks of a tensor leave some of its elements out.
    """
    for placement in placements:
        tensor, moved = placement.tensor, 0
        for stored in tensor.source.chunks:
            common = _common(stored.chunk, tensor.chunk)
            if common is None:
                continue
            moved += common.numel
            if common.numel:
                yield _move(path, placement.offset, tensor, stored, common)
        if moved != tensor.chunk.numel:
            where = tensor.source.chunks[0].record.path if tensor.source.chunks else "a tensor"
            raise CorruptCheckpoint(
                f"{where}: {moved} of {tensor.chunk.numel} elements of a tensor are stored"
            )


def _common(stored: Chunk, wanted: Chunk) -> Chunk | None:
    return wanted if not wanted.sizes else stored.intersect(wanted)


def _move(path: str, base: int, tensor: OutTensor, stored: StoredChunk, box: Chunk) -> Move:
    strides = stored.strides or row_major_strides(stored.chunk.sizes)
    out_strides = row_major_strides(tensor.chunk.sizes)
    return Move(
        record=stored.record,
        dtype=tensor.source.dtype,
        start=stored.start + _flat(box, stored.chunk, strides),
        strides=strides,
        path=path,
        base=base,
        out_dtype=tensor.dtype,
        out_start=_flat(box, tensor.chunk, out_strides),
        out_strides=out_strides,
        sizes=box.sizes,
    )


def _flat(box: Chunk, inside: Chunk, strides: tuple[int, ...]) -> int:
    """Position of the box's first element, with these strides, from that of `inside`."""
    return sum(
        (offset - start) * stride
        for offset, start, stride in zip(box.offsets, inside.offsets, strides, strict=True)
    )


def run_numel(move: Move) -> int:
    """Elements of the runs that are contiguous on both sides."""
    return prod(move.sizes[_outer_dims(move) :])


def _outer_dims(move: Move) -> int:
    """How many leading dimensions have to be stepped through, run by run."""
    numel, dim = 1, len(move.sizes)
    while dim:
        size = move.sizes[dim - 1]
        if size != 1 and not move.strides[dim - 1] == move.out_strides[dim - 1] == numel:
            break
        numel *= size
        dim -= 1
    return dim


def runs_of(move: Move) -> Iterator[Run]:
    """The move as runs that are contiguous on both sides, as long as they can be."""
    outer = _outer_dims(move)
    numel = prod(move.sizes[outer:])
    for index in product(*(range(size) for size in move.sizes[:outer])):
        yield Run(
            move.start + sum(i * s for i, s in zip(index, move.strides, strict=False)),
            move.out_start + sum(i * s for i, s in zip(index, move.out_strides, strict=False)),
            numel,
        )
