"""torch.save files: read their object graph without data, and lay out new ones.

Reading parses the zip directory (or the legacy stream) and unpickles with `safe_pickle`; each
tensor comes back as a `StoredTensor` that knows its byte range and the record's CRC-32. Laying
out lets torch's own archive writer place every record, leaving holes that the copy engine fills.

Source: torch 2.13.0 torch/serialization.py (`_save`, `_legacy_save`), caffe2/serialize.
"""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from ckpt.chunks import row_major_strides
from ckpt.dtypes import DType
from ckpt.errors import CkptError, CorruptCheckpoint, Unsupported
from ckpt.model import InlineTensor, Opaque, Plain, Record, walk
from ckpt.plan import FlatTensor, Layout, OutTensor, Placement
from ckpt.storage import safe_pickle
from ckpt.storage.named_classes import NamingPickler
from ckpt.storage.pickle_data import STORAGE_DTYPES, StorageRef

__all__ = ["TorchFile", "is_torch_file", "lay_out", "read", "read_item"]

ZIP_MAGIC = b"PK\x03\x04"
LEGACY_MAGIC_NUMBER = 0x1950A86A20F9469CFC6C  # torch/serialization.py MAGIC_NUMBER
LEGACY_PROTOCOL = 1001  # torch/serialization.py PROTOCOL_VERSION
LEGACY_MAGIC = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"  # LONG1, 10 bytes
LOCAL_HEADER_BYTES = 30
ZIP_PROBLEMS = (
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    LookupError,
    NotImplementedError,
    OSError,
    OverflowError,
    RuntimeError,
    ValueError,
)
"""What Python's zipfile raises on damaged archives, as found by flipping their bits."""


def is_torch_file(path: Path) -> bool:
    """True when the first bytes are those of a zip archive or of a legacy torch.save stream."""
    try:
        with path.open("rb") as stream:
            head = stream.read(64)
    except OSError:
        return False
    return head.startswith(ZIP_MAGIC) or LEGACY_MAGIC in head


def read(path: Path, data_classes: frozenset[str] = frozenset()) -> Any:
    """The object saved in a file by torch.save, with `StoredTensor` in the place of tensors.

    Args:
        data_classes: full names of framework classes to read as `Opaque` data.

    Raises:
        CorruptCheckpoint: truncated or damaged. UnsafePickle: a global that is not data.
    """
    try:
        with path.open("rb") as stream:
            size = path.stat().st_size
            if stream.read(4) == ZIP_MAGIC:
                return read_item(stream, str(path), 0, size, data_classes)
            stream.seek(0)
            return _read_legacy(stream, str(path), size, data_classes)
    except OSError as problem:
        raise CorruptCheckpoint(f"{path}: cannot be read ({problem.strerror})") from problem


class _Window(io.RawIOBase):
    """The bytes [offset, offset + length) of a stream as a file of their own."""

    def __init__(self, stream: BinaryIO, offset: int, length: int) -> None:
        self._stream, self._offset, self._length, self._at = stream, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, position: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + position < 0:
            raise OSError(22, "seek before the beginning")
        self._at = base + position
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._at, 0)
        wanted = left if size is None or size < 0 else min(size, left)
        self._stream.seek(self._offset + self._at)
        data = self._stream.read(wanted)
        self._at += len(data)
        return data


def read_item(
    stream: BinaryIO,
    where: str,
    offset: int,
    length: int,
    data_classes: frozenset[str] = frozenset(),
) -> Any:
    """The object in a torch.save archive that lies at [offset, offset + length) of a stream."""
    try:
        archive = zipfile.ZipFile(_Window(stream, offset, length))
        names = {info.filename: info for info in archive.infolist()}
        root = next(
            (name[: -len("data.pkl")] for name in names if name.endswith("/data.pkl")), None
        )
        if root is None:
            raise CorruptCheckpoint(f"{where}: a zip archive, but not one that torch.save wrote")
        if f"{root}constants.pkl" in names:
            raise Unsupported(f"{where}: a TorchScript archive; convert the state_dict() of it")
        order = names.get(f"{root}byteorder")
        if order and _content(stream, where, offset, length, order) != b"little":
            raise Unsupported(f"{where}: written on a big-endian machine")
        data = _content(stream, where, offset, length, names[f"{root}data.pkl"])
    except ZIP_PROBLEMS as problem:
        if isinstance(problem, CkptError):
            raise
        raise CorruptCheckpoint(
            f"{where}: the archive is truncated or damaged ({problem}). "
            "Copy it again from the machine that wrote it, or use an earlier save."
        ) from problem
    records = _Records(stream, where, offset, length, root, names)
    return safe_pickle.loads(data, where, records.load, data_classes)


class _Records:
    """The storages of one archive, found when the pickle asks for them."""

    def __init__(
        self,
        stream: BinaryIO,
        where: str,
        offset: int,
        length: int,
        root: str,
        names: Mapping[str, zipfile.ZipInfo],
    ) -> None:
        self._stream, self._where, self._names, self._root = stream, where, names, root
        self._offset, self._length = offset, length
        self._storages: dict[str, StorageRef] = {}

    def load(self, pid: Any) -> StorageRef:
        """The storage of a persistent id, `("storage", type, key, location, numel)`."""
        dtype, key, numel = pid[1].dtype, str(pid[2]), int(pid[4])
        if key not in self._storages:
            info = self._names.get(f"{self._root}data/{key}")
            if info is None or info.file_size != numel * dtype.itemsize:
                found = "nothing" if info is None else f"{info.file_size} bytes"
                raise CorruptCheckpoint(
                    f"{self._where}: record data/{key} holds {found}, expected "
                    f"{numel * dtype.itemsize} bytes"
                )
            begin = _data_offset(self._stream, self._where, self._offset, self._length, info)
            record = Record(self._where, begin, info.file_size, info.CRC or None)
            self._storages[key] = StorageRef(dtype, record)
        return self._storages[key]


def _content(stream: BinaryIO, where: str, base: int, length: int, info: zipfile.ZipInfo) -> bytes:
    """A small record's bytes. A checksum of 0 is none: see torch's `set_crc32_options`."""
    stream.seek(_data_offset(stream, where, base, length, info))
    data = stream.read(info.file_size)
    if info.CRC and zlib.crc32(data) != info.CRC:
        raise CorruptCheckpoint(
            f"{where}: {info.filename} does not have its checksum; the file is damaged. Copy it "
            "again from the machine that wrote it, or use an earlier save."
        )
    return data


def _data_offset(
    stream: BinaryIO, where: str, base: int, length: int, info: zipfile.ZipInfo
) -> int:
    """Where a record's bytes begin: its local header has lengths of its own."""
    if info.compress_type != zipfile.ZIP_STORED:
        raise Unsupported(f"{where}: record {info.filename} is compressed; torch never does that")
    stream.seek(base + info.header_offset)
    header = stream.read(LOCAL_HEADER_BYTES)
    if len(header) < LOCAL_HEADER_BYTES or not header.startswith(ZIP_MAGIC):
        raise CorruptCheckpoint(f"{where}: the header of {info.filename} is damaged")
    name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
    begin = int(base + info.header_offset + LOCAL_HEADER_BYTES + name_bytes + extra_bytes)
    if begin + info.file_size > base + length:
        raise CorruptCheckpoint(f"{where}: record {info.filename} reaches beyond the file")
    return begin


def _read_legacy(stream: BinaryIO, where: str, size: int, data_classes: frozenset[str]) -> Any:
    """The object in a file of the format before torch 1.6: pickles, then raw storages in order."""
    plain = safe_pickle.load
    if plain(stream, where) != LEGACY_MAGIC_NUMBER or plain(stream, where) != LEGACY_PROTOCOL:
        raise CorruptCheckpoint(f"{where}: not a file that torch.save wrote")
    plain(stream, where)  # the writer's int sizes and byte order
    start = stream.tell()
    keys: dict[str, int] = {}

    def first_pass(pid: Any) -> StorageRef:
        keys[str(pid[2])] = int(pid[4]) * pid[1].dtype.itemsize
        return StorageRef(pid[1].dtype, Record(where, 0, 1 << 62))

    safe_pickle.load(stream, where, first_pass, data_classes)
    order = [str(key) for key in plain(stream, where)]
    records: dict[str, Record] = {}
    position = stream.tell()
    for key in order:
        nbytes = keys.get(key, 0)
        records[key] = Record(where, position + 8, nbytes)  # 8: the storage's length as int64
        position += 8 + nbytes
    if position > size:
        raise CorruptCheckpoint(f"{where}: {size} bytes, expected {position}; truncated")
    storages: dict[str, StorageRef] = {}

    def second_pass(pid: Any) -> StorageRef:
        key = str(pid[2])
        if len(pid) > 5 and pid[5] is not None:
            raise Unsupported(f"{where}: storages that are views of storages (torch before 0.4)")
        return storages.setdefault(key, StorageRef(pid[1].dtype, records[key]))

    stream.seek(start)
    return safe_pickle.load(stream, where, second_pass, data_classes)


# --- writing ------------------------------------------------------------------------------------


class _Storage:
    """What the pickler sees instead of a tensor's storage."""

    def __init__(self, key: str, dtype: DType, numel: int) -> None:
        self.key, self.dtype, self.numel = key, dtype, numel


Copied = OutTensor | FlatTensor
Saved = Copied | InlineTensor


@dataclass(frozen=True, slots=True)
class TorchFile:
    """A torch.save file to be written: plain data with tensors in it.

    Attributes:
        classes: full names of the classes whose instances, as `Opaque` in the tree, are written as
            what they are. Such a file is not one for torch.load(weights_only=True).
    """

    path: str
    tree: Plain
    classes: frozenset[str] = frozenset()

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, shared ones once."""
        leaves = {id(leaf): leaf for _, leaf in walk(self.tree) if isinstance(leaf, Copied)}
        return sum(leaf.nbytes for leaf in leaves.values())

    def lay_out(self, stream: BinaryIO) -> Layout:
        """See `lay_out`."""
        return lay_out(stream, self.tree, self.classes)


def lay_out(stream: BinaryIO, tree: Plain, classes: frozenset[str] = frozenset()) -> Layout:
    """Write everything of a torch.save file but the tensors' bytes; say where those go.

    Args:
        stream: a seekable binary file, written from its present position on.
        tree: plain data with `OutTensor`, `FlatTensor` and `InlineTensor` leaves; the same object
            in two places becomes one storage, as for tied weights.
        classes: see `TorchFile`.

    Returns:
        For each distinct `OutTensor`, and each piece of a `FlatTensor`, where in the stream its
        elements belong.

    The records of the tensors carry no CRC-32 (0): torch does not check it, `unzip -t` does.
    """
    import torch

    tensors: dict[int, tuple[str, Saved]] = {}
    pickled = io.BytesIO()
    _pickler(pickled, tensors, classes).dump(_for_torch(tree))
    sink: Any = _Sink(stream)
    writer: Any = torch._C.PyTorchFileWriter(sink)
    data = pickled.getvalue()
    writer.write_record("data.pkl", data, len(data))
    writer.write_record("byteorder", b"little", len(b"little"))
    outgoing: list[Copied] = []
    for key, tensor in tensors.values():
        if isinstance(tensor, InlineTensor):
            writer.write_record(f"data/{key}", tensor.data, len(tensor.data))
        else:
            writer.write_record_metadata(f"data/{key}", tensor.nbytes)
            outgoing += [tensor] if tensor.nbytes else []
    writer.write_end_of_file()
    stream.flush()
    placed = zip(sink.holes, outgoing, strict=True)
    return Layout([p for offset, tensor in placed for p in _placements(offset, tensor)])


def _placements(offset: int, tensor: Copied) -> Iterator[Placement]:
    """Where a tensor's elements, or those of its pieces, belong; gaps stay as zero as the hole."""
    if isinstance(tensor, OutTensor):
        yield Placement(offset, tensor)
        return
    for first, piece in tensor.pieces:
        yield Placement(offset + first * tensor.dtype.itemsize, piece)


class _Sink:
    """What torch's archive writer writes into: it seeks over each tensor that is left out."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.holes: list[int] = []

    def write(self, data: Any) -> int:
        """Pass bytes on."""
        return self._stream.write(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Leave a hole, and remember where it begins."""
        if whence == io.SEEK_CUR:
            self.holes.append(self._stream.tell())
        return self._stream.seek(offset, whence)


def _for_torch(tree: Plain) -> Plain:
    """The tree with what torch.load(weights_only=True) takes: torch's own dtypes above all."""
    if isinstance(tree, DType):
        import torch

        return getattr(torch, tree.torch_name)
    if isinstance(tree, bytes) and not tree:
        return bytearray()  # torch.load(weights_only=True) takes no empty bytes
    if isinstance(tree, dict):
        kind = OrderedDict if isinstance(tree, OrderedDict) else dict
        return kind((key, _for_torch(value)) for key, value in tree.items())
    if isinstance(tree, list | tuple):
        return type(tree)(_for_torch(value) for value in tree)
    if isinstance(tree, Opaque):
        return replace(tree, state=_for_torch(tree.state))
    return tree


def _pickler(
    target: BinaryIO, tensors: dict[int, tuple[str, Saved]], classes: frozenset[str]
) -> pickle.Pickler | NamingPickler:
    """A pickler that writes tensors as torch.save does and collects them in `tensors`."""
    import torch

    storage_types: dict[DType, Any] = {
        dtype: getattr(torch, name)
        for name, dtype in STORAGE_DTYPES.items()
        if name != "UntypedStorage"
    }
    alive: list[Any] = []  # ids stay unique while the objects live

    def storage_of(tensor: Saved) -> _Storage:
        alive.append(tensor)
        key, _ = tensors.setdefault(id(tensor), (str(len(tensors)), tensor))
        return _Storage(key, tensor.dtype, prod(tensor.shape))

    class Tensors:
        def persistent_id(self, obj: Any) -> Any:
            if not isinstance(obj, _Storage):
                return None
            storage_type = storage_types.get(obj.dtype, torch.UntypedStorage)
            scale = obj.dtype.itemsize if storage_type is torch.UntypedStorage else 1
            return ("storage", storage_type, obj.key, "cpu", obj.numel * scale)

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, Saved):
                return _reduce_tensor(obj, storage_of(obj), obj.dtype in storage_types)
            if isinstance(obj, Opaque):
                raise Unsupported(f"{obj.type_name} cannot be written to a torch file")
            return NotImplemented

    class Pickler(Tensors, pickle.Pickler):
        pass

    class PicklerOfClasses(Tensors, NamingPickler):
        pass

    return PicklerOfClasses(target, classes) if classes else Pickler(target, protocol=2)


def _reduce_tensor(
    tensor: Saved, storage: _Storage, has_storage_type: bool
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The call that rebuilds a tensor, as torch/_tensor.py `_reduce_ex_internal` writes it."""
    import torch

    shape = tuple(tensor.shape)
    args: tuple[Any, ...] = (storage, 0, shape, row_major_strides(shape), False, OrderedDict())
    if has_storage_type:
        return torch._utils._rebuild_tensor_v2, args
    return torch._utils._rebuild_tensor_v3, (*args, getattr(torch, tensor.dtype.torch_name))
