"""Layouts of ZeRO files that the training runs of these tests do not produce.

Small changes to files that DeepSpeed wrote, each as the releases named in the tests write them.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ckpt

ZERO2 = FIXTURES / "ds009_t21-zero2_rich_w2" / "ckpt"
ZERO3 = FIXTURES / "ds009_t21-zero3_rich_w2" / "ckpt"


def changed(source: Path, tmp_path: Path, pattern: str, change: Callable[[Any], None]) -> Path:
    """A copy in which `change` was applied to the content of the files that match."""
    copy = Path(shutil.copytree(source, tmp_path / "source"))
    for file in copy.rglob(pattern):
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)
    return copy


def test_a_state_that_is_not_cut_like_the_parameters_is_refused_by_name(tmp_path: Path) -> None:
    """Muon without offload keeps whole momentum tensors (deepspeed 0.19 stage_1_and_2.py)."""

    def keep_whole_momentum(content: Any) -> None:
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"]
        state[0]["momentum_buffer"] = torch.zeros(7)

    source = changed(ZERO2, tmp_path, "*optim_states.pt", keep_whole_momentum)
    with pytest.raises(ckpt.CkptError, match=r"'momentum_buffer' is not cut .* --weights-only"):
        ckpt.convert(source, "torch", tmp_path / "out.pt")
    ckpt.convert(source, "hf", tmp_path / "hf")
    ckpt.convert(source, "torch", tmp_path / "out.pt", weights_only=True)


def test_quantised_frozen_weights_are_refused(tmp_path: Path) -> None:
    """zero_quantized_nontrainable_weights saves int8 fragments and no scale."""

    def quantise(content: Any) -> None:
        fragments = content["frozen_param_fragments"]
        for name, value in fragments.items():
            fragments[name] = value.to(torch.int8)

    source = changed(ZERO3, tmp_path, "*model_states.pt", quantise)
    with pytest.raises(ckpt.CkptError, match=r"blocks\.0\.fc\.weight is quantised"):
        ckpt.open(source)


def test_a_fragment_missing_on_one_rank_is_damage(tmp_path: Path) -> None:
    def forget(content: Any) -> None:
        content["frozen_param_fragments"].pop("blocks.1.ln.bias")

    source = changed(ZERO3, tmp_path, "zero_pp_rank_1_*model_states.pt", forget)
    with pytest.raises(ckpt.CkptError, match=r"blocks\.1\.ln\.bias is missing on some ranks"):
        ckpt.open(source)


def test_parameters_without_elements_are_kept(tmp_path: Path) -> None:
    """DeepSpeed takes them for tied to one another, since their addresses are all 0."""

    def add_empty(content: Any) -> None:
        content["module"]["empty_a"] = torch.zeros(0, 3)
        content["module"]["empty_b"] = torch.zeros(0, 3)
        content["shared_params"]["empty_b"] = "empty_a"

    source = changed(ZERO2, tmp_path, "*model_states.pt", add_empty)
    ckpt.convert(source, "torch", tmp_path / "out.pt")
    model = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert (model["empty_a"].shape, model["empty_b"].shape) == ((0, 3), (0, 3))


def test_a_tied_name_whose_owner_was_not_saved_is_told(tmp_path: Path) -> None:
    """A frozen owner under exclude_frozen_parameters, in releases that keep the alias."""

    def tie_to_nobody(content: Any) -> None:
        content["module"]["copy.weight"] = torch.empty(0)
        content["shared_params"]["copy.weight"] = "gone.weight"

    source = changed(ZERO3, tmp_path, "*model_states.pt", tie_to_nobody)
    with pytest.raises(ckpt.CkptError, match=r"copy\.weight.*--allow-loss"):
        ckpt.convert(source, "torch", tmp_path / "out.pt")
    ckpt.convert(source, "torch", tmp_path / "out.pt", allow_loss=True)
    assert "copy.weight" not in torch.load(tmp_path / "out.pt", weights_only=True)["model"]


def test_names_are_cleaned_on_each_side(tmp_path: Path) -> None:
    """Under activation checkpointing `param_shapes` has wrapper names and `module` has not."""

    def wrap(content: Any) -> None:
        content["param_shapes"] = [
            {name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module."): shape
             for name, shape in group.items()}
            for group in content["param_shapes"]
        ]  # fmt: skip

    source = changed(ZERO3, tmp_path, "*model_states.pt", wrap)
    found = ckpt.open(source)
    assert list(found.params) == list(ckpt.open(ZERO3).params)
    assert found.origin.stripped == ("_checkpoint_wrapped_module.",)


def test_nvme_offload_is_refused_by_name(tmp_path: Path) -> None:
    source = Path(shutil.copytree(ZERO3, tmp_path / "source"))
    (source / "global_step3" / "offloaded_tensors").mkdir()
    with pytest.raises(ckpt.CkptError, match="NVMe"):
        ckpt.open(source)


def test_a_rank_in_two_precisions_is_two_saves(tmp_path: Path) -> None:
    source = Path(shutil.copytree(ZERO3, tmp_path / "source"))
    file = next(source.rglob("zero_pp_rank_0_*optim_states.pt"))
    shutil.copy(file, file.with_name(f"bf16_{file.name}"))
    with pytest.raises(ckpt.CkptError, match="both of rank 0"):
        ckpt.open(source)


def test_round_robin_in_the_config_alone_moves_nothing(tmp_path: Path) -> None:
    def claim(content: Any) -> None:
        content["ds_config"]["zero_optimization"]["round_robin_gradients"] = True

    source = changed(ZERO2, tmp_path, "mp_rank_00_model_states.pt", claim)
    assert ckpt.open(source).groups == ckpt.open(ZERO2).groups


def test_deepspeeds_own_adam_loads_into_torchs_adamw_through_dcp(tmp_path: Path) -> None:
    """FusedAdam's groups lack options that torch's AdamW asks `dcp.load` for."""

    def as_fused_adam(content: Any) -> None:
        for group in content["optimizer_state_dict"]["optimizer_state_dict"]["param_groups"]:
            for name in ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"):
                group.pop(name, None)
            group["bias_correction"] = True

    source = changed(ZERO3, tmp_path, "*optim_states.pt", as_fused_adam)
    plan = ckpt.prepare(source, "fsdp", tmp_path / "dcp")
    assert any("torch.optim.AdamW has these options" in str(note) for note in plan.notes)
    plan.run()
    weight = ckpt.open(source).params["emb.weight"]
    model = nn.ModuleDict({"emb": nn.Embedding(*weight.shape)})
    optimizer = torch.optim.AdamW(model.parameters())
    model["emb"](torch.tensor([0])).sum().backward()
    optimizer.step()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert state["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)


def test_how_an_old_torch_decayed_weights_is_not_made_up(tmp_path: Path) -> None:
    """Groups of torch 2.1 do not say whether they are those of Adam or of AdamW."""
    source = FIXTURES / "ds009_t21-fsdp1_dcp_rich_uop_w2" / "ckpt"
    plan = ckpt.prepare(source, "dcp", tmp_path / "dcp")
    assert any("allow_partial_load" in str(note) for note in plan.notes)
    plan.run()
    options = ckpt.open(tmp_path / "dcp").groups[0].options
    assert "decoupled_weight_decay" not in options


def test_a_stateless_optimizer_comes_back_from_dcp(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    content = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(content, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    ckpt.convert(tmp_path / "dcp", "torch", tmp_path / "out.pt")
    saved = torch.load(tmp_path / "out.pt", weights_only=True)
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_frozen_copy_in_a_torch_file_is_not_taken_for_tied(tmp_path: Path) -> None:
    """A teacher equals its student before the first step; storages tell them apart."""
    student = nn.Linear(4, 3, bias=False)
    model = {"student.weight": student.weight.detach(), "teacher.weight": student.weight.clone()}
    optimizer = torch.optim.AdamW([("student.weight", student.weight)])
    torch.save({"model": model, "optimizer": optimizer.state_dict()}, tmp_path / "job.pt")
    ckpt.convert(tmp_path / "job.pt", "torch", tmp_path / "out.pt")
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)["model"]) == list(model)
