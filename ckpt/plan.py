"""What a conversion is going to write: files, the tensors in them, and what has to be said.

A writer makes a `WritePlan` from a `Checkpoint` without reading or writing anything. The files
lay themselves out (`OutputFile.lay_out`), the copy engine fills in the bytes, and the commit
files, which make the output complete, are rendered last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Protocol

from ckpt.chunks import Chunk
from ckpt.dtypes import DType
from ckpt.model import StoredTensor
from ckpt.note import Note

__all__ = [
    "CommitFile",
    "CopiedFile",
    "FileSpans",
    "FlatTensor",
    "Layout",
    "OutTensor",
    "OutputFile",
    "Placement",
    "Span",
    "WritePlan",
]


@dataclass(frozen=True, slots=True, eq=False)
class OutTensor:
    """A tensor, or a box of one, on its way into an output file, row-major, in some dtype.

    Compared by identity: the same object in two places is stored once.
    """

    source: StoredTensor
    dtype: DType
    chunk: Chunk

    @classmethod
    def of(cls, tensor: StoredTensor, dtype: DType | None = None) -> OutTensor:
        """The whole tensor, as it is or cast to `dtype`."""
        return cls(tensor, dtype or tensor.dtype, Chunk.whole(tensor.shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the output."""
        return self.chunk.sizes

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.chunk.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class FlatTensor:
    """A 1-D tensor made of many others, one after another; what none of them covers is zero.

    Compared by identity: the same object in two places is stored once.

    Attributes:
        numel: elements, padding included.
        pieces: first element and tensor; each lies flat from there on, and none overlaps another.
            Iterated more than once, in any order.
    """

    dtype: DType
    numel: int
    pieces: Iterable[tuple[int, OutTensor]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in the output."""
        return (self.numel,)

    @property
    def nbytes(self) -> int:
        """Bytes in the output."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Placement:
    """Where in its output file a tensor's first byte belongs."""

    offset: int
    tensor: OutTensor


Span = tuple[int, int]
"""Offset and length in bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A file that is complete but for its tensors' bytes.

    Attributes:
        placements: where those belong.
        spans: where named parts of the file lie, for a commit file that lists them.
    """

    placements: Sequence[Placement]
    spans: Mapping[str, Span] = field(default_factory=dict)


class OutputFile(Protocol):
    """A file with tensors in it.

    Attributes:
        path: relative to the output, "/" separated; empty for a format that is a single file.
        nbytes: bytes of the tensors.
    """

    @property
    def path(self) -> str: ...

    @property
    def nbytes(self) -> int: ...

    def lay_out(self, stream: BinaryIO) -> Layout:
        """Write everything but the tensors' bytes into an empty file."""
        ...


FileSpans = Mapping[str, Mapping[str, Span]]
"""The spans of every output file, by its path."""


@dataclass(frozen=True, slots=True)
class CommitFile:
    """A small file that makes the output complete: an index, `.metadata`, `latest`."""

    path: str
    render: Callable[[FileSpans], bytes]


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A file taken over as it is, such as a tokenizer."""

    path: str
    source: str


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Everything a conversion will write, and the notes about it.

    Attributes:
        is_single_file: the output is a file and not a folder.
    """

    files: tuple[OutputFile, ...]
    notes: tuple[Note, ...]
    commit: tuple[CommitFile, ...] = ()
    copied: tuple[CopiedFile, ...] = field(default=())
    is_single_file: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors to be written."""
        return sum(file.nbytes for file in self.files)
