"""Everything a pickle may name or call: stand-ins that build plain data and cannot be changed.

A pickle can call whatever the unpickler hands out, and set attributes on it. So nothing that lives
longer than one load is handed out: functions, dtypes and storages come in wrappers that refuse to
be given a state, classes are made anew for each load, and `finished` turns what was built into
`StoredTensor`, `DType` and `Opaque` at the end.

Source of the tensor rebuild arguments: torch 2.13.0 torch/_utils.py.
"""

from __future__ import annotations

import codecs
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.chunks import Chunk, row_major_strides
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.model import Opaque, Record, StoredChunk, StoredTensor
from ckpt.storage.numpy_data import NumpyDtype, scalar, tensor_of

__all__ = ["STORAGE_DTYPES", "StorageRef", "data_class", "finished", "lookup", "python_3_name"]

MAX_NODES = 50_000_000
MAX_DEPTH = 200

STORAGE_DTYPES = {
    "DoubleStorage": DType.float64,
    "FloatStorage": DType.float32,
    "HalfStorage": DType.float16,
    "BFloat16Storage": DType.bfloat16,
    "LongStorage": DType.int64,
    "IntStorage": DType.int32,
    "ShortStorage": DType.int16,
    "CharStorage": DType.int8,
    "ByteStorage": DType.uint8,
    "BoolStorage": DType.bool,
    "ComplexFloatStorage": DType.complex64,
    "ComplexDoubleStorage": DType.complex128,
    "UntypedStorage": DType.uint8,
}


class _Inert:
    """Something a pickle may hold and may not change."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it tries to change an object that is not its own")


class _Call(_Inert):
    """A function that a pickle may call."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        return self._function(*args)


class _Name(_Inert):
    """A global that a pickle refers to and does not call; becomes its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _DTypeRef(_Inert):
    """A dtype, or the storage type that stands for it; becomes a `DType`."""

    __slots__ = ("dtype",)

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype


class StorageRef(_Inert):
    """A storage that a pickle points to: where its bytes lie, and their element type."""

    __slots__ = ("dtype", "record", "views")

    def __init__(self, dtype: DType, record: Record) -> None:
        self.dtype = dtype
        self.record = record
        self.views: dict[tuple[Any, ...], _TensorRef] = {}


class _TensorRef(_Inert):
    """A tensor; becomes a `StoredTensor`."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: StoredTensor) -> None:
        self.tensor = tensor


class _Data:
    """An instance of a data class while it is being unpickled; becomes an `Opaque`."""

    type_name = ""
    args: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]

    def __new__(cls, *args: Any) -> _Data:
        self = super().__new__(cls)
        self.args, self.state, self.items = args, None, {}
        return self

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        """Items of a list subclass; kept as positional arguments."""
        self.args = (*self.args, value)

    def extend(self, values: Any) -> None:
        """As `append`, for several."""
        self.args = (*self.args, *values)

    def content(self) -> Any:
        """Attributes, items and arguments: whichever there are."""
        state = self.state if self.state is not None else self.items or None
        return {"args": self.args, "state": state} if self.args else state


GETATTR = "builtins.getattr"  # how protocol 2 writes a class inside of a class


def data_class(full_name: str) -> Any:
    """A class of its own for one load, whose instances become `Opaque` data of that name.

    For GETATTR, a function that gives such a class for the name of a class inside of another.
    """
    if full_name == GETATTR:
        return _Call(_nested_class)
    return type("Data", (_Data,), {"type_name": full_name})


# --- tensors ------------------------------------------------------------------------------------


def rebuild_tensor(
    storage: StorageRef,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    backward_hooks: Any = None,
    metadata: Any = None,
    dtype: DType | None = None,
) -> _TensorRef:
    """A tensor for the arguments of torch._utils._rebuild_tensor_v2.

    The same view of the same storage is the same object, which is how tied weights are seen.

    Raises:
        CorruptCheckpoint: the tensor reaches beyond its storage.
    """
    dtype, record = dtype or storage.dtype, storage.record
    if isinstance(metadata, dict) and any(metadata.values()):
        raise Unsupported(
            f"{record.path}: a tensor is a lazy {' and '.join(metadata)} of its bytes; save "
            "tensor.resolve_conj().resolve_neg()"
        )
    shape, strides = tuple(size), tuple(stride)
    if not all(type(n) is int and n >= 0 for n in (storage_offset, *shape, *strides)):
        raise CorruptCheckpoint(f"{record.path}: a tensor has an impossible shape")
    last = storage_offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    empty = 0 in shape
    if not empty and (last + 1) * dtype.itemsize > record.length:
        raise CorruptCheckpoint(f"{record.path}: a tensor reaches beyond its storage")
    contiguous = empty or all(
        n == 1 or s == r for n, s, r in zip(shape, strides, row_major_strides(shape), strict=True)
    )
    view = (dtype, storage_offset, shape, None if contiguous else strides)
    if view not in storage.views:
        chunk = StoredChunk(Chunk.whole(shape), record, storage_offset, view[3])
        storage.views[view] = _TensorRef(StoredTensor(dtype, shape, (chunk,)))
    return storage.views[view]


def _rebuild_tensor_v3(
    storage: StorageRef,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    backward_hooks: Any,
    dtype: _DTypeRef,
    metadata: Any = None,
) -> _TensorRef:
    """As v2, for the element types whose storage is saved as bytes."""
    return rebuild_tensor(storage, storage_offset, size, stride, dtype=dtype.dtype)


def _rebuild_parameter(data: _TensorRef, *_ignored: Any) -> _TensorRef:
    return data


def _rebuild_from_type(func: Any, new_type: Any, args: tuple[Any, ...], state: Any) -> Any:
    """A tensor with attributes, which are not kept, or a tensor subclass that is data."""
    value = func(*args)
    if isinstance(value, _Data):
        value.state = state
    return value


def _rebuild_wrapper_subclass(cls: Any, *args: Any) -> _Data:
    """A tensor subclass around others, such as DTensor, where its class is read as data."""
    if not isinstance(cls, type) or not issubclass(cls, _Data):
        raise ValueError("a tensor subclass of something else")
    return cls(*args)


def _nested_class(cls: Any, name: Any) -> type[_Data]:
    if not isinstance(cls, type) or not issubclass(cls, _Data) or not isinstance(name, str):
        raise ValueError("an attribute of something else")
    return type("Data", (_Data,), {"type_name": f"{cls.type_name}.{name}"})


# --- numpy --------------------------------------------------------------------------------------


class _NumpyArray(_Data):
    """A numpy array of plain numbers; becomes an `Opaque` around a tensor."""

    type_name = "numpy.ndarray"

    def __setstate__(self, state: Any) -> None:
        self.args, self.state = (), tensor_of(state)


def _numpy_reconstruct(*_ignored: Any) -> _NumpyArray:
    return _NumpyArray()


# --- Python's own -------------------------------------------------------------------------------


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise ValueError(f"encoding {encoding!r}")
    return codecs.encode(text, encoding)


def _bytearray(data: Any = b"", encoding: str | None = None) -> bytearray:
    if isinstance(data, str) and encoding:
        return bytearray(_encode(data, encoding))
    if not isinstance(data, bytes | bytearray | list):  # a number would be a size
        raise ValueError("a bytearray of something else")
    return bytearray(data)


def _empty_bytes() -> bytes:
    return b""


def _set(items: Any = ()) -> set[Any]:
    if not isinstance(items, list | tuple):
        raise ValueError("a set of something else")
    return set(items)


def _size(items: Any = ()) -> tuple[int, ...]:
    if not all(isinstance(item, int) for item in items):
        raise ValueError("a torch.Size of something else")
    return tuple(items)


def _device(*args: Any) -> str:
    if not all(isinstance(arg, str | int) for arg in args):
        raise ValueError("a device of something else")
    return ":".join(map(str, args))


def _layout(name: Any) -> str:
    if not isinstance(name, str):
        raise ValueError("a layout of something else")
    return name


class _OrderedDict(OrderedDict[Any, Any]):
    """An OrderedDict that ignores attributes, such as a state dict's `_metadata`."""

    def __setstate__(self, state: Any) -> None:
        return None


def _counter(counts: Any = ()) -> dict[Any, Any]:
    return dict(counts) if isinstance(counts, dict) else {}


def _default_dict(*_factory: Any) -> Any:
    return defaultdict(None)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": _OrderedDict,
    "collections.defaultdict": _default_dict,
    "collections.Counter": _counter,
    "builtins.set": _set,
    "builtins.frozenset": lambda items=(): frozenset(_set(items)),
    "builtins.complex": complex,
    "builtins.bytearray": _bytearray,
    "builtins.bytes": _empty_bytes,
    "builtins.slice": slice,
    "_codecs.encode": _encode,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._utils._rebuild_wrapper_subclass": _rebuild_wrapper_subclass,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "numpy.dtype": NumpyDtype,
    "numpy.core.multiarray.scalar": scalar,
    "numpy._core.multiarray.scalar": scalar,
    "numpy.core.multiarray._reconstruct": _numpy_reconstruct,
    "numpy._core.multiarray._reconstruct": _numpy_reconstruct,
}
_NAMES = frozenset(
    {"torch.Tensor", "torch.nn.parameter.Parameter", "numpy.ndarray"}
    | {f"builtins.{name}" for name in ("bool", "dict", "float", "int", "list", "str", "tuple")}
)
"""Globals that are arguments, such as a defaultdict's factory, and are never called."""


def python_3_name(module: str, name: str) -> str:
    """The full name of a global; pickles of protocol 2 use Python 2's names."""
    if module == "__builtin__":
        return "builtins.range" if name == "xrange" else f"builtins.{name}"
    return f"{module}.{name}"


def lookup(module: str, name: str) -> Any | None:
    """A stand-in for a global that is plain data, or None."""
    full_name = python_3_name(module, name)
    if full_name in _FUNCTIONS:
        return _Call(_FUNCTIONS[full_name])
    if full_name in _NAMES:
        return _Name(full_name)
    if module in ("torch", "torch.storage"):
        dtype = STORAGE_DTYPES.get(name) or DType.from_torch_name(name)
        return None if dtype is None else _DTypeRef(dtype)
    return None


def finished(root: Any) -> Any:
    """What was unpickled as plain data, without any stand-in.

    Raises:
        CorruptCheckpoint: data that contains itself, is nested deeper than MAX_DEPTH, or is shared
            so often that walking through it would take more than MAX_NODES steps.
    """
    return _Finisher().finish(root, 0)[0]


class _Finisher:
    """Converts each object once and counts the steps that a walk through the result takes."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Any, int] | None] = {}
        self._alive: list[Any] = []  # ids stay unique while the objects live

    def finish(self, value: Any, depth: int) -> tuple[Any, int]:
        """The finished value, and the number of nodes in it as a tree."""
        if isinstance(value, _TensorRef):
            return value.tensor, 1
        if isinstance(value, _DTypeRef):
            return value.dtype, 1
        if isinstance(value, _Name):
            return value.name, 1
        if isinstance(value, NumpyDtype):
            return f"numpy.{value.name}", 1
        if not isinstance(value, dict | list | tuple | set | frozenset | _Data):
            return value, 1
        key = id(value)
        if key not in self._done:
            if depth > MAX_DEPTH:
                raise CorruptCheckpoint(f"data is nested deeper than {MAX_DEPTH}")
            self._done[key] = None
            self._done[key] = self._container(value, depth + 1)
        found = self._done[key]
        if found is None:
            raise CorruptCheckpoint("data contains itself")
        return found

    def _container(self, value: Any, depth: int) -> tuple[Any, int]:
        if isinstance(value, _Data):
            self._alive.append(value.content())
            content, size = self.finish(self._alive[-1], depth)
            return Opaque(value.type_name, content), size
        flat = [part for item in value.items() for part in item] if isinstance(value, dict) else (
            list(value)
        )  # fmt: skip
        parts = [self.finish(part, depth) for part in flat]
        size = 1 + sum(part[1] for part in parts)
        if size > MAX_NODES:
            raise CorruptCheckpoint("data that is shared without end")
        items = [part[0] for part in parts]
        if isinstance(value, dict):
            return dict(zip(items[::2], items[1::2], strict=True)), size
        return next(t for t in (list, tuple, set, frozenset) if isinstance(value, t))(items), size
