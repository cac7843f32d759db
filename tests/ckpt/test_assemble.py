"""Comparing tensors box by box: bits, tolerances, NaN, empty ones, and where they first differ."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import ckpt.assemble as assemble
from ckpt.model import StoredTensor
from ckpt.storage import torch_file


def stored(folder: Path, name: str, tensor: torch.Tensor) -> StoredTensor:
    torch.save(tensor, folder / name)
    found = torch_file.read(folder / name)
    assert isinstance(found, StoredTensor)
    return found


@pytest.fixture(autouse=True)
def small_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several boxes for every tensor of more than a few rows."""
    monkeypatch.setattr(assemble, "BOX_BYTES", 64)


def test_equal_bits_are_equal(tmp_path: Path) -> None:
    tensor = torch.arange(60.0).view(12, 5)
    a, b = stored(tmp_path, "a", tensor), stored(tmp_path, "b", tensor.t().contiguous().t())
    assert assemble.equal(a, b)
    assert assemble.compare(a, b, 0, 0) is None


def test_shape_and_dtype_count_as_bits(tmp_path: Path) -> None:
    a = stored(tmp_path, "a", torch.zeros(4, 2))
    assert not assemble.equal(a, stored(tmp_path, "b", torch.zeros(2, 4)))
    assert not assemble.equal(a, stored(tmp_path, "c", torch.zeros(4, 2, dtype=torch.int32)))


def test_differences_are_counted_and_the_first_one_is_placed(tmp_path: Path) -> None:
    tensor = torch.zeros(12, 5)
    other = tensor.clone()
    other[7, 3], other[11, 4] = 0.5, -2.0
    a, b = stored(tmp_path, "a", tensor), stored(tmp_path, "b", other)
    assert assemble.compare(a, b, 0, 0) == assemble.Difference(2, 2.0, (7, 3))
    assert assemble.compare(a, b, 0, 1.0) == assemble.Difference(1, 2.0, (11, 4))
    assert assemble.compare(a, b, 0, 2.0) is None


def test_a_relative_tolerance_is_of_the_second(tmp_path: Path) -> None:
    a = stored(tmp_path, "a", torch.tensor([1.0, 100.0]))
    b = stored(tmp_path, "b", torch.tensor([1.01, 101.0]))
    assert assemble.compare(a, b, 0.0101, 0) is None
    assert assemble.compare(a, b, 0.0098, 0) is not None


def test_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    a = stored(tmp_path, "a", torch.tensor([0.5, 0.25]))
    assert (
        assemble.compare(a, stored(tmp_path, "b", torch.tensor([0.5, 0.25]).half()), 0, 0) is None
    )


def test_nan_equals_nan_and_nothing_else(tmp_path: Path) -> None:
    nan = torch.tensor([float("nan"), 1.0])
    a = stored(tmp_path, "a", nan)
    assert assemble.compare(a, stored(tmp_path, "b", nan.half()), 0, 0) is None
    found = assemble.compare(a, stored(tmp_path, "c", torch.ones(2)), 0, 9)
    assert found is not None
    assert (found.count, math.isnan(found.largest)) == (1, True)


def test_empty_tensors_are_equal(tmp_path: Path) -> None:
    a = stored(tmp_path, "a", torch.zeros(0, 3))
    b = stored(tmp_path, "b", torch.zeros(0, 3).half())
    assert assemble.compare(a, b, 0, 0) is None


def test_large_integers_are_not_rounded(tmp_path: Path) -> None:
    a = stored(tmp_path, "a", torch.tensor([2**60]))
    assert assemble.compare(a, stored(tmp_path, "b", torch.tensor([2**60 + 1])), 0, 0) is not None
