"""One training state, whatever its sharding: the model in the middle of every conversion.

A reader turns files into a `Checkpoint`, a writer turns a `Checkpoint` into a plan of files.
Nothing here holds tensor data: a `StoredTensor` says in which bytes of which files its elements
lie. No torch, no input or output.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeAlias

from ckpt.chunks import Chunk
from ckpt.dtypes import DType
from ckpt.note import Note

__all__ = [
    "Checkpoint",
    "InlineTensor",
    "Opaque",
    "Origin",
    "Param",
    "ParamGroup",
    "Plain",
    "Record",
    "Scalar",
    "StoredChunk",
    "StoredTensor",
    "walk",
]

Scalar: TypeAlias = int | float | bool | str | None
Plain: TypeAlias = Any
"""Numbers, strings, None, and dicts, lists, tuples, sets of them, with `StoredTensor`,
`InlineTensor` or `Opaque` leaves: everything of a job that is not a weight."""


@dataclass(frozen=True, slots=True)
class Record:
    """A run of bytes in a file.

    Attributes:
        path: absolute path of the file.
        offset: first byte.
        length: bytes.
        crc32: the checksum that the container keeps for exactly these bytes; None if it has none.
    """

    path: str
    offset: int
    length: int
    crc32: int | None = None


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A box of a tensor and where its elements are.

    Attributes:
        chunk: the box, in the tensor's own coordinates.
        record: the bytes it lies in.
        start: its first element, counted in elements from the beginning of the record.
        strides: strides in elements inside the record; None means row-major and contiguous.
    """

    chunk: Chunk
    record: Record
    start: int = 0
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor that stays in its files: dtype, shape, and chunks that tile it exactly.

    Compared by identity: two names that hold the same object are tied.
    """

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous copy."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class InlineTensor:
    """A small tensor whose row-major little-endian bytes are at hand."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """An instance of a class known to occur in checkpoints, as inert data: never that class."""

    type_name: str
    state: Plain


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter under its clean fully qualified name.

    Attributes:
        value: the weight as the forward pass read it (bf16, fp16, fp32); None where the source
            keeps only the master copy.
        master: the fp32 copy the optimizer steps; None where `value` is itself the master.
        lp_dtype: the dtype the model computed in, also where `value` is absent.
        state: optimizer state by the optimizer's own names, tensors of the parameter's shape as
            a rule; `step` and the like as plain numbers.
    """

    value: StoredTensor | None
    master: StoredTensor | None = None
    lp_dtype: DType | None = None
    state: Mapping[str, StoredTensor | Scalar] = field(default_factory=dict)

    @property
    def weight(self) -> StoredTensor:
        """The weight to carry on with: the fp32 master where there is one."""
        tensor = self.master or self.value
        assert tensor is not None, "a Param has a value or a master"
        return tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.weight.shape


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """One param group of the optimizer: its members in order, and its hyper-parameters."""

    fqns: tuple[str, ...]
    options: Mapping[str, Plain]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a checkpoint came from.

    Attributes:
        stripped: wrapper segments that were taken off the names.
        repeats_ties: the format saves a tied weight once under each of its names.
        keeps_order: the names are in the model's order; safetensors files have another.
        trainer_files: absolute paths of what HF Trainer or accelerate keep beside the checkpoint
            and want again.
    """

    format: str
    path: str
    writer: str | None = None
    world_size: int | None = None
    stripped: tuple[str, ...] = ()
    repeats_ties: bool = False
    keeps_order: bool = True
    trainer_files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole training state; opening one reads metadata only.

    Attributes:
        params: parameters by FQN, in the model's order if `origin` keeps it.
        buffers: persistent buffers by FQN, such as BatchNorm's running statistics.
        order: every name of the model's state dict, in its order: parameters, buffers, aliases.
        ties: alias FQN -> owner FQN.
        extra_state: what modules saved with `get_extra_state`, by name; plain data.
        groups: param groups in the optimizer's order; empty without an optimizer.
        optimizer: the optimizer's class name where the source tells it.
        objects: the rest of the job by the source's names: scheduler, scaler, counters, client
            state, config.
        origin: where it came from.
        notes: what a reader has to tell about its source.
    """

    params: Mapping[str, Param]
    buffers: Mapping[str, StoredTensor]
    order: tuple[str, ...]
    ties: Mapping[str, str]
    groups: tuple[ParamGroup, ...]
    objects: Mapping[str, Plain]
    origin: Origin
    notes: tuple[Note, ...] = ()
    extra_state: Mapping[str, Plain] = field(default_factory=dict)

    @property
    def has_optimizer(self) -> bool:
        """True when there are param groups, with or without state."""
        return bool(self.groups)

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters that no param group has; empty without an optimizer."""
        members = {fqn for group in self.groups for fqn in group.fqns}
        return tuple(fqn for fqn in self.params if members and fqn not in members)

    def without_job(self) -> Checkpoint:
        """The same model without optimizer, scheduler and the rest of the job."""
        params = {fqn: replace(param, state={}) for fqn, param in self.params.items()}
        return replace(self, params=params, groups=(), objects={})

    def tensors(self) -> Iterator[tuple[str, StoredTensor]]:
        """Every stored tensor with a path-like label, weights first."""
        for fqn, param in self.params.items():
            if param.master is not None:
                yield f"master/{fqn}", param.master
            if param.value is not None:
                yield f"weight/{fqn}", param.value
        for fqn, buffer in self.buffers.items():
            yield f"buffer/{fqn}", buffer
        for fqn, param in self.params.items():
            for name, value in param.state.items():
                if isinstance(value, StoredTensor):
                    yield f"{name}/{fqn}", value
        for name, tree in self.objects.items():
            for path, leaf in walk(tree):
                if isinstance(leaf, StoredTensor):
                    yield "/".join(("object", name, *path)), leaf


def walk(tree: Plain, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Plain]]:
    """Every leaf of a tree of plain data, with its path."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from walk(value, (*path, str(key)))
    elif isinstance(tree, list | tuple | set | frozenset):
        for index, value in enumerate(tree):
            yield from walk(value, (*path, str(index)))
    elif isinstance(tree, Opaque):
        yield from walk(tree.state, path)
    else:
        yield path, tree
