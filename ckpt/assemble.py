"""Tensors of two checkpoints side by side in bounded memory: what comparing needs.

Boxes of both tensors are assembled by the copy engine into temporary files and seen through memory
maps. Used to compare checkpoints and to find tied weights that were saved twice.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from ckpt.chunks import Chunk
from ckpt.copying import copy
from ckpt.dtypes import DType
from ckpt.model import StoredTensor
from ckpt.moves import moves_of
from ckpt.plan import OutTensor, Placement

__all__ = ["Difference", "compare", "equal"]

BOX_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """How two tensors of one shape differ.

    Attributes:
        count: elements outside the tolerance; NaN equals NaN.
        largest: largest absolute difference; NaN when only one side is NaN.
        first: index of the first such element.
    """

    count: int
    largest: float
    first: tuple[int, ...]


def equal(a: StoredTensor, b: StoredTensor) -> bool:
    """True when two tensors have the same dtype, shape and bits."""
    same = a.dtype is b.dtype and a.shape == b.shape
    return same and all(_bytes_equal(x, y) for x, y, _ in _boxes(a, b, a.dtype, b.dtype))


def compare(a: StoredTensor, b: StoredTensor, rtol: float, atol: float) -> Difference | None:
    """The difference of two tensors of one shape beyond |a - b| <= atol + rtol * |b|, or None.

    With both tolerances 0 and one dtype, bits are compared first, which is the common case.
    """
    found: list[Difference] = []
    for x, y, box in _boxes(a, b, a.dtype, b.dtype):
        if a.dtype is b.dtype and _bytes_equal(x, y):
            continue
        difference = _difference(x.view(_torch(a.dtype)), y.view(_torch(b.dtype)), box, rtol, atol)
        if difference:
            found.append(difference)
    if not found:
        return None
    largest = max(found, key=lambda d: (d.largest != d.largest, d.largest)).largest
    return Difference(sum(d.count for d in found), largest, found[0].first)


def _boxes(
    a: StoredTensor, b: StoredTensor, a_dtype: DType, b_dtype: DType
) -> Iterator[tuple[Any, Any, Chunk]]:
    """Both tensors box by box, as flat uint8 tensors over temporary files."""
    import torch

    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        for box in _slabs(a.shape, max(a_dtype.itemsize, b_dtype.itemsize)):
            sides = []
            for side, tensor, dtype in (("a", a, a_dtype), ("b", b, b_dtype)):
                path = Path(folder) / side
                out = OutTensor(tensor, dtype, box)
                with path.open("wb") as stream:
                    stream.truncate(out.nbytes)
                unchecked = (
                    replace(move, record=replace(move.record, crc32=None))
                    for move in moves_of(str(path), [Placement(0, out)])
                )
                copy(unchecked)
                sides.append(
                    torch.from_file(str(path), shared=False, size=out.nbytes, dtype=torch.uint8)
                    if out.nbytes
                    else torch.empty(0, dtype=torch.uint8)
                )
            yield sides[0], sides[1], box


def _slabs(shape: tuple[int, ...], itemsize: int) -> Iterator[Chunk]:
    """The tensor in boxes of whole rows, none larger than BOX_BYTES if rows allow."""
    if not shape or prod(shape) * itemsize <= BOX_BYTES:
        yield Chunk.whole(shape)
        return
    rows = max(BOX_BYTES // (prod(shape[1:]) * itemsize), 1)
    for first in range(0, shape[0], rows):
        offsets = (first,) + (0,) * (len(shape) - 1)
        yield Chunk(offsets, (min(rows, shape[0] - first), *shape[1:]))


def _bytes_equal(x: Any, y: Any) -> bool:
    import torch

    return bool(torch.equal(x, y))


def _difference(x: Any, y: Any, box: Chunk, rtol: float, atol: float) -> Difference | None:
    import torch

    wide = torch.complex128 if x.dtype.is_complex or y.dtype.is_complex else torch.float64
    if not x.dtype.is_floating_point and not y.dtype.is_floating_point and not x.dtype.is_complex:
        wide = torch.int64
    x, y = x.to(wide), y.to(wide)
    gap = (x - y).abs()
    both_nan = (x != x) & (y != y)
    same = (x == y) | both_nan
    wrong = ~same & ~(gap <= atol + rtol * y.abs())
    count = int(wrong.sum())
    if not count:
        return None
    gaps = gap[wrong]
    largest = float("nan") if bool((gaps != gaps).any()) else float(gaps.max())
    position = int(wrong.nonzero()[0])
    return Difference(count, largest, _index(position, box))


def _index(position: int, box: Chunk) -> tuple[int, ...]:
    index = []
    for size in reversed(box.sizes):
        position, at = divmod(position, size)
        index.append(at)
    return tuple(a + o for a, o in zip(reversed(index), box.offsets, strict=True))


def _torch(dtype: DType) -> Any:
    import torch

    return getattr(torch, dtype.torch_name)
