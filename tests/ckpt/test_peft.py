"""PEFT adapters: which weights, under which names.

peft itself is not installed; its names are those of `get_peft_model_state_dict` (peft
src/peft/utils/save_and_load.py). The ZeRO-3 shards are DeepSpeed's, of a net with LoRA of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from safetensors.torch import load_file, save_file
from truth import Truth

import ckpt

LAYER = "base_model.model.h.0.attn.q_proj"
WEIGHTS = {
    f"{LAYER}.base_layer.weight": torch.ones(4, 4),
    f"{LAYER}.lora_A.default.weight": torch.full((2, 4), 2.0),
    f"{LAYER}.lora_B.default.weight": torch.full((4, 2), 3.0),
    f"{LAYER}.lora_magnitude_vector.default.weight": torch.full((4,), 4.0),
    "base_model.model.wte.lora_embedding_A.default": torch.full((2, 9), 5.0),
    "base_model.model.score.original_module.weight": torch.full((3, 4), 6.0),
    "base_model.model.score.modules_to_save.default.weight": torch.full((3, 4), 7.0),
}
PEFT = {
    f"{LAYER}.lora_A.weight": 2.0,
    f"{LAYER}.lora_B.weight": 3.0,
    f"{LAYER}.lora_magnitude_vector": 4.0,
    "base_model.model.wte.lora_embedding_A": 5.0,
    "base_model.model.score.weight": 7.0,
}
CONFIG = {"peft_type": "LORA", "r": 2, "bias": "none"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(WEIGHTS, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_an_adapter_has_pefts_names_and_its_files(
    source: Path, config: Path, tmp_path: Path
) -> None:
    ckpt.convert(source, "peft", tmp_path / "out", hf_config=config)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert {name: tensor.unique().item() for name, tensor in written.items()} == PEFT
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text()) == CONFIG
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_what_stays_behind_is_said(source: Path, tmp_path: Path) -> None:
    notes = ckpt.prepare(source, "peft", tmp_path / "out").notes
    base = next(note for note in notes if note.detail.startswith("weights of the base model"))
    assert base.subjects == (
        f"{LAYER}.base_layer.weight",
        "base_model.model.score.original_module.weight",
    )
    assert any(note.subjects == ("adapter_config.json",) for note in notes)


def test_zero_3_shards_become_an_adapter(tmp_path: Path) -> None:
    truth = Truth.load(FIXTURES / "ds019_t213-zero3_lora_w2")
    ckpt.convert(truth.source, "peft", tmp_path / "out")
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    names = {f"base_model.model.{name}": name for name in truth.weights() if "lora_" in name}
    assert written.keys() == names.keys()
    assert all(torch.equal(written[new], truth.tensors[old]) for new, old in names.items())


def test_what_was_trained_beside_the_adapter_wants_consent(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"lora_A": torch.nn.Linear(4, 2), "head": torch.nn.Linear(2, 1)})
    net = torch.nn.ModuleDict({"q": model})
    optimizer = torch.optim.AdamW(net.named_parameters())
    content = {"model": net.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(ckpt.CkptError, match=r"q\.head\.weight.*trained, and not part"):
        ckpt.convert(tmp_path / "a.pt", "peft", tmp_path / "out")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_an_adapter_is_read_and_written_again(name: str, config: Path, tmp_path: Path) -> None:
    tensors = {name: torch.full((2, 3), value) for name, value in PEFT.items()}
    save = save_file if name.endswith("safetensors") else torch.save
    save(tensors, config / name)
    assert ckpt.open(config).origin.format == "peft"
    ckpt.convert(config, "peft", tmp_path / "again")
    written = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert {n: t.unique().item() for n, t in written.items()} == PEFT
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text()) == CONFIG
    ckpt.convert(config, "hf", tmp_path / "hf")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == PEFT.keys()


def test_a_model_without_lora_has_no_adapter(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2, 2)}, tmp_path / "a.pt")
    with pytest.raises(ckpt.CkptError, match="holds no LoRA weights"):
        ckpt.convert(tmp_path / "a.pt", "peft", tmp_path / "out")


def test_several_adapters_are_not_mixed(source: Path, tmp_path: Path) -> None:
    more = {f"{LAYER}.lora_A.other.weight": torch.ones(2, 4)}
    torch.save(WEIGHTS | more, source)
    with pytest.raises(ckpt.CkptError, match=r"several adapters \(default, other\)"):
        ckpt.convert(source, "peft", tmp_path / "out")


def test_a_config_folder_without_an_adapters_config_is_refused(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ckpt.CkptError, match=r"no adapter_config\.json there"):
        ckpt.convert(source, "peft", tmp_path / "out", hf_config=tmp_path / "empty")
