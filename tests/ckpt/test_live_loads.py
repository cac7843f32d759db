"""Live jobs that load what is no plain resume: weights alone, elastic jobs, jobs with dropout.

Real DeepSpeed and FSDP2 jobs of two ranks; see live_jobs.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from training.cases import Case
from training.launch import HERE, run_jobs
from training.model import FROZEN, RICH, ModelOptions
from truth import Truth

import ckpt
from ckpt.errors import MissingPart, Unsupported
from ckpt.formats._zero_groups import arranged

WORLD_SIZE, GLOBAL_BATCH, STEPS = 2, 12, 3
SPLITTABLE = ModelOptions(tie=True, tiny=True, frozen=FROZEN)
"""Without BatchNorm, whose statistics are each rank's own."""

ELASTIC = {"zero_optimization": {"elastic_checkpoint": True}}
SOURCES = {
    "zero3_bf16": Case("", "", (), stage=3, options=RICH, dtype="bf16"),
    "zero2": Case("", "", (), stage=2, options=RICH),
    "zero2_split": Case("", "", (), stage=2, options=SPLITTABLE),
    "elastic": Case("", "", (), stage=2, options=SPLITTABLE, config=ELASTIC),
}
WITHOUT_OPTIMIZER = {"hf": "zero3_bf16", "torch": "zero2"}
"""Formats, and the source from which they have their weights."""

WEIGHTS_ONLY = {"load_optimizer_states": False, "load_lr_scheduler_states": False}
MODULE_ONLY = {"load_module_only": True}
NEW_OPTIMIZER = {"load_lr_scheduler_states": False}
STAGES = (1, 2, 3)
OF_WEIGHTS = (
    *((name, stage) for name in ("zero3_bf16", "hf") for stage in STAGES),
    ("zero2", 3),
    ("torch", 2),
)
OF_MODULES = (("zero3_bf16", 1), ("hf", 2), ("torch", 2))
GROUPS_GIVEN = ((1, "bf16"), (2, "fp32"), (3, "bf16"))
ELASTIC_LOADS = (("zero2_split", 1), ("zero2_split", 2), ("elastic", 2))
DROPOUT_TARGETS = {
    "zero3": "zero3",
    "zero2": "zero2",
    "dcp": "fsdp2",
    "fsdp-full": "fsdp1 flat",
}
"""Formats, and the strategy that resumes from them."""


def configuration(stage: int, dtype: str = "fp32", **zero: Any) -> dict[str, Any]:
    """DeepSpeed's configuration of the job that loads."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": GLOBAL_BATCH // WORLD_SIZE,
        "gradient_clipping": 0.0,
        "steps_per_print": 10000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "sub_group_size": 700, **zero},
    }
    return config | ({} if dtype == "fp32" else {dtype: {"enabled": True}})


class Jobs:
    """The list for live_jobs.py."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.listed: list[dict[str, Any]] = []

    def add(self, do: str, out: str, **more: Any) -> Path:
        path = self.root / out
        self.listed.append({"do": do, "out": str(path), **more})
        return path

    def convert(self, source: Path, to: str, out: str, **more: Any) -> Path:
        path = self.root / out
        arguments = {"source": str(source), "to": to, "output": str(path), **more}
        self.add("convert", out, arguments=arguments)
        return path

    def load(
        self, source: Path, name: str, config: Mapping[str, Any], options: ModelOptions, **more: Any
    ) -> None:
        """Convert for the job of that configuration, and load there."""
        stage = config["zero_optimization"]["stage"]
        conversion = {"world_size": WORLD_SIZE, "ds_config": config, **more.pop("convert", {})}
        folder = self.convert(source, f"zero{stage}", f"{name}-folder", **conversion)
        self.add(
            "load", f"{name}.safetensors", folder=str(folder), config=config,
            model_options=options.to_json(), **more,
        )  # fmt: skip

    def run(self) -> None:
        for job in self.listed:
            if job["do"] in ("train", "dropout"):
                Path(job["out"]).mkdir()
        run_jobs(HERE / "live_jobs.py", self.listed, self.root, "live", WORLD_SIZE, 240)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything, in one group of processes; a folder with a file or folder for each job."""
    jobs = Jobs(tmp_path_factory.mktemp("live"))
    made = {}
    for name, case in SOURCES.items():
        made[name] = jobs.add("train", name, case=asdict(case)) / "ckpt"
    for name, source in WITHOUT_OPTIMIZER.items():
        suffix = ".pt" if name == "torch" else ""
        made[name] = jobs.convert(made[source], name, f"{name}{suffix}", weights_only=True)
    jobs.add("sort", "hf/model.safetensors")
    _weights(jobs, made)
    for name, stage in ELASTIC_LOADS:
        config = configuration(stage, elastic_checkpoint=True)
        like = {"like": str(made["zero2_split"])} if name == "elastic" else {}
        jobs.load(made[name], f"elastic-{name}-{stage}", config, SPLITTABLE, convert=like)
    begun = jobs.add("dropout", "dropout", strategy="zero3")
    for target, strategy in DROPOUT_TARGETS.items():
        more = {"world_size": WORLD_SIZE} if target.startswith("zero") else {}
        converted = jobs.convert(begun / "ckpt", target, f"dropout-as-{target}", **more)
        jobs.add("dropout", f"dropout-{target}", strategy=strategy, source=str(converted))
    jobs.run()
    return jobs.root


def _weights(jobs: Jobs, made: Mapping[str, Path]) -> None:
    only = {"weights_only": True}
    for flags, loads in ((WEIGHTS_ONLY, OF_WEIGHTS), (MODULE_ONLY, OF_MODULES)):
        for name, stage in loads:
            out, config = f"{next(iter(flags))}-{name}-{stage}", configuration(stage)
            jobs.load(made[name], out, config, RICH, flags=flags, convert=only)
    source = made["zero3_bf16"]
    for stage in (2, 3):
        config = configuration(stage, "bf16")
        jobs.load(source, f"bf16-{stage}", config, RICH, flags=WEIGHTS_ONLY, convert=only)
    for stage, dtype in GROUPS_GIVEN:
        config, more = configuration(stage, dtype), {**only, "like": str(source)}
        jobs.load(made["hf"], f"like-{stage}", config, RICH, flags=NEW_OPTIMIZER, convert=more)


def result(root: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What stood in a job that loaded, and how it went on."""
    for failed in (f"{name}.safetensors", f"{name}-folder"):
        error = root / f"{failed}.error.txt"
        assert not error.exists(), error.read_text()
    meta: dict[str, Any] = json.loads((root / f"{name}.json").read_text())
    return load_file(root / f"{name}.safetensors"), meta


def unequal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in wanted.items() if not torch.equal(found[name], tensor)]


def loaded_weights(root: Path, source: str) -> dict[str, torch.Tensor]:
    """fp32 weights of a source's run, and rank 0's buffers."""
    truth = Truth.load(root / WITHOUT_OPTIMIZER.get(source, source))
    buffers = {k: v for k, v in truth.tensors.items() if k.startswith("buffer/")}
    return truth.weights() | buffers


@pytest.mark.parametrize(("source", "stage"), OF_WEIGHTS)
def test_an_engine_takes_weights_alone(live: Path, source: str, stage: int) -> None:
    tensors, meta = result(live, f"load_optimizer_states-{source}-{stage}")
    assert unequal(tensors, loaded_weights(live, source)) == []
    assert len(meta["next_losses"]) == STEPS


@pytest.mark.parametrize(("source", "stage"), OF_MODULES)
def test_an_engine_takes_the_module_alone(live: Path, source: str, stage: int) -> None:
    tensors, _ = result(live, f"load_module_only-{source}-{stage}")
    assert unequal(tensors, loaded_weights(live, source)) == []


@pytest.mark.parametrize("stage", (2, 3))
def test_a_bf16_engine_takes_weights_alone(live: Path, stage: int) -> None:
    """Its module and its fp32 weights are the rounded ones: DeepSpeed loads no others so."""
    tensors, _ = result(live, f"bf16-{stage}")
    truth = Truth.load(live / "zero3_bf16")
    for name, tensor in truth.weights().items():
        assert torch.equal(tensors[f"lp/{name}"], tensor.bfloat16()), name
        assert torch.equal(tensors[name], tensor.bfloat16().float()), name


@pytest.mark.parametrize(("stage", "dtype"), GROUPS_GIVEN)
def test_groups_of_another_checkpoint_make_a_whole_load_of_weights(
    live: Path, stage: int, dtype: str
) -> None:
    """With fp32 weights, that `load_optimizer_states=False` leaves out, and a new optimizer."""
    tensors, meta = result(live, f"like-{stage}")
    truth = Truth.load(live / "zero3_bf16")
    trained = {k: v for k, v in truth.weights().items() if k not in FROZEN}
    assert unequal(tensors, trained) == []
    assert meta["param_groups"] == truth.meta["param_groups"]
    assert len(meta["next_losses"]) == STEPS


@pytest.mark.parametrize(("source", "stage"), ELASTIC_LOADS)
def test_an_elastic_job_resumes(live: Path, source: str, stage: int) -> None:
    tensors, meta = result(live, f"elastic-{source}-{stage}")
    truth = Truth.load(live / source)
    wanted = {k: v for k, v in truth.tensors.items() if not k.startswith("buffer")}
    assert unequal(tensors, wanted) == []
    assert meta["next_losses"] == pytest.approx(truth.meta["next_losses"], rel=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_weights_alone_are_read_again(live: Path, stage: int) -> None:
    source, ours = (ckpt.open(live / n) for n in ("hf", f"load_optimizer_states-hf-{stage}-folder"))
    found = ckpt.diff(source, ours, weights_only=True)  # bf16 where frozen, in the source
    assert [item for item in found if not item.detail.endswith("values equal")] == []
    assert not any("frozen" in str(note) for note in ours.notes)


def test_groups_without_hyper_parameters_are_refused(live: Path, tmp_path: Path) -> None:
    """No job could go on: elastic checkpoints keep none."""
    with pytest.raises(MissingPart, match="no hyper-parameters in the param groups"):
        ckpt.prepare(live / "elastic" / "ckpt", "zero2", tmp_path / "out")


def test_hyper_parameters_come_from_one_group_or_not_at_all(live: Path) -> None:
    elastic, other = (ckpt.open(live / name / "ckpt") for name in ("elastic", "zero2_split"))
    first, second = other.groups
    moved = replace(first, fqns=first.fqns[1:]), replace(second, fqns=second.fqns + first.fqns[:1])
    with pytest.raises(Unsupported, match="groups with different hyper-parameters"):
        arranged(elastic, replace(other, groups=moved), None, "zero2")


def test_weights_with_the_groups_of_an_elastic_checkpoint_have_no_optimizer(
    live: Path, tmp_path: Path
) -> None:
    conversion = ckpt.prepare(
        live / "zero2_split" / "ckpt", "zero2", tmp_path / "out", weights_only=True,
        like=live / "elastic" / "ckpt",
    )  # fmt: skip
    assert any("--like has no hyper-parameters: load with" in str(n) for n in conversion.notes)


@pytest.mark.parametrize("target", DROPOUT_TARGETS)
def test_every_rank_goes_on_with_its_own_random_numbers(live: Path, target: str) -> None:
    uninterrupted = json.loads((live / "dropout" / "losses.json").read_text())
    resumed = json.loads((live / f"dropout-{target}" / "losses.json").read_text())
    assert uninterrupted[0] != uninterrupted[1]
    for ours, theirs in zip(resumed, uninterrupted, strict=True):
        assert ours == pytest.approx(theirs[STEPS:], rel=1e-5)
