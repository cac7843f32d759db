"""Which part of a tensor a rank holds: as torch's own DTensor computes it."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from ckpt.chunks import coverage
from ckpt.placements import Cut, held_boxes, held_shape

SHAPES = [(7, 5), (8, 6), (1, 9), (2, 3), (13, 1), (0, 4), (5,), (4, 3, 7)]
ONE_DIM = [(ranks, dim) for ranks in (1, 2, 3, 5, 8) for dim in (0, 1)]


def torchs(
    shape: tuple[int, ...], mesh: tuple[int, ...], at: tuple[int, ...], placed: list
) -> tuple:  # type: ignore[type-arg]
    return _compute_local_shape_and_global_offset(shape, mesh, list(at), placed)


def taken(shape: tuple[int, ...], cuts: list[Cut]) -> torch.Tensor:
    """The elements of a numbered tensor that a rank holds, as they lie in its local tensor."""
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    local = torch.full(held_shape(shape, cuts), -1)
    for box in held_boxes(shape, cuts):
        there = [slice(o, o + n) for o, n in zip(box.chunk.offsets, box.chunk.sizes, strict=True)]
        here = [slice(o, o + n) for o, n in zip(box.local_offsets, box.chunk.sizes, strict=True)]
        local[tuple(here)] = whole[tuple(there)]
    return local


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("ranks", "dim"), ONE_DIM)
def test_one_cut_is_that_of_torch(shape: tuple[int, ...], ranks: int, dim: int) -> None:
    dim = min(dim, len(shape) - 1)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    pieces = list(torch.chunk(whole, ranks, dim)) if shape[dim] else [whole]
    empty = whole.narrow(dim, 0, 0)
    pieces += [empty] * (ranks - len(pieces))
    for rank in range(ranks):
        cut = Cut(dim, ranks, rank)
        size, _ = torchs(shape, (ranks,), (rank,), [Shard(dim)])
        assert held_shape(shape, [cut]) == size
        assert torch.equal(taken(shape, [cut]), pieces[rank])


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) > 1])
def test_cuts_of_two_dimensions_are_those_of_torch(shape: tuple[int, ...]) -> None:
    boxes = []
    for at in product(range(3), range(2)):
        cuts = [Cut(0, 3, at[0]), Cut(1, 2, at[1])]
        size, offset = torchs(shape, (3, 2), at, [Shard(0), Shard(1)])
        found = held_boxes(shape, cuts)
        assert held_shape(shape, cuts) == size
        assert [(b.chunk.offsets, b.chunk.sizes) for b in found] == [(offset, size)] * len(found)
        boxes += [box.chunk for box in found]
    assert coverage(shape, boxes).missing == 0
    assert coverage(shape, boxes).repeated == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_one_dimension_cut_twice_is_that_of_torch(shape: tuple[int, ...]) -> None:
    for at in product(range(2), range(3)):
        cuts = [Cut(0, 2, at[0]), Cut(0, 3, at[1])]
        size, _ = torchs(shape, (2, 3), at, [Shard(0), Shard(0)])
        assert held_shape(shape, cuts) == size


@pytest.mark.parametrize("rows", [1, 4, 7, 12, 13])
def test_fsdp_above_tensor_parallelism_takes_the_rows_that_torch_takes(rows: int) -> None:
    placed = [_StridedShard(0, split_factor=2), Shard(0)]
    held = []
    for at in product(range(3), range(2)):
        cuts = [Cut(0, 3, at[0], split_factor=2), Cut(0, 2, at[1])]
        size, _ = torchs((rows, 2), (3, 2), at, placed)
        strided = placed[0]._split_tensor(torch.arange(rows), 3, with_padding=False)[0][at[0]]
        expected = [*torch.chunk(strided, 2), *[strided[:0]] * 2][at[1]]
        assert held_shape((rows, 2), cuts) == size
        assert torch.equal(taken((rows, 2), cuts)[:, 0] // 2, expected)
        held += [box.chunk for box in held_boxes((rows, 2), cuts)]
    assert (coverage((rows, 2), held).missing, coverage((rows, 2), held).repeated) == (0, 0)


def test_a_tensor_without_dimensions_is_one_box() -> None:
    assert [box.chunk.sizes for box in held_boxes((), [])] == [()]
    assert torchs((), (2,), (1,), [Replicate()]) == ((), ())


@pytest.mark.parametrize("cut", [Cut(2, 2, 0), Cut(-1, 2, 0), Cut(0, 2, 2), Cut(0, 2, 0, 0)])
def test_a_cut_that_cannot_be_is_refused(cut: Cut) -> None:
    with pytest.raises(ValueError, match="of a tensor of shape"):
        held_boxes((4, 4), [cut])
