"""The rewritten programs train the same: they are run, and their weights compared.

The original runs in one process, the rewritten program under torchrun in two, on the same samples
in the same order; both unmodified. On a machine without two GPUs a stand-in takes CUDA's place.
"""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from scripts import TARGETS, Case, cases, contents
from shim.launch import Run, run_original, run_single, run_torchrun

from migrate.api import rewrite
from migrate.rule import Options

CASES = cases()
RESUMED = [case for case in CASES if case.facts["resume_args"]]
WITH_BATCH_NORM = [case for case in CASES if case.facts["batch_norm"]]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_target = pytest.mark.parametrize("target", TARGETS)
TOLERANCE = 1e-5


@cache
def original(case: Case, data_parallel: str = "whole") -> Run:
    """One run of the original for all tests of this process."""
    return run_original(case.entry, case.arguments(), folder(), data_parallel=data_parallel)


def folder() -> Path:
    return Path(mkdtemp(prefix="scripts-"))


def weights(case: Case, run: Run) -> dict[str, torch.Tensor]:
    """The model's state dict in the program's last checkpoint."""
    content: Any = torch.load(run.cwd / case.facts["checkpoint"], weights_only=False)
    key = case.facts["weights"]
    return dict(content if key is None else content[key])


def plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value for name, value in state.items()}


def assert_ran(run: Run) -> None:
    assert not run.timed_out, run.stderr[-3000:]
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.written_by_several() == set()


def assert_same_weights(case: Case, one: Run, other: Run, same_names: bool = True) -> None:
    expected, found = weights(case, one), weights(case, other)
    if not same_names:
        expected, found = plain(expected), plain(found)
    assert list(expected) == list(found)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


@each_target
@each_case
def test_two_processes_train_the_same_weights(case: Case, target: str, tmp_path: Path) -> None:
    entry = case.completed(target, tmp_path)
    run = run_torchrun(entry, case.arguments(target), folder())
    assert_ran(run)
    assert_ran(original(case))
    assert_same_weights(case, original(case), run)
    shutil.rmtree(run.cwd)


@pytest.mark.parametrize(
    ("case", "target"),
    [*((case, "ddp") for case in CASES), *((case, "fsdp") for case in RESUMED)],
    ids=lambda item: item if isinstance(item, str) else item.name,
)
def test_one_process_trains_the_same_weights(case: Case, target: str, tmp_path: Path) -> None:
    run = run_single(case.completed(target, tmp_path), case.arguments(target), folder())
    assert_ran(run)
    # On one device the script may not wrap its model: the same weights without `module.`.
    assert_same_weights(case, original(case), run, same_names=False)
    shutil.rmtree(run.cwd)


@pytest.mark.parametrize("case", WITH_BATCH_NORM, ids=lambda case: case.name)
def test_keeping_batch_norm_keeps_what_data_parallel_did(case: Case, tmp_path: Path) -> None:
    result = rewrite([case.entry], "ddp", options=Options(batch_norm="keep"))
    for name, content in contents(case, result).items():
        (tmp_path / name).write_bytes(content)
    run = run_torchrun(tmp_path / case.entry.name, case.arguments(), folder())
    assert_ran(run)
    assert_same_weights(case, original(case, "dealt"), run)


@each_target
@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_checkpoints_go_to_the_other_side_and_back(case: Case, target: str, tmp_path: Path) -> None:
    mine, theirs = folder(), folder()
    for place in (mine, theirs):
        shutil.copytree(original(case).cwd, place, dirs_exist_ok=True)
    arguments = case.facts["resume_args"]
    expected = run_original(case.entry, arguments, mine)
    found = run_torchrun(case.completed(target, tmp_path), arguments, theirs)
    assert_ran(found)
    assert_same_weights(case, expected, found)
    back = run_original(case.entry, arguments, theirs)
    assert back.returncode == 0, back.stderr[-3000:]
