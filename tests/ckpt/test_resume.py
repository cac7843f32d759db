"""Converted checkpoints loaded by live FSDP2, FSDP1 and DDP jobs, by those frameworks' own means.

Each job is built with other random weights, wrapped, given an optimizer, and loads what was
converted; what then stands in its parameters and optimizer has to be the truth of the run that
wrote the source, bit for bit, at another world size as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from training.launch import run_resume
from truth import Truth

import ckpt

Runs = Mapping[tuple[str, int], Truth]

TO_DCP = [
    ("fsdp2", ("zero3_fp32", 2), 3),
    ("fsdp2", ("zero3_subgroup", 3), 2),
    ("fsdp2", ("zero2_fp32", 3), 2),
    ("fsdp2", ("zero1_bf16", 2), 2),
    ("fsdp2", ("ddp_named", 2), 2),
    ("fsdp2", ("fsdp1_full", 2), 3),
    ("fsdp1", ("zero3_fp32", 3), 2),
    ("fsdp1", ("fsdp2_shard1", 2), 2),
]
TO_TORCH = [
    ("ddp", ("zero3_fp32", 2), "ddp", ()),
    ("ddp", ("fsdp2_flat", 3), "ddp", ()),
    ("ddp", ("zero1_fp32", 2), "torch", ("--plain",)),
]


def states_of(tensors: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Optimizer states by FQN, out of keys such as `exp_avg/<fqn>`."""
    states: dict[str, dict[str, Any]] = {}
    for key, value in tensors.items():
        kind, _, fqn = key.partition("/")
        if fqn and not kind.startswith("buffer"):
            name = "momentum_buffer" if kind == "momentum" else kind
            states.setdefault(fqn, {})[name] = value
    return states


def weights_of(tensors: Mapping[str, Any], truth: Truth) -> dict[str, Any]:
    """The live model's state dict: weights, buffers of rank 0, and the tied names."""
    weights = {k: v for k, v in tensors.items() if "/" not in k}
    persistent = set(truth.meta["buffers"]) - set(truth.meta["nonpersistent_buffers"])
    weights |= {name: tensors[f"buffer/{name}"] for name in persistent}
    return weights | {alias: weights[owner] for alias, owner in truth.meta["tied"].items()}


def problems(out: Path, groups: list[Mapping[str, Any]], truth: Truth) -> list[str]:
    tensors = load_file(out)
    found = truth.weight_problems(weights_of(tensors, truth))
    return found + truth.optimizer_problems(states_of(tensors), groups)


@pytest.mark.parametrize(
    ("kind", "run", "world_size"), TO_DCP, ids=lambda v: v if isinstance(v, str) else None
)
def test_a_dcp_folder_resumes_under_fsdp(
    runs: Runs, kind: str, run: tuple[str, int], world_size: int, tmp_path: Path
) -> None:
    truth, out = runs[run], tmp_path / "out.safetensors"
    folder = ckpt.convert(truth.source, "fsdp", tmp_path / "dcp")
    meta = run_resume(
        kind, folder, out, world_size, model_options=truth.meta["model_options"], timeout_s=240
    )
    assert problems(out, meta["param_groups"], truth) == []


@pytest.mark.parametrize(("kind", "run", "target", "flags"), TO_TORCH)
def test_a_torch_file_resumes_under_ddp_and_alone(
    runs: Runs,
    kind: str,
    run: tuple[str, int],
    target: str,
    flags: tuple[str, ...],
    tmp_path: Path,
) -> None:
    truth, out = runs[run], tmp_path / "out.safetensors"
    file = ckpt.convert(truth.source, target, tmp_path / "out.pt")
    options = truth.meta["model_options"]
    world_size = 1 if flags else 2
    meta = run_resume(
        kind, file, out, world_size, model_options=options, flags=flags, timeout_s=240
    )
    assert problems(out, meta["param_groups"], truth) == []
