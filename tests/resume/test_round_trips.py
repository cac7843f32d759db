"""From any format over any two others and back, every tensor is the same."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ckpt

FORMATS = ("torch", "ddp", "fsdp-full", "dcp", "zero1", "zero2", "zero3", "universal")
SHARDED = ("zero1", "zero2", "zero3")
SHAPES = ((), (1,), (5,), (16,), (7, 3), (4, 4), (2, 3, 5), (3, 1, 2, 2))
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Job:
    """A training state made of random numbers, and the way that it goes."""

    content: dict[str, Any]
    way: tuple[tuple[str, int], ...]  # formats with numbers of ranks


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Parameters of any shapes in one to three groups, some frozen, some tied, a buffer."""
    torch.manual_seed(draw(st.integers(0, 1000)))
    shapes = [(7, 3), *draw(st.lists(st.sampled_from(SHAPES), max_size=5))]
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    count = draw(st.integers(1, 3))
    home = [draw(st.integers(0 if i else 1, count)) for i in range(len(shapes))]  # 0: frozen
    model = {f"layer.{i}.weight": torch.randn(s).to(dtype) for i, s in enumerate(shapes)}
    groups = [[f"layer.{i}.weight" for i, at in enumerate(home) if at == g + 1] for g in range(3)]
    optimizer = _optimizer(model, [names for names in groups if names])
    if draw(st.booleans()):
        model["again.weight"] = model["layer.0.weight"]
    if draw(st.booleans()):
        model["running_mean"] = torch.randn(3)
    way = st.tuples(st.sampled_from(FORMATS), st.integers(1, 5))
    first, second, third = (draw(way) for _ in range(3))
    job = {"model": model, "optimizer": optimizer, "scheduler": {"last_epoch": 3}}
    return Job(job, (first, second, third, (first[0], draw(st.integers(1, 5)))))


def _optimizer(model: Mapping[str, torch.Tensor], groups: list[list[str]]) -> dict[str, Any]:
    """AdamW's state dict, with names."""
    made, state, number = [], {}, 0
    for index, names in enumerate(groups):
        numbers = list(range(number, number + len(names)))
        number += len(names)
        members = [torch.nn.Parameter(model[name]) for name in names]
        adam = torch.optim.AdamW(members, lr=0.1 / (index + 1), weight_decay=0.1 * index)
        options = {k: v for k, v in adam.state_dict()["param_groups"][0].items() if k != "params"}
        made.append({**options, "params": numbers, "param_names": names})
        for at, name in zip(numbers, names, strict=True):
            kinds = {kind: torch.rand_like(model[name]) for kind in STATES}
            state[at] = {"step": torch.tensor(3.0), **kinds}
    return {"state": state, "param_groups": made}


def travel(job: Job, folder: Path) -> dict[str, Any]:
    """The content of a torch file at the end of the job's way."""
    path = folder / "start.pt"
    torch.save(job.content, path)
    for number, (name, world) in enumerate(job.way):
        given = {"world_size": world} if name in SHARDED else {}
        if name == "universal":
            given["stage"] = 1 + world % 3
        path = ckpt.convert(path, name, folder / f"{number}-{name}", **given)
    found: dict[str, Any] = torch.load(
        ckpt.convert(path, "torch", folder / "end.pt"), weights_only=True
    )
    return found


def states(optimizer: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Optimizer states by name."""
    return {
        f"{kind}/{name}": torch.as_tensor(value)
        for group in optimizer["param_groups"]
        for number, name in zip(group["params"], group["param_names"], strict=True)
        for kind, value in optimizer["state"][number].items()
    }


def others(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> list[str]:
    """Names of what is not the same; ZeRO keeps 16-bit numbers in fp32, which changes none."""
    unequal = [
        name
        for name in expected.keys() & found.keys()
        if not torch.equal(expected[name].float(), found[name].float())
    ]
    return sorted([*unequal, *(expected.keys() ^ found.keys())])


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(job=jobs())
def test_a_round_trip_gives_back_every_tensor(job: Job) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = travel(job, Path(folder))
        assert others(job.content["model"], found["model"]) == []
        before, after = job.content["optimizer"], found["optimizer"]
        assert others(states(before), states(after)) == []
        for mine, theirs in zip(before["param_groups"], after["param_groups"], strict=True):
            assert {k: theirs.get(k) for k in mine if k != "params"} == {
                k: v for k, v in mine.items() if k != "params"
            }
