"""Boxes inside tensors: intersections, flat ranges cut into boxes, and coverage."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.chunks import Chunk, Coverage, chunks_of_flat_range, coverage, row_major_strides

Shape = tuple[int, ...]
FlatRange = tuple[Shape, int, int]


@st.composite
def flat_ranges(draw: st.DrawFn) -> FlatRange:
    """A shape of 0 to 4 dimensions and a non-empty range of its flat elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    numel = int(np.prod(shape))
    start = draw(st.integers(0, numel - 1))
    return shape, start, draw(st.integers(start + 1, numel))


@st.composite
def boxes(draw: st.DrawFn, shape: Shape) -> Chunk:
    """A box inside a shape, possibly empty."""
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    sizes = tuple(
        draw(st.integers(0, size - offset)) for size, offset in zip(shape, offsets, strict=True)
    )
    return Chunk(offsets, sizes)


@st.composite
def shapes_with_boxes(draw: st.DrawFn, most: int) -> tuple[Shape, list[Chunk]]:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    return shape, draw(st.lists(boxes(shape), max_size=most))


def region(chunk: Chunk) -> tuple[slice, ...]:
    return tuple(
        slice(offset, offset + size)
        for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)
    )


def flat_elements(shape: Shape, chunk: Chunk) -> npt.NDArray[np.int64]:
    return np.arange(int(np.prod(shape))).reshape(shape)[region(chunk)].reshape(-1)


def times_stored(shape: Shape, chunks: list[Chunk]) -> npt.NDArray[np.int64]:
    counts = np.zeros(shape, dtype=np.int64)
    for chunk in chunks:
        counts[region(chunk)] += 1
    return counts


# --- one box ------------------------------------------------------------------------------------


def test_the_whole_of_a_tensor_is_the_box_from_its_origin() -> None:
    assert Chunk.whole([2, 3]) == Chunk((0, 0), (2, 3))


def test_the_box_of_a_0_dimensional_tensor_has_one_element() -> None:
    assert Chunk.whole([]).numel == 1


def test_a_box_without_extent_in_one_dimension_has_no_elements() -> None:
    assert Chunk((1, 0), (2, 0)).numel == 0


def test_a_box_met_with_itself_is_itself() -> None:
    assert Chunk((1, 2), (3, 4)).intersect(Chunk((1, 2), (3, 4))) == Chunk((1, 2), (3, 4))


def test_two_boxes_meet_in_their_common_box() -> None:
    assert Chunk((0, 1), (3, 3)).intersect(Chunk((2, 0), (5, 3))) == Chunk((2, 1), (1, 2))


def test_neighbouring_boxes_do_not_meet() -> None:
    assert Chunk((0,), (3,)).intersect(Chunk((3,), (3,))) is None


def test_an_empty_box_meets_nothing() -> None:
    assert Chunk((1,), (0,)).intersect(Chunk((0,), (5,))) is None


def test_boxes_of_0_dimensional_tensors_meet() -> None:
    assert Chunk((), ()).intersect(Chunk((), ())) == Chunk((), ())


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_boxes_meet_where_both_have_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = one.intersect(other)
    shared = np.intersect1d(flat_elements(shape, one), flat_elements(shape, other))
    found = [] if common is None else flat_elements(shape, common).tolist()
    assert found == shared.tolist()


def test_a_box_inside_a_tensor_fits() -> None:
    assert Chunk((1, 0), (1, 3)).fits((2, 3))


def test_an_empty_box_at_the_end_of_a_tensor_fits() -> None:
    assert Chunk((2, 0), (0, 3)).fits((2, 3))


@pytest.mark.parametrize(
    "chunk",
    [
        Chunk((1, 0), (2, 3)),
        Chunk((-1, 0), (1, 3)),
        Chunk((0, 0), (1, -3)),
        Chunk((0,), (1,)),
        Chunk((), ()),
    ],
)
def test_a_box_that_reaches_out_of_a_tensor_or_has_other_dimensions_does_not_fit(
    chunk: Chunk,
) -> None:
    assert not chunk.fits((2, 3))


def test_row_major_strides_are_those_of_numpy() -> None:
    assert row_major_strides((2, 3, 4)) == (12, 4, 1)


def test_row_major_strides_of_a_tensor_without_elements_are_those_of_torch() -> None:
    assert row_major_strides((2, 0, 4)) == (4, 4, 1)


# --- flat ranges --------------------------------------------------------------------------------


def test_an_empty_range_has_no_boxes() -> None:
    assert chunks_of_flat_range((3, 4), 5, 5) == []


def test_the_only_element_of_a_0_dimensional_tensor_is_one_box() -> None:
    assert chunks_of_flat_range((), 0, 1) == [Chunk((), ())]


def test_the_whole_range_is_the_whole_box() -> None:
    assert chunks_of_flat_range((2, 3, 4), 0, 24) == [Chunk((0, 0, 0), (2, 3, 4))]


def test_a_range_over_rows_is_a_tail_whole_rows_and_a_head() -> None:
    assert chunks_of_flat_range((4, 3), 2, 10) == [
        Chunk((0, 2), (1, 1)),
        Chunk((1, 0), (2, 3)),
        Chunk((3, 0), (1, 1)),
    ]


@given(flat_ranges())
@settings(max_examples=300, deadline=None)
def test_the_boxes_of_a_range_hold_exactly_its_elements_in_flat_order(case: FlatRange) -> None:
    shape, start, stop = case
    found = [flat_elements(shape, chunk) for chunk in chunks_of_flat_range(shape, start, stop)]
    assert np.concatenate(found).tolist() == list(range(start, stop))


@given(flat_ranges())
@settings(max_examples=300, deadline=None)
def test_a_range_needs_at_most_two_boxes_a_dimension_less_one(case: FlatRange) -> None:
    shape, start, stop = case
    assert len(chunks_of_flat_range(shape, start, stop)) <= max(2 * len(shape) - 1, 1)


@given(flat_ranges())
@settings(max_examples=100, deadline=None)
def test_the_boxes_of_a_range_fit_the_tensor_and_are_not_empty(case: FlatRange) -> None:
    shape, start, stop = case
    found = chunks_of_flat_range(shape, start, stop)
    assert all(chunk.fits(shape) and chunk.numel for chunk in found)


# --- coverage -----------------------------------------------------------------------------------


def test_one_whole_box_covers_a_tensor() -> None:
    assert coverage((2, 3), [Chunk.whole((2, 3))]) == Coverage(0, 0)


def test_one_box_covers_a_0_dimensional_tensor() -> None:
    assert coverage((), [Chunk((), ())]) == Coverage(0, 0)


def test_a_0_dimensional_tensor_without_a_box_misses_its_element() -> None:
    assert coverage((), []) == Coverage(1, 0)


def test_a_0_dimensional_tensor_with_two_boxes_stores_its_element_twice() -> None:
    assert coverage((), [Chunk((), ()), Chunk((), ())]) == Coverage(0, 1)


def test_a_tensor_without_elements_is_covered_by_nothing_or_by_an_empty_box() -> None:
    assert coverage((0, 3), []) == coverage((0, 3), [Chunk((0, 0), (0, 3))]) == Coverage(0, 0)


def test_empty_boxes_change_nothing() -> None:
    halves = [Chunk((0,), (2,)), Chunk((2,), (2,))]
    assert coverage((4,), [*halves, Chunk((2,), (0,)), Chunk((4,), (0,))]) == Coverage(0, 0)


def test_a_hole_is_counted_in_elements() -> None:
    assert coverage((4, 3), [Chunk((0, 0), (2, 3)), Chunk((3, 0), (1, 3))]) == Coverage(3, 0)


def test_an_overlap_is_counted_in_elements() -> None:
    assert coverage((4, 3), [Chunk((0, 0), (3, 3)), Chunk((2, 0), (2, 3))]) == Coverage(0, 3)


def test_an_overlap_as_large_as_a_hole_does_not_hide_it() -> None:
    assert coverage((4,), [Chunk((0,), (2,)), Chunk((1,), (2,))]) == Coverage(1, 1)


def test_an_element_stored_three_times_hides_no_hole_and_makes_none() -> None:
    assert coverage((2,), [Chunk((0,), (1,))] * 3) == Coverage(1, 2)


@given(flat_ranges())
@settings(max_examples=100, deadline=None)
def test_a_flat_range_and_what_is_around_it_cover_a_tensor(case: FlatRange) -> None:
    shape, start, stop = case
    numel = int(np.prod(shape))
    ranges = [(0, start), (start, stop), (stop, numel)]
    chunks = [chunk for bounds in ranges for chunk in chunks_of_flat_range(shape, *bounds)]
    assert coverage(shape, chunks) == Coverage(0, 0)


@given(shapes_with_boxes(most=2))
@settings(max_examples=300, deadline=None)
def test_coverage_of_two_boxes_counts_as_numpy_does(case: tuple[Shape, list[Chunk]]) -> None:
    shape, chunks = case
    counts = times_stored(shape, chunks)
    expected = Coverage(int((counts == 0).sum()), int((counts > 1).sum()))
    assert coverage(shape, chunks) == expected


@given(shapes_with_boxes(most=6))
@settings(max_examples=300, deadline=None)
def test_coverage_is_perfect_exactly_when_every_element_is_stored_once(
    case: tuple[Shape, list[Chunk]],
) -> None:
    shape, chunks = case
    is_tiled = bool((times_stored(shape, chunks) == 1).all())
    assert (coverage(shape, chunks) == Coverage(0, 0)) is is_tiled


def test_ten_thousand_slices_of_dimension_0_are_checked_in_a_second() -> None:
    slices = [Chunk((row, 0), (1, 8)) for row in range(10_000)]
    began = time.monotonic()
    assert coverage((10_000, 8), slices) == Coverage(0, 0)
    assert time.monotonic() - began < 1
