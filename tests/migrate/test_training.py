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
from scripts import TARGETS, Case, cases
from shim.launch import Run, run_original, run_single, run_torchrun

CASES = cases()
SAME = [case for case in CASES if case.facts.get("equal", True)]
RESUMED = [case for case in CASES if case.facts["resume_args"]]
each_target = pytest.mark.parametrize("target", TARGETS)
TOLERANCE = 1e-5


@cache
def original(case: Case) -> Run:
    """One run of the original for all tests of this process."""
    return run_original(case.entry, case.facts["args"], folder())


def folder() -> Path:
    return Path(mkdtemp(prefix="scripts-"))


def weights(case: Case, run: Run) -> dict[str, torch.Tensor]:
    """The model's state dict in the program's last checkpoint."""
    content: Any = torch.load(run.cwd / case.facts["checkpoint"], weights_only=False)
    key = case.facts["weights"]
    return dict(content if key is None else content[key])


def assert_ran(run: Run) -> None:
    assert not run.timed_out, run.stderr[-3000:]
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.written_by_several() == set()


def assert_same_weights(case: Case, one: Run, other: Run) -> None:
    expected, found = weights(case, one), weights(case, other)
    assert list(expected) == list(found)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )


@each_target
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_processes_train_the_same_weights(case: Case, target: str) -> None:
    run = run_torchrun(case.expected_entry(target), case.facts["args"], folder())
    assert_ran(run)
    assert_ran(original(case))
    if case in SAME:
        assert_same_weights(case, original(case), run)
    shutil.rmtree(run.cwd)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_process_trains_the_same_weights(case: Case) -> None:
    run = run_single(case.expected_entry("ddp"), case.facts["args"], folder())
    assert_ran(run)
    if case in SAME:
        assert_same_weights(case, original(case), run)
    shutil.rmtree(run.cwd)


@each_target
@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_checkpoints_are_read_by_the_other_side(case: Case, target: str) -> None:
    there = original(case).cwd
    mine, theirs = folder(), folder()
    shutil.copytree(there, mine, dirs_exist_ok=True)
    shutil.copytree(there, theirs, dirs_exist_ok=True)
    arguments = case.facts["resume_args"]
    expected = run_original(case.entry, arguments, mine)
    found = run_torchrun(case.expected_entry(target), arguments, theirs)
    assert_ran(found)
    assert_same_weights(case, expected, found)
    back = run_original(case.entry, arguments, theirs)
    assert back.returncode == 0, back.stderr[-3000:]
