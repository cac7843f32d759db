"""Tensors of two checkpoints side by side in bounded memory: what comparing needs.

Boxes of both tensors are assembled by the copy engine in temporary files and read from there. Used
to compare checkpoints and to find tied weights that were saved twice. Equal bytes need no torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.chunks import Chunk, row_slabs
from ckpt.copying import copy
from ckpt.model import StoredTensor
from ckpt.moves import moves_of
from ckpt.plan import OutTensor, Placement
from ckpt.values import is_small, read_bytes

__all__ = ["Difference", "compare", "equal"]

BOX_BYTES = 8 << 20


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
    return a.dtype is b.dtype and a.shape == b.shape and all(x == y for x, y, _ in _boxes(a, b))


def compare(a: StoredTensor, b: StoredTensor, rtol: float, atol: float) -> Difference | None:
    """The difference of two tensors of one shape beyond |a - b| <= atol + rtol * |b|, or None.

    Equal bits of one dtype, the common case, are not looked at as numbers.
    """
    found = [
        difference
        for x, y, box in _boxes(a, b)
        if x and (a.dtype is not b.dtype or x != y)
        if (difference := _difference(_numbers(x, a), _numbers(y, b), box, rtol, atol))
    ]
    if not found:
        return None
    largest = max(found, key=lambda d: (d.largest != d.largest, d.largest)).largest
    return Difference(sum(d.count for d in found), largest, found[0].first)


def _boxes(a: StoredTensor, b: StoredTensor) -> Iterator[tuple[bytes, bytes, Chunk]]:
    """The row-major bytes of both tensors, box by box."""
    with tempfile.TemporaryDirectory(prefix="ckpt-") as folder:
        path = Path(folder) / "box"
        for box in row_slabs(a.shape, max(a.dtype.itemsize, b.dtype.itemsize), BOX_BYTES):
            yield _bytes(a, box, path), _bytes(b, box, path), box


def _bytes(tensor: StoredTensor, box: Chunk, path: Path) -> bytes:
    if box.sizes == tensor.shape and is_small(tensor):
        return read_bytes(tensor)
    out = OutTensor(tensor, tensor.dtype, box)
    with path.open("wb") as stream:
        stream.truncate(out.nbytes)
    moves = moves_of(str(path), [Placement(0, out)])
    # A record would be read to its end for its checksum, once for every box.
    copy(replace(move, record=replace(move.record, crc32=None)) for move in moves)
    return path.read_bytes()


def _numbers(data: bytes, tensor: StoredTensor) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=getattr(torch, tensor.dtype.torch_name))


def _difference(x: Any, y: Any, box: Chunk, rtol: float, atol: float) -> Difference | None:
    import torch

    wide = torch.complex128 if x.dtype.is_complex or y.dtype.is_complex else torch.float64
    if not x.dtype.is_floating_point and not y.dtype.is_floating_point and not x.dtype.is_complex:
        wide = torch.int64
    x, y = x.to(wide), y.to(wide)
    gap = (x - y).abs()
    both_nan = (x != x) & (y != y)
    same = (x == y) | both_nan
    near = (gap <= atol + rtol * y.abs()) & x.isfinite() & y.isfinite()
    wrong = ~same & ~near
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
