"""What `--to hf` writes, loaded by transformers and safetensors themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import FIXTURES, REPO
from safetensors import safe_open
from safetensors.torch import load_model, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from truth import Truth

import ckpt
from ckpt.cli import main

GPT2 = FIXTURES / "ds019_t213-hf_trainer_zero3_w2"
CONFIG = GPT2 / "checkpoint-3"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def convert_gpt2(out: Path, **options: Any) -> Path:
    return ckpt.convert(CONFIG, "hf", out, hf_config=CONFIG, **options)


def test_transformers_loads_a_zero3_checkpoint(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(convert_gpt2(tmp_path / "hf"))
    state = model.state_dict()
    assert Truth.load(GPT2).weight_problems(state) == []
    assert state["lm_head.weight"].data_ptr() == state["transformer.wte.weight"].data_ptr()


def test_transformers_loads_shards_through_the_index(tmp_path: Path) -> None:
    folder = convert_gpt2(tmp_path / "hf", max_shard_bytes=20_000)
    files = sorted(folder.glob("*.safetensors"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = {name for file in files for name in safe_open(file, "pt").keys()}  # noqa: SIM118
    assert len(files) >= 2
    assert set(index["weight_map"]) == names
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for tensor in Truth.load(GPT2).weights().values()
    )
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert Truth.load(GPT2).weight_problems(model.state_dict()) == []


def test_no_shard_is_larger_than_asked_unless_one_tensor_is(tmp_path: Path) -> None:
    folder = convert_gpt2(tmp_path / "hf", max_shard_bytes=20_000)
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as shard:
            sizes = [shard.get_tensor(name).nbytes for name in shard.keys()]  # noqa: SIM118
        assert sum(sizes) <= 20_000 or len(sizes) == 1


def test_the_header_says_pt_and_remembers_ties(tmp_path: Path) -> None:
    folder = convert_gpt2(tmp_path / "hf")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "lm_head.weight": "transformer.wte.weight"}


def test_ties_come_back_in_a_later_conversion(tmp_path: Path) -> None:
    folder = convert_gpt2(tmp_path / "hf", max_shard_bytes=20_000)
    file = ckpt.convert(folder, "torch", tmp_path / "model.pt")
    model = torch.load(file, weights_only=True)["model"]
    assert Truth.load(GPT2).weight_problems(model) == []
    assert model["lm_head.weight"].data_ptr() == model["transformer.wte.weight"].data_ptr()
    again = ckpt.convert(file, "hf", tmp_path / "again")
    assert list(ckpt.diff(ckpt.open(folder), ckpt.open(again))) == []


def test_safetensors_own_load_model_takes_the_file(tmp_path: Path) -> None:
    folder = convert_gpt2(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.transformer.wte.weight.zero_()
    load_model(model, folder / "model.safetensors")
    assert Truth.load(GPT2).weight_problems(model.state_dict()) == []


def test_config_generation_config_and_tokenizer_go_along(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    for name in ("config.json", "generation_config.json"):
        (config / name).write_bytes((CONFIG / name).read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        (config / name).write_text("{}")
    (config / "pytorch_model.bin").write_text("not taken along")
    folder = ckpt.convert(CONFIG, "hf", tmp_path / "hf", hf_config=config)
    assert sorted(file.name for file in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_bf16_weights_load_as_bf16(tmp_path: Path) -> None:
    folder = convert_gpt2(tmp_path / "hf", dtype="bf16")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    want = {name: value.bfloat16() for name, value in Truth.load(GPT2).weights().items()}
    state = model.state_dict()
    assert [name for name in want if not torch.equal(state[name], want[name])] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_layer": 3}, "the checkpoint lacks transformer.h.2."),
        ({"n_layer": 1}, "the config's model does not have transformer.h.1."),
        ({"n_positions": 99}, "the shape differs for transformer.wpe.weight"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    change: dict[str, int], words: str, tmp_path: Path
) -> None:
    config = tmp_path / "config"
    config.mkdir()
    content = json.loads((CONFIG / "config.json").read_text()) | change
    (config / "config.json").write_text(json.dumps(content))
    result = run("convert", CONFIG, "--to", "hf", "-o", tmp_path / "hf", "--hf-config", config)
    assert (result.exit_code, words in result.stderr) == (2, True)
    assert not (tmp_path / "hf").exists()


def test_a_config_without_architectures_is_a_causal_language_models(tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    config.architectures = None
    config.save_pretrained(tmp_path / "config")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    result = run("convert", tmp_path / "model.pt", "--to", "hf", "-o", tmp_path / "hf",
                 "--hf-config", tmp_path / "config")  # fmt: skip
    assert (result.exit_code, "not verified" in result.output) == (0, False)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in model.state_dict().items())


def test_the_demo_ends_with_equal_logits() -> None:
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    shown = subprocess.run(
        ["bash", "docs/demo/run.sh"],
        cwd=REPO, capture_output=True, text=True, timeout=240, check=False,
        env={"PATH": path, "HOME": str(Path.home())},
    )  # fmt: skip
    assert shown.returncode == 0, shown.stdout[-3000:] + shown.stderr[-3000:]
    assert "$ ckpt convert RUN --to hf --hf-config CONFIG -o HF" in shown.stdout


# --- the order of names -------------------------------------------------------------------------


class Unsorted(nn.Module):
    """Weights of equal shapes whose names are not in the alphabet's order; one is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.also = nn.Linear(3, 3, bias=False)
        self.also.weight = self.second.weight


def saved_unsorted(folder: Path) -> Path:
    """As transformers saves a model: every tied weight once."""
    folder.mkdir()
    torch.manual_seed(0)
    weights = {name: value.detach() for name, value in Unsorted().named_parameters()}
    save_file(dict(sorted(weights.items())), folder / "model.safetensors")
    return folder


def test_a_model_gives_the_order_and_the_ties(tmp_path: Path) -> None:
    source = saved_unsorted(tmp_path / "hf")
    assert [*ckpt.open(source).params] == ["first.weight", "second.weight"]
    found = ckpt.open(source, model=f"{__name__}:Unsorted")
    assert [*found.params] == ["second.weight", "first.weight"]
    assert found.order == ("second.weight", "first.weight", "also.weight")
    assert found.ties == {"also.weight": "second.weight"}


@pytest.mark.parametrize("target", ["zero1", "zero2", "zero3"])
def test_shards_are_in_the_models_order_where_it_is_known(target: str, tmp_path: Path) -> None:
    source = saved_unsorted(tmp_path / "hf")
    unsure = ckpt.prepare(source, target, tmp_path / "out", world_size=2)
    assert any("not in the model's order, which --model gives" in n.detail for n in unsure.notes)
    model = f"{__name__}:Unsorted"
    shards = ckpt.convert(source, target, tmp_path / "out", world_size=2, model=model)
    first = min(shards.glob("*/*_model_states.pt"))
    (shapes,) = torch.load(first, weights_only=False)["param_shapes"]
    assert [*shapes] == ["second.weight", "first.weight"]
