"""numpy's scalars and arrays of plain numbers, decoded without numpy.

Source: numpy 2.4 _core/multiarray (`scalar`, `_reconstruct`), ndarray.__reduce__: version, shape,
dtype, column-major or not, bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from ckpt.dtypes import DType
from ckpt.errors import Unsupported
from ckpt.model import InlineTensor

__all__ = ["NumpyDtype", "scalar", "tensor_of"]


class NumpyDtype:
    """A numpy dtype of plain numbers, as a pickle may build one."""

    CODES: Mapping[str, tuple[str, DType]] = {
        "f8": ("d", DType.float64),
        "f4": ("f", DType.float32),
        "f2": ("e", DType.float16),
        "i8": ("q", DType.int64),
        "i4": ("i", DType.int32),
        "i2": ("h", DType.int16),
        "i1": ("b", DType.int8),
        "u8": ("Q", DType.uint64),
        "u4": ("I", DType.uint32),
        "u2": ("H", DType.uint16),
        "u1": ("B", DType.uint8),
        "b1": ("?", DType.bool),
    }

    def __init__(self, code: str, *_ignored: Any) -> None:
        if code not in self.CODES:
            raise Unsupported(
                f"a numpy array or scalar of dtype {code!r} is no plain number; save it as a list"
            )
        self.name, self.order = code, "<"
        self.code, self.dtype = self.CODES[code]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] == ">":
            self.order = ">"

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        """The numbers in `data`."""
        count = len(data) // struct.calcsize(self.code)
        return struct.unpack(f"{self.order}{count}{self.code}", data)


def scalar(dtype: NumpyDtype, data: Any) -> Any:
    """A numpy scalar as a number."""
    return dtype.unpack(_raw(data))[0]


def tensor_of(state: Any) -> InlineTensor:
    """The array with that pickled state, as a tensor of the same dtype and shape.

    Raises:
        ValueError: another number of elements than the shape says.
    """
    _version, shape, dtype, is_column_major, data = state
    values: Sequence[Any] = dtype.unpack(_raw(data))
    if len(values) != prod(shape):
        raise ValueError(f"{len(values)} numbers for an array of shape {shape}")
    if is_column_major:
        steps = [prod(shape[:dim]) for dim in range(len(shape))]
        places = product(*(range(size) for size in shape))
        values = [values[sum(i * s for i, s in zip(at, steps, strict=True))] for at in places]
    packed = struct.pack(f"<{len(values)}{dtype.code}", *values)
    return InlineTensor(dtype.dtype, tuple(shape), packed)


def _raw(data: Any) -> bytes:
    return data.encode("latin-1") if isinstance(data, str) else bytes(data)
