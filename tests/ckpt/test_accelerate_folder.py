"""accelerate's and HF Trainer's FSDP folders, against the truth of the runs that wrote them.

The fresh ones are written by accelerate's own `save_fsdp_model`, `save_fsdp_optimizer` and
`save_accelerator_state` (accelerate 1.15) in the training processes; its Accelerator wants a GPU
for FSDP and is not used. The fixture was written by an Accelerator that was told the CPU is one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from truth import Truth, by_name

import ckpt

Saves = Mapping[tuple[str, int], Truth]
WAYS = ["fsdp1-accelerate", "fsdp2-accelerate", "fsdp2-accelerate_full"]
REAL = FIXTURES / "ds019_t213-accelerate_fsdp1_w2"


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


def test_of_two_models_one_is_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(REAL / "ckpt", folder)
    shutil.copytree(folder / "pytorch_model_fsdp_0", folder / "pytorch_model_fsdp_1")
    with pytest.raises(ckpt.CkptError, match="--key: model, model_1"):
        ckpt.open(folder)
    assert ckpt.open(folder, key="model_1", weights_only=True).params.keys()
