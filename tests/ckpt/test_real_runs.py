"""Every source that a framework really wrote, into every target, against the run's own truth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from training.cases import CASES
from truth import Truth, by_name

import ckpt

RUNS = [(case.name, world) for case in CASES.values() for world in case.worlds]
SOURCES = [run for run in RUNS if run[0] != "whole"]
JOBS = [run for run in SOURCES if run[0] != "bare"]
Runs = Mapping[tuple[str, int], Truth]


def named(run: tuple[str, int]) -> str:
    return f"{run[0]}-{run[1]}"


def load_torch(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def load_dcp(path: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Everything under a prefix of a DCP folder, read by torch itself in one process."""
    metadata = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(path), no_dist=True)
    return {key.removeprefix(prefix): value for key, value in state.items()}


@pytest.mark.parametrize("run", SOURCES, ids=named)
def test_weights_become_a_torch_file(runs: Runs, run: tuple[str, int], tmp_path: Path) -> None:
    truth = runs[run]
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt")
    assert truth.weight_problems(load_torch(tmp_path / "out.pt")["model"]) == []


@pytest.mark.parametrize("run", JOBS, ids=named)
def test_the_optimizer_becomes_a_torch_file(
    runs: Runs, run: tuple[str, int], tmp_path: Path
) -> None:
    truth = runs[run]
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt")
    states, groups = by_name(load_torch(tmp_path / "out.pt")["optimizer"])
    assert truth.optimizer_problems(states, groups) == []


@pytest.mark.parametrize("run", SOURCES, ids=named)
def test_weights_become_safetensors(runs: Runs, run: tuple[str, int], tmp_path: Path) -> None:
    truth = runs[run]
    ckpt.convert(truth.source, "hf", tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    tied = truth.meta["tied"]
    assert tied.keys() & written.keys() == set()
    restored = written | {alias: written[owner] for alias, owner in tied.items()}
    assert truth.weight_problems(restored) == []


@pytest.mark.parametrize("run", SOURCES, ids=named)
def test_weights_become_a_dcp_folder(runs: Runs, run: tuple[str, int], tmp_path: Path) -> None:
    truth = runs[run]
    ckpt.convert(truth.source, "dcp", tmp_path / "dcp")
    assert truth.weight_problems(load_dcp(tmp_path / "dcp", "model.")) == []


@pytest.mark.parametrize("run", SOURCES, ids=named)
def test_ddp_names_begin_with_module(runs: Runs, run: tuple[str, int], tmp_path: Path) -> None:
    truth = runs[run]
    ckpt.convert(truth.source, "ddp", tmp_path / "out.pt")
    model = load_torch(tmp_path / "out.pt")["model"]
    assert truth.weight_problems({k.removeprefix("module."): v for k, v in model.items()}) == []
    assert all(name.startswith("module.") for name in model)


@pytest.mark.parametrize("run", JOBS, ids=named)
@pytest.mark.parametrize("target", ["torch", "ddp", "dcp"])
def test_there_and_back_is_the_same_training_state(
    runs: Runs, run: tuple[str, int], target: str, tmp_path: Path
) -> None:
    truth = runs[run]
    there = ckpt.convert(truth.source, target, tmp_path / "there")
    back = ckpt.convert(there, "torch", tmp_path / "back.pt")
    again = ckpt.convert(back, target, tmp_path / "again")
    differences = [
        str(item)
        for other in (back, again)
        for item in ckpt.diff(ckpt.open(truth.source), ckpt.open(other))
    ]
    assert differences == []


@pytest.mark.parametrize("run", JOBS, ids=named)
def test_the_rest_of_the_job_comes_along(runs: Runs, run: tuple[str, int], tmp_path: Path) -> None:
    truth = runs[run]
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt")
    job = load_torch(tmp_path / "out.pt")
    scheduler = job.get("scheduler") or job["lr_scheduler"]
    assert job["epoch"] == 1
    assert scheduler["last_epoch"] == truth.meta["scheduler"]["state"]["last_epoch"]


@pytest.mark.parametrize("name", ["zero1_bf16", "zero1_bf16_acc32", "zero2_bf16", "zero3_bf16"])
def test_keep_gives_the_weights_as_the_model_computed(
    runs: Runs, name: str, tmp_path: Path
) -> None:
    truth = runs[name, 2]
    ckpt.convert(truth.source, "hf", tmp_path / "hf", dtype="keep")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    low = {k.removeprefix("lp/"): v for k, v in truth.tensors.items() if k.startswith("lp/")}
    assert {name: written[name].dtype for name in low} == {name: low[name].dtype for name in low}
    assert [name for name in low if not torch.equal(written[name], low[name])] == []


@pytest.mark.parametrize("choice", ["bf16", "fp16"])
def test_a_cast_rounds_as_torch_does(runs: Runs, choice: str, tmp_path: Path) -> None:
    truth = runs["zero3_fp32", 3]
    ckpt.convert(truth.source, "hf", tmp_path / "hf", dtype=choice)
    written = load_file(tmp_path / "hf" / "model.safetensors")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[choice]
    want = {name: value.to(dtype) for name, value in truth.weights().items()}
    assert [name for name in want if not torch.equal(written[name], want[name])] == []
    assert written["bn.num_batches_tracked"].dtype == torch.int64


def test_a_whole_pickled_model_is_refused(runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(ckpt.CkptError, match="pickled whole model"):
        ckpt.convert(runs["whole", 2].source, "torch", tmp_path / "out.pt")
