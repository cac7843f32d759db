"""Element types by torch's names, without torch: sizes, safetensors codes, what is a float.

Source: torch 2.13.0 torch/_C (dtype names), torch/storage.py `_dtype_to_storage_type_map`;
safetensors 0.8 README (dtype codes).
"""

from __future__ import annotations

import builtins
from enum import Enum

__all__ = ["DType"]


class DType(Enum):
    """A torch dtype: its name (`torch.<value>`), its size in bytes and its safetensors code."""

    float64 = ("float64", 8, "F64")
    float32 = ("float32", 4, "F32")
    float16 = ("float16", 2, "F16")
    bfloat16 = ("bfloat16", 2, "BF16")
    float8_e4m3fn = ("float8_e4m3fn", 1, "F8_E4M3")
    float8_e5m2 = ("float8_e5m2", 1, "F8_E5M2")
    int64 = ("int64", 8, "I64")
    int32 = ("int32", 4, "I32")
    int16 = ("int16", 2, "I16")
    int8 = ("int8", 1, "I8")
    uint8 = ("uint8", 1, "U8")
    uint16 = ("uint16", 2, "U16")
    uint32 = ("uint32", 4, "U32")
    uint64 = ("uint64", 8, "U64")
    bool = ("bool", 1, "BOOL")
    complex64 = ("complex64", 8, "C64")
    complex128 = ("complex128", 16, None)

    @property
    def torch_name(self) -> str:
        """The attribute of the `torch` module, such as `bfloat16`."""
        return str(self.value[0])

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return int(self.value[1])

    @property
    def safetensors_code(self) -> str | None:
        """The dtype code of a safetensors header; None where the format has none."""
        code = self.value[2]
        return None if code is None else str(code)

    @property
    def is_floating_point(self) -> builtins.bool:
        """True for the real floating point types, which `--dtype` may cast."""
        return self.torch_name.startswith(("float", "bfloat"))

    @property
    def is_complex(self) -> builtins.bool:
        """True for complex numbers."""
        return self.torch_name.startswith("complex")

    @classmethod
    def from_torch_name(cls, name: str) -> DType | None:
        """The dtype called `torch.<name>` (a leading `torch.` is allowed), or None."""
        return cls.__members__.get(name.removeprefix("torch."))

    @classmethod
    def from_safetensors_code(cls, code: str) -> DType | None:
        """The dtype of a safetensors header entry, or None."""
        return next((dtype for dtype in cls if dtype.safetensors_code == code), None)
