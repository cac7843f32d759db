"""Ranges of flattened tensors, laid one after another: what flat groups of parameters are made of.

Numbers are elements. No torch, no files.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt.chunks import Chunk, chunks_of_flat_range, row_major_strides
from ckpt.dtypes import DType
from ckpt.model import Record, StoredChunk, StoredTensor
from ckpt.plan import FlatTensor, OutTensor

__all__ = ["FlatRange", "FlatSource", "flat_tensor"]


@dataclass(frozen=True, slots=True)
class _Run:
    """Elements [begin, end) of a flattened tensor, side by side in a record from `start` on."""

    begin: int
    end: int
    record: Record
    start: int


@dataclass(frozen=True)
class FlatSource:
    """A stored tensor whose flattened elements are wanted, range by range."""

    tensor: StoredTensor

    @cached_property
    def _runs(self) -> list[_Run] | None:
        """Its runs in flat order; None where a chunk is no run of flat elements."""
        runs = []
        for stored in self.tensor.chunks:
            if not stored.chunk.numel:
                continue
            begin = _flat_begin(stored, self.tensor.shape)
            if begin is None:
                return None
            runs.append(_Run(begin, begin + stored.chunk.numel, stored.record, stored.start))
        runs.sort(key=lambda run: run.begin)
        joined: list[_Run] = []
        for run in runs:
            last = joined[-1] if joined else None
            if last and last.record == run.record and _continues(last, run):
                joined[-1] = _Run(last.begin, run.end, run.record, last.start)
            else:
                joined.append(run)
        return joined

    @cached_property
    def _begins(self) -> list[int]:
        return [run.begin for run in self._runs or ()]

    def pieces(self, start: int, stop: int, dtype: DType) -> Iterator[tuple[int, OutTensor]]:
        """The elements [start, stop), each piece with its distance from `start`."""
        if start >= stop:
            return
        if self._runs is not None:
            yield 0, OutTensor.of(self._slice(self._runs, start, stop), dtype)
            return
        at = 0
        for box in chunks_of_flat_range(self.tensor.shape, start, stop):
            yield at, OutTensor(self.tensor, dtype, box)
            at += box.numel

    def _slice(self, runs: Sequence[_Run], start: int, stop: int) -> StoredTensor:
        """The elements [start, stop) as a 1-D tensor; what no run has is missing from it."""
        chunks = []
        for run in runs[max(bisect_right(self._begins, start) - 1, 0) :]:
            if run.begin >= stop:
                break
            begin, end = max(run.begin, start), min(run.end, stop)
            if begin < end:
                box = Chunk((begin - start,), (end - begin,))
                chunks.append(StoredChunk(box, run.record, run.start + begin - run.begin))
        return StoredTensor(self.tensor.dtype, (stop - start,), tuple(chunks))


def _continues(last: _Run, run: _Run) -> bool:
    return last.end == run.begin and last.start + last.end - last.begin == run.start


def _flat_begin(stored: StoredChunk, shape: tuple[int, ...]) -> int | None:
    """The first flat element of a chunk that is a run of flat elements, or None."""
    sizes = stored.chunk.sizes
    first = next((dim for dim, size in enumerate(sizes) if size != 1), len(sizes))
    if stored.strides is not None or sizes[first + 1 :] != tuple(shape)[first + 1 :]:
        return None
    strides = row_major_strides(shape)
    return sum(o * s for o, s in zip(stored.chunk.offsets, strides, strict=True))


@dataclass(frozen=True, slots=True)
class FlatRange:
    """The flat elements [start, stop) of a source, from element `at` of a flat tensor on."""

    at: int
    source: FlatSource
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Pieces:
    """The pieces of a flat tensor, made when asked for."""

    ranges: tuple[FlatRange, ...]
    dtype: DType

    def __iter__(self) -> Iterator[tuple[int, OutTensor]]:
        for part in self.ranges:
            for at, piece in part.source.pieces(part.start, part.stop, self.dtype):
                yield part.at + at, piece


def flat_tensor(dtype: DType, numel: int, ranges: Sequence[FlatRange]) -> FlatTensor:
    """A flat tensor of `numel` elements that holds the ranges and else zeros."""
    assert all(0 <= r.at and r.at + r.stop - r.start <= numel for r in ranges)
    return FlatTensor(dtype, numel, _Pieces(tuple(ranges), dtype))
