"""transformers' Trainer and accelerate resume from what was converted, under another strategy.

Real jobs of two ranks train six steps with dropout and save their folders after three; see
trainer_jobs.py. A job under the target's strategy resumes from the converted folder: its losses are
those of the run that went on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from training.launch import HERE, run_jobs

WORLD_SIZE, MORE_STEPS = 2, 3
SAVED = {"trainer": "checkpoint-3", "accelerate": "state"}
SOURCES = (
    ("trainer", "zero2"),
    ("trainer", "zero3"),
    ("trainer", "fsdp"),
    ("trainer", "ddp"),
    ("accelerate", "zero2"),
    ("accelerate", "zero3"),
)
WAYS = (
    ("trainer", "zero2", "zero3"),
    ("trainer", "zero3", "zero2"),
    ("trainer", "fsdp", "zero3"),
    ("trainer", "ddp", "zero2"),
    ("accelerate", "zero2", "zero3"),
    ("accelerate", "zero3", "zero2"),
)
Losses = Mapping[tuple[str, ...], tuple[list[float], list[float]]]


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """For each of WAYS, the losses of the source's next steps, and of the job that resumed."""
    root = tmp_path_factory.mktemp("trainers")
    begun = {key: root / "-".join(key) for key in SOURCES}
    resumed = {way: root / "-".join(("from", *way)) for way in WAYS}
    jobs = [_job(kind, mode, out) for (kind, mode), out in begun.items()]
    for (kind, mode, target), out in resumed.items():
        source = begun[kind, mode] / SAVED[kind]
        jobs.append({**_job(kind, target, out), "source": str(source)})
    run_jobs(HERE / "trainer_jobs.py", jobs, root, "trainers", WORLD_SIZE, 240)
    return {way: (_losses(begun[way[:2]]), _losses(out)) for way, out in resumed.items()}


def _job(kind: str, mode: str, out: Path) -> dict[str, Any]:
    return {"kind": kind, "mode": mode, "out": str(out)}


def _losses(out: Path) -> list[float]:
    found: list[float] = json.loads((out / "losses.json").read_text())
    return found


@pytest.mark.parametrize("way", WAYS)
def test_a_trainer_resumes_as_if_nothing_had_happened(losses: Losses, way: tuple[str, ...]) -> None:
    uninterrupted, resumed = losses[way]
    assert len(resumed) == MORE_STEPS
    assert resumed == pytest.approx(uninterrupted[-MORE_STEPS:], rel=1e-5)
