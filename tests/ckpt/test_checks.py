"""What a checkpoint says against itself: step counts, master weights."""

from __future__ import annotations

from pathlib import Path

import torch
from conftest import FIXTURES

import ckpt
from ckpt.checks import remarks, step_of

ZERO3 = FIXTURES / "ds009_t21-zero3_rich_w2" / "ckpt"


def saved(path: Path, steps: list[float]) -> Path:
    model = {f"w{i}": torch.zeros(i + 1) for i in range(len(steps))}
    state = {i: {"step": torch.tensor(step)} for i, step in enumerate(steps)}
    groups = [{"lr": 0.1, "params": list(range(len(steps)))}]
    optimizer = {"state": state, "param_groups": groups}
    torch.save({"model": model, "optimizer": optimizer}, path)
    return path


def test_the_optimizers_step() -> None:
    assert step_of(ckpt.open(ZERO3)) == 4  # deepspeed 0.9.5 begins with an extra step


def test_equal_steps_are_not_remarked(tmp_path: Path) -> None:
    checkpoint = ckpt.open(saved(tmp_path / "a.pt", [5.0, 5.0]))
    assert (step_of(checkpoint), remarks(checkpoint)) == (5, [])


def test_the_jobs_counter_stands_in(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    torch.save({"model": {"w": torch.zeros(2)}, "global_step": 9}, file)
    assert step_of(ckpt.open(file)) == 9


def test_different_steps_are_told_before_converting(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.pt", [5.0, 3.0])
    notes = [str(note) for note in ckpt.prepare(file, "torch", tmp_path / "b.pt").notes]
    assert any("3 to 5 steps" in note for note in notes)


def test_a_bf16_job_agrees_with_its_master_weights() -> None:
    for name in ("ds009_t21-zero1_bf16_w2", "ds014_t24-zero1_bf16acc32_w2"):
        assert remarks(ckpt.open(FIXTURES / name / "ckpt")) == []
