"""Unpickling that cannot execute anything: every global maps to a function written here.

Python's own unpickler calls what `find_class` returns. Here that is a constructor of plain data
from a closed list, so a hostile pickle can at worst build odd data. Tensors become `StoredTensor`
descriptions: no tensor data is read, and torch is not imported. Classes that frameworks are known
to put into checkpoints (loss scalers, enums, DCP metadata, argparse.Namespace) become `Opaque`
data by name, so DeepSpeed need not be installed to read its files.

Source of the tensor rebuild arguments: torch 2.13.0 torch/_utils.py, torch/serialization.py.
"""

from __future__ import annotations

import codecs
import io
import pickle
import pickletools
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

from ckpt.chunks import Chunk, row_major_strides
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint, UnsafePickle, Unsupported
from ckpt.model import Opaque, Record, StoredChunk, StoredTensor

__all__ = ["Global", "StorageRef", "load", "loads"]

PICKLE_PROBLEMS = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
)

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

DATA_CLASSES = frozenset(
    {
        "argparse.Namespace",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "pathlib.WindowsPath",
        "datetime.datetime",
        "datetime.date",
        "datetime.timedelta",
        "torch.Generator",
        "omegaconf.dictconfig.DictConfig",
        "omegaconf.listconfig.ListConfig",
    }
)
"""Classes of plain data that training scripts put into their dicts."""

PICKLED_MODEL_PREFIXES = ("torch.nn.modules.", "torch.nn.parallel.", "torch.fx.")
SHARDED_TENSOR_PREFIXES = (
    "torch.distributed._shard.",
    "torch.distributed._tensor.",
    "torch.distributed.tensor.",
)


class Global:
    """The name of a global that a pickle refers to but does not call, such as a dtype."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}>"


class StorageRef:
    """A storage that a pickle points to: where its bytes lie and their element type."""

    def __init__(self, dtype: DType, record: Record) -> None:
        self.dtype = dtype
        self.record = record
        self.views: dict[tuple[Any, ...], StoredTensor] = {}


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

    def __hash__(self) -> int:
        return hash((self.type_name, repr(self.args), repr(self.state)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Data) and (self.type_name, self.args, self.state) == (
            other.type_name,
            other.args,
            other.state,
        )


PersistentLoad = Callable[[Any], StorageRef]


def loads(
    data: bytes,
    where: str,
    persistent_load: PersistentLoad | None = None,
    data_classes: frozenset[str] = frozenset(),
) -> Any:
    """The plain data in a pickle; see `load`."""
    return load(io.BytesIO(data), where, persistent_load, data_classes)


def load(
    stream: BinaryIO,
    where: str,
    persistent_load: PersistentLoad | None = None,
    data_classes: frozenset[str] = frozenset(),
) -> Any:
    """The plain data in the pickle at the stream's position.

    Args:
        where: the file, for messages.
        persistent_load: turns a persistent id (`("storage", ...)`) into a `StorageRef`.
        data_classes: full names of further classes to read as `Opaque`.

    Raises:
        UnsafePickle: a global that is not known to be data.
        CorruptCheckpoint: not a pickle, or a truncated one.
    """
    start = stream.tell()
    unpickler = _Unpickler(stream, where, persistent_load, DATA_CLASSES | data_classes)
    try:
        return _finish(unpickler.load(), {})
    except UnsafePickle:
        stream.seek(start)
        _explain_refusal(stream, where)
        raise
    except PICKLE_PROBLEMS as problem:
        if isinstance(problem, CorruptCheckpoint):
            raise
        raise CorruptCheckpoint(
            f"{where}: the pickled part cannot be read ({problem}); the file is damaged or not a "
            "checkpoint. Copy it again from the machine that wrote it."
        ) from problem


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: BinaryIO,
        where: str,
        persistent_load: PersistentLoad | None,
        data_classes: frozenset[str],
    ) -> None:
        super().__init__(stream, encoding="latin-1")
        self._where = where
        self._persistent_load = persistent_load
        self._data_classes = data_classes

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{module}.{name}"
        if full_name in _CONSTRUCTORS:
            return _CONSTRUCTORS[full_name]
        if module in ("torch", "torch.storage"):
            if name in STORAGE_DTYPES:
                return STORAGE_DTYPES[name]
            if DType.from_torch_name(name) is not None:
                return DType.from_torch_name(name)
        if full_name in self._data_classes:
            return type("Data", (_Data,), {"type_name": full_name})
        raise UnsafePickle(
            f"{self._where}: the pickle asks for {full_name}, which is not plain training data; "
            "nothing was executed. Save again with torch.save of tensors, numbers, strings, dicts "
            "and lists only."
        )

    def persistent_load(self, pid: Any) -> StorageRef:
        if self._persistent_load is None:
            raise CorruptCheckpoint(f"{self._where}: the pickle points to storages it cannot have")
        return self._persistent_load(pid)


def _explain_refusal(stream: BinaryIO, where: str) -> None:
    """Raises a better message when the pickle is a whole nn.Module or holds sharded tensors."""
    try:
        names = {str(arg).replace(" ", ".") for _, arg, _ in pickletools.genops(stream) if arg}
    except ValueError:  # what pickletools raises on a broken stream; the plain refusal stands
        return
    if any(name.startswith(PICKLED_MODEL_PREFIXES) for name in names):
        raise UnsafePickle(
            f"{where}: holds a pickled whole model, which needs its source code and runs it when "
            "loaded. In the project that wrote it run "
            "torch.save(torch.load(FILE, weights_only=False).state_dict(), NEW_FILE) "
            "and convert NEW_FILE."
        )
    if any(name.startswith(SHARDED_TENSOR_PREFIXES) for name in names):
        raise Unsupported(
            f"{where}: holds one rank's sharded tensors (DTensor or ShardedTensor) saved with "
            "torch.save. Save with torch.distributed.checkpoint.save, or a full state dict "
            "(StateDictOptions(full_state_dict=True)), and convert that."
        )


def _finish(value: Any, done: dict[int, Any]) -> Any:
    """The tree with every `_Data` turned into `Opaque` and dict subclasses into dicts."""
    key = id(value)
    if key in done:
        return done[key]
    if isinstance(value, dict):
        out: Any = {}
        done[key] = out
        out.update((_finish(k, done), _finish(v, done)) for k, v in value.items())
        return out
    if isinstance(value, list):
        out = []
        done[key] = out
        out.extend(_finish(item, done) for item in value)
        return out
    if isinstance(value, tuple):
        items = [_finish(item, done) for item in value]
        return tuple(items) if type(value) is tuple else type(value)(*items)
    if isinstance(value, _Data):
        out = Opaque(value.type_name, None)
        done[key] = out
        state = _finish(value.state if value.state is not None else value.items or None, done)
        args = _finish(value.args, done)
        object.__setattr__(out, "state", state if not args else {"args": args, "state": state})
        return out
    return value


# --- constructors: everything a pickle may call ------------------------------------------------


def rebuild_tensor(
    storage: StorageRef,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    *_ignored: Any,
) -> StoredTensor:
    """A `StoredTensor` for the arguments of torch._utils._rebuild_tensor_v2.

    The same view of the same storage is the same object, which is how tied weights are seen.

    Raises:
        CorruptCheckpoint: the tensor reaches beyond its storage.
    """
    shape = tuple(int(n) for n in size)
    strides = tuple(int(n) for n in stride)
    dtype, record = storage.dtype, storage.record
    last = storage_offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    empty = 0 in shape
    if storage_offset < 0 or (not empty and (last + 1) * dtype.itemsize > record.length):
        raise CorruptCheckpoint(f"{record.path}: a tensor reaches beyond its storage")
    contiguous = empty or all(
        n == 1 or s == r for n, s, r in zip(shape, strides, row_major_strides(shape), strict=True)
    )
    chunk = StoredChunk(
        Chunk.whole(shape), record, int(storage_offset), None if contiguous else strides
    )
    view = (storage_offset, shape, None if contiguous else strides)
    return storage.views.setdefault(view, StoredTensor(dtype, shape, (chunk,)))


def _rebuild_tensor_v3(
    storage: StorageRef,
    storage_offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    backward_hooks: Any,
    dtype: DType,
    metadata: Any = None,
) -> StoredTensor:
    """As v2, for the element types whose storage is saved as bytes."""
    return rebuild_tensor(StorageRef(dtype, storage.record), storage_offset, size, stride)


def _rebuild_parameter(data: StoredTensor, *_ignored: Any) -> StoredTensor:
    return data


def _rebuild_from_type(func: Any, new_type: Any, args: tuple[Any, ...], state: Any) -> Any:
    return func(*args)


def _numpy_scalar(dtype: Any, data: Any = None) -> Any:
    raw = data.encode("latin-1") if isinstance(data, str) else data
    return dtype.unpack(raw)[0]


class _NumpyDtype:
    """A numpy dtype of plain numbers: enough to decode scalars and arrays without numpy."""

    CODES: Mapping[str, str] = {
        "f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "i2": "h", "i1": "b",
        "u8": "Q", "u4": "I", "u2": "H", "u1": "B", "b1": "?",
    }  # fmt: skip

    def __init__(self, code: str, *_ignored: Any) -> None:
        if code not in self.CODES:
            raise ValueError(f"numpy dtype {code!r} is not a plain number")
        self.code, self.order = self.CODES[code], "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] == ">":
            self.order = ">"

    def unpack(self, data: bytes) -> tuple[Any, ...]:
        """The numbers in `data`."""
        count = len(data) // struct.calcsize(self.code)
        return struct.unpack(f"{self.order}{count}{self.code}", data)


class _NumpyArray(_Data):
    """A numpy array of plain numbers while it is unpickled; becomes an `Opaque` with lists."""

    type_name = "numpy.ndarray"

    def __setstate__(self, state: Any) -> None:
        _version, shape, dtype, fortran, data = state
        raw = data.encode("latin-1") if isinstance(data, str) else data
        self.args = ()
        self.state = {
            "shape": shape,
            "fortran_order": fortran,
            "values": list(dtype.unpack(raw)),
        }


def _numpy_reconstruct(*_ignored: Any) -> _NumpyArray:
    return _NumpyArray()


def _encode(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1", "utf-8", "utf8", "ascii"):
        raise ValueError(f"encoding {encoding!r}")
    return codecs.encode(text, encoding)


def _bytearray(data: Any = b"", encoding: str | None = None) -> bytearray:
    return bytearray(data, encoding) if isinstance(data, str) and encoding else bytearray(data)


class _OrderedDict(OrderedDict[Any, Any]):
    """An OrderedDict that ignores attributes, such as a state dict's `_metadata`."""

    def __setstate__(self, state: Any) -> None:
        return None


class _DefaultDict(defaultdict[Any, Any]):
    """A defaultdict without its factory."""

    def __init__(self, *_ignored: Any) -> None:
        super().__init__(None)


def _layout(name: str) -> Global:
    return Global(name)


_CONSTRUCTORS: Mapping[str, Any] = {
    "collections.OrderedDict": _OrderedDict,
    "collections.defaultdict": _DefaultDict,
    "collections.Counter": Counter,
    "builtins.set": set,
    "builtins.frozenset": frozenset,
    "builtins.complex": complex,
    "builtins.bytearray": _bytearray,
    "builtins.list": list,
    "builtins.dict": dict,
    "builtins.tuple": tuple,
    "builtins.int": int,
    "builtins.float": float,
    "builtins.str": str,
    "builtins.bool": bool,
    "builtins.slice": slice,
    "builtins.range": range,
    "__builtin__.set": set,
    "__builtin__.frozenset": frozenset,
    "__builtin__.bytearray": _bytearray,
    "_codecs.encode": _encode,
    "torch.Size": tuple,
    "torch.device": lambda *args: ":".join(map(str, args)),
    "torch.serialization._get_layout": _layout,
    "torch.Tensor": Global("torch.Tensor"),
    "torch.nn.parameter.Parameter": Global("torch.nn.parameter.Parameter"),
    "torch._utils._rebuild_tensor": rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_tensor_v3,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "numpy.dtype": _NumpyDtype,
    "numpy.ndarray": Global("numpy.ndarray"),
    "numpy.core.multiarray.scalar": _numpy_scalar,
    "numpy._core.multiarray.scalar": _numpy_scalar,
    "numpy.core.multiarray._reconstruct": _numpy_reconstruct,
    "numpy._core.multiarray._reconstruct": _numpy_reconstruct,
}
