"""What every rank saved in its own way, such as random number states, through every target."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from torch import nn

import ckpt

ZERO3 = FIXTURES / "ds009_t21-zero3_rich_w2" / "ckpt"
DTENSORS = FIXTURES / "ds019_t213-fsdp2_shardpt_w2" / "ckpt"


def states(rank: int) -> dict[str, Any]:
    """A rank's random number states, as scripts save them."""
    torch.manual_seed(rank)
    return {
        "torch": torch.get_rng_state(),
        "numpy": np.random.RandomState(rank).get_state(),
        "python": random.Random(rank).getstate(),
    }


def same(found: Any, expected: Any) -> bool:
    """Equal by value, arrays and tensors too."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(map(same, found, expected))
    if isinstance(expected, np.ndarray | torch.Tensor):
        return np.array_equal(np.asarray(found), np.asarray(expected))
    return bool(found == expected)


@pytest.fixture
def zero3(tmp_path: Path) -> Path:
    """A ZeRO-3 save of two ranks with their random number states in the client state."""
    source = Path(shutil.copytree(ZERO3, tmp_path / "source"))
    for rank, file in enumerate(model_files(source)):
        content = torch.load(file, weights_only=False)
        torch.save(content | {"rng": states(rank), "seed": 7}, file)
    return source


def model_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*_model_states.pt"))


def client_states(folder: Path) -> list[dict[str, Any]]:
    return [torch.load(file, weights_only=False) for file in model_files(folder)]


def test_files_of_ranks_give_each_its_own_again(zero3: Path, tmp_path: Path) -> None:
    ckpt.convert(zero3, "zero3", tmp_path / "out")
    first, second = client_states(tmp_path / "out")
    assert same(first["rng"], states(0)) and same(second["rng"], states(1))
    assert first["seed"] == second["seed"] == 7
    assert "by_rank" not in first


@pytest.mark.parametrize("target", ["torch", "dcp", "zero2", "universal", "fsdp-full"])
def test_other_targets_keep_all_of_them_on_the_way_back_too(
    zero3: Path, target: str, tmp_path: Path
) -> None:
    options = {"stage": 3} if target == "universal" else {}
    between = ckpt.convert(zero3, target, tmp_path / "between", **options)
    ckpt.convert(between, "zero3", tmp_path / "back", world_size=2)
    assert [same(found["rng"], states(rank)) for rank, found in enumerate(
        client_states(tmp_path / "back")
    )] == [True, True]  # fmt: skip


def test_a_script_finds_its_own_under_its_rank(zero3: Path, tmp_path: Path) -> None:
    ckpt.convert(zero3, "torch", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same(content["rng"], states(0))
    assert same(content["by_rank"]["rng"][1], states(1))
    ckpt.convert(zero3, "dcp", tmp_path / "dcp")
    empty = [{"torch": torch.zeros(5056, dtype=torch.uint8)} for _ in range(2)]
    wanted = {"by_rank": {"rng": empty}}
    dcp.load(wanted, checkpoint_id=tmp_path / "dcp")
    assert same(wanted["by_rank"]["rng"][1]["torch"], states(1)["torch"])


def test_numpy_and_python_take_their_states_back(zero3: Path, tmp_path: Path) -> None:
    ckpt.convert(zero3, "torch", tmp_path / "out.pt")
    rng = torch.load(tmp_path / "out.pt", weights_only=True)["by_rank"]["rng"][1]
    ours, python = np.random.RandomState(), random.Random()
    ours.set_state(rng["numpy"])
    python.setstate(rng["python"])
    assert ours.rand() == np.random.RandomState(1).rand()
    assert python.random() == random.Random(1).random()


def test_arrays_and_the_tensors_they_become_are_the_same_to_diff(tmp_path: Path) -> None:
    for name, last in (("a.pt", 1), ("b.pt", 1), ("c.pt", 2)):
        order = np.arange(200_000)
        order[-1] = last
        torch.save({"model": {"w": torch.ones(3, 4)}, "order": order}, tmp_path / name)
    ckpt.convert(tmp_path / "b.pt", "dcp", tmp_path / "dcp")
    first, second = ckpt.open(tmp_path / "a.pt"), ckpt.open(tmp_path / "dcp")
    assert list(ckpt.diff(first, second)) == []
    assert len(list(ckpt.diff(ckpt.open(tmp_path / "c.pt"), second))) == 1


@pytest.mark.parametrize("target", ["zero2", "zero3"])
def test_ranks_of_another_number_have_no_use_for_them(
    zero3: Path, target: str, tmp_path: Path
) -> None:
    conversion = ckpt.prepare(zero3, target, tmp_path / "out", world_size=3)
    told = [str(note) for note in conversion.notes]
    assert "dropped: rng: 2 ranks had their own, the job has 3; rank 0's is for all" in told
    conversion.run()
    for content in client_states(tmp_path / "out"):
        assert same(content["rng"], states(0)) and "by_rank" not in content


def test_files_of_ranks_with_sharded_tensors(tmp_path: Path) -> None:
    source = Path(shutil.copytree(DTENSORS, tmp_path / "source"))
    for rank in (0, 1):
        content = torch.load(source / f"rank{rank}.pt", weights_only=False)
        torch.save(content | {"rng": states(rank)}, source / f"rank{rank}.pt")
    conversion = ckpt.prepare(source, "zero3", tmp_path / "out", world_size=2)
    assert [note.subjects for note in conversion.notes if note.kind.value == "by rank"] == [
        ("rng",)
    ]
    conversion.run()
    assert all(
        same(c["rng"], states(rank)) for rank, c in enumerate(client_states(tmp_path / "out"))
    )


def test_files_of_ranks_with_whole_tensors(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    for rank in (0, 1):
        content = {"model": net.state_dict(), "rng": states(rank), "epoch": 4}
        torch.save(content, tmp_path / f"ckpt_rank{rank}.pt")
    found = ckpt.open(tmp_path)
    assert found.objects["epoch"] == 4
    assert len(found.objects["by_rank"]["rng"]) == 2


def test_a_name_that_a_script_uses_itself_is_left_alone(zero3: Path, tmp_path: Path) -> None:
    for file in model_files(zero3):
        torch.save(torch.load(file, weights_only=False) | {"by_rank": "mine"}, file)
    conversion = ckpt.prepare(zero3, "zero3", tmp_path / "out")
    assert any(str(note).startswith("one rank's: rng: ") for note in conversion.notes)
    conversion.run()
    assert {content["by_rank"] for content in client_states(tmp_path / "out")} == {"mine"}
