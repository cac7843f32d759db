"""A job resumes under another strategy, and the losses are those of a job never interrupted."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from training.launch import run_jobs

from resume.matrix import (
    TOLERANCE,
    WORKER,
    Outcome,
    Pair,
    Source,
    compare,
    converted,
    measure,
    pairs,
    train,
)

PAIRS = pairs()
SPOILT = Pair(Source("fsdp2", "convolutional", "fp32", 2), "ddp", 2)
PARTS = ("optimizer", "buffers", "scheduler")
DESCRIPTION = {"losses": [3.0], "param_groups": [], "last_epoch": 3, "device": "cpu"}
Measured = Callable[[Pair], Outcome]


def alike(pair: Pair) -> tuple[str, int, int]:
    """What is measured together."""
    return pair.source.dtype, pair.source.world, pair.world


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """The outcome of a pair, and of all that are measured with it."""
    root = tmp_path_factory.mktemp("resume")

    @cache
    def part(of: tuple[str, int, int]) -> dict[Pair, Outcome]:
        some = [pair for pair in PAIRS if alike(pair) == of]
        try:
            return measure(root, some)
        except AssertionError as problem:  # once, not for every pair anew
            return {pair: Outcome(pair, 0.0, 0.0, (str(problem),)) for pair in some}

    return lambda pair: part(alike(pair))[pair]


@pytest.mark.timeout(1200)  # the first of each part measures all of it
@pytest.mark.parametrize("pair", sorted(PAIRS, key=alike), ids=lambda pair: pair.name)
def test_a_job_goes_on_as_if_it_had_not_been_interrupted(measured: Measured, pair: Pair) -> None:
    outcome = measured(pair)
    assert outcome.problems == ()
    assert outcome.state == 0
    assert outcome.losses <= TOLERANCE[pair.source.dtype]


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Resumes that lose a part after loading it, and one that keeps all, by the part."""
    root = tmp_path_factory.mktemp("spoilt")
    source = root / SPOILT.source.name
    train(root, [SPOILT.source])
    whole = converted(root, SPOILT)
    jobs = [{**whole, "out": str(root / part), "forget": part} for part in PARTS]
    run_jobs(WORKER, [whole, *jobs], root, "spoilt", SPOILT.world, timeout_s=120)
    found = {part: compare(SPOILT, source, root / part) for part in PARTS}
    return {**found, "nothing": compare(SPOILT, source, root / SPOILT.name)}


def test_losses_are_the_same_when_nothing_is_forgotten(spoilt: dict[str, Outcome]) -> None:
    assert spoilt["nothing"].problems == ()


@pytest.mark.parametrize("part", PARTS)
def test_losses_tell_when_a_part_is_forgotten(spoilt: dict[str, Outcome], part: str) -> None:
    assert spoilt[part].losses > 10 * TOLERANCE["fp32"]


def test_a_single_other_bit_is_seen(tmp_path: Path) -> None:
    for name, lowest_bit in (("source", 0), ("resumed", 1)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "truth.json").write_text(json.dumps(DESCRIPTION))
        weight = torch.ones(3).view(torch.int32) ^ lowest_bit
        save_file({"weight": weight.view(torch.float32)}, folder / "truth.safetensors")
    outcome = compare(SPOILT, tmp_path / "source", tmp_path / "resumed")
    assert outcome.problems == ("weight differs by 1.1920928955078125e-07",)
