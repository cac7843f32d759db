"""accelerate's and HF Trainer's folders, against the truth of the runs that wrote them.

Those of DDP are written by a Trainer and an Accelerator on two processes. The fresh ones of FSDP
are written by accelerate's own `save_fsdp_model`, `save_fsdp_optimizer` and
`save_accelerator_state` (accelerate 1.15) in the training processes; its Accelerator wants a GPU
for FSDP and is not used. The fixture was written by an Accelerator that was told the CPU is one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from conftest import FIXTURES, REPO
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from small import stepped
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training.launch import run_jobs
from truth import Truth, by_name

import ckpt
from ckpt.errors import AmbiguousSource
from ckpt.formats import _config_model

Saves = Mapping[tuple[str, int], Truth]
WAYS = ["fsdp1-accelerate", "fsdp2-accelerate", "fsdp2-accelerate_full"]
REAL = FIXTURES / "ds019_t213-accelerate_fsdp1_w2"
TRAINER = FIXTURES / "ds019_t213-hf_trainer_ddp_w2" / "checkpoint-3"
DDP = ["trainer", "trainer_tied", "trainer_shards", "accelerate", "accelerate_bin"]
SAFE = ["trainer", "trainer_shards", "accelerate"]
FACTORY = "training.trainer_ddp:build"


class Sampler:
    """Such an object as accelerate pickles into sampler.bin."""


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_folder_becomes_a_torch_file(
    fsdp_saves: Saves, way: str, world_size: int, tmp_path: Path
) -> None:
    truth = fsdp_saves[way, world_size]
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert truth.weight_problems(content["model"]) == []
    assert truth.optimizer_problems(*by_name(content["optimizer"])) == []
    assert content["scheduler"]["last_epoch"] == 3
    states = [content[f"random_states_{rank}"] for rank in range(world_size)]
    assert [state["step"] for state in states] == [3] * world_size


def test_a_real_accelerators_folder_is_read_with_its_job() -> None:
    found = ckpt.open(REAL / "ckpt")
    assert (found.origin.format, found.origin.world_size) == ("accelerate", 2)
    assert found.objects["scheduler"]["last_epoch"] == 3
    assert "custom_checkpoint_0" in found.objects
    assert found.notes == () or all(not note.needs_consent for note in found.notes)


def test_a_trainers_state_goes_along(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(REAL / "ckpt", folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    assert ckpt.open(folder).objects["trainer_state"] == {"global_step": 3}


def test_an_object_of_a_class_stays_behind_with_consent(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(REAL / "ckpt", folder)
    torch.save(Sampler(), folder / "sampler.bin")
    with pytest.raises(ckpt.CkptError, match=r"sampler\.bin.*--allow-loss"):
        ckpt.convert(folder, "torch", tmp_path / "out.pt")
    ckpt.convert(folder, "torch", tmp_path / "out.pt", allow_loss=True)


def test_the_inner_folder_is_still_read_by_itself() -> None:
    found = ckpt.open(REAL / "ckpt" / "pytorch_model_fsdp_0")
    assert found.origin.format == "dcp"
    assert not found.has_optimizer


def test_the_ranks_are_those_that_left_their_random_states(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(TRAINER, folder)
    assert ckpt.open(folder).origin.world_size == 2
    (folder / "rng_state_1.pth").unlink()
    (folder / "rng_state_0.pth").rename(folder / "rng_state.pth")
    found = ckpt.open(folder)
    assert (found.origin.world_size, "rng_state" in found.objects) == (1, True)


def test_weights_without_an_optimizer_are_those_of_hf(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(TRAINER, folder)
    assert ckpt.open(folder).origin.format == "accelerate"
    assert ckpt.open(folder / "model.safetensors").origin.format == "hf"
    (folder / "optimizer.pt").unlink()
    assert ckpt.open(folder).origin.format == "hf"


def test_of_two_models_one_is_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(REAL / "ckpt", folder)
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp_1")
    with pytest.raises(ckpt.CkptError, match="--key: model, model_1"):
        ckpt.open(folder)
    assert ckpt.open(folder, key="model_1", weights_only=True).params.keys()


# --- DDP and one GPU ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Truth]:
    """Runs of Trainer and accelerate under DDP on two processes; see trainer_ddp.py."""
    root = tmp_path_factory.mktemp("trainer_ddp")
    script = REPO / "tests" / "training" / "trainer_ddp.py"
    run_jobs(script, [{"out": str(root)}], root, "jobs", 2, timeout_s=300)
    return {name: Truth.load(root / name) for name in DDP}


def source_options(truth: Truth) -> dict[str, Any]:
    """accelerate writes no config.json beside safetensors, so its order has to be told."""
    return {"model": FACTORY} if truth.folder.name == "accelerate" else {}


def problems(truth: Truth, file: Path) -> list[str]:
    """What a torch file has otherwise than the run; no reader of ours in between."""
    content = torch.load(file, weights_only=True)
    states, groups = by_name(content["optimizer"])
    return [*truth.weight_problems(content["model"]), *truth.optimizer_problems(states, groups)]


def sorted_groups(truth: Truth) -> list[str]:
    """The optimizer's parameters with those of equal shape in the order of a safetensors file."""
    order = []
    for group in truth.meta["param_groups"]:
        left = sorted(group["params"])
        for name in group["params"]:
            shape = truth.tensors[name].shape
            order.append(next(other for other in left if truth.tensors[other].shape == shape))
            left.remove(order[-1])
    return order


@pytest.mark.parametrize("name", DDP)
def test_the_whole_job_of_a_trainer_becomes_a_torch_file(
    trained: Mapping[str, Truth], name: str, tmp_path: Path
) -> None:
    truth = trained[name]
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt", **source_options(truth))
    assert problems(truth, tmp_path / "out.pt") == []
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    stem = "random_states" if name.startswith("accelerate") else "rng_state"
    assert {"scheduler", f"{stem}_0", f"{stem}_1"} <= content.keys()
    assert content["scheduler"] == torch.load(next(truth.source.glob("scheduler.*")))


@pytest.mark.parametrize("name", DDP)
def test_the_whole_job_of_a_trainer_becomes_dcp(
    trained: Mapping[str, Truth], name: str, tmp_path: Path
) -> None:
    truth = trained[name]
    ckpt.convert(truth.source, "dcp", tmp_path / "dcp", **source_options(truth))
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt", weights_only=False)
    assert truth.weight_problems(content["model"]) == []
    optimizer = content["optimizer"]
    assert truth.optimizer_problems(optimizer["state"], optimizer["param_groups"]) == []
    assert content["scheduler"] == torch.load(next(truth.source.glob("scheduler.*")))


@pytest.mark.parametrize("name", ["trainer", "trainer_tied", "accelerate_bin"])
def test_the_whole_job_of_a_trainer_becomes_zero3(
    trained: Mapping[str, Truth], name: str, tmp_path: Path
) -> None:
    truth = trained[name]
    ckpt.convert(truth.source, "zero3", tmp_path / "zero3", world_size=4)
    weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "zero3"))
    assert truth.weight_problems(weights) == []
    ckpt.convert(tmp_path / "zero3", "torch", tmp_path / "out.pt")
    assert problems(truth, tmp_path / "out.pt") == []


@pytest.mark.parametrize("name", SAFE)
def test_the_order_of_a_safetensors_file_would_swap_states(
    trained: Mapping[str, Truth], name: str, tmp_path: Path
) -> None:
    truth = trained[name]
    wrong = sorted_groups(truth)
    swapped = [n for n, other in zip(truth.order, wrong, strict=True) if n != other]
    assert len(swapped) > 10
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt", param_order=wrong)
    found = problems(truth, tmp_path / "out.pt")
    assert {f"exp_avg/{name} has other values" for name in swapped} <= {*found}


@pytest.mark.parametrize("name", SAFE)
def test_a_given_order_or_model_needs_no_transformers(
    trained: Mapping[str, Truth], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = trained[name]
    monkeypatch.setattr(_config_model, "transformers_model", lambda _folder: None)
    ckpt.convert(truth.source, "torch", tmp_path / "order.pt", param_order=truth.order)
    ckpt.convert(truth.source, "torch", tmp_path / "model.pt", model=FACTORY)
    assert problems(truth, tmp_path / "order.pt") == []
    assert problems(truth, tmp_path / "model.pt") == []


def test_a_given_order_stays_through_formats_without_one(
    trained: Mapping[str, Truth], tmp_path: Path
) -> None:
    truth = trained["accelerate"]
    ckpt.convert(truth.source, "dcp", tmp_path / "dcp", param_order=truth.order)
    ckpt.convert(tmp_path / "dcp", "torch", tmp_path / "out.pt")
    assert problems(truth, tmp_path / "out.pt") == []


def test_without_an_order_equal_shapes_are_refused_with_the_ways_out(
    trained: Mapping[str, Truth], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, ways = "no config.json beside", "--param-order.*--model.*--weights-only"
    with pytest.raises(AmbiguousSource, match=f"{beside}.*lm_head.*{ways}"):
        ckpt.convert(trained["accelerate"].source, "torch", tmp_path / "out.pt")
    monkeypatch.setattr(_config_model, "transformers_model", lambda _folder: None)
    with pytest.raises(AmbiguousSource, match=f"transformers were installed.*{ways}"):
        ckpt.convert(trained["trainer"].source, "torch", tmp_path / "out.pt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [*SAFE, "accelerate_bin"])
def test_weights_alone_need_no_order(
    trained: Mapping[str, Truth], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = trained[name]
    monkeypatch.setattr(_config_model, "transformers_model", pytest.fail)
    ckpt.convert(truth.source, "hf", tmp_path / "hf")
    assert truth.weight_problems(load_file(tmp_path / "hf" / "model.safetensors")) == []
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt", weights_only=True)
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert truth.weight_problems(content["model"]) == []
    assert "optimizer" not in content


def changed_config(truth: Truth, folder: Path, **changes: Any) -> Path:
    """A copy of the run's folder with other values in config.json."""
    shutil.copytree(truth.source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": 3}, r"another model: its model\.layers\.2\..* is not there"),
        ({"num_hidden_layers": 1}, r"another model: it has no model\.layers\.1\."),
        ({"vocab_size": 8}, r"another model: its .* has shape \(8, 16\), not \(31, 16\)"),
        ({"model_type": "of-nobody", "architectures": ["X"]}, "makes no model of config.json"),
        ({"architectures": ["OfNobody"]}, "knew the architecture"),
    ],
)
def test_a_config_of_another_model_tells_nothing(
    trained: Mapping[str, Truth], changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder = changed_config(trained["trainer"], tmp_path / "in", **changes)
    with pytest.raises(AmbiguousSource, match=words):
        ckpt.open(folder)


def test_the_order_of_another_version_of_transformers_is_said(
    trained: Mapping[str, Truth], tmp_path: Path
) -> None:
    folder = changed_config(trained["trainer"], tmp_path / "in", transformers_version="4.30.1")
    assert any("transformers 4.30.1" in str(note) for note in ckpt.open(folder).notes)
    source = trained["trainer"].source
    assert not any("saved with transformers" in str(note) for note in ckpt.open(source).notes)


def test_shapes_that_leave_one_possibility_need_no_order(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = stepped(model, torch.optim.AdamW(model.parameters()))
    folder = tmp_path / "in"
    folder.mkdir()
    accelerator = Accelerator(cpu=True)
    accelerator.save(model.state_dict(), folder / "model.safetensors", safe_serialization=True)
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    ckpt.convert(folder, "torch", tmp_path / "out.pt")
    states, _ = by_name(torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"])
    for name, param in model.named_parameters():
        assert torch.equal(states[name]["exp_avg"], optimizer.state[param]["exp_avg"])


def test_shards_of_torch_files_do_not_keep_the_order_either(
    trained: Mapping[str, Truth], tmp_path: Path
) -> None:
    truth, folder = trained["accelerate_bin"], tmp_path / "in"
    shutil.copytree(truth.source, folder)
    weights = torch.load(folder / "pytorch_model.bin", weights_only=True)
    (folder / "pytorch_model.bin").unlink()
    save_torch_state_dict(weights, folder, max_shard_size=1200, safe_serialization=False)
    assert len([*folder.glob("pytorch_model-*.bin")]) > 2
    with pytest.raises(AmbiguousSource, match="do not keep the model's order"):
        ckpt.open(folder)
    ckpt.convert(folder, "torch", tmp_path / "out.pt", model=FACTORY)
    assert problems(truth, tmp_path / "out.pt") == []


def test_a_registered_object_that_looks_like_a_model_is_an_object(
    trained: Mapping[str, Truth], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    shutil.copytree(trained["accelerate_bin"].source, folder)
    torch.save({"average": torch.ones(3)}, folder / "custom_checkpoint_0.pkl")
    ckpt.convert(folder, "torch", tmp_path / "out.pt")
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert torch.equal(content["custom_checkpoint_0"]["average"], torch.ones(3))


def test_an_optimizer_file_of_no_plain_data_is_asked_for_only_where_it_is_needed(
    trained: Mapping[str, Truth], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    shutil.copytree(trained["trainer"].source, folder)
    torch.save({"state": Sampler()}, folder / "optimizer.pt")
    with pytest.raises(ckpt.CkptError, match=r"optimizer\.pt"):
        ckpt.convert(folder, "torch", tmp_path / "out.pt")
    notes = ckpt.prepare(folder, "hf", tmp_path / "hf").notes
    assert any("optimizer.pt" in str(note) for note in notes)
