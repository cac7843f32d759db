"""DTensors and ShardedTensors in pickles of torch 2.1, 2.4 and 2.13, read without running them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import FIXTURES
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckpt.errors import CorruptCheckpoint, UnsafePickle, Unsupported
from ckpt.storage import safe_pickle, torch_file
from ckpt.storage.sharded_tensors import (
    SHARDED_CLASSES,
    ShardedPart,
    is_sharded,
    sharded_part,
)

OLD = {
    "ds009_t21-fsdp1_shardpt_uop_w2": ((16, 0), (15, 13), 2),
    "ds014_t24-fsdp2_shardpt_w2": ((16, 0), (15, 13), 2),
    "ds019_t213-fsdp2_shardpt_w2": ((16, 0), (15, 13), 2),
    "ds019_t213-fsdp2_tp_shardpt_w4": ((0, 0), (16, 13), 4),
}


def parts_of(file: Path) -> dict[str, ShardedPart]:
    tree = torch_file.read(file, SHARDED_CLASSES)
    model = tree.get("model", tree)
    return {name: sharded_part(value, name) for name, value in model.items() if is_sharded(value)}


@pytest.mark.parametrize("case", OLD)
def test_parts_of_old_and_new_torch_know_their_place(case: str) -> None:
    offsets, sizes, world_size = OLD[case]
    part = parts_of(FIXTURES / case / "ckpt" / "rank1.pt")["emb.weight"]
    assert part.shape == (31, 13)
    assert [(c.chunk.offsets, c.chunk.sizes) for c in part.chunks] == [(offsets, sizes)]
    assert part.world_size == world_size
    assert part.rank in (1, None)


# --- DTensors of a process group that is not there ------------------------------------------------


@pytest.fixture(scope="module")
def mesh() -> Any:
    """A 3 x 2 mesh, as rank 3 sees it, at (1, 1)."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=6)
    yield DeviceMesh("cpu", torch.arange(6).reshape(3, 2), mesh_dim_names=("a", "b"))
    dist.destroy_process_group()


def saved(
    mesh: Any, shape: tuple[int, ...], placements: list[Placement], local: Any, file: Path
) -> dict[str, ShardedPart]:
    whole = torch.empty(shape)
    tensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )
    torch.save({"w": tensor}, file)
    return parts_of(file)


@pytest.mark.parametrize(
    ("placements", "local", "expected"),
    [
        ([Shard(0), Shard(1)], (2, 2), ((2, 2), (2, 2))),
        ([Shard(1), Shard(0)], (2, 2), ((3, 2), (2, 2))),
        ([Replicate(), Shard(0)], (2, 4), ((3, 0), (2, 4))),
        ([Replicate(), Replicate()], (5, 4), ((0, 0), (5, 4))),
        ([Shard(0), Replicate()], (2, 4), ((2, 0), (2, 4))),
    ],
    ids=repr,
)
def test_a_placement_gives_a_box(
    mesh: Any,
    placements: list[Placement],
    local: tuple[int, ...],
    expected: tuple[tuple[int, ...], tuple[int, ...]],
    tmp_path: Path,
) -> None:
    part = saved(mesh, (5, 4), placements, torch.ones(local), tmp_path / "rank3.pt")["w"]
    assert [(c.chunk.offsets, c.chunk.sizes) for c in part.chunks] == [expected]
    assert (part.rank, part.world_size) == (3, 6)


def test_a_rank_may_hold_nothing(mesh: Any, tmp_path: Path) -> None:
    part = saved(mesh, (1, 4), [Shard(0), Replicate()], torch.ones(0, 4), tmp_path / "rank3.pt")
    assert part["w"].chunks == ()


def test_a_local_tensor_that_is_a_column_of_a_larger_one_keeps_its_strides(
    mesh: Any, tmp_path: Path
) -> None:
    local = torch.arange(10.0).reshape(5, 2)[:, :1]  # torch saves DTensors at offset 0 only
    part = saved(mesh, (5, 2), [Replicate(), Shard(1)], local, tmp_path / "rank3.pt")["w"]
    assert [(c.start, c.strides) for c in part.chunks] == [(0, (2, 1))]


def test_a_partial_tensor_is_refused(mesh: Any, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"w: a Partial DTensor.*full_tensor"):
        saved(mesh, (5, 4), [Partial(), Replicate()], torch.ones(5, 4), tmp_path / "rank3.pt")


def test_a_part_of_another_shape_than_its_placement_is_corrupt(mesh: Any, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"w: this rank holds \(5, 4\), but its placement"):
        saved(mesh, (5, 4), [Shard(0), Replicate()], torch.ones(5, 4), tmp_path / "rank3.pt")


# --- hostile pickles ------------------------------------------------------------------------------


def call(function: str, argument: str) -> bytes:
    """A pickle that calls getattr of a global."""
    return (
        b"c__builtin__\ngetattr\n("
        + f"c{function}\n".replace(" ", "\n").encode()
        + f"V{argument}\ntR.".encode()
    )


@pytest.mark.parametrize("function", ["os system", "builtins eval"])
def test_getattr_of_what_is_not_data_is_refused(function: str) -> None:
    with pytest.raises(UnsafePickle, match=function.replace(" ", ".")):
        safe_pickle.loads(call(function, "__call__"), "file", data_classes=SHARDED_CLASSES)


@pytest.mark.parametrize("function", ["collections OrderedDict", "torch float32", "torch Size"])
def test_getattr_of_a_stand_in_is_corrupt(function: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        safe_pickle.loads(call(function, "__class__"), "file", data_classes=SHARDED_CLASSES)


def test_getattr_of_a_class_is_a_name_and_nothing_else() -> None:
    nested = call("torch.distributed.tensor DTensor", "__init__")[:-1] + b")R."
    found = safe_pickle.loads(nested, "file", data_classes=SHARDED_CLASSES)
    assert found.type_name == "torch.distributed.tensor.DTensor.__init__"


def test_getattr_is_refused_where_no_sharded_tensors_are_expected() -> None:
    with pytest.raises(UnsafePickle, match="getattr"):
        safe_pickle.loads(call("argparse Namespace", "x"), "file")


def test_a_tensor_subclass_of_something_else_is_corrupt() -> None:
    hostile = b"ctorch._utils\n_rebuild_wrapper_subclass\n(ccollections\nOrderedDict\ntR."
    with pytest.raises(CorruptCheckpoint, match="a tensor subclass of something else"):
        safe_pickle.loads(hostile, "file", data_classes=SHARDED_CLASSES)


def test_a_sharded_tensor_without_its_parts_is_corrupt(tmp_path: Path) -> None:
    content: Any = safe_pickle.loads(
        b"ctorch.distributed.tensor\nDTensor\n(tR.", "file", data_classes=SHARDED_CLASSES
    )
    assert is_sharded(content)
    with pytest.raises(CorruptCheckpoint, match="not as torch writes it"):
        sharded_part(content, "file: w")
