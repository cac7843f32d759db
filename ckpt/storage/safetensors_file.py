"""safetensors files: read the header, and lay out new files.

Source: safetensors README (format): 8 bytes little-endian header length, JSON header, then the
tensors' bytes without holes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ckpt.chunks import Chunk
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint, Unsupported
from ckpt.model import Record, StoredChunk, StoredTensor
from ckpt.plan import Layout, OutTensor, Placement

__all__ = ["SafetensorsFile", "read"]

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
HEADER_ALIGNMENT = 8
METADATA = "__metadata__"
HEADER_PROBLEMS = (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError)


def read(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors of a safetensors file by name, and its metadata.

    Raises:
        CorruptCheckpoint: truncated, or a header that is not one.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise CorruptCheckpoint(f"{path}: not a safetensors file, or a truncated one")
        try:
            header = json.loads(stream.read(length))
            metadata = {str(k): str(v) for k, v in header.pop(METADATA, {}).items()}
            tensors = {
                name: _tensor(path, 8 + length, size, name, entry) for name, entry in header.items()
            }
        except HEADER_PROBLEMS as problem:
            if isinstance(problem, CorruptCheckpoint | Unsupported):
                raise
            raise CorruptCheckpoint(f"{path}: the header is damaged ({problem})") from problem
    return tensors, metadata


def _tensor(path: Path, base: int, size: int, name: str, entry: Mapping[str, Any]) -> StoredTensor:
    dtype = DType.from_safetensors_code(str(entry["dtype"]))
    if dtype is None:
        raise Unsupported(f"{path}: {name} has dtype {entry['dtype']}, which is not supported")
    begin, end = (int(n) for n in entry["data_offsets"])
    chunk = Chunk.whole([int(n) for n in entry["shape"]])
    if (
        min(begin, *chunk.sizes, 0) < 0
        or base + end > size
        or (end - begin != chunk.numel * dtype.itemsize)
    ):
        raise CorruptCheckpoint(f"{path}: {name} does not lie inside the file; truncated?")
    stored = StoredChunk(chunk, Record(str(path), base + begin, end - begin))
    return StoredTensor(dtype, chunk.sizes, (stored,))


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A safetensors file to be written.

    Attributes:
        path: name relative to the output.
        tensors: by name, in the order they are to lie in the file.
        metadata: strings for the header; `{"format": "pt"}` for transformers.
    """

    path: str
    tensors: Mapping[str, OutTensor]
    metadata: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def lay_out(self, stream: BinaryIO) -> Layout:
        """Write the header; the tensors follow it in order.

        Raises:
            Unsupported: a dtype that safetensors cannot hold.
        """
        header: dict[str, object] = {METADATA: dict(self.metadata)} if self.metadata else {}
        ends: list[tuple[int, OutTensor]] = []
        at = 0
        if METADATA in self.tensors:
            raise Unsupported(
                f"{METADATA}: safetensors cannot hold a tensor of this name; --rename it"
            )
        for name, tensor in self.tensors.items():
            code = tensor.dtype.safetensors_code
            if code is None:
                raise Unsupported(f"{name}: safetensors cannot hold {tensor.dtype.torch_name}")
            header[name] = {
                "dtype": code,
                "shape": list(tensor.shape),
                "data_offsets": [at, at + tensor.nbytes],
            }
            ends.append((at, tensor))
            at += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % HEADER_ALIGNMENT)
        stream.write(struct.pack("<Q", len(text)) + text)
        base = 8 + len(text)
        stream.truncate(base + at)
        return Layout([Placement(base + begin, tensor) for begin, tensor in ends])
