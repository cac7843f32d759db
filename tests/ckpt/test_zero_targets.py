"""Checkpoints converted to ZeRO shards: as DeepSpeed's own files, and loaded by live engines.

Real DDP, FSDP2 and DeepSpeed jobs train on two ranks. What becomes of their checkpoints is loaded
by `engine.load_checkpoint` on one, two and three ranks; what then stands in the engine has to be
the truth of the run bit for bit, what the engine saves has to be the files it loaded, tensor by
tensor and key by key, and it trains on as the run did.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.launch import run_zero_jobs
from truth import Truth

import ckpt

GLOBAL_BATCH, STEPS = 12, 3
WORLDS = (1, 2, 3)
SAME_LAYOUT = (
    "zero1",
    "zero3",
    "zero2_rich",
    "zero2_bf16",
    "zero1_acc32",
    "zero3_bf16",
    "zero2_fp16",
    "zero1_sgd",
    "zero2_dealt",
    "zero1_aligned",
    "zero2_aligned_dealt",
)
LOADS = [
    *((name, stage) for name in ("ddp", "fsdp2", "zero1", "zero3") for stage in (1, 2, 3)),
    *(("zero2_bf16", stage) for stage in (1, 2, 3)),
    *(("zero3_bf16", stage) for stage in (1, 2, 3)),
    ("zero1_acc32", 1),
    ("zero2_fp16", 3),
]
AT_OTHER_WORLD_SIZES = ("ddp", "zero3", "zero2_bf16")
JOBS = [
    (name, stage, world_size)
    for world_size in WORLDS
    for name, stage in LOADS
    if world_size == 2 or name in AT_OTHER_WORLD_SIZES
]
LOSSES_AGREE = {"ddp", "fsdp2", "zero1", "zero3"}
"""fp32 without BatchNorm: the loss does not depend on the number of ranks."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder a source, each with `ckpt` and its truth; see zero_jobs.py."""
    root = tmp_path_factory.mktemp("zero_sources")
    run_zero_jobs("train", root, root / "train.log", 2)
    return root


@dataclass(frozen=True)
class Loaded:
    """One engine's answer, and the folders that it loaded and saved."""

    folder: Path
    saved: Path
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]


def configuration(name: str, stage: int, world_size: int) -> dict[str, Any]:
    """DeepSpeed's configuration of the job that loads."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // world_size,
        "gradient_clipping": 0.0,
        "steps_per_print": 10000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "sub_group_size": 700},
    }
    if "bf16" in name or "acc32" in name:
        config["bf16"] = {"enabled": True}
    if "acc32" in name:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if "fp16" in name:
        config["fp16"] = {"enabled": True, "initial_scale_power": 8}
    return config


@pytest.fixture(scope="module")
def loaded(
    sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[tuple[str, int, int], Loaded]:
    """Every load of JOBS, in one group of processes a world."""
    root, found = tmp_path_factory.mktemp("zero_loads"), {}
    for world_size in WORLDS:
        loads = [(name, stage) for name, stage, world in JOBS if world == world_size]
        jobs = [_job(sources, root / str(world_size), *load, world_size) for load in loads]
        listed = root / f"jobs{world_size}.json"
        listed.write_text(json.dumps(jobs))
        run_zero_jobs("load", listed, root / f"load{world_size}.log", world_size)
        for (name, stage), job in zip(loads, jobs, strict=True):
            out = Path(job["out"])
            meta = json.loads(out.with_suffix(".json").read_text())
            folders = (Path(job["folder"]), Path(job["saved"]))
            found[name, stage, world_size] = Loaded(*folders, load_file(out), meta)
    return found


def _job(sources: Path, root: Path, name: str, stage: int, world_size: int) -> dict[str, Any]:
    truth = Truth.load(sources / name)
    config = configuration(name, stage, world_size)
    folder = root / f"{name}-zero{stage}"
    root.mkdir(exist_ok=True)
    ckpt.convert(
        truth.source, f"zero{stage}", folder, world_size=world_size, ds_config=config,
    )  # fmt: skip
    return {
        "folder": str(folder),
        "out": str(root / f"{name}-zero{stage}.safetensors"),
        "saved": str(root / f"{name}-zero{stage}-saved"),
        "config": config,
        "model_options": truth.meta["model_options"],
    }


# --- the same content, value by value -----------------------------------------------------------


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where two unpickled trees differ: types, keys, dtypes, shapes, every element."""
    if isinstance(theirs, torch.Tensor):
        if not isinstance(ours, torch.Tensor) or (ours.dtype, ours.shape) != (
            theirs.dtype,
            theirs.shape,
        ):
            yield f"{path}: another kind of tensor"
        elif not torch.equal(ours, theirs):
            yield f"{path}: other values"
    elif type(ours) is not type(theirs):
        yield f"{path}: {type(ours)}, expected {type(theirs)}"
    elif isinstance(theirs, dict):
        yield from key_differences(ours, theirs, path)
        for key in theirs.keys() & ours.keys():
            yield from differences(ours[key], theirs[key], f"{path}/{key}")
    elif isinstance(theirs, list | tuple) and not isinstance(theirs, torch.Size):
        if len(ours) != len(theirs):
            yield f"{path}: {len(ours)} items, expected {len(theirs)}"
        for index, (one, other) in enumerate(zip(ours, theirs, strict=False)):
            yield from differences(one, other, f"{path}/{index}")
    elif hasattr(theirs, "__dict__") and not isinstance(theirs, Enum):
        yield from differences(vars(ours), vars(theirs), f"{path}/{type(theirs).__name__}")
    elif ours != theirs:
        yield f"{path}: {ours}, expected {theirs}"


def key_differences(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    """Keys of two dicts, in their order but for hyper-parameters."""
    lacking = [key for key in theirs if key not in ours]
    if lacking or theirs.keys() != ours.keys():
        yield f"{path}: lacks {lacking}, has besides {[key for key in ours if key not in theirs]}"
    elif list(ours) != list(theirs) and not path.rpartition("/")[0].endswith("param_groups"):
        yield f"{path}: keys in another order"


def folder_differences(ours: Path, theirs: Path) -> list[str]:
    """Of two saves: file by file."""
    names = [sorted(f.name for f in folder.iterdir()) for folder in (ours, theirs)]
    if names[0] != names[1]:
        return [f"files {names[0]}, expected {names[1]}"]
    return [
        f"{name}{item}"
        for name in names[0]
        for item in differences(load(ours / name), load(theirs / name))
    ]


def load(path: Path) -> Any:
    """As DeepSpeed loads it."""
    return torch.load(path, map_location="cpu", weights_only=False)


RANKS_OWN = ("bn.running", "num_batches")
"""BatchNorm's statistics differ between ranks, and a conversion has those of rank 0."""


def unpadded(found: list[str]) -> list[str]:
    """Without what DeepSpeed leaves to chance: ZeRO-3 pads weights with uninitialised memory."""
    chance = ("fp32_flat_groups", "frozen_param_fragments", *RANKS_OWN)
    return [item for item in found if not any(word in item for word in chance)]


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_the_same_stage_and_ranks_give_deepspeeds_own_files(
    sources: Path, name: str, tmp_path: Path
) -> None:
    source = sources / name / "ckpt"
    ckpt.convert(source, name[:5], tmp_path / "out")
    assert (tmp_path / "out" / "latest").read_text() == (source / "latest").read_text()
    found = folder_differences(tmp_path / "out" / "global_step3", source / "global_step3")
    assert (unpadded(found) if name.startswith("zero3") else found) == []
    assert list(ckpt.diff(ckpt.open(source), ckpt.open(tmp_path / "out"))) == []


@pytest.mark.parametrize(("name", "stage", "world_size"), JOBS)
def test_a_live_engine_has_the_truth(
    loaded: Mapping[tuple[str, int, int], Loaded],
    sources: Path,
    name: str,
    stage: int,
    world_size: int,
) -> None:
    truth, got = Truth.load(sources / name), loaded[name, stage, world_size]
    wanted = {k: v for k, v in truth.tensors.items() if not k.startswith("buffer")}
    assert [key for key in wanted if not torch.equal(got.tensors[key], wanted[key])] == []
    buffers = [key for key in truth.tensors if key.startswith("buffer/")]
    assert [key for key in buffers if not torch.equal(got.tensors[key], truth.tensors[key])] == []
    assert got.meta["param_groups"] == truth.meta["param_groups"]
    assert got.meta["client"] == truth.meta["client_state"]
    assert got.meta["global_steps"] == STEPS
    assert got.meta["scheduler"] == truth.meta["scheduler"]["state"]


@pytest.mark.parametrize(("name", "stage", "world_size"), JOBS)
def test_an_engine_saves_what_it_loaded(
    loaded: Mapping[tuple[str, int, int], Loaded], name: str, stage: int, world_size: int
) -> None:
    """DeepSpeed's own files of the same state, at this stage and for these ranks."""
    got = loaded[name, stage, world_size]
    found = folder_differences(got.folder / "global_step3", got.saved / "global_step3")
    uncounted = ": lacks ['global_samples'], has besides []"  # only DeepSpeed's own jobs count them
    if name in ("ddp", "fsdp2"):
        found = [item for item in found if not item.endswith(uncounted)]
    assert found == []


@pytest.mark.parametrize(
    ("name", "stage", "world_size"), [job for job in JOBS if job[0] in LOSSES_AGREE]
)
def test_it_trains_on_as_the_run_did(
    loaded: Mapping[tuple[str, int, int], Loaded],
    sources: Path,
    name: str,
    stage: int,
    world_size: int,
) -> None:
    wanted = Truth.load(sources / name).meta["next_losses"]
    losses = loaded[name, stage, world_size].meta["next_losses"]
    assert losses == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(("name", "stage", "world_size"), JOBS)
def test_our_own_reader_sees_the_source(
    loaded: Mapping[tuple[str, int, int], Loaded],
    sources: Path,
    name: str,
    stage: int,
    world_size: int,
) -> None:
    source = ckpt.open(Truth.load(sources / name).source)
    ours = ckpt.open(loaded[name, stage, world_size].folder)
    found = [item for item in ckpt.diff(source, ours) if item.kind != "job"]
    assert [str(item) for item in found] == []
