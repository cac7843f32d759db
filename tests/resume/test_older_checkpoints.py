"""Checkpoints of older versions become those of each new target, and read back the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES, PACK
from truth import Truth, by_name

import ckpt

TARGETS: Mapping[str, Mapping[str, Any]] = {
    "zero1": {"world_size": 3},
    "zero2": {"world_size": 2},
    "zero3": {"world_size": 5},
    "universal": {"stage": 2},
    "fsdp-full": {},
}
REFUSED = {
    ("fsdp1_local", ""): "--model package.module:factory",
    ("whole_", ""): "runs it when loaded",
    ("moe", ""): "mixture-of-experts",
    ("plain_dcp", "universal"): "restores weights through the optimizer",
    ("zero2_elastic_w2", "zero1"): "no hyper-parameters in the param groups",
    ("zero2_elastic_w2", "zero2"): "no hyper-parameters in the param groups",
    ("zero2_elastic_w2", "zero3"): "elastic_checkpoint",
}
"""Why some cannot become a target, or, where that is empty, cannot be read."""


def cases() -> Iterator[tuple[Path, str]]:
    """Each of the fixtures, and of the whole pack where it is there, with every target."""
    for truth in sorted([*FIXTURES.glob("*/truth.json"), *PACK.glob("*/*/truth.json")]):
        yield from ((truth.parent, target) for target in TARGETS)


def label(value: Path | str) -> str:
    if isinstance(value, str):
        return value
    return value.name if value.parent == FIXTURES else f"{value.parent.name}-{value.name}"


def readable(truth: Truth) -> dict[str, Any]:
    """What has to be said about a source."""
    try:
        ckpt.open(truth.source)
    except ckpt.CkptError as problem:
        assert "--param-order" in str(problem)
        prefix = "net." if "lightning" in truth.folder.name else ""
        return {"param_order": [prefix + name for name in truth.order]}
    return {}


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(path, weights_only=True)
    return found


def problems(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Names of weights, states and groups that are not the same."""
    unequal = [*differing(expected["model"], found["model"])]
    if "optimizer" in expected:
        (mine, groups), (theirs, others) = (by_name(c["optimizer"]) for c in (expected, found))
        for name, state in mine.items():
            unequal += [f"{name} {kind}" for kind in differing(state, theirs[name])]
        if [g["params"] for g in groups] != [g["params"] for g in others]:
            unequal.append("members of groups")
        for name in ("lr", "weight_decay", "betas", "momentum"):
            if [g.get(name) for g in groups] != [g.get(name) for g in others]:
                unequal.append(name)
    return unequal


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """ZeRO keeps 16-bit numbers in fp32, which changes none."""
    return [
        name
        for name, value in expected.items()
        if name not in found
        or not torch.equal(torch.as_tensor(value).float(), torch.as_tensor(found[name]).float())
    ]


def refusal(folder: Path, target: str) -> str | None:
    """Why this one cannot become that."""
    reasons = (
        why for (name, to), why in REFUSED.items() if to in ("", target) and name in folder.name
    )
    return next(reasons, None)


CASES = list(cases())
Plain = Callable[[Path], tuple[Truth, dict[str, Any], dict[str, Any]]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """An older checkpoint, what has to be said about it, and its content as a torch file."""

    @cache
    def converted(folder: Path) -> tuple[Truth, dict[str, Any], dict[str, Any]]:
        truth = Truth.load(folder)
        given = {"allow_loss": True, **readable(truth)}
        out = tmp_path_factory.mktemp("plain") / "plain.pt"
        return truth, given, content(ckpt.convert(truth.source, "torch", out, **given))

    return converted


@pytest.mark.parametrize(
    ("folder", "target"), [case for case in CASES if refusal(*case) is None], ids=label
)
def test_an_older_checkpoint_survives_a_new_target(
    folder: Path, target: str, plain: Plain, tmp_path: Path
) -> None:
    truth, given, expected = plain(folder)
    there = ckpt.convert(truth.source, target, tmp_path / "there", **given, **TARGETS[target])
    back = ckpt.convert(there, "torch", tmp_path / "back.pt", allow_loss=True)
    assert problems(expected, content(back)) == []


@pytest.mark.parametrize(("folder", "target"), [c for c in CASES if refusal(*c)], ids=label)
def test_what_a_target_cannot_hold_is_refused(folder: Path, target: str, tmp_path: Path) -> None:
    source = Truth.load(folder).source
    with pytest.raises(ckpt.CkptError, match=str(refusal(folder, target))):
        ckpt.convert(source, target, tmp_path / "out", allow_loss=True, **TARGETS[target])
