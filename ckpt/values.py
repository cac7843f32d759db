"""Explicit reads of small tensors: step counts, scalars, RNG states. Never of weights."""

from __future__ import annotations

import struct
from pathlib import Path

from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint
from ckpt.model import InlineTensor, StoredChunk, StoredTensor

__all__ = ["is_small", "read_bytes", "read_number", "read_run"]

MAX_BYTES = 1 << 20
STRUCT_CODES = {
    DType.float64: "<d",
    DType.float32: "<f",
    DType.float16: "<e",
    DType.int64: "<q",
    DType.int32: "<i",
    DType.int16: "<h",
    DType.int8: "<b",
    DType.uint8: "<B",
    DType.bool: "<?",
}


def read_bytes(tensor: StoredTensor | InlineTensor, most: int = MAX_BYTES) -> bytes:
    """The row-major bytes of a small tensor, of `most` bytes, that one place stores.

    Raises:
        CorruptCheckpoint: the file ends before the tensor does.
        ValueError: the tensor is large, in pieces, or not contiguous; those go through the engine.
    """
    if isinstance(tensor, InlineTensor):
        return tensor.data
    if not is_small(tensor, most):
        raise ValueError("read_bytes is for small tensors in one place; others need the engine")
    place = tensor.chunks[0]
    at = place.record.offset + place.start * tensor.dtype.itemsize
    return _read(place.record.path, at, tensor.nbytes)


def is_small(tensor: StoredTensor, most: int = MAX_BYTES) -> bool:
    """True for a tensor that `read_bytes` takes: small, in one place, row-major."""
    return tensor.nbytes <= most and len(tensor.chunks) == 1 and not tensor.chunks[0].strides


def read_run(chunk: StoredChunk, dtype: DType, count: int) -> list[float]:
    """The first elements of a contiguous chunk, as numbers; for samples, not for weights."""
    at = chunk.record.offset + chunk.start * dtype.itemsize
    data = _read(chunk.record.path, at, count * dtype.itemsize)
    if dtype is DType.bfloat16:  # the upper half of a float32
        data = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
        return list(struct.unpack(f"<{count}f", data))
    return list(struct.unpack(f"<{count}{STRUCT_CODES[dtype][1:]}", data))


def _read(path: str, offset: int, nbytes: int) -> bytes:
    with Path(path).open("rb") as stream:
        stream.seek(offset)
        data = stream.read(nbytes)
    if len(data) != nbytes:
        raise CorruptCheckpoint(f"{path}: ends before its tensors do; truncated")
    return data


def read_number(value: object) -> float | int | None:
    """The number in a 0-dimensional tensor, a number itself, or None for anything else."""
    if isinstance(value, StoredTensor | InlineTensor):
        if value.shape not in ((), (1,)) or value.dtype not in STRUCT_CODES:
            return None
        number: float | int = struct.unpack(STRUCT_CODES[value.dtype], read_bytes(value))[0]
        return number
    return value if isinstance(value, int | float) else None
