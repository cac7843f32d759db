"""Real training runs, once a session, and where real checkpoints lie."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from training.cases import CASES
from training.launch import run_fsdp_saves, run_training
from truth import Truth

REPO = Path(__file__).resolve().parent.parent
FIXTURES = REPO / "fixtures" / "checkpoints"
PACK = REPO.parent / "shared" / "eras"


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], Truth]:
    """Every training case at every world size, by name and number of processes.

    DeepSpeed, FSDP1, FSDP2 and DDP really train here, under torchrun with gloo on the CPU.
    """
    root, found = tmp_path_factory.mktemp("runs"), {}
    for world_size in (2, 3, 4):
        names = [case.name for case in CASES.values() if world_size in case.worlds]
        folder = root / f"world{world_size}"
        run_training(folder, names, world_size, timeout_s=420)
        for name in names:
            found[name, world_size] = Truth.load(folder / name)
    return found


@pytest.fixture(scope="session")
def fsdp_saves(tmp_path_factory: pytest.TempPathFactory) -> Mapping[tuple[str, int], Truth]:
    """What FSDP1 and FSDP2 runs saved in many ways, by `run-way` and number of processes."""
    root, found = tmp_path_factory.mktemp("fsdp"), {}
    for world_size in (2, 3, 4):
        folder = root / f"world{world_size}"
        run_fsdp_saves(folder, world_size)
        for truth in folder.glob("*/truth.json"):
            found[truth.parent.name, world_size] = Truth.load(truth.parent)
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--accept` writes the expected results of fixtures/scripts anew; review the difference."""
    parser.addoption("--accept", action="store_true", help="write expected results anew")
