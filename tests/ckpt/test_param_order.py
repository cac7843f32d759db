"""Which parameter an integer in an optimizer's state stands for."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import AmbiguousSource, CkptError, CorruptCheckpoint
from ckpt.param_order import Shape, Slot, match_given_order, match_names, match_shapes

WHERE = "job.pt"
MATRIX, OTHER_MATRIX, VECTOR = (4, 3), (3, 4), (4,)


def groups_of(*shapes: Sequence[Shape | None]) -> list[list[Slot]]:
    """Groups of numbered slots; the numbers go on from group to group, as torch's do."""
    groups, index = [], 0
    for group in shapes:
        groups.append([Slot(index + at, shape) for at, shape in enumerate(group)])
        index += len(group)
    return groups


def assignments(
    groups: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape]
) -> Iterator[dict[int, str]]:
    """Every assignment that keeps the order inside each group, by trying all of them."""
    if not shapes:
        yield from [{}] if not any(groups) else []
        return
    (name, shape), *rest = shapes.items()
    yield from assignments(groups, dict(rest))
    for at, group in enumerate(groups):
        if group and group[0].shape in (None, shape):
            left = [*groups[:at], group[1:], *groups[at + 1 :]]
            for found in assignments(left, dict(rest)):
                yield {group[0].index: name, **found}


def outcome(groups: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape]) -> object:
    """The match, or the type of the refusal."""
    try:
        return match_names(groups, shapes, WHERE)
    except CkptError as refusal:
        return type(refusal)


def expected(groups: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape]) -> object:
    found = list(assignments(groups, shapes))
    if len(found) == 1:
        return found[0]
    return AmbiguousSource if found else CorruptCheckpoint


some_shapes = st.sampled_from([(1,), (2,), (2, 2)])


@st.composite
def small_optimizers(draw: st.DrawFn) -> tuple[list[list[Slot]], dict[str, Shape]]:
    """Up to 6 parameters, some of them frozen, the rest in up to 3 groups, some without state."""
    shapes = {f"p{at}": shape for at, shape in enumerate(draw(st.lists(some_shapes, max_size=6)))}
    count = draw(st.integers(1, 3))
    slots: list[list[Shape | None]] = [[] for _ in range(count)]
    for shape in shapes.values():
        group = draw(st.integers(-1, count - 1))
        if group >= 0:
            slots[group].append(draw(st.sampled_from([shape, shape, None])))
    return groups_of(*slots), shapes


# --- one possibility ----------------------------------------------------------------------------


def test_no_parameters_match_no_numbers() -> None:
    assert match_names([], {}, WHERE) == {}


def test_a_group_as_long_as_the_model_matches_in_order() -> None:
    shapes = {"a": MATRIX, "b": MATRIX, "c": VECTOR}
    assert match_names(groups_of([MATRIX, MATRIX, VECTOR]), shapes, WHERE) == {
        0: "a",
        1: "b",
        2: "c",
    }


def test_a_group_as_long_as_the_model_matches_without_any_state() -> None:
    shapes = {"a": MATRIX, "b": VECTOR}
    assert match_names(groups_of([None, None]), shapes, WHERE) == {0: "a", 1: "b"}


def test_two_groups_by_number_of_dimensions_match_by_shape() -> None:
    shapes = {"a.w": MATRIX, "a.b": VECTOR, "c.w": MATRIX, "c.b": VECTOR}
    groups = groups_of([MATRIX, MATRIX], [VECTOR, VECTOR])
    assert match_names(groups, shapes, WHERE) == {0: "a.w", 1: "c.w", 2: "a.b", 3: "c.b"}


def test_groups_in_another_order_than_the_model_match_by_shape() -> None:
    shapes = {"a.w": MATRIX, "a.b": VECTOR}
    assert match_names(groups_of([VECTOR], [MATRIX]), shapes, WHERE) == {0: "a.b", 1: "a.w"}


def test_frozen_parameters_of_another_shape_are_skipped() -> None:
    shapes = {"frozen": OTHER_MATRIX, "a": MATRIX, "also_frozen": VECTOR, "b": MATRIX}
    assert match_names(groups_of([MATRIX, MATRIX]), shapes, WHERE) == {0: "a", 1: "b"}


def test_a_slot_without_state_takes_the_only_place_left_between_its_neighbours() -> None:
    shapes = {"a": MATRIX, "b": VECTOR, "c": OTHER_MATRIX}
    assert match_names(groups_of([MATRIX, None, OTHER_MATRIX]), shapes, WHERE) == {
        0: "a",
        1: "b",
        2: "c",
    }


def test_an_empty_group_takes_no_part() -> None:
    assert match_names(groups_of([], [MATRIX]), {"a": MATRIX}, WHERE) == {0: "a"}


def test_a_0_dimensional_parameter_has_a_shape_like_any_other() -> None:
    shapes = {"scale": (), "w": MATRIX}
    assert match_names(groups_of([MATRIX], [()]), shapes, WHERE) == {0: "w", 1: "scale"}


# --- several, or none ---------------------------------------------------------------------------


def test_equal_shapes_of_which_one_is_frozen_are_ambiguous_and_named() -> None:
    shapes = {"first": MATRIX, "second": MATRIX, "bias": VECTOR}
    with pytest.raises(AmbiguousSource, match=r"first|second") as refusal:
        match_names(groups_of([MATRIX, VECTOR]), shapes, WHERE)
    assert "bias" not in str(refusal.value)


def test_equal_shapes_in_two_groups_are_ambiguous_and_named() -> None:
    shapes = {"clear": VECTOR, "one": MATRIX, "two": MATRIX}
    with pytest.raises(AmbiguousSource, match=r"one, two\b|two, one\b") as refusal:
        match_names(groups_of([VECTOR, MATRIX], [MATRIX]), shapes, WHERE)
    assert "clear" not in str(refusal.value)


def test_slots_without_state_in_two_groups_are_ambiguous() -> None:
    with pytest.raises(AmbiguousSource, match=r"a, b|b, a"):
        match_names(groups_of([None], [None]), {"a": MATRIX, "b": VECTOR}, WHERE)


def test_an_ambiguity_names_the_file_and_every_way_out() -> None:
    with pytest.raises(AmbiguousSource) as refusal:
        match_names(groups_of([MATRIX]), {"a": MATRIX, "b": MATRIX}, WHERE)
    told = str(refusal.value)
    assert told.startswith("job.pt: ")
    assert "--param-order" in told
    assert "--model" in told
    assert "--weights-only" in told


@pytest.mark.parametrize(
    "slots",
    [
        [MATRIX, OTHER_MATRIX],
        [VECTOR, MATRIX],
        [MATRIX, VECTOR, VECTOR],
        [MATRIX, VECTOR, None],
        [MATRIX, (4, 1)],
        [MATRIX, ()],
    ],
)
def test_states_that_fit_no_order_belong_to_another_model(slots: list[Shape | None]) -> None:
    with pytest.raises(CorruptCheckpoint, match="another model"):
        match_names(groups_of(slots), {"a": MATRIX, "b": VECTOR}, WHERE)


@given(small_optimizers())
@settings(max_examples=400, deadline=None)
def test_a_match_is_the_only_one_that_keeps_the_order(
    case: tuple[list[list[Slot]], dict[str, Shape]],
) -> None:
    groups, shapes = case
    assert outcome(groups, shapes) == expected(groups, shapes)


@given(
    st.lists(st.lists(st.one_of(some_shapes, st.none()), max_size=3), min_size=1, max_size=2),
    st.lists(some_shapes, max_size=5),
)
@settings(max_examples=400, deadline=None)
def test_arbitrary_slots_match_exactly_when_one_order_fits(
    slots: list[list[Shape | None]], shapes: list[Shape]
) -> None:
    groups, named = groups_of(*slots), {f"p{at}": shape for at, shape in enumerate(shapes)}
    assert outcome(groups, named) == expected(groups, named)


# --- names in no order that means anything ------------------------------------------------------


def orderless(groups: Sequence[Sequence[Slot]], shapes: Mapping[str, Shape]) -> object:
    """The match whatever the order of names, by trying all of them; or the refusal's type."""
    slots = [slot for group in groups for slot in group]
    found = [
        {slot.index: name for slot, name in zip(slots, names, strict=True)}
        for names in itertools.permutations(shapes, len(slots))
        if all(slot.shape in (None, shapes[n]) for slot, n in zip(slots, names, strict=True))
    ]
    if len(found) == 1:
        return found[0]
    return AmbiguousSource if found else CorruptCheckpoint


@given(
    st.lists(
        st.lists(st.one_of(some_shapes, st.just((3,)), st.none()), max_size=2),
        min_size=1,
        max_size=2,
    ),
    st.lists(st.sampled_from([(1,), (2,), (2, 2), (3,), ()]), max_size=5),
)
@settings(max_examples=600, deadline=None)
def test_shapes_match_exactly_when_one_assignment_fits(
    slots: list[list[Shape | None]], shapes: list[Shape]
) -> None:
    groups, named = groups_of(*slots), {f"p{at}": shape for at, shape in enumerate(shapes)}
    found: object
    try:
        found = match_shapes(groups, named, WHERE)
    except CkptError as refusal:
        found = type(refusal)
    assert found == orderless(groups, named)


def test_shapes_match_in_another_order_than_the_names() -> None:
    shapes = {"b": VECTOR, "a": MATRIX}
    assert match_shapes(groups_of([MATRIX, VECTOR]), shapes, WHERE) == {0: "a", 1: "b"}


def test_equal_shapes_without_an_order_are_ambiguous_and_the_reason_is_told() -> None:
    shapes = {"k": MATRIX, "q": MATRIX, "b": VECTOR}
    with pytest.raises(AmbiguousSource, match=r"order, no config, and .* k, q\.") as refusal:
        match_shapes(groups_of([MATRIX, MATRIX, VECTOR]), shapes, WHERE, "no config")
    assert "--param-order" in str(refusal.value)


# --- large models -------------------------------------------------------------------------------


def test_two_thousand_parameters_in_two_groups_match_in_two_seconds() -> None:
    layers = {f"{at}.w": (64, 64) for at in range(1000)}, {f"{at}.b": (64,) for at in range(1000)}
    shapes = {name: part[name] for at in range(1000) for part, name in zip(
        layers, (f"{at}.w", f"{at}.b"), strict=True
    )}  # fmt: skip
    groups = groups_of([(64, 64)] * 1000, [(64,)] * 1000)
    began = time.monotonic()
    found = match_names(groups, shapes, WHERE)
    assert time.monotonic() - began < 2
    assert found == dict(enumerate([*layers[0], *layers[1]]))


def test_two_thousand_parameters_without_state_in_one_group_match_in_two_seconds() -> None:
    shapes = {f"p{at}": MATRIX for at in range(2000)}
    began = time.monotonic()
    found = match_names(groups_of([None] * 2000), shapes, WHERE)
    assert time.monotonic() - began < 2
    assert found == dict(enumerate(shapes))


# --- an order that the user gives ---------------------------------------------------------------


def test_a_given_order_is_taken_across_groups() -> None:
    groups = groups_of([MATRIX], [MATRIX, VECTOR])
    shapes = {"a": MATRIX, "b": MATRIX, "c": VECTOR}
    assert match_given_order(groups, ["b", "a", "c"], shapes, WHERE) == {0: "b", 1: "a", 2: "c"}


def test_a_given_order_says_nothing_about_frozen_parameters() -> None:
    shapes = {"a": MATRIX, "b": MATRIX}
    assert match_given_order(groups_of([MATRIX]), ["b"], shapes, WHERE) == {0: "b"}


def test_a_given_order_may_name_any_parameter_where_there_is_no_state() -> None:
    assert match_given_order(groups_of([None]), ["b"], {"b": MATRIX}, WHERE) == {0: "b"}


def test_a_given_order_of_another_length_is_refused_with_both_numbers() -> None:
    with pytest.raises(AmbiguousSource, match="has 2 parameters, the given order 1"):
        match_given_order(groups_of([None, None]), ["a"], {"a": MATRIX, "b": MATRIX}, WHERE)


def test_a_given_order_with_an_unknown_name_is_refused_with_the_name() -> None:
    with pytest.raises(AmbiguousSource, match="'wrong'"):
        match_given_order(groups_of([None]), ["wrong"], {"a": MATRIX}, WHERE)


def test_a_given_order_that_contradicts_a_shape_is_refused_with_both_shapes() -> None:
    with pytest.raises(AmbiguousSource, match=r"\(4, 3\).*\(4,\)"):
        match_given_order(groups_of([VECTOR]), ["a"], {"a": MATRIX}, WHERE)


def test_a_given_order_that_names_a_parameter_twice_is_refused() -> None:
    groups, shapes = groups_of([MATRIX, MATRIX]), {"a": MATRIX, "b": MATRIX}
    with pytest.raises(AmbiguousSource, match="'a'"):
        match_given_order(groups, ["a", "a"], shapes, WHERE)
