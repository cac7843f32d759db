"""What a training run said about itself, and how a converted checkpoint compares with it.

`truth.safetensors` and `truth.json` were gathered inside the training processes; nothing of the
converter is used here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

STATE_NAMES = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "step": "step",
}
REFERENCE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class Truth:
    """Tensors by kind and clean name, and the description of a run."""

    folder: Path
    tensors: Mapping[str, torch.Tensor]
    meta: Mapping[str, Any]

    @classmethod
    def load(cls, folder: Path) -> Truth:
        meta = json.loads((folder / "truth.json").read_text())
        for group, members in zip(
            meta["param_groups"], meta.get("param_groups_by_name", ()), strict=False
        ):
            group["params"] = members["names"]
        return cls(folder, load_file(folder / "truth.safetensors"), meta)

    @property
    def source(self) -> Path:
        """What to convert: the folder that the framework wrote, or the only file in it."""
        named = ("ckpt", "checkpoint-3", "universal")
        inner = next(self.folder / name for name in named if (self.folder / name).exists())
        for file in ("checkpoint.pt", "model.pt", "last.ckpt"):
            if (inner / file).exists():
                return inner / file
        return inner

    @property
    def order(self) -> list[str]:
        """Parameters in the order of the optimizer's groups."""
        return [name for group in self.meta["param_groups"] for name in group["params"]]

    @property
    def tolerance(self) -> float:
        """0, but where the run itself could not be asked and a one-process run stands in."""
        source = str(self.meta.get("truth_source", ""))
        return REFERENCE_TOLERANCE if source.startswith("plain single-process") else 0.0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.tensors.items() if "/" not in name}

    def same(self, got: torch.Tensor, want: torch.Tensor) -> bool:
        if got.shape != want.shape:
            return False
        return torch.allclose(got.float(), want.float(), rtol=0, atol=self.tolerance)

    # --- what is wrong with a converted checkpoint, as readable lines ---------------------------

    def weight_problems(self, state: Mapping[str, torch.Tensor]) -> list[str]:
        return list(self._weight_problems(state))

    def _weight_problems(self, state: Mapping[str, torch.Tensor]) -> Iterator[str]:
        want, tied = self.weights(), self.meta.get("tied") or {}
        buffers = set(self.meta.get("buffers") or ())
        gone = set(self.meta.get("nonpersistent_buffers") or ())
        for name in sorted({*want, *tied, *(buffers - gone)} - state.keys()):
            yield f"{name} is missing"
        for name in sorted(state.keys() - want.keys() - tied.keys() - buffers):
            yield f"{name} is too much"
        for name in sorted(want.keys() & state.keys()):
            if not self.same(state[name], want[name]):
                yield f"{name} has other values"
        for alias, owner in tied.items():
            if alias in state and owner in state and not torch.equal(state[alias], state[owner]):
                yield f"{alias} differs from {owner}"
        for name in sorted(buffers & state.keys()):
            if not any(torch.equal(state[name], value) for value in self._buffers(name)):
                yield f"{name} has no rank's values"

    def _buffers(self, name: str) -> list[torch.Tensor]:
        """The values that the ranks have; a save may hold any one's."""
        return [v for k, v in self.tensors.items() if k.startswith("buffer") and _fqn(k) == name]

    def optimizer_problems(
        self, states: Mapping[str, Mapping[str, Any]], groups: list[Mapping[str, Any]]
    ) -> list[str]:
        """Of states by FQN, and groups with their members under `params`."""
        return [*self._state_problems(states), *self._group_problems(groups)]

    def _state_problems(self, states: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
        for key, want in self.tensors.items():
            kind, _, name = key.partition("/")
            if kind not in STATE_NAMES.values():
                continue
            got = {STATE_NAMES[k]: v for k, v in states.get(name, {}).items() if k in STATE_NAMES}
            if kind not in got:
                yield f"{key} is missing"
            elif not self.same(torch.as_tensor(got[kind]).reshape(want.shape), want):
                yield f"{key} has other values"

    def _group_problems(self, groups: list[Mapping[str, Any]]) -> Iterator[str]:
        wanted = self.meta["param_groups"]
        if [list(g["params"]) for g in groups] != [g["params"] for g in wanted]:
            yield "param groups have other members"
        for index, (got, want) in enumerate(zip(groups, wanted, strict=False)):
            for name in ("lr", "weight_decay", "betas", "eps", "momentum"):
                if name in want and _plain(got.get(name)) != _plain(want[name]):
                    yield f"group {index} has {name} {got.get(name)}, expected {want[name]}"


def _fqn(key: str) -> str:
    return key.partition("/")[2]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    return list(value) if isinstance(value, tuple) else value


def by_name(optimizer: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """States and groups of a converted `torch` file by FQN, through its `param_names`."""
    states, groups = {}, []
    for group in optimizer["param_groups"]:
        names = group["param_names"]
        for number, name in zip(group["params"], names, strict=True):
            states[name] = optimizer["state"].get(number, {})
        groups.append({**group, "params": names})
    return states, groups
