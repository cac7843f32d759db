"""Numbered flat parts of optimizers: what they stand for, where sizes leave a choice."""

from __future__ import annotations

from typing import Any

import pytest

import ckpt
from ckpt.chunks import Chunk
from ckpt.dtypes import DType
from ckpt.formats._flat_optimizer import read_flat_optimizer, saved_twice
from ckpt.model import Record, StoredChunk, StoredTensor


def tensor(*shape: int, crc32: int | None = None) -> StoredTensor:
    record = Record("/file", 0, 4 * Chunk.whole(shape).numel, crc32)
    return StoredTensor(DType.float32, shape, (StoredChunk(Chunk.whole(shape), record),))


def ranks(*counts: tuple[int, ...]) -> list[dict[str, Any]]:
    """The optimizers of all ranks, of whose numbers the first has so many elements each."""
    return [
        {
            "state": {n: {"exp_avg": tensor(size)} for n, size in enumerate(sizes) if size},
            "param_groups": [{"lr": 0.1, "params": list(range(len(sizes)))}],
        }
        for sizes in counts
    ]


def test_a_run_lies_behind_those_of_earlier_ranks() -> None:
    weights = {"a.weight": tensor(2, 3), "b.weight": tensor(5)}
    tree, notes = read_flat_optimizer(ranks((5, 0), (1, 5)), weights, None, None, "x")
    assert tree["param_groups"][0]["param_names"] == ["a.weight", "b.weight"]
    gathered = tree["state"][0]["exp_avg"]
    boxes = [(c.chunk.offsets, c.chunk.sizes, c.start) for c in gathered.chunks]
    assert boxes == [((0, 0), (1, 3), 0), ((1, 0), (1, 2), 3), ((1, 2), (1, 1), 0)]
    assert tree["state"][1]["exp_avg"].shape == (5,)
    assert "carry numbers only" in notes[0].detail


def test_sizes_that_fit_parameters_and_flat_parameters_are_refused() -> None:
    weights = {"a.weight": tensor(4), "b.weight": tensor(4), "c.weight": tensor(8)}
    with pytest.raises(ckpt.CkptError, match=r"fit parameters .* and flat parameters .*--param-"):
        read_flat_optimizer(ranks((4,), (4,)), weights, None, None, "x")
    tree, _ = read_flat_optimizer(ranks((4,), (4,)), weights, None, ["c.weight"], "x")
    assert tree["param_groups"][0]["param_names"] == ["c.weight"]


def test_units_of_one_parameter_each_are_these_parameters_either_way() -> None:
    weights = {"a.weight": tensor(4), "b.weight": tensor(6)}
    tree, _ = read_flat_optimizer(ranks((2, 3), (2, 3)), weights, None, None, "x")
    assert tree["param_groups"][0]["param_names"] == ["a.weight", "b.weight"]


@pytest.mark.parametrize("counts", [[(5, 0), (1, 5)], [(9, 9), (9, 9)]])
def test_a_given_order_that_is_not_as_long_is_refused_for_runs(counts: list[Any]) -> None:
    weights = {"a.weight": tensor(2, 3), "b.weight": tensor(5)}
    with pytest.raises(ckpt.CkptError, match=r"has 2 parameters, the given order 1"):
        read_flat_optimizer(ranks(*counts), weights, None, ["a.weight"], "x")


def test_flat_parameters_need_no_order_of_parameters() -> None:
    weights = {"a.weight": tensor(2, 3), "a.bias": tensor(2), "b.weight": tensor(5)}
    order = ["b.weight", "a.bias", "a.weight"]
    tree, notes = read_flat_optimizer(ranks((3, 4), (3, 4)), weights, None, order, "x")
    assert tree["param_groups"][0]["params"] == ["b.weight", "a.weight", "a.bias"]
    assert notes[0].detail.endswith("their sizes fit wrapping a alone")


def test_a_state_that_no_group_has_is_refused() -> None:
    broken = ranks((5, 1), (1, 4))
    broken[1]["param_groups"][0]["params"] = broken[0]["param_groups"][0]["params"] = [0]
    with pytest.raises(ckpt.CkptError, match=r"a state of number 1, which no group has"):
        read_flat_optimizer(broken, {"a.weight": tensor(6)}, None, None, "x")


def test_states_by_name_without_a_place_are_refused() -> None:
    one = {"state": {"a": {"exp_avg": tensor(3)}}, "param_groups": [{"params": ["a"]}]}
    with pytest.raises(ckpt.CkptError, match=r"different states under 'a'"):
        read_flat_optimizer([one, one], {"a": tensor(6)}, None, None, "x")


def test_equal_matrices_are_saved_twice_and_equal_vectors_are_not() -> None:
    same = tensor(5)
    weights = {
        "emb": tensor(2, 3, crc32=7), "bias": tensor(3, crc32=1), "bias2": tensor(3, crc32=1),
        "head": tensor(2, 3, crc32=7), "other": tensor(2, 3, crc32=8), "plain": tensor(2, 3),
        "plain2": tensor(2, 3), "a": same, "b": same,
    }  # fmt: skip
    assert saved_twice(weights) == {"head", "b"}
