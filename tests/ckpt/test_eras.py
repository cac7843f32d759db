"""Checkpoints of older DeepSpeed and torch versions, against the truth of the runs that wrote them.

A selection stands in fixtures/checkpoints; the whole pack is used where it is there.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FIXTURES, PACK
from safetensors.torch import load_file
from truth import Truth, by_name

import ckpt


class Sampler:
    """Such an object as trainers pickle."""


REFUSED = {
    "whole_model_pt": "pickled whole model",
    "whole_ddp_pt_w2": "pickled whole model",
    "zero2_moe_w2": "mixture-of-experts",
    "fsdp1_local": "LOCAL_STATE_DICT",
}
WEIGHTS_ONLY = ("plain_dcp",)
NO_HYPER_PARAMETERS = ("elastic",)


def found(root: Path, pattern: str) -> list[Path]:
    return sorted(truth.parent for truth in root.glob(pattern))


CASES = found(FIXTURES, "*/truth.json") + found(PACK, "*/*/truth.json")


def matches(case: Path, names: Iterable[str]) -> bool:
    return any(name in case.name for name in names)


def refusal(case: Path) -> str | None:
    """The words with which a source is refused that this version cannot convert."""
    return next((words for name, words in REFUSED.items() if name in case.name), None)


READABLE = [case for case in CASES if refusal(case) is None]
REFUSABLE = [case for case in CASES if refusal(case) is not None]


def label(case: Path) -> str:
    return case.name if case.parent == FIXTURES else f"{case.parent.name}/{case.name}"


def renames(case: Path) -> list[str]:
    """Lightning puts the network's attribute name before every parameter."""
    return [r"^net\.="] if "lightning" in case.name else []


def disagrees(case: Path) -> bool:
    """DeepSpeed 0.9 steps its fp32 weights once at the start, and not the module's."""
    return case.parent.name == "ds009_t21" and case.name == "zero2_step0_w2"


def options(truth: Truth) -> dict[str, Any]:
    """Numbered optimizer states need the order where shapes alone do not tell it."""
    given: dict[str, Any] = {"rename_rules": renames(truth.folder)}
    given["allow_loss"] = disagrees(truth.folder)
    try:
        ckpt.open(truth.source)
    except ckpt.CkptError as problem:
        assert "--param-order" in str(problem)
        prefix = "net." if given["rename_rules"] else ""
        given["param_order"] = [prefix + name for name in truth.order]
    return given


@pytest.mark.parametrize("case", READABLE, ids=label)
def test_old_checkpoints_keep_everything(case: Path, tmp_path: Path) -> None:
    truth = Truth.load(case)
    dcp = ckpt.convert(truth.source, "dcp", tmp_path / "dcp", **options(truth))
    ckpt.convert(dcp, "torch", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    expected = expected_problems(truth)
    assert [p for p in truth.weight_problems(content["model"]) if p not in expected] == []
    if not matches(case, WEIGHTS_ONLY):
        problems = truth.optimizer_problems(*by_name(content["optimizer"]))
        hyper = matches(case, NO_HYPER_PARAMETERS)
        assert [p for p in problems if not (hyper and p.startswith("group"))] == []


@pytest.mark.parametrize("case", READABLE, ids=label)
def test_old_checkpoints_become_safetensors(case: Path, tmp_path: Path) -> None:
    truth = Truth.load(case)
    hf = tmp_path / "hf"
    ckpt.convert(truth.source, "hf", hf, rename_rules=renames(case), allow_loss=disagrees(case))
    written = load_file(tmp_path / "hf" / "model.safetensors")
    ties = ckpt.open(tmp_path / "hf").ties
    restored = written | {alias: written[owner] for alias, owner in ties.items()}
    expected = expected_problems(truth)
    assert [p for p in truth.weight_problems(restored) if p not in expected] == []


def expected_problems(truth: Truth) -> list[str]:
    """What was never saved: frozen parameters under exclude_frozen_parameters, and a tied name
    that transformers and accelerate leave out of their file."""
    gone = truth.meta["frozen"] if "excl_frozen" in truth.folder.name else []
    if truth.folder.name.endswith(("hf_trainer_ddp_w2", "accelerate_ddp_w2")):
        gone = list(truth.meta["tied"])
    return [f"{name} is missing" for name in gone]


@pytest.mark.parametrize("trainer", ["hf_trainer_zero3_w2", "hf_trainer_ddp_w2"])
def test_a_trainers_files_go_along(trainer: str, tmp_path: Path) -> None:
    source = FIXTURES / f"ds019_t213-{trainer}" / "checkpoint-3"
    ckpt.convert(source, "torch", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    for rank in (0, 1):
        saved = torch.load(source / f"rng_state_{rank}.pth", weights_only=False)
        found = content[f"rng_state_{rank}"]
        assert torch.equal(found["cpu"], saved["cpu"])
        assert found["python"] == saved["python"]
        assert found["numpy"][0] == saved["numpy"][0]
        assert found["numpy"][1].tolist() == saved["numpy"][1].tolist()
    assert content["trainer_state"] == json.loads((source / "trainer_state.json").read_text())
    assert content["trainer_state"]["global_step"] == content["scheduler"]["last_epoch"] == 3


def test_a_trainers_file_that_is_no_plain_data_is_named_and_its_loss_is_asked_for(
    tmp_path: Path,
) -> None:
    source = tmp_path / "checkpoint-3"
    shutil.copytree(FIXTURES / "ds019_t213-hf_trainer_zero3_w2" / "checkpoint-3", source)
    torch.save({"sampler": Sampler()}, source / "scheduler.pt")
    with pytest.raises(ckpt.CkptError, match=r"dropped: scheduler\.pt: .*--allow-loss"):
        ckpt.convert(source, "torch", tmp_path / "out.pt")
    ckpt.convert(source, "torch", tmp_path / "out.pt", allow_loss=True)
    assert "scheduler" not in torch.load(tmp_path / "out.pt", weights_only=True)
    notes = ckpt.prepare(source, "hf", tmp_path / "hf").notes
    assert any("scheduler.pt" in str(note) for note in notes)


@pytest.mark.parametrize("case", REFUSABLE, ids=label)
def test_what_cannot_be_converted_is_refused_with_the_reason(case: Path, tmp_path: Path) -> None:
    with pytest.raises(ckpt.CkptError, match=str(refusal(case))):
        ckpt.convert(Truth.load(case).source, "torch", tmp_path / "out.pt")
    assert list(tmp_path.iterdir()) == []
