"""The files of torch.distributed.checkpoint: `.metadata` and `.distcp`, read and laid out.

`.metadata` is a plain pickle of torch's dataclasses; they are read as inert data, by name, so
that neither torch nor the pickle's own wishes are executed. Every item in a `.distcp` file is a
complete torch.save archive of one tensor or one Python object.

Source: torch 2.13.0 torch/distributed/checkpoint/{metadata,filesystem,default_planner}.py; older
releases (2.1, 2.4) by their files.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ckpt.chunks import Chunk, coverage
from ckpt.dtypes import DType
from ckpt.errors import CkptError, CorruptCheckpoint, MissingPart, Unsupported
from ckpt.model import InlineTensor, Opaque, Plain, StoredChunk, StoredTensor, walk
from ckpt.plan import CommitFile, FileSpans, Layout, OutTensor, Placement
from ckpt.storage import safe_pickle, torch_file

__all__ = [
    "DATA_SUFFIX",
    "METADATA_FILE",
    "DcpDataFile",
    "DcpItem",
    "OutItem",
    "metadata_file",
    "read_items",
]

METADATA_FILE = ".metadata"
DATA_SUFFIX = ".distcp"
_METADATA = "torch.distributed.checkpoint.metadata"
METADATA_CLASSES = frozenset(
    {
        f"{module}.{name}"
        for module in (
            _METADATA,
            "torch.distributed.checkpoint.filesystem",
            "torch.distributed._shard.checkpoint.metadata",
            "torch.distributed._shard.checkpoint.filesystem",
            "torch.distributed._shard.sharded_tensor.metadata",
            "torch.distributed._shard.metadata",
        )
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "MEM_FORMAT_ENCODING",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
            "_StorageInfo",
        )
    }
)
COMPRESSION = "transform_descriptors"
MAX_OPEN_FILES = 64


@dataclass(frozen=True, slots=True)
class DcpItem:
    """One entry of a DCP folder: its path in the saved dict, and a tensor or a Python value."""

    path: tuple[str | int, ...]
    value: Plain


def read_items(folder: Path) -> list[DcpItem]:
    """Every entry of a DCP folder; tensors stay in their files, small objects are read.

    Raises:
        MissingPart: no `.metadata`, or a `.distcp` file it names is not there.
        CorruptCheckpoint: chunks with holes, truncated or foreign files.
    """
    metadata = _read_metadata(folder)
    paths = metadata.get("planner_data") or {}
    reader = _ItemReader(folder)
    try:
        by_fqn: dict[str, list[Any]] = {}
        for index, info in metadata["storage_data"].items():
            by_fqn.setdefault(_fields(index)["fqn"], []).append((_fields(index), _fields(info)))
        entries = metadata["state_dict_metadata"]
        # Entries come in the order in which ranks were given work; paths in that of the dict.
        order = dict.fromkeys([*(fqn for fqn in paths if fqn in entries), *entries])
        return [
            DcpItem(tuple(paths.get(fqn) or (fqn,)), _read_entry(reader, fqn, entries[fqn], by_fqn))
            for fqn in order
        ]
    except (LookupError, TypeError, AttributeError, ValueError, OverflowError) as problem:
        if isinstance(problem, CkptError):
            raise
        raise CorruptCheckpoint(
            f"{folder / METADATA_FILE}: not the metadata of a DCP folder ({problem!r})"
        ) from problem
    finally:
        reader.close()


def _read_metadata(folder: Path) -> Mapping[str, Any]:
    path = folder / METADATA_FILE
    if not path.exists():
        raise MissingPart(
            f"{folder}: no {METADATA_FILE}, so the save did not finish (torch writes it last). "
            "Use an earlier checkpoint."
        )
    root = safe_pickle.loads(path.read_bytes(), str(path), data_classes=METADATA_CLASSES)
    if not isinstance(root, Opaque) or not root.type_name.endswith(".Metadata"):
        raise CorruptCheckpoint(f"{path}: not the metadata of a DCP folder")
    return _fields(root)


def _fields(data: Any) -> Mapping[str, Any]:
    state = data.state
    if isinstance(state, Mapping) and set(state) == {"args", "state"}:
        state = state["state"]
    if not isinstance(state, Mapping):
        raise TypeError(f"{data!r} has no fields")
    return state


class _ItemReader:
    """Opens each `.distcp` file once, and parses equal objects once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._streams: dict[str, tuple[BinaryIO, int]] = {}
        self._objects: dict[bytes, Any] = {}

    def close(self) -> None:
        for stream, _ in self._streams.values():
            stream.close()

    def _stream(self, info: Mapping[str, Any]) -> BinaryIO:
        name = str(info["relative_path"])
        path = self.folder / name
        if Path(name).name != name or name in ("", ".", ".."):
            raise CorruptCheckpoint(f"{self.folder}: {METADATA_FILE} points outside to {name!r}")
        if info.get(COMPRESSION):
            raise Unsupported(f"{path}: items are compressed ({info[COMPRESSION]}); not supported")
        if name not in self._streams:
            if len(self._streams) == MAX_OPEN_FILES:
                self._streams.pop(next(iter(self._streams)))[0].close()
            if not path.is_file():
                raise MissingPart(
                    f"{self.folder}: {name} is missing, which {METADATA_FILE} names. Copy the "
                    ".distcp files of every rank into one folder."
                )
            self._streams[name] = (path.open("rb"), path.stat().st_size)
        stream, size = self._streams[name]
        if info["offset"] + info["length"] > size:
            raise CorruptCheckpoint(
                f"{path}: {size} bytes, but {METADATA_FILE} expects at least "
                f"{info['offset'] + info['length']}; truncated, or of another save"
            )
        return stream

    def read_object(self, info: Mapping[str, Any]) -> Any:
        """The Python object of a BYTE_IO item."""
        stream, offset, length = self._stream(info), info["offset"], info["length"]
        stream.seek(offset)
        data = stream.read(length)
        if data in self._objects:
            return self._objects[data]
        where = str(self.folder / info["relative_path"])
        value = torch_file.read_item(stream, where, offset, length)
        if not any(isinstance(leaf, StoredTensor) for _, leaf in walk(value)):
            self._objects[data] = value
        return value

    def read_tensor(self, info: Mapping[str, Any]) -> StoredTensor:
        """The tensor of a tensor item, not its data."""
        where = str(self.folder / info["relative_path"])
        tensor = torch_file.read_item(self._stream(info), where, info["offset"], info["length"])
        if not isinstance(tensor, StoredTensor):
            raise CorruptCheckpoint(f"{where}: expected a tensor at byte {info['offset']}")
        return tensor


def _read_entry(
    reader: _ItemReader, fqn: str, entry: Any, by_fqn: Mapping[str, list[Any]]
) -> Plain:
    where = f"{reader.folder}: {fqn}"
    places = by_fqn.get(fqn)
    if entry.type_name.endswith("BytesStorageMetadata"):
        if not places:
            raise CorruptCheckpoint(f"{where}: no bytes are stored for it")
        return reader.read_object(places[0][1])
    fields = _fields(entry)
    shape, dtype = tuple(fields["size"]), _dtype(fields["properties"], where)
    chunks = {tuple(_fields(c)["offsets"]): tuple(_fields(c)["sizes"]) for c in fields["chunks"]}
    stored = []
    for index, info in places or ():
        offsets = tuple(index["offset"] or (0,) * len(shape))
        if offsets not in chunks:
            raise CorruptCheckpoint(f"{where}: stored at {offsets}, where no chunk begins")
        tensor, chunk = reader.read_tensor(info), Chunk(offsets, chunks[offsets])
        if tensor.shape != chunk.sizes or tensor.dtype is not dtype or not chunk.fits(shape):
            raise CorruptCheckpoint(
                f"{where}: the chunk at {offsets} has shape {tensor.shape} in "
                f"{info['relative_path']}, expected {chunk.sizes}; files of two saves are mixed"
            )
        source = tensor.chunks[0]
        stored.append(StoredChunk(chunk, source.record, source.start, source.strides))
    tiling = coverage(shape, [c.chunk for c in stored])
    if tiling.missing or tiling.repeated:
        raise CorruptCheckpoint(
            f"{where}: chunks leave {tiling.missing} elements out and store {tiling.repeated} "
            "twice; the folder is incomplete or mixed from two saves"
        )
    return StoredTensor(dtype, shape, tuple(c for c in stored if c.chunk.numel or not shape))


def _dtype(properties: Any, where: str) -> DType:
    """The dtype in a TensorProperties, which pickles itself as a tuple."""
    state = properties.state
    while isinstance(state, Mapping) and set(state) == {"args", "state"}:
        state = state["state"]
    dtype = state["dtype"] if isinstance(state, Mapping) else state[0]
    if not isinstance(dtype, DType):
        raise CorruptCheckpoint(f"{where}: {METADATA_FILE} gives no dtype")
    return dtype


# --- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutItem:
    """One item of a `.distcp` file to be written.

    Attributes:
        fqn: the flat key; several items of one tensor share it.
        path: the key's path in the dict that `dcp.load` fills.
        value: a box of a tensor, or plain data.
        size: shape of the whole tensor.
    """

    fqn: str
    path: tuple[str | int, ...]
    value: OutTensor | InlineTensor | Plain
    size: tuple[int, ...] = ()

    @property
    def is_tensor(self) -> bool:
        """True for a tensor item, False for an object."""
        return isinstance(self.value, OutTensor | InlineTensor)

    @property
    def chunk(self) -> Chunk:
        """The box of the tensor that this item holds."""
        return self.value.chunk if isinstance(self.value, OutTensor) else Chunk.whole(self.size)

    @property
    def name(self) -> str:
        """Unique among the items of a folder."""
        return f"{self.fqn} {self.chunk.offsets}" if self.is_tensor else self.fqn


@dataclass(frozen=True, slots=True)
class DcpDataFile:
    """A `.distcp` file to be written: archives of one tensor or one object, one after another."""

    path: str
    items: tuple[OutItem, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(i.value.nbytes for i in self.items if isinstance(i.value, OutTensor))

    def lay_out(self, stream: BinaryIO) -> Layout:
        """Write the archives; the spans are those of the items."""
        placements: list[Placement] = []
        spans = {}
        for item in self.items:
            begin = stream.tell()
            placements += torch_file.lay_out(stream, item.value).placements
            spans[item.name] = (begin, stream.tell() - begin)
        return Layout(placements, spans)


def metadata_file(files: Sequence[DcpDataFile]) -> CommitFile:
    """`.metadata` for these files, pickled with torch's own classes; what `dcp.load` reads."""

    def render(spans: FileSpans) -> bytes:
        from torch.distributed.checkpoint import filesystem, metadata

        tensors: dict[str, Any] = {}
        storage, paths = {}, {}
        for file in files:
            for item in file.items:
                paths[item.fqn] = item.path
                index = _add_item(metadata, tensors, item)
                offset, length = spans[file.path][item.name]
                storage[index] = filesystem._StorageInfo(file.path, offset, length)
        content = metadata.Metadata(
            state_dict_metadata=tensors, planner_data=paths, storage_data=storage
        )
        return pickle.dumps(content)

    return CommitFile(METADATA_FILE, render)


def _add_item(metadata: Any, tensors: dict[str, Any], item: OutItem) -> Any:
    """Enter an item into `state_dict_metadata`; returns its MetadataIndex."""
    import torch

    if not item.is_tensor:
        tensors[item.fqn] = metadata.BytesStorageMetadata()
        return metadata.MetadataIndex(item.fqn)
    if item.fqn not in tensors:
        dtype = getattr(torch, item.value.dtype.torch_name)
        properties = metadata.TensorProperties(dtype=dtype)
        tensors[item.fqn] = metadata.TensorStorageMetadata(
            properties, torch.Size(item.size), chunks=[]
        )
    chunks = tensors[item.fqn].chunks
    offsets = torch.Size(item.chunk.offsets)
    chunks.append(metadata.ChunkStorageMetadata(offsets, torch.Size(item.chunk.sizes)))
    return metadata.MetadataIndex(item.fqn, offsets, len(chunks) - 1)
