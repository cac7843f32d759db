"""FSDP's full state dicts: those that FSDP wrote are read, ours are loaded by live FSDP jobs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.launch import run_fsdp_loads, run_training
from truth import Truth, by_name

import ckpt

Saves = Mapping[tuple[str, int], Truth]
SOURCES = {"fsdp1": ("fsdp1-by_name", 3), "fsdp2": ("fsdp2-by_name", 2)}
LIVE = [(kind, source) for kind in ("fsdp1", "fsdp2") for source in (*SOURCES, "zero3")]


@pytest.fixture(scope="module")
def loads(
    fsdp_saves: Saves, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, str, int], tuple[Truth, Path]]:
    """What live jobs had after loading: by kind of job, source and number of processes."""
    root = tmp_path_factory.mktemp("loads")
    run_training(root / "zero3", ["zero3_fp32"], 2)
    truths = {name: fsdp_saves[save] for name, save in SOURCES.items()}
    truths["zero3"] = Truth.load(root / "zero3" / "zero3_fp32")
    for name, truth in truths.items():
        ckpt.convert(truth.source, "fsdp-full", root / f"{name}.pt")
    found = {}
    for world_size in (1, 2, 3):
        jobs = []
        for kind, source in LIVE:
            out = root / f"{kind}-{source}-{world_size}.safetensors"
            jobs.append({"kind": kind, "file": str(root / f"{source}.pt"), "out": str(out)})
            found[kind, source, world_size] = truths[source], out
        run_fsdp_loads(jobs, root, world_size)
    return found


def states_of(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Optimizer states by FQN, out of keys such as `exp_avg/<fqn>`."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        kind, _, fqn = key.partition("/")
        if fqn and not kind.startswith("buffer"):
            states.setdefault(fqn, {})[kind] = value
    return states


def weights_of(tensors: Mapping[str, Any], truth: Truth) -> dict[str, Any]:
    """The live model's state dict: weights, buffers of rank 0, and the tied names."""
    weights = {k: v for k, v in tensors.items() if "/" not in k}
    persistent = set(truth.meta["buffers"]) - set(truth.meta["nonpersistent_buffers"])
    weights |= {name: tensors[f"buffer/{name}"] for name in persistent}
    return weights | {alias: weights[owner] for alias, owner in truth.meta["tied"].items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("kind", "source"), LIVE)
def test_a_live_job_has_the_truth_and_trains_on(
    loads: Mapping[tuple[str, str, int], tuple[Truth, Path]],
    kind: str,
    source: str,
    world_size: int,
) -> None:
    truth, out = loads[kind, source, world_size]
    tensors, meta = load_file(out), json.loads(out.with_suffix(".json").read_text())
    assert truth.weight_problems(weights_of(tensors, truth)) == []
    assert truth.optimizer_problems(states_of(tensors), meta["param_groups"]) == []
    if truth.meta["world_size"] == world_size:  # BatchNorm's loss depends on the split
        assert meta["next_losses"] == pytest.approx(truth.meta["next_losses"], rel=1e-5)
    else:
        assert meta["next_losses"] == pytest.approx(truth.meta["next_losses"], rel=0.1)


@pytest.mark.parametrize("save", ["fsdp1-full", "fsdp2-full"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_full_state_dicts_of_fsdp_are_recognised_and_read(
    fsdp_saves: Saves, save: str, world_size: int, tmp_path: Path
) -> None:
    truth = fsdp_saves[save, world_size]
    assert ckpt.open(truth.source).origin.format == "fsdp-full"
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert truth.weight_problems(content["model"]) == []
    assert truth.optimizer_problems(*by_name(content["optimizer"])) == []


def test_what_is_written_has_the_shape_of_what_fsdp_writes(
    fsdp_saves: Saves, tmp_path: Path
) -> None:
    truth = fsdp_saves["fsdp1-full", 2]
    ckpt.convert(truth.source, "fsdp-full", tmp_path / "out.pt")
    theirs = torch.load(truth.source, weights_only=True)
    ours = torch.load(tmp_path / "out.pt", weights_only=True)
    assert ours.keys() == theirs.keys()
    assert ours["model"].keys() == theirs["model"].keys()
    assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
    states = ours["optimizer"]["state"], theirs["optimizer"]["state"]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][n][k], v) for n in states[1] for k, v in states[1][n].items())


def test_weights_only_leaves_the_optimizer_out(fsdp_saves: Saves, tmp_path: Path) -> None:
    truth = fsdp_saves["fsdp2-by_number", 2]
    ckpt.convert(truth.source, "fsdp-full", tmp_path / "out.pt", weights_only=True)
    assert torch.load(tmp_path / "out.pt", weights_only=True).keys() == {"model"}
