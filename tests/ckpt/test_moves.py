"""Which bytes go where: moves and runs, carried out here on plain lists of elements."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product
from math import prod

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.chunks import Chunk, row_major_strides
from ckpt.dtypes import DType
from ckpt.errors import CorruptCheckpoint
from ckpt.model import Record, StoredChunk, StoredTensor
from ckpt.moves import Move, moves_of, run_numel, runs_of
from ckpt.plan import OutTensor, Placement

Shape = tuple[int, ...]
Elements = npt.NDArray[np.int64]


def record(number: int = 0, numel: int = 1000) -> Record:
    return Record(f"/source/{number}", 0, numel * 4)


def in_one_place(shape: Shape, strides: Shape | None = None, start: int = 0) -> StoredTensor:
    stored = StoredChunk(Chunk.whole(shape), record(), start, strides)
    return StoredTensor(DType.float32, shape, (stored,))


def in_slices(shape: Shape, dim: int, lengths: Sequence[int]) -> StoredTensor:
    """A tensor cut along one dimension, every slice in a record of its own."""
    stored, at = [], 0
    for number, length in enumerate(lengths):
        offsets = tuple(at if d == dim else 0 for d in range(len(shape)))
        sizes = tuple(length if d == dim else size for d, size in enumerate(shape))
        stored.append(StoredChunk(Chunk(offsets, sizes), record(number)))
        at += length
    return StoredTensor(DType.float32, shape, tuple(stored))


def moves(tensor: OutTensor, offset: int = 0) -> list[Move]:
    return list(moves_of("/out", [Placement(offset, tensor)]))


def carried_out(found: Sequence[Move], records: dict[str, Elements], numel: int) -> Elements:
    """The output's elements after every run; -1 where nothing arrived."""
    out = np.full(numel, -1)
    for move in found:
        for run in runs_of(move):
            source = records[move.record.path][run.start : run.start + run.numel]
            out[run.out_start : run.out_start + run.numel] = source
    return out


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[StoredTensor, dict[str, Elements], Elements]:
    """A tensor cut into a random grid of boxes, its records, and its elements."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=4)))
    elements = np.arange(prod(shape)).reshape(shape)
    edges = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=2))}) for size in shape]
    spans = [list(pairwise(edge)) for edge in edges]
    stored, records = [], {}
    for number, cell in enumerate(product(*spans)):
        chunk = Chunk(tuple(a for a, _ in cell), tuple(b - a for a, b in cell))
        box = elements[tuple(slice(a, b) for a, b in cell)]
        order = draw(st.permutations(range(len(shape))))
        start = draw(st.integers(0, 3))
        turned = box.transpose(order)
        strides = row_major_strides(turned.shape)
        places = tuple(strides[order.index(dim)] for dim in range(len(shape)))
        path = f"/source/{number}"
        records[path] = np.concatenate([np.full(start, -2), turned.reshape(-1)])
        stored.append(StoredChunk(chunk, Record(path, 0, len(records[path]) * 4), start, places))
    return StoredTensor(DType.float32, shape, tuple(stored)), records, elements


@st.composite
def cut_tensors_with_a_box(
    draw: st.DrawFn,
) -> tuple[StoredTensor, dict[str, Elements], Elements, Chunk]:
    tensor, records, elements = draw(cut_tensors())
    offsets = tuple(draw(st.integers(0, size - 1)) for size in tensor.shape)
    sizes = tuple(
        draw(st.integers(1, size - offset))
        for size, offset in zip(tensor.shape, offsets, strict=True)
    )
    return tensor, records, elements, Chunk(offsets, sizes)


# --- nothing to do ------------------------------------------------------------------------------


def test_a_tensor_without_elements_needs_no_moves() -> None:
    assert moves(OutTensor.of(in_one_place((0, 3)))) == []


def test_a_tensor_without_elements_and_without_chunks_needs_no_moves() -> None:
    assert moves(OutTensor.of(StoredTensor(DType.float32, (0,), ()))) == []


def test_no_placements_need_no_moves() -> None:
    assert list(moves_of("/out", [])) == []


# --- one run ------------------------------------------------------------------------------------


def test_a_contiguous_tensor_is_one_move_of_one_run() -> None:
    (move,) = moves(OutTensor.of(in_one_place((2, 3, 4))))
    (run,) = runs_of(move)
    assert (run.start, run.out_start, run.numel) == (0, 0, 24)


def test_a_0_dimensional_tensor_is_one_run_of_one_element() -> None:
    (move,) = moves(OutTensor.of(in_one_place((), start=7)))
    (run,) = runs_of(move)
    assert (run.start, run.out_start, run.numel) == (7, 0, 1)


def test_a_move_knows_its_record_file_and_place() -> None:
    (move,) = moves(OutTensor.of(in_one_place((2, 3))), offset=64)
    assert (move.record, move.path, move.base) == (record(), "/out", 64)


def test_a_slice_of_dimension_0_is_one_run() -> None:
    box = Chunk((1, 0), (2, 5))
    (move,) = moves(OutTensor(in_one_place((4, 5)), DType.float32, box))
    (run,) = runs_of(move)
    assert (run.start, run.out_start, run.numel) == (5, 0, 10)


def test_shards_of_dimension_0_are_one_run_each() -> None:
    found = moves(OutTensor.of(in_slices((6, 5), 0, [1, 2, 3])))
    runs = [run for move in found for run in runs_of(move)]
    assert [(run.start, run.out_start, run.numel) for run in runs] == [
        (0, 0, 5),
        (0, 5, 10),
        (0, 15, 15),
    ]


def test_dimensions_of_size_1_do_not_cut_a_run_whatever_their_strides() -> None:
    (move,) = moves(OutTensor.of(in_one_place((1, 3, 1, 4), strides=(99, 4, 77, 1))))
    assert run_numel(move) == 12


# --- many runs ----------------------------------------------------------------------------------


def test_shards_of_the_last_dimension_are_a_run_a_row() -> None:
    found = moves(OutTensor.of(in_slices((3, 4), 1, [1, 3])))
    assert [run_numel(move) for move in found] == [1, 3]
    assert [len(list(runs_of(move))) for move in found] == [3, 3]


def test_a_transposed_source_is_a_run_an_element() -> None:
    (move,) = moves(OutTensor.of(in_one_place((3, 4), strides=(1, 3))))
    runs = list(runs_of(move))
    assert run_numel(move) == 1
    assert [(run.start, run.out_start) for run in runs[:5]] == [
        (0, 0),
        (3, 1),
        (6, 2),
        (9, 3),
        (1, 4),
    ]


def test_an_expanded_source_is_read_again_for_every_row() -> None:
    (move,) = moves(OutTensor.of(in_one_place((3, 4), strides=(0, 1))))
    assert [(run.start, run.out_start, run.numel) for run in runs_of(move)] == [
        (0, 0, 4),
        (0, 4, 4),
        (0, 8, 4),
    ]


def test_a_box_of_a_box_lands_at_its_place_in_the_wanted_box() -> None:
    wanted = Chunk((1, 1), (2, 2))
    found = moves(OutTensor(in_slices((3, 4), 1, [2, 2]), DType.float32, wanted))
    runs = [run for move in found for run in runs_of(move)]
    assert [(run.start, run.out_start, run.numel) for run in runs] == [
        (3, 0, 1),
        (5, 2, 1),
        (2, 1, 1),
        (4, 3, 1),
    ]


@given(cut_tensors())
@settings(max_examples=200, deadline=None)
def test_a_tensor_in_pieces_of_any_layout_is_assembled(
    case: tuple[StoredTensor, dict[str, Elements], Elements],
) -> None:
    tensor, records, elements = case
    out = carried_out(moves(OutTensor.of(tensor)), records, elements.size)
    assert out.tolist() == elements.reshape(-1).tolist()


@given(cut_tensors_with_a_box())
@settings(max_examples=200, deadline=None)
def test_a_box_of_a_tensor_in_pieces_is_assembled_as_numpy_slices_it(
    case: tuple[StoredTensor, dict[str, Elements], Elements, Chunk],
) -> None:
    tensor, records, elements, box = case
    out = carried_out(moves(OutTensor(tensor, DType.float32, box)), records, box.numel)
    region = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
    assert out.tolist() == elements[region].reshape(-1).tolist()


@given(cut_tensors())
@settings(max_examples=100, deadline=None)
def test_moves_arrive_with_the_bytes_of_the_output(
    case: tuple[StoredTensor, dict[str, Elements], Elements],
) -> None:
    out = OutTensor.of(case[0], DType.bfloat16)
    assert sum(move.nbytes for move in moves(out)) == out.nbytes


# --- pieces missing -----------------------------------------------------------------------------


def test_a_piece_that_is_missing_is_refused_with_the_file() -> None:
    whole = in_slices((6,), 0, [2, 2, 2])
    tensor = StoredTensor(whole.dtype, whole.shape, whole.chunks[:2])
    with pytest.raises(CorruptCheckpoint, match="/source/0: 4 of 6 elements"):
        moves(OutTensor.of(tensor))


def test_a_tensor_that_is_nowhere_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="0 of 6 elements"):
        moves(OutTensor.of(StoredTensor(DType.float32, (6,), ())))


def test_a_0_dimensional_tensor_that_is_nowhere_is_refused() -> None:
    with pytest.raises(CorruptCheckpoint, match="0 of 1 elements"):
        moves(OutTensor.of(StoredTensor(DType.float32, (), ())))


def test_a_missing_piece_outside_of_the_wanted_box_does_not_matter() -> None:
    whole = in_slices((6,), 0, [2, 2, 2])
    tensor = StoredTensor(whole.dtype, whole.shape, whole.chunks[:2])
    assert len(moves(OutTensor(tensor, DType.float32, Chunk((0,), (4,))))) == 2
