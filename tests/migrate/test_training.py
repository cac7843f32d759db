"""The rewritten programs train the same: they are run, and everything about them is compared.

The original runs in one process, the rewritten program under torchrun in two, on the same samples
in the same order; both unmodified. On a machine without two GPUs a stand-in takes CUDA's place.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import TARGETS, Case, cases, contents
from verifying import folder, original, start, start_several, verdict

from migrate.api import rewrite
from migrate.rule import Options
from migrate.verify.trace import Run

CASES = cases()
RESUMED = [case for case in CASES if case.facts["resume_args"]]
WITH_BATCH_NORM = [case for case in CASES if case.facts["batch_norm"]]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_target = pytest.mark.parametrize("target", TARGETS)
TOLERANCE = 1e-5


def weights(case: Case, run: Run) -> dict[str, torch.Tensor]:
    """The model's state dict in the program's last checkpoint."""
    content: Any = torch.load(run.cwd / case.facts["checkpoint"], weights_only=False)
    key = case.facts["weights"]
    return dict(content if key is None else content[key])


def tolerance(case: Case, target: str) -> float:
    """How far apart the weights of two processes may be: more where the program rounds them."""
    return float(case.facts.get("tolerance", {}).get(target, TOLERANCE))


def plain(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): value for name, value in state.items()}


def assert_ran(run: Run) -> None:
    assert run.is_good, run.stderr[-3000:]
    assert run.written_by_several() == set()


def assert_same_weights(
    case: Case, one: Run, other: Run, same_names: bool = True, tolerance: float = TOLERANCE
) -> None:
    expected, found = weights(case, one), weights(case, other)
    if not same_names:
        expected, found = plain(expected), plain(found)
    assert list(expected) == list(found)
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name],
            value,
            rtol=tolerance,
            atol=tolerance,
            check_dtype=tolerance == TOLERANCE,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@each_target
@each_case
def test_two_processes_train_the_same(case: Case, target: str, tmp_path: Path) -> None:
    """In the way of `migrate verify`: replicas, unless batch norm is synchronised."""
    run = start_several(case.completed(target, tmp_path), case.arguments(target))
    assert_ran(run)
    # `differs` of case.json: what is not the same on purpose.
    mode, rounding = "whole" if case.facts["batch_norm"] else "dealt", tolerance(case, target)
    found = verdict(original(case, mode), run, mode, tolerance=max(rounding, 1e-4))
    expected = case.facts.get("differs", {}).get(target, [])
    assert [cause.name for cause in found.causes] == expected, found.causes
    assert_same_weights(case, original(case, mode), run, tolerance=rounding)
    shutil.rmtree(run.cwd)


@pytest.mark.parametrize(
    ("case", "target"),
    [*((case, "ddp") for case in CASES), *((case, "fsdp") for case in RESUMED)],
    ids=lambda item: item if isinstance(item, str) else item.name,
)
def test_one_process_trains_the_same_weights(case: Case, target: str, tmp_path: Path) -> None:
    run = start(case.completed(target, tmp_path), case.arguments(target), sees=1)
    assert_ran(run)
    # On one device the script may not wrap its model: the same weights without `module.`.
    assert_same_weights(case, original(case), run, same_names=False)
    shutil.rmtree(run.cwd)


@pytest.mark.parametrize("case", WITH_BATCH_NORM, ids=lambda case: case.name)
def test_keeping_batch_norm_keeps_what_data_parallel_did(case: Case, tmp_path: Path) -> None:
    result = rewrite([case.entry], "ddp", options=Options(batch_norm="keep"))
    for name, content in contents(case, result).items():
        (tmp_path / name).write_bytes(content)
    run = start_several(tmp_path / case.entry.name, case.arguments())
    assert_ran(run)
    found = verdict(original(case, "dealt"), run, "dealt")
    assert found.causes == ()
    assert [note.name for note in found.notes] == ["batch-norm-by-process"]
    assert_same_weights(case, original(case, "dealt"), run)


@each_target
@pytest.mark.parametrize("case", RESUMED, ids=lambda case: case.name)
def test_checkpoints_go_to_the_other_side_and_back(case: Case, target: str, tmp_path: Path) -> None:
    mine, theirs = folder(), folder()
    for place in (mine, theirs):
        shutil.copytree(original(case).cwd, place, dirs_exist_ok=True)
    arguments = case.facts["resume_args"]
    expected = start(case.entry, arguments, mine)
    found = start_several(case.completed(target, tmp_path), arguments, theirs)
    assert_ran(found)
    assert_same_weights(case, expected, found, tolerance=tolerance(case, target))
    back = start(case.entry, arguments, theirs)
    assert back.is_good, back.stderr[-3000:]
