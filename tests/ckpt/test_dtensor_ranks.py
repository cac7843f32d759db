"""Files that every rank saved with torch.save, against the truth of the runs that wrote them."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import FIXTURES
from safetensors.torch import load_file
from torch import nn
from training.model import RICH, Block, build
from truth import Truth, by_name

import ckpt
from ckpt.chunks import Chunk
from ckpt.formats._ranks import shard_ranks

Saves = Mapping[tuple[str, int], Truth]

BY_NAME = [
    *[(f"{run}-by_name", world) for run in ("fsdp1", "fsdp1_mesh", "fsdp2") for world in (2, 3)],
    ("fsdp1_hybrid-by_name", 4),
    ("fsdp2-accelerate_ranks", 2),
    ("fsdp2-accelerate_ranks", 3),
]
BY_NUMBER = [
    *[
        (save, world)
        for save in ("fsdp2-by_number", "fsdp2_dim1-by_number", "fsdp2-verl")
        for world in (2, 3)
    ],
    *[(save, world) for save in ("fsdp1-verl", "fsdp1-raw", "fsdp1_mesh-verl") for world in (2, 3)],
    ("fsdp2_hybrid-by_number", 4),
    ("fsdp1_hybrid-raw", 4),
]
FLAT_UNITS = [
    *[(save, world) for save in ("fsdp1_flat-raw", "fsdp1_flat-verl") for world in (2, 3)],
    ("fsdp1_flat_hybrid-verl", 4),
]
NAMED = [("fsdp1-named", 3), ("fsdp1_flat-named", 3), ("fsdp1_flat_hybrid-named", 4)]
SHARDED = FIXTURES / "ds019_t213-fsdp2_shardpt_w2" / "ckpt"


def problems(file: Path, truth: Truth) -> list[str]:
    content = torch.load(file, weights_only=True)
    found = truth.weight_problems(content["model"])
    return found + truth.optimizer_problems(*by_name(content["optimizer"]))


@pytest.mark.parametrize("save", BY_NAME, ids=lambda save: f"{save[0]}-{save[1]}")
def test_states_by_name_keep_everything(
    fsdp_saves: Saves, save: tuple[str, int], tmp_path: Path
) -> None:
    truth = fsdp_saves[save]
    assert ckpt.open(truth.source).origin.format == "fsdp-ranks"
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt")
    assert problems(tmp_path / "out.pt", truth) == []


@pytest.mark.parametrize("save", BY_NUMBER, ids=lambda save: f"{save[0]}-{save[1]}")
def test_states_by_number_keep_everything_when_their_order_is_given(
    fsdp_saves: Saves, save: tuple[str, int], tmp_path: Path
) -> None:
    truth = fsdp_saves[save]
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt", param_order=truth.order)
    assert problems(tmp_path / "out.pt", truth) == []


@pytest.mark.parametrize("save", [("fsdp1-by_name", 3), ("fsdp2-by_name", 3)])
def test_a_dcp_folder_and_safetensors_get_the_same(
    fsdp_saves: Saves, save: tuple[str, int], tmp_path: Path
) -> None:
    truth = fsdp_saves[save]
    ckpt.convert(truth.source, "dcp", tmp_path / "dcp")
    ckpt.convert(tmp_path / "dcp", "torch", tmp_path / "out.pt")
    assert problems(tmp_path / "out.pt", truth) == []
    metadata = dcp.FileSystemReader(str(tmp_path / "dcp")).read_metadata()
    assert "optimizer.state.emb.weight.exp_avg" in metadata.state_dict_metadata
    ckpt.convert(truth.source, "hf", tmp_path / "hf")
    written = load_file(tmp_path / "hf" / "model.safetensors")
    restored = written | {a: written[o] for a, o in truth.meta["tied"].items()}
    assert truth.weight_problems(restored) == []


def test_tied_weights_of_fsdp2_are_seen(fsdp_saves: Saves) -> None:
    found = ckpt.open(fsdp_saves["fsdp2-by_name", 3].source)
    assert found.ties == {"head.weight": "emb.weight"}
    assert found.origin.world_size == 3


def test_buffers_that_differ_are_those_of_rank_0_and_that_is_said(
    fsdp_saves: Saves, tmp_path: Path
) -> None:
    truth = fsdp_saves["fsdp2-by_name", 2]
    conversion = ckpt.prepare(truth.source, "torch", tmp_path / "out.pt")
    told = next(n for n in conversion.notes if n.kind.value == "one rank's")
    assert told.subjects == ("model.bn.running_mean", "model.bn.running_var")
    conversion.run()
    written = torch.load(tmp_path / "out.pt", weights_only=True)["model"]
    assert torch.equal(written["bn.running_mean"], truth.tensors["buffer/bn.running_mean"])


def test_verls_scheduler_and_random_state_go_along(fsdp_saves: Saves, tmp_path: Path) -> None:
    truth = fsdp_saves["fsdp2-verl", 3]
    conversion = ckpt.prepare(truth.source, "torch", tmp_path / "out.pt", param_order=truth.order)
    assert any(n.kind.value == "by rank" and n.subjects == ("rng",) for n in conversion.notes)
    conversion.run()
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert content["lr_scheduler"]["last_epoch"] == 3
    for rank, kept in enumerate(content["by_rank"]["rng"]):
        saved = torch.load(truth.source / f"extra_state_world_size_3_rank_{rank}.pt")
        assert torch.equal(kept["cpu"], saved["rng"]["cpu"])


# --- optimizer.state_dict() of FSDP1 ------------------------------------------------------------


@pytest.mark.parametrize("save", FLAT_UNITS, ids=lambda save: f"{save[0]}-{save[1]}")
def test_flat_parameters_of_an_optimizer_are_inferred_from_their_sizes(
    fsdp_saves: Saves, save: tuple[str, int], tmp_path: Path
) -> None:
    truth = fsdp_saves[save]
    conversion = ckpt.prepare(truth.source, "torch", tmp_path / "out.pt")
    told = next(note for note in conversion.notes if "units of FSDP" in note.detail)
    assert told.detail.endswith("their sizes fit wrapping blocks.* alone")
    assert told.kind.value == "not verified" and told.of_job
    conversion.run()
    assert problems(tmp_path / "out.pt", truth) == []
    ckpt.convert(truth.source, "dcp", tmp_path / "dcp")
    ckpt.convert(tmp_path / "dcp", "torch", tmp_path / "again.pt")
    assert problems(tmp_path / "again.pt", truth) == []


@pytest.mark.parametrize("save", NAMED, ids=lambda save: f"{save[0]}-{save[1]}")
def test_flat_parts_that_carry_names_go_by_them(
    fsdp_saves: Saves, save: tuple[str, int], tmp_path: Path
) -> None:
    truth = fsdp_saves[save]
    conversion = ckpt.prepare(truth.source, "torch", tmp_path / "out.pt")
    assert not any("numbers" in note.detail or "units" in note.detail for note in conversion.notes)
    conversion.run()
    assert problems(tmp_path / "out.pt", truth) == []


def half() -> nn.Module:
    """The net of the fresh runs with one block frozen."""
    block = tuple(f"blocks.1.{name}" for name, _ in Block().named_parameters())
    return build(replace(RICH, frozen=block))


@pytest.mark.parametrize(
    ("save", "model"),
    [("fsdp1-raw", "rich"), ("fsdp1_flat_frozen-raw", "half"), ("fsdp1_flat_frozen-named", "half")],
)
def test_the_model_tells_which_parameters_have_flat_parts(
    fsdp_saves: Saves, save: str, model: str, tmp_path: Path
) -> None:
    truth = fsdp_saves[save, 2]
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt", model=f"{__name__}:{model}")
    assert problems(tmp_path / "out.pt", truth) == []


@pytest.mark.parametrize(
    ("save", "words"),
    [
        ("fsdp1_flat_frozen-raw", r"fit several ways.*--model tells.*optim_state_dict.*--weights"),
        ("fsdp1-raw", r"order and shapes do not tell.*--param-order"),
    ],
)
def test_flat_parts_that_could_be_several_are_refused_and_the_weights_are_not(
    fsdp_saves: Saves, save: str, words: str, tmp_path: Path
) -> None:
    truth = fsdp_saves[save, 2]
    with pytest.raises(ckpt.CkptError, match=words):
        ckpt.convert(truth.source, "torch", tmp_path / "out.pt")
    seen = ckpt.open(truth.source, need_optimizer=False)
    assert any(n.kind.value == "dropped" and n.subjects == ("optimizer",) for n in seen.notes)
    assert not seen.has_optimizer
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt", weights_only=True)
    assert truth.weight_problems(torch.load(tmp_path / "out.pt", weights_only=True)["model"]) == []


def shorter(state: dict[str, Any]) -> None:
    state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"][1:], state["exp_avg_sq"][1:]


def of_half_precision(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"].bfloat16()


def factored(state: dict[str, Any]) -> None:
    state["exp_avg_sq_row"] = state.pop("exp_avg_sq")[:7].clone()


def gone(state: dict[str, Any]) -> None:
    state.clear()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shorter, r"add up neither to the weights.*nor to units.*two saves.*--weights-only"),
        (of_half_precision, r"exp_avg is bfloat16 and float32 on different ranks: files of two"),
        (factored, r"states of number 1 are not one flat run of elements each.*exp_avg_sq_row"),
        (gone, r"add up neither to the weights"),
    ],
)
def test_flat_parts_of_two_saves_are_refused(
    fsdp_saves: Saves, change: Any, words: str, tmp_path: Path
) -> None:
    source = shutil.copytree(fsdp_saves["fsdp1_flat-verl", 3].source, tmp_path / "save")
    file = source / "optim_world_size_3_rank_2.pt"
    edited(file, file, lambda content: change(content["state"][1]))
    with pytest.raises(ckpt.CkptError, match=words):
        ckpt.open(source)


def test_the_optimizers_file_of_every_rank_is_needed(fsdp_saves: Saves, tmp_path: Path) -> None:
    source = shutil.copytree(fsdp_saves["fsdp1_flat-verl", 3].source, tmp_path / "save")
    (source / "optim_world_size_3_rank_1.pt").unlink()
    with pytest.raises(ckpt.CkptError, match=r"optimizer of rank 1 is not there"):
        ckpt.open(source)


def test_replicas_are_the_ranks_that_have_the_same_of_every_weight() -> None:
    top, low, nothing = (Chunk((0,), (2,)),), (Chunk((2,), (1,)),), ()
    assert shard_ranks({0: [top], 1: [low], 2: [top], 3: [low]}) == [0, 1]
    assert shard_ranks({0: [top], 1: [top], 2: [low], 3: [low]}) == [0, 2]
    assert shard_ranks({3: [nothing], 2: [nothing], 1: [low], 0: [top]}) == [0, 1, 2, 3]


def test_a_state_beside_sharded_ones_that_differs_is_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        file = f"rank{rank}.pt"
        edited(SHARDED / file, tmp_path / file, lambda c, rank=rank: c["optim"]["state"].update(
            {0: {"step": 3.0, "exp_avg": torch.full((7,), float(rank))}}))  # fmt: skip
    with pytest.raises(ckpt.CkptError, match=r"optim\.state.*differs between ranks.*not of one"):
        ckpt.open(tmp_path)


def test_flat_parts_belong_to_the_rank_of_the_weights_beside_them(
    fsdp_saves: Saves, tmp_path: Path
) -> None:
    truth = fsdp_saves["fsdp1_flat-verl", 2]
    source = tmp_path / "save"
    source.mkdir()
    for file in truth.source.iterdir():
        head, _, rank = file.stem.rpartition("_")
        shutil.copy(file, source / f"{head}_{1 - int(rank)}.pt")
    ckpt.convert(source, "torch", tmp_path / "out.pt")
    assert problems(tmp_path / "out.pt", truth) == []


# --- LOCAL_STATE_DICT ---------------------------------------------------------------------------


def rich() -> nn.Module:
    """The net of the fresh runs."""
    return build(RICH)


def trained() -> nn.Module:
    """The same with nothing frozen."""
    return build(replace(RICH, frozen=()))


def older() -> nn.Module:
    """The net of the fixtures."""
    block = {"ln": nn.LayerNorm(13), "fc": nn.Linear(13, 52), "proj": nn.Linear(52, 13)}
    blocks = nn.ModuleList(nn.ModuleDict(copy.deepcopy(block)) for _ in range(2))
    head = nn.Linear(13, 31, bias=False)
    return nn.ModuleDict({"emb": nn.Embedding(31, 13), "blocks": blocks, "head": head})


def smaller() -> nn.Module:
    """Another net with the same names as far as they go."""
    return nn.ModuleDict({"emb": nn.Embedding(31, 12), "blocks": nn.ModuleList()})


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("run", ["fsdp1", "fsdp1_flat"])
def test_flat_parameters_are_taken_apart_by_the_model(
    fsdp_saves: Saves, run: str, world_size: int, tmp_path: Path
) -> None:
    truth = fsdp_saves[f"{run}-local", world_size]
    model = f"{__name__}:{'rich' if run == 'fsdp1' else 'trained'}"
    ckpt.convert(truth.source, "torch", tmp_path / "out.pt", model=model)
    assert problems(tmp_path / "out.pt", truth) == []


@pytest.mark.parametrize("case", ["fsdp1_local_uop_w2", "fsdp1_local_nouop_w3"])
def test_flat_parameters_with_and_without_their_own_are_taken_apart(
    case: str, tmp_path: Path
) -> None:
    truth = Truth.load(FIXTURES / f"ds019_t213-{case}")
    conversion = ckpt.prepare(truth.source, "torch", tmp_path / "out.pt", model=f"{__name__}:older")
    assert any("those of --model" in note.detail for note in conversion.notes)
    conversion.run()
    assert problems(tmp_path / "out.pt", truth) == []


def test_flat_parameters_without_the_model_are_refused(fsdp_saves: Saves) -> None:
    with pytest.raises(ckpt.CkptError, match=r"flat parameters without names.*--model"):
        ckpt.open(fsdp_saves["fsdp1-local", 2].source)


@pytest.mark.parametrize("model", ["rich", "smaller"])
def test_flat_parameters_of_another_model_are_refused(model: str) -> None:
    source = FIXTURES / "ds019_t213-fsdp1_local_nouop_w3" / "ckpt"
    with pytest.raises(ckpt.CkptError, match=r"flat parameter.*Is --model the model"):
        ckpt.open(source, model=f"{__name__}:{model}")


# --- which files --------------------------------------------------------------------------------


def test_the_files_of_two_saves_want_one_to_be_named(tmp_path: Path) -> None:
    for rank in (0, 1):
        for step in (10, 20):
            shutil.copy(SHARDED / f"rank{rank}.pt", tmp_path / f"step{step}_rank{rank}.pt")
    with pytest.raises(ckpt.CkptError, match=r"several saves.*step10_rank0\.pt, step20_rank0\.pt"):
        ckpt.open(tmp_path)
    found = ckpt.open(tmp_path / "step20_rank1.pt")
    assert found.origin.world_size == 2
    used = {Path(chunk.record.path).name for _, t in found.tensors() for chunk in t.chunks}
    assert used == {"step20_rank0.pt", "step20_rank1.pt"}


def test_a_missing_ranks_file_is_named(tmp_path: Path) -> None:
    shutil.copy(SHARDED / "rank0.pt", tmp_path / "rank0.pt")
    with pytest.raises(ckpt.CkptError, match=r"in none of the files; the files of ranks 1 of 2"):
        ckpt.open(tmp_path)


def test_a_missing_replica_is_named_too(fsdp_saves: Saves, tmp_path: Path) -> None:
    source = fsdp_saves["fsdp2_hybrid-by_number", 4].source
    for rank in (0, 1, 3):
        shutil.copy(source / f"step3_rank_{rank}.pt", tmp_path)
    with pytest.raises(ckpt.CkptError, match=r"4 ranks saved, the files of ranks 2 are not there"):
        ckpt.open(tmp_path)


def test_a_rank_is_what_its_tensors_say(tmp_path: Path) -> None:
    for rank in (0, 1):
        shutil.copy(SHARDED / f"rank{rank}.pt", tmp_path / f"shard-{rank + 1}.pt")
    assert ckpt.open(tmp_path).origin.world_size == 2


def test_a_file_of_a_rank_too_many_is_refused(tmp_path: Path) -> None:
    for name, rank in (("rank0.pt", 0), ("rank1.pt", 1), ("rank2.pt", 1)):
        shutil.copy(SHARDED / f"rank{rank}.pt", tmp_path / name)
    with pytest.raises(ckpt.CkptError, match=r"2 ranks saved, but there is rank2\.pt"):
        ckpt.open(tmp_path)


def edited(source: Path, target: Path, change: Any) -> None:
    """A rank's file with something changed, by torch itself; DTensors load without processes."""
    content = torch.load(source, weights_only=False)
    change(content)
    torch.save(content, target)


def one_more_epoch(content: dict[str, Any]) -> None:
    content["epoch"] += 1


def one_more_step(content: dict[str, Any]) -> None:
    for state in content["optim"]["state"].values():
        state["step"] += 1


def another_rate(content: dict[str, Any]) -> None:
    content["optim"]["param_groups"][0]["lr"] = 1.0


def whole_weight(content: dict[str, Any]) -> None:
    content["model"]["emb.weight"] = torch.zeros(31, 13)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (one_more_epoch, r"epoch is 1 for rank 0 and 2 for rank 1: files of two saves"),
        (one_more_step, r"step is 3 for rank 0 and 4 for rank 1: files of two saves"),
        (another_rate, r"different optim\.param_groups\.0\.lr: files of two saves"),
        (whole_weight, r"emb\.weight: sharded for some ranks and not for rank 1"),
    ],
)
def test_ranks_of_two_saves_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    shutil.copy(SHARDED / "rank0.pt", tmp_path / "rank0.pt")
    edited(SHARDED / "rank1.pt", tmp_path / "rank1.pt", change)
    with pytest.raises(ckpt.CkptError, match=words):
        ckpt.open(tmp_path)


def test_whole_tensors_of_each_rank_are_read_from_the_first(tmp_path: Path) -> None:
    for rank in (0, 1):
        torch.save({"w": torch.ones(4, 4), "b": torch.ones(4)}, tmp_path / f"ckpt_rank{rank}.pt")
    found = ckpt.open(tmp_path)
    assert list(found.params) == ["w", "b"]
    assert found.origin.format == "torch"


def test_local_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    for rank in (0, 1):
        torch.save({"w": torch.full((4, 4), float(rank))}, tmp_path / f"ckpt_rank{rank}.pt")
    with pytest.raises(ckpt.CkptError, match=r"w differs between ranks.*to_local"):
        ckpt.open(tmp_path)
