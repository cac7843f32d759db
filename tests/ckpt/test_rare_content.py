"""Rare things that people's files hold: kept, or refused with the reason; never changed unsaid."""

from __future__ import annotations

import collections
import datetime
import decimal
import io
import types
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from torch import nn

import ckpt
from ckpt.cli import main


class WithExtraState(nn.Linear):
    """A module that keeps more than tensors, as fp8 layers do."""

    def get_extra_state(self) -> dict[str, float]:
        return {"scale": 0.5}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


@pytest.mark.parametrize("target", ["torch", "dcp"])
def test_extra_state_loads_with_the_model(target: str, tmp_path: Path) -> None:
    torch.save({"model": WithExtraState(2, 2).state_dict()}, tmp_path / "job.pt")
    out = ckpt.convert(tmp_path / "job.pt", target, tmp_path / "out")
    again = ckpt.convert(out, "torch", tmp_path / "again.pt")
    model = WithExtraState(2, 2)
    model.load_state_dict(torch.load(again, weights_only=True)["model"])
    assert model.scale == 0.5


def test_extra_state_that_safetensors_cannot_hold_is_told(tmp_path: Path) -> None:
    torch.save(WithExtraState(2, 2).state_dict(), tmp_path / "model.pt")
    notes = ckpt.prepare(tmp_path / "model.pt", "hf", tmp_path / "hf").notes
    assert any("_extra_state" in str(note) for note in notes)


def test_a_lazy_negative_is_refused(tmp_path: Path) -> None:
    negative = torch.randn(3, dtype=torch.cfloat).conj().imag
    torch.save({"model": {"w": negative, "b": torch.ones(1)}}, tmp_path / "job.pt")
    with pytest.raises(ckpt.CkptError, match="resolve_neg"):
        ckpt.open(tmp_path / "job.pt")


def test_plain_objects_of_python_are_no_obstacle(tmp_path: Path) -> None:
    job = {
        "model": {"w": torch.ones(2, 2)},
        "buffer": io.BytesIO(b"x"),
        "recent": collections.deque([1.0, 2.0], maxlen=3),
        "price": decimal.Decimal("1.5"),
        "config": types.SimpleNamespace(lr=0.1),
        "run": uuid.UUID(int=7),
        "when": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
        "span": range(3),
    }
    torch.save(job, tmp_path / "job.pt")
    plan = ckpt.prepare(tmp_path / "job.pt", "torch", tmp_path / "out.pt")
    assert any("recent" in note.subjects for note in plan.notes)
    plan.run()
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert content["config"] == {"lr": 0.1}


def test_numpy_text_is_refused_as_what_it_is(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    torch.save({"model": {"w": torch.ones(2)}, "names": numpy.array(["a"])}, tmp_path / "job.pt")
    with pytest.raises(ckpt.CkptError, match="no plain number"):
        ckpt.open(tmp_path / "job.pt")


def test_a_name_that_safetensors_reserves_is_refused(tmp_path: Path) -> None:
    torch.save({"__metadata__": torch.ones(2), "w": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(ckpt.CkptError, match="__metadata__"):
        ckpt.convert(tmp_path / "model.pt", "hf", tmp_path / "hf")
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


def test_a_target_network_is_not_taken_for_tied(tmp_path: Path) -> None:
    """Just synchronised with the trained one, as in Q-learning, after steps of the optimizer."""
    online, target = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)
    optimizer = torch.optim.AdamW([("online.weight", online.weight), ("online.bias", online.bias)])
    online(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    target.load_state_dict(online.state_dict())
    model = nn.ModuleDict({"online": online, "target": target})
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    ckpt.convert(tmp_path / "dcp", "hf", tmp_path / "hf")
    assert ckpt.open(tmp_path / "hf").ties == {}


def test_numbers_alone_are_not_called_certain(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "job.pt")
    notes = ckpt.prepare(tmp_path / "job.pt", "torch", tmp_path / "out.pt").notes
    assert any("is taken to be in the order of the state dict" in str(note) for note in notes)


def diff(a: Any, b: Any, tmp_path: Path, *words: str) -> int:
    for name, content in (("a.pt", a), ("b.pt", b)):
        torch.save(content, tmp_path / name)
    paths = [str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    return int(CliRunner().invoke(main, ["diff", *paths, *words]).exit_code)


INFINITE = torch.tensor([[float("inf"), 2.0]])


@pytest.mark.parametrize("other", [torch.tensor([[1.0, 2.0]]), -INFINITE])
def test_infinite_numbers_are_within_no_tolerance(other: torch.Tensor, tmp_path: Path) -> None:
    assert diff({"w": INFINITE}, {"w": other}, tmp_path, "--rtol", "1e9") == 1
    assert diff({"w": other}, {"w": INFINITE}, tmp_path, "--rtol", "1e9") == 1
    assert diff({"w": INFINITE}, {"w": INFINITE}, tmp_path, "--rtol", "1e-5") == 0


def test_diff_tells_what_only_one_side_has(tmp_path: Path) -> None:
    model = {"model": {"w": torch.ones(2)}}
    assert diff({**model, "epoch": 1}, model, tmp_path) == 1
    assert diff(model, {**model, "epoch": 1}, tmp_path) == 1
    assert diff({**model, "best": float("nan")}, {**model, "best": float("nan")}, tmp_path) == 0


@pytest.mark.parametrize("target", ["torch", "hf"])
def test_an_output_that_is_no_file_or_folder_is_refused(target: str, tmp_path: Path) -> None:
    import os

    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ckpt.CkptError, match="neither a file nor a folder"):
        ckpt.convert(tmp_path / "model.pt", target, tmp_path / "pipe", overwrite=True)


def test_an_output_inside_the_source_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    folder = ckpt.convert(tmp_path / "model.pt", "dcp", tmp_path / "dcp")
    with pytest.raises(ckpt.CkptError, match="part of it"):
        ckpt.convert(folder, "hf", folder / "hf")


def test_an_order_that_is_no_text_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    words = ["convert", str(tmp_path / "model.pt"), "--to", "torch", "--param-order"]
    result = CliRunner().invoke(main, [*words, str(tmp_path / "model.pt")])
    assert (result.exit_code, "not a text file" in result.stderr) == (2, True)


def test_keys_that_are_numbers_are_no_obstacle(tmp_path: Path) -> None:
    torch.save({0: {"w": torch.ones(2, 2)}, 1: "note"}, tmp_path / "job.pt")
    ckpt.convert(tmp_path / "job.pt", "torch", tmp_path / "out.pt")
    assert list(torch.load(tmp_path / "out.pt", weights_only=True)["model"]) == ["w"]


def test_complex_weights_are_parameters(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(3, 2, dtype=torch.cfloat))
    optimizer = torch.optim.Adam([weight])
    weight.abs().sum().backward()
    optimizer.step()
    state = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "job.pt")
    found = ckpt.open(tmp_path / "job.pt")
    assert (list(found.params), found.groups[0].fqns) == (["w"], ("w",))


def test_a_chosen_model_is_told_to_have_the_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    state = {"model": model.state_dict(), "ema": model.state_dict()}
    torch.save({**state, "optimizer": optimizer.state_dict()}, tmp_path / "job.pt")
    notes = ckpt.prepare(tmp_path / "job.pt", "torch", tmp_path / "out.pt", key="ema").notes
    told = [str(note) for note in notes]
    assert any("is taken to be that of ema" in note for note in told)
    assert any("renamed: model -> model_" in note for note in told)


def test_a_tag_is_for_deepspeed_folders(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")
    with pytest.raises(ckpt.CkptError, match="has no tags"):
        ckpt.open(tmp_path / "model.pt", tag="global_step3")
