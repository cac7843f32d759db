"""Every pair of strategies: train, save, convert, resume, compare.

`measure(root, pairs)` does it for pytest and for the page: sources are trained once, and all
resumes at a world size share a process group.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from training.launch import run_jobs

import ckpt
from resume.nets import NETS
from resume.strategies import STRATEGIES, deepspeed_config

WORKER = Path(__file__).resolve().parent / "worker.py"
WORLDS = ((2, 2), (2, 3), (3, 1))
"""Numbers of processes, before and after."""
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
BF16 = (
    ("ddp", "zero3"),
    ("ddp", "zero1"),
    ("fsdp2", "zero2"),
    ("fsdp2", "zero3"),
    ("zero1", "fsdp2"),
    ("zero1", "zero2"),
    ("zero2", "ddp"),
    ("zero2", "zero3"),
    ("zero3", "ddp"),
    ("zero3", "fsdp2"),
    ("zero3", "zero1"),
)
OPTIONS_COMPARED = ("lr", "initial_lr", "weight_decay", "betas", "eps")
SECONDS_A_JOB = 6


@dataclass(frozen=True)
class Source:
    """A training that is saved."""

    strategy: str
    net: str
    dtype: str
    world: int

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.strategy}-{self.net}-{self.dtype}-w{self.world}"


@dataclass(frozen=True)
class Pair:
    """A training, and the strategy and number of processes under which it goes on."""

    source: Source
    target: str
    world: int

    @property
    def name(self) -> str:
        """Of its folder and its test."""
        return f"{self.source.name}-to-{self.target}-w{self.world}"


@dataclass(frozen=True)
class Outcome:
    """What came of a pair.

    Attributes:
        losses: largest relative difference of a loss to the uninterrupted run.
        state: largest absolute difference of an element of weights, states, buffers.
        problems: what is wrong, in words; empty when the resume is proven.
    """

    pair: Pair
    losses: float
    state: float
    problems: tuple[str, ...]
    device: str = "cpu"


def pairs(nets: Iterable[str] = NETS) -> list[Pair]:
    """All pairs in fp32, and the selection in bf16."""
    found = [
        Pair(Source(source, net, "fp32", before), target, after)
        for (before, after), net in itertools.product(WORLDS, nets)
        for source, target in itertools.product(STRATEGIES, repeat=2)
    ]
    for source, target in BF16:
        made = Source(source, "transformer", "bf16", 2)
        found += [Pair(made, target, after) for after in (2, 3)]
    return found


def measure(root: Path, wanted: Iterable[Pair]) -> dict[Pair, Outcome]:
    """The outcome of every pair; `root` gets a folder for each training and each resume."""
    wanted = list(wanted)
    train(root, dict.fromkeys(pair.source for pair in wanted))
    refused: dict[Pair, str] = {}
    jobs: dict[int, list[dict[str, Any]]] = {}
    for pair in wanted:
        try:
            jobs.setdefault(pair.world, []).append(converted(root, pair))
        except ckpt.CkptError as problem:
            refused[pair] = f"not converted: {problem}"
    for world, listed in jobs.items():
        start(root, f"resume_w{world}", listed, world)
    return {
        pair: Outcome(pair, 0.0, 0.0, (refused[pair],))
        if pair in refused
        else compare(pair, root / pair.source.name, root / pair.name)
        for pair in wanted
    }


def train(root: Path, sources: Iterable[Source]) -> None:
    """Train the sources that are not there yet, all of a world size in one process group."""
    by_world: dict[int, list[dict[str, Any]]] = {}
    for source in sources:
        if (root / source.name / "truth.json").exists():
            continue
        job = {"strategy": source.strategy, "net": source.net, "dtype": source.dtype}
        by_world.setdefault(source.world, []).append({**job, "out": str(root / source.name)})
    for world, jobs in by_world.items():
        start(root, f"train_w{world}", jobs, world)


def start(root: Path, name: str, jobs: list[dict[str, Any]], world: int) -> None:
    """Run the jobs in one process group."""
    run_jobs(WORKER, jobs, root, name, world, 60 + SECONDS_A_JOB * len(jobs))


def converted(root: Path, pair: Pair) -> dict[str, Any]:
    """Convert the pair's source for its target; returns the job that resumes."""
    source, target = STRATEGIES[pair.source.strategy], STRATEGIES[pair.target]
    folder, out = root / pair.source.name, root / pair.name
    out.mkdir(parents=True, exist_ok=True)
    given: dict[str, Any] = {}
    if target.kind == "deepspeed":
        config = deepspeed_config(target, pair.world, pair.source.dtype)
        given = {"world_size": pair.world, "ds_config": config}
    if source.kind == "ddp":  # plain optimizers number their states
        groups = json.loads((folder / "truth.json").read_text())["param_groups"]
        given["param_order"] = [name for group in groups for name in group["params"]]
    saved = folder / "ckpt"
    one_file = saved / "checkpoint.pt"
    path = ckpt.convert(
        one_file if one_file.exists() else saved, target.target, out / "converted", **given
    )
    return {
        "strategy": pair.target,
        "net": pair.source.net,
        "dtype": pair.source.dtype,
        "out": str(out),
        "checkpoint": str(path),
        "scheduler_key": source.scheduler_key,
    }


def compare(pair: Pair, source: Path, resumed: Path) -> Outcome:
    """What the resumed job left in its folder beside what the uninterrupted one left."""
    (want, expected), (got, found) = _noted(source), _noted(resumed)
    errors = tuple(m["error"] for m in (want, got) if "error" in m)
    if errors:
        return Outcome(pair, 0.0, 0.0, errors)
    differences = {key: _difference(expected[key], found[key]) for key in expected if key in found}
    state = max(differences.values())
    both = zip(got["losses"], want["losses"], strict=True)
    losses = max(abs(mine - theirs) / abs(theirs) for mine, theirs in both)
    problems = [f"{key} is on one side only" for key in sorted(expected.keys() ^ found.keys())]
    problems += [f"{key} differs by {value}" for key, value in differences.items() if value]
    problems += _other_options(got, want)
    if not losses <= TOLERANCE[pair.source.dtype]:
        problems.append(f"losses {got['losses']}, expected {want['losses']}")
    return Outcome(pair, losses, state, tuple(problems), got["device"])


def _noted(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """What a job left: its description, and tensors; not the 16-bit copies of its weights."""
    meta: dict[str, Any] = json.loads((folder / "truth.json").read_text())
    if "error" in meta:
        return meta, {}
    tensors = load_file(folder / "truth.safetensors")
    return meta, {key: value for key, value in tensors.items() if not key.startswith("lp/")}


def _difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """0 exactly when they are equal bit for bit; infinite when not of one shape and dtype."""
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return float("inf")
    if torch.equal(expected, found):
        return 0.0
    return float((expected.double() - found.double()).abs().max())


def _other_options(got: Mapping[str, Any], want: Mapping[str, Any]) -> Iterator[str]:
    """Param groups and schedule."""
    if got["last_epoch"] != want["last_epoch"]:
        yield f"the scheduler is at {got['last_epoch']}, expected {want['last_epoch']}"
    groups = list(zip(got["param_groups"], want["param_groups"], strict=True))
    for number, (mine, theirs) in enumerate(groups):
        if mine["params"] != theirs["params"]:
            yield f"group {number} has other members"
        for name in OPTIONS_COMPARED:
            if mine.get(name) != theirs.get(name):
                yield f"group {number} has {name} {mine.get(name)}, expected {theirs.get(name)}"
