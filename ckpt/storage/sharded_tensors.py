"""One rank's DTensors and ShardedTensors as torch.save pickles them: which boxes, where they lie.

Both carry what is needed to find their place in the whole tensor: a DTensor its mesh and its
placements, a ShardedTensor the offsets of its shards. They are read as inert data, by the names of
their classes; no process group is needed, and nothing of torch is called.

Source: torch 2.13.0 torch/distributed/tensor/{_api,_dtensor_spec,placement_types}.py,
torch/distributed/{device_mesh,_mesh_layout}.py, torch/distributed/_shard/sharded_tensor/api.py;
torch 2.1 and 2.4 by their files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpt.chunks import Chunk, row_major_strides
from ckpt.dtypes import DType
from ckpt.errors import CkptError, CorruptCheckpoint, Unsupported
from ckpt.model import Opaque, Plain, StoredChunk, StoredTensor
from ckpt.placements import Cut, HeldBox, held_boxes, held_shape
from ckpt.values import read_bytes

__all__ = ["SHARDED_CLASSES", "ShardedPart", "is_sharded", "sharded_part"]

_TENSOR_MODULES = (
    "torch.distributed.tensor",
    "torch.distributed.tensor._api",
    "torch.distributed.tensor._dtensor_spec",
    "torch.distributed.tensor.placement_types",
    "torch.distributed._tensor",
    "torch.distributed._tensor.api",
    "torch.distributed._tensor._dtensor_spec",
    "torch.distributed._tensor.placement_types",
)
_DTENSORS = frozenset(f"{module}.DTensor" for module in _TENSOR_MODULES)
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"
_TENSOR_CLASSES = (
    "DTensorSpec", "TensorMeta", "ShardOrderEntry", "Placement", "Shard", "Replicate", "Partial",
    "_Partial", "_StridedShard", "_MaskPartial",
)  # fmt: skip
SHARDED_CLASSES = (
    _DTENSORS
    | {f"{module}.{name}" for module in _TENSOR_MODULES for name in _TENSOR_CLASSES}
    | {
        _SHARDED_TENSOR,
        "builtins.getattr",  # of ShardedTensor.ProcessGroupState
        "torch.distributed.device_mesh.DeviceMesh",
        "torch.distributed._mesh_layout._MeshLayout",
        "torch.distributed._mesh_layout._FlatLayout",
        "torch.distributed._shard.metadata.ShardMetadata",
        "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
        "torch.distributed._shard.sharded_tensor.metadata.ShardedTensorMetadata",
        "torch.distributed._shard.sharded_tensor.metadata.TensorProperties",
        "torch.distributed._shard.sharded_tensor.shard.Shard",
        "torch.distributed._shard.sharding_spec.chunk_sharding_spec.ChunkShardingSpec",
        "torch.distributed._shard.sharding_spec.api.EnumerableShardingSpec",
        "torch.distributed.remote_device._remote_device",
    }
)
"""Further classes that `torch_file.read` takes for data in a rank's file."""

PARTIAL = ("Partial", "_Partial", "_MaskPartial")
MALFORMED = (LookupError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True, slots=True)
class ShardedPart:
    """What one rank has of a tensor.

    Attributes:
        shape: of the whole tensor.
        chunks: the boxes it holds, in the whole tensor's coordinates, none of them empty.
        local: the tensors as they lie in the file; the same objects for tied weights.
        rank: its number among all ranks, where it was saved.
        world_size: how many ranks there are at least.
    """

    dtype: DType
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    local: tuple[StoredTensor, ...]
    rank: int | None
    world_size: int


def is_sharded(value: Plain) -> bool:
    """True for what `sharded_part` reads."""
    return isinstance(value, Opaque) and (
        value.type_name in _DTENSORS or value.type_name == _SHARDED_TENSOR
    )


def sharded_part(value: Opaque, where: str) -> ShardedPart:
    """The rank's part of a DTensor or ShardedTensor.

    Args:
        where: file and name, for messages.

    Raises:
        Unsupported: a Partial placement, or one of an unknown kind.
        CorruptCheckpoint: what the rank holds has another shape than its placement says.
    """
    try:
        if value.type_name == _SHARDED_TENSOR:
            return _of_sharded_tensor(value, where)
        return _of_dtensor(value, where)
    except MALFORMED as problem:
        if isinstance(problem, CkptError):
            raise
        raise CorruptCheckpoint(
            f"{where}: a sharded tensor that is not as torch writes it ({problem!r})"
        ) from problem


# --- DTensor ------------------------------------------------------------------------------------


def _of_dtensor(value: Opaque, where: str) -> ShardedPart:
    fields = _fields(value)
    local, spec = fields["_local_tensor"], _fields(fields["_spec"])
    shape = tuple(int(size) for size in _args(value)[1])
    mesh = _mesh(spec["mesh"])
    if not isinstance(local, StoredTensor):
        raise Unsupported(f"{where}: a DTensor around another tensor subclass")
    boxes: list[HeldBox] = []
    if mesh.coordinate is not None:
        cuts = list(_cuts(spec["placements"], mesh, where))
        boxes = held_boxes(shape, cuts)
        if local.shape != held_shape(shape, cuts):
            raise CorruptCheckpoint(
                f"{where}: this rank holds {local.shape}, but its placement of {shape} gives it "
                f"{held_shape(shape, cuts)}"
            )
    chunks = tuple(_within(local, box) for box in boxes)
    return ShardedPart(local.dtype, shape, chunks, (local,), mesh.rank, mesh.world_size)


def _cuts(placements: Sequence[Plain], mesh: _Mesh, where: str) -> Iterator[Cut]:
    """The cuts that placements make, in mesh order; replicas make none."""
    assert mesh.coordinate is not None, "asked for ranks in the mesh only"
    for placement, parts, index in zip(placements, mesh.shape, mesh.coordinate, strict=True):
        kind = placement.type_name.rpartition(".")[2]
        if kind in PARTIAL:
            raise Unsupported(
                f"{where}: a Partial DTensor, of which each rank holds an addend. Save "
                "tensor.full_tensor(), or redistribute it to Shard or Replicate first."
            )
        if kind not in ("Shard", "_StridedShard", "Replicate"):
            raise Unsupported(f"{where}: a DTensor with the placement {kind}, which is not known")
        if kind != "Replicate":
            fields = _fields(placement)
            yield Cut(int(fields["dim"]), parts, index, int(fields.get("split_factor", 1)))


@dataclass(frozen=True, slots=True)
class _Mesh:
    shape: tuple[int, ...]
    coordinate: tuple[int, ...] | None
    rank: int | None
    world_size: int


def _mesh(value: Opaque) -> _Mesh:
    """The mesh a DTensor lies on, and the rank's place in it; None outside of it."""
    fields = _fields(value)
    layout = fields.get("_layout")
    shape = tuple(fields["mesh"].shape) if layout is None else tuple(_axes(_fields(layout)))
    place = fields["_coordinate_on_dim"]
    coordinate = None if place is None else tuple(int(index) for index in place)
    rank = fields.get("_rank")
    return _Mesh(shape, coordinate, rank, max(_ranks(fields), default=-1) + 1)


def _axes(layout: Mapping[str, Plain]) -> Iterator[int]:
    """Sizes of the mesh's dimensions; an axis may be made of several."""
    if "axes" in layout:
        yield from (_numel(_fields(axis)["shape"]) for axis in layout["axes"])
    elif isinstance(layout["shape"], int):
        yield layout["shape"]
    else:
        yield from (_numel(axis) for axis in layout["shape"])


def _numel(shape: Plain) -> int:
    return shape if isinstance(shape, int) else prod(_numel(size) for size in shape)


def _ranks(mesh: Mapping[str, Plain]) -> Sequence[int]:
    """The numbers of the ranks in the mesh, or in the one that it is a slice of."""
    listed = mesh.get("_flatten_rank_map")
    if listed is not None:
        return tuple(int(rank) for rank in listed)
    stored = mesh["_rank_map"] if "_rank_map" in mesh else mesh["mesh"]
    code = {DType.int64: "q", DType.int32: "i"}[stored.dtype]
    return struct.unpack(f"<{stored.numel}{code}", read_bytes(stored))


# --- ShardedTensor ------------------------------------------------------------------------------


def _of_sharded_tensor(value: Opaque, where: str) -> ShardedPart:
    shards, metadata, group = _content(value)[:3]
    shape = tuple(int(size) for size in _fields(metadata)["size"])
    dtype: DType = _args(value)[0]
    chunks, local = list[StoredChunk](), list[StoredTensor]()
    for shard in map(_fields, shards):
        tensor, about = shard["tensor"], _fields(shard["metadata"])
        chunk = Chunk(tuple(about["shard_offsets"]), tuple(about["shard_sizes"]))
        if tensor.shape != chunk.sizes or not chunk.fits(shape):
            raise CorruptCheckpoint(
                f"{where}: a shard of shape {tensor.shape}, which should be {chunk.sizes} at "
                f"{chunk.offsets} of {shape}"
            )
        local.append(tensor)
        if tensor.numel:
            chunks.append(_within(tensor, HeldBox(chunk, (0,) * len(shape))))
    ranks = _fields(group)
    rank, world_size = int(ranks["global_rank"]), int(ranks["global_world_size"])
    return ShardedPart(dtype, shape, tuple(chunks), tuple(local), rank, world_size)


# --- shared -------------------------------------------------------------------------------------


def _within(local: StoredTensor, box: HeldBox) -> StoredChunk:
    """A box of the whole tensor, whose elements are a box of the local tensor."""
    stored = local.chunks[0]
    strides = stored.strides or row_major_strides(local.shape)
    start = stored.start + sum(o * s for o, s in zip(box.local_offsets, strides, strict=True))
    contiguous = all(
        size == 1 or stride == ours
        for size, stride, ours in zip(
            box.chunk.sizes, strides, row_major_strides(box.chunk.sizes), strict=True
        )
    )
    return StoredChunk(box.chunk, stored.record, start, None if contiguous else strides)


def _content(value: Opaque) -> Plain:
    """What was given to `__setstate__`."""
    state = value.state
    return state["state"] if isinstance(state, Mapping) and "args" in state else state


def _args(value: Opaque) -> Sequence[Plain]:
    """What the object was made with."""
    args: Sequence[Plain] = value.state["args"]
    return args


def _fields(value: Opaque) -> Mapping[str, Plain]:
    """The attributes of an object, with and without `__slots__`."""
    state = _content(value)
    if isinstance(state, tuple):  # an object with slots: its __dict__ and its slots
        state = {name: inner for part in state if part for name, inner in part.items()}
    return state if state is not None else {}
