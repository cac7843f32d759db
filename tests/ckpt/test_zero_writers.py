"""ZeRO shards without DeepSpeed at hand: any shapes there and back, options, refusals, notes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from conftest import FIXTURES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt.cli import main
from ckpt.formats._zero3_out import sub_groups
from ckpt.formats._zero12_out import flat_layout

ZERO3 = FIXTURES / "ds009_t21-zero3_rich_w2" / "ckpt"
STAGES = (1, 2, 3)


def job(path: Path, shapes: list[tuple[int, ...]], split: int, skip: int | None = None) -> Path:
    """A torch file of a model with these parameters after two AdamW steps, in two groups.

    Args:
        split: the first parameter of the second group.
        skip: a parameter that never gets a gradient.
    """
    names = [f"p{number}" for number in range(len(shapes))]
    params = {n: nn.Parameter(torch.randn(s)) for n, s in zip(names, shapes, strict=True)}
    listed = list(params.items())
    groups = [
        {"params": part, "weight_decay": decay}
        for part, decay in ((listed[:split], 0.1), (listed[split:], 0.0))
        if part
    ]
    optimizer = torch.optim.AdamW(groups)
    for _ in range(2):
        for number, param in enumerate(params.values()):
            param.grad = None if number == skip else torch.randn_like(param)
        optimizer.step()
    model = {name: param.detach() for name, param in params.items()}
    content = {"model": model, "optimizer": optimizer.state_dict(), "epoch": 7}
    torch.save(content, path)
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return job(tmp_path / "job.pt", [(5, 3), (4,), (2, 7)], 2)


def notes(source: Path, stage: int, tmp_path: Path, **options: Any) -> str:
    plan = ckpt.prepare(source, f"zero{stage}", tmp_path / "noted", **options)
    return "\n".join(map(str, plan.notes))


def changes(before: Path, after: Path, **options: Any) -> list[str]:
    """Differences but for counters and configuration, which DeepSpeed's files have besides."""
    found = ckpt.diff(ckpt.open(before), ckpt.open(after), **options)
    return [str(item) for item in found if item.kind != "job"]


SHAPES = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    shapes=SHAPES,
    stage=st.sampled_from(STAGES),
    world_size=st.integers(1, 9),
    sub_group_size=st.integers(1, 60),
    switches=st.tuples(st.booleans(), st.booleans()),
    data=st.data(),
)
def test_there_and_back_is_the_same_state(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    stage: int,
    world_size: int,
    sub_group_size: int,
    switches: tuple[bool, bool],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("zero")
    shapes = [(3, 2), *shapes]
    file = job(folder / "job.pt", shapes, data.draw(st.integers(0, len(shapes))))
    zero = {"stage": stage, "sub_group_size": sub_group_size}
    zero |= {"round_robin_gradients": switches[0], "parameter_alignment": switches[1]}
    out = ckpt.convert(
        file, f"zero{stage}", folder / "out", world_size=world_size,
        ds_config={"zero_optimization": zero},
    )  # fmt: skip
    found = ckpt.open(out)
    before = ckpt.open(file)
    assert changes(file, out) == []
    if not switches[0]:
        assert [group.fqns for group in found.groups] == [group.fqns for group in before.groups]
    assert found.origin.world_size == world_size


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 120))
def test_sub_groups_are_full_with_the_member_that_fills_them(shares: list[int], size: int) -> None:
    found = sub_groups(shares, size)
    assert [number for group in found for number in group] == list(range(len(shares)))
    sums = [[shares[number] for number in group] for group in found]
    assert all(sum(group) >= size and sum(group[:-1]) < size for group in sums[:-1])
    assert sum(sums[-1][:-1]) < size


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 9), st.booleans())
def test_partitions_are_equal_and_hold_every_parameter(
    numels: list[int], world_size: int, is_round_robin: bool
) -> None:
    layout = flat_layout(numels, world_size, is_round_robin=is_round_robin)
    assert sorted(layout.order) == list(range(len(numels)))
    assert layout.used == sum(numels)
    whole = layout.share * world_size
    assert whole % (2 * world_size) == 0
    assert layout.used <= whole < layout.used + 2 * world_size
    assert sum(layout.padding(rank) for rank in range(world_size)) == whole - layout.used


@pytest.mark.parametrize("stage", STAGES)
def test_a_parameter_without_a_state_gets_zeros_and_a_note(tmp_path: Path, stage: int) -> None:
    source = job(tmp_path / "job.pt", [(3,), (4,), (5,)], 3, skip=1)
    assert "p1: no optimizer state in the source" in notes(source, stage, tmp_path)
    found = ckpt.open(ckpt.convert(source, f"zero{stage}", tmp_path / "out", world_size=2))
    ckpt.convert(tmp_path / "out", "torch", tmp_path / "back.pt")
    saved = torch.load(tmp_path / "back.pt", weights_only=True)["optimizer"]
    assert found.groups[0].fqns == ("p0", "p1", "p2")
    assert saved["state"][1]["exp_avg"].tolist() == [0, 0, 0, 0]
    assert saved["state"][1]["step"] == 2


@pytest.mark.parametrize("stage", STAGES)
def test_different_steps_in_one_flat_group_need_consent(tmp_path: Path, stage: int) -> None:
    source = job(tmp_path / "job.pt", [(3,), (4,)], 2)
    content = torch.load(source, weights_only=True)
    content["optimizer"]["state"][0]["step"] -= 1
    torch.save(content, source)
    with pytest.raises(ckpt.CkptError, match=r"step of p0: a flat group has one step count"):
        ckpt.convert(source, f"zero{stage}", tmp_path / "out")
    ckpt.convert(source, f"zero{stage}", tmp_path / "out", allow_loss=True)


def test_sub_groups_keep_their_own_steps(tmp_path: Path) -> None:
    source = job(tmp_path / "job.pt", [(3,), (4,)], 2)
    content = torch.load(source, weights_only=True)
    content["optimizer"]["state"][0]["step"] -= 1
    torch.save(content, source)
    zero = {"zero_optimization": {"stage": 3, "sub_group_size": 1}}
    out = ckpt.convert(source, "zero3", tmp_path / "out", ds_config=zero)
    assert changes(source, out) == []


@pytest.mark.parametrize("stage", STAGES)
def test_weights_alone_are_said_to_be_that(tmp_path: Path, stage: int) -> None:
    torch.save({"a": torch.randn(3, 2), "b": torch.randn(5)}, tmp_path / "model.pt")
    assert "load_optimizer_states=False" in notes(tmp_path / "model.pt", stage, tmp_path)
    out = ckpt.convert(tmp_path / "model.pt", f"zero{stage}", tmp_path / "out", world_size=3)
    assert changes(tmp_path / "model.pt", out, weights_only=True) == []


def test_the_world_size_is_the_sources_or_one(source: Path, tmp_path: Path) -> None:
    assert "world size 1: the source does not tell" in notes(source, 2, tmp_path)
    assert "world size 2: that of the source" in notes(ZERO3, 2, tmp_path)


REFUSED = [
    ({"zero_optimization": {"stage": 2}}, r"stage is 2, and the target is zero3"),
    ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        r"offload_param\.device",
    ),
    (
        {"zero_optimization": {"stage": 3, "zero_quantized_nontrainable_weights": True}},
        "zero_quantized_nontrainable_weights",
    ),
    ({"zero_optimization": {"stage": 3, "elastic_checkpoint": True}}, "elastic_checkpoint"),
    ({"zero_optimization": {"stage": 3}, "optimizer": {"type": "Muon"}}, "muon"),
    ({"zero_optimization": {"stage": 3}, "checkpoint": {"load_universal": True}}, "load_universal"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_another_layout_is_refused_by_name(
    source: Path, tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ckpt.CkptError, match=message):
        ckpt.convert(source, "zero3", tmp_path / "out", ds_config=config)


def test_a_dtype_against_the_configuration_is_refused(source: Path, tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}
    with pytest.raises(ckpt.CkptError, match="--ds-config says bfloat16"):
        ckpt.convert(source, "zero1", tmp_path / "out", ds_config=config, dtype="fp32")


def test_auto_leaves_the_choice_to_the_source(source: Path, tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 1, "sub_group_size": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
    }
    assert "a float32 engine" in notes(source, 1, tmp_path, ds_config=config)


def test_fp16_begins_with_the_configured_loss_scale(source: Path, tmp_path: Path) -> None:
    text = notes(source, 2, tmp_path, dtype="fp16")
    assert "loss scale 65536: not in the source" in text


def changed_order(tmp_path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    file = job(tmp_path / "like.pt", [(5, 3), (4,), (2, 7)], 2)
    content = torch.load(file, weights_only=True)
    change(content)
    torch.save(content, file)
    return ckpt.convert(file, "zero2", tmp_path / "like", world_size=2)


def test_like_gives_the_order_inside_groups(source: Path, tmp_path: Path) -> None:
    def swap(content: dict[str, Any]) -> None:
        group = content["optimizer"]["param_groups"][0]
        group["params"].reverse()
        group["param_names"].reverse()

    like = changed_order(tmp_path, swap)
    out = ckpt.convert(source, "zero3", tmp_path / "out", like=like)
    assert [group.fqns for group in ckpt.open(out).groups] == [("p1", "p0"), ("p2",)]
    assert ckpt.open(out).origin.world_size == 2


def test_like_gives_hyper_parameters_to_weights(source: Path, tmp_path: Path) -> None:
    like = changed_order(tmp_path, lambda content: None)
    out = ckpt.convert(source, "zero1", tmp_path / "out", like=like, weights_only=True)
    found = ckpt.open(out)
    assert [group.options["weight_decay"] for group in found.groups] == [0.1, 0.0]
    assert all(not param.state for param in found.params.values())


def test_like_of_another_model_is_refused(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ckpt.CkptError, match=r"--like: .* is not in the source"):
        ckpt.convert(source, "zero2", tmp_path / "out", like=ZERO3)
    with pytest.raises(ckpt.CkptError, match="expected one that DeepSpeed wrote"):
        ckpt.convert(source, "zero2", tmp_path / "out", like=source)


def test_other_formats_refuse_the_options_by_name(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ckpt.CkptError, match=r"--world-size: .* it is for zero1, zero2, zero3"):
        ckpt.convert(source, "hf", tmp_path / "out", world_size=2)


def test_the_command_line_takes_a_configuration_file(source: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "ds.json", tmp_path / "out"
    config.write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
    words = ["convert", source, "--to", "zero3", "--world-size", 3, "--ds-config", config]
    result = CliRunner().invoke(main, [str(word) for word in (*words, "-o", out)])
    assert result.exit_code == 0, result.output
    assert len(list(out.rglob("bf16_zero_pp_rank_*_optim_states.pt"))) == 3
    assert (out / "latest").read_text() == "global_step2"
    again = CliRunner().invoke(main, [str(word) for word in (*words, "-o", out, "--overwrite")])
    assert again.exit_code == 0, again.output


def test_a_configuration_that_is_no_json_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{")
    with pytest.raises(ckpt.CkptError, match=r"--ds-config .*ds\.json: no JSON file"):
        ckpt.convert(source, "zero3", tmp_path / "out", ds_config=tmp_path / "ds.json")


def test_a_folder_with_more_than_the_save_is_not_replaced(source: Path, tmp_path: Path) -> None:
    out = ckpt.convert(source, "zero1", tmp_path / "out")
    (out / "global_step2" / "mine.txt").write_text("keep me")
    with pytest.raises(ckpt.CkptError, match="global_step2"):
        ckpt.convert(source, "zero1", tmp_path / "out", overwrite=True)
