"""Explicit reads of small tensors: step counts, scalars, RNG states. Never of weights."""

from __future__ import annotations

import struct
from pathlib import Path

from ckpt.chunks import row_major_strides
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint
from ckpt.model import InlineTensor, StoredTensor

__all__ = ["read_bytes", "read_number"]

MAX_BYTES = 1 << 24
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


def read_bytes(tensor: StoredTensor | InlineTensor) -> bytes:
    """The row-major bytes of a small tensor that one place stores.

    Raises:
        CorruptCheckpoint: the file ends before the tensor does.
        ValueError: the tensor is large, in pieces, or not contiguous; those go through the engine.
    """
    if isinstance(tensor, InlineTensor):
        return tensor.data
    if tensor.nbytes > MAX_BYTES or len(tensor.chunks) != 1:
        raise ValueError("read_bytes is for small tensors in one place")
    place = tensor.chunks[0]
    if place.strides not in (None, row_major_strides(tensor.shape)):
        raise ValueError("read_bytes is for contiguous tensors")
    with Path(place.record.path).open("rb") as stream:
        stream.seek(place.record.offset + place.start * tensor.dtype.itemsize)
        data = stream.read(tensor.nbytes)
    if len(data) != tensor.nbytes:
        raise CorruptCheckpoint(f"{place.record.path}: ends before its tensors do; truncated")
    return data


def read_number(value: object) -> float | int | None:
    """The number in a 0-dimensional tensor, a number itself, or None for anything else."""
    if isinstance(value, StoredTensor | InlineTensor):
        if value.shape not in ((), (1,)) or value.dtype not in STRUCT_CODES:
            return None
        number: float | int = struct.unpack(STRUCT_CODES[value.dtype], read_bytes(value))[0]
        return number
    return value if isinstance(value, int | float) else None
