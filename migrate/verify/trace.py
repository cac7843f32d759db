"""What a run left behind: its records as `migrate/runner` wrote them, by rank."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Sums:
    """Sum and sum of squares: of `whole` tensors, and of this process's part of `sharded` ones."""

    whole: tuple[float, float]
    sharded: tuple[float, float]

    @classmethod
    def of(cls, content: Mapping[str, Sequence[float]]) -> Sums:
        """From the record."""
        whole, sharded = content["whole"], content["sharded"]
        return cls((whole[0], whole[1]), (sharded[0], sharded[1]))

    @property
    def norm(self) -> float:
        """Of the tensors of which the process holds everything."""
        return math.sqrt(self.whole[1])


def total(sums: Sequence[Sums]) -> tuple[float, float]:
    """Sum and norm over all processes: whole tensors once, shards together."""
    value = sums[0].whole[0] + math.fsum(each.sharded[0] for each in sums)
    square = sums[0].whole[1] + math.fsum(each.sharded[1] for each in sums)
    return value, math.sqrt(square) if square >= 0 else math.nan


@dataclass(frozen=True, slots=True)
class Step:
    """One optimizer step of one process. `samples` were given out since the step before it."""

    at: str
    optimizer: int
    losses: tuple[float, ...]
    samples: int
    lr: tuple[float, ...]
    before: Sums
    gradients: Sums
    after: Sums
    without_gradient: int
    batch_norm: float | None

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Step:
        """From the record."""
        sums = {name: Sums.of(content[name]) for name in ("before", "gradients", "after")}
        lists = {name: tuple(content[name]) for name in ("losses", "lr")}
        return cls(**{**content, **sums, **lists})


@dataclass(frozen=True, slots=True)
class Pass:
    """One iteration over a loader: the samples' numbers by batch, None in those of a stream."""

    batches: tuple[tuple[Any, ...], ...]
    sizes: tuple[int, ...]
    trains: bool
    """Whether steps were taken with its batches."""
    begin: int
    end: int
    """Batches that all loaders had given out before its first and after its last one."""

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Pass:
        """From the record."""
        lists = {"batches": tuple(map(tuple, content["batches"])), "sizes": tuple(content["sizes"])}
        return cls(**{**content, **lists})

    @property
    def samples(self) -> list[Any]:
        """All of them, in order."""
        return [sample for batch in self.batches for sample in batch]


@dataclass(frozen=True, slots=True)
class Loader:
    """One DataLoader; `seed` is that of its sampler, if it shares among ranks."""

    seed: int | None
    passes: tuple[Pass, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Loader:
        """From the record."""
        return cls(**{**content, "passes": tuple(map(Pass.of, content["passes"]))})


@dataclass(frozen=True, slots=True)
class Call:
    """A collective call that the script made, after so many batches of all loaders."""

    name: str
    at: str
    batches: int


@dataclass(frozen=True, slots=True)
class Rank:
    """One process. `at` is the line of the script where it was last; `waiting` in which call."""

    rank: int
    pid: int
    status: str
    exit_code: int | None
    error: str
    traceback: str
    at: str
    waiting: Mapping[str, str] | None
    steps: tuple[Step, ...]
    loaders: tuple[Loader, ...]
    files: tuple[tuple[str, str], ...]
    outside: tuple[tuple[str, str], ...]
    refused: tuple[tuple[str, str], ...]
    collectives: tuple[Call, ...]
    batch_norms: Mapping[str, int]
    wraps: Mapping[str, int]
    synthetic: tuple[str, ...]

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Rank:
        """From the record."""
        return cls(
            **{
                **content,
                "steps": tuple(map(Step.of, content["steps"])),
                "loaders": tuple(map(Loader.of, content["loaders"])),
                "files": tuple((action, path) for action, path in content["files"]),
                "outside": tuple((action, path) for action, path in content["outside"]),
                "refused": tuple((action, path) for action, path in content["refused"]),
                "collectives": tuple(Call(*call) for call in content["collectives"]),
                "synthetic": tuple(content["synthetic"]),
            }
        )

    @property
    def written(self) -> set[str]:
        """Paths that the process opened for writing or renamed something to."""
        return {path for action, path in self.files if action == "write"}

    @property
    def progress(self) -> tuple[int, ...]:
        """Grows as long as the process gets on."""
        batches = sum(len(p.batches) for loader in self.loaders for p in loader.passes)
        return (len(self.steps), batches, len(self.collectives), len(self.files))


@dataclass(frozen=True)
class Run:
    """One run of a script. `ended` says why: by itself, or because of a limit or a stall."""

    returncode: int
    ended: str
    stdout: str
    stderr: str
    cwd: Path
    record: Path
    ranks: Mapping[int, Rank] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps of the first process."""
        return self.ranks[0].steps if 0 in self.ranks else ()

    @property
    def is_good(self) -> bool:
        """Whether every process came to its end without an error."""
        return self.returncode == 0 and self.ended == "itself" and bool(self.ranks)

    def written_by_several(self) -> set[str]:
        """Paths that more than one process wrote: a race, whatever came out this time."""
        seen: set[str] = set()
        twice: set[str] = set()
        for rank in self.ranks.values():
            twice |= seen & rank.written
            seen |= rank.written
        return twice


def read_ranks(folder: Path) -> dict[int, Rank]:
    """The records in a folder; those that are still being written are the last complete ones."""
    found = [Rank.of(json.loads(path.read_text())) for path in sorted(folder.glob("rank*.json"))]
    return {rank.rank: rank for rank in found}
