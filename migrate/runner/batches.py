"""Which samples every loader of the script gave out, pass by pass and batch by batch."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

SAMPLER_DEPTH = 5


@dataclass
class Pass:
    """One iteration over a loader: `batches` are the numbers of the samples asked for."""

    loader: Loader
    batches: list[Any] = field(default_factory=list)
    given: int = 0
    since_step: int = 0
    sizes: list[int] = field(default_factory=list)
    trains: bool = False
    """Whether a step followed one of its batches, before it had come to its end."""
    begin: int = 0
    end: int = 0
    """Batches that all loaders had given out before its first and after its last one."""

    def listed(self) -> dict[str, Any]:
        """For the record; workers ask for more batches than are given out."""
        return {
            "batches": self.batches[: self.given],
            "sizes": self.sizes,
            "trains": self.trains,
            "begin": self.begin,
            "end": self.end,
        }


@dataclass
class Loader:
    """One DataLoader, numbered by the order in which they were made."""

    number: int
    replicas: int
    seed: int | None
    passes: list[Pass] = field(default_factory=list)

    def listed(self) -> dict[str, Any]:
        """For the record."""
        return {
            "seed": self.seed,
            "passes": [one.listed() for one in self.passes],
        }


class Batches:
    """`pass_batches` ends every pass early; `pass_samples` says where, by loader, in samples."""

    def __init__(self, pass_batches: int = 0, pass_samples: str = "") -> None:
        self._limit = pass_batches
        self._samples = [int(item or 0) for item in pass_samples.split(",")] if pass_samples else []
        self._loaders: list[Loader] = []
        self._open: dict[int, Pass] = {}  # passes whose batches may be those of the next step
        self.clock = 0
        self._pid = os.getpid()

    def watch(self) -> None:
        """Hook into DataLoader and its iterators."""
        self._watch_loaders()
        self._watch_passes()
        self._watch_batches()

    def listed(self) -> list[dict[str, Any]]:
        """Every loader, for the record."""
        return [loader.listed() for loader in self._loaders]

    def taken(self) -> int:
        """Samples for the step that is taken now: of passes that go on, with gradients on."""
        count = sum(one.since_step for one in self._open.values())
        for one in self._open.values():
            one.trains, one.since_step = True, 0
        self._open.clear()
        return count

    def _watch_loaders(self) -> None:
        kind: Any = DataLoader
        start = kind.__init__

        @functools.wraps(start)
        def made(loader: Any, *args: Any, **kwargs: Any) -> None:
            start(loader, *args, **kwargs)
            if os.getpid() == self._pid:
                loader._seen_as = _described(loader, len(self._loaders))
                self._loaders.append(loader._seen_as)

        kind.__init__ = made

    def _watch_passes(self) -> None:
        """An iterator is a pass; one with workers that stay is begun again for the next."""
        base: Any = _BaseDataLoaderIter
        start, reset = base.__init__, base._reset

        @functools.wraps(start)
        def begun(iterator: Any, loader: Any) -> None:
            iterator._pass = self._begin(loader)
            start(iterator, loader)

        @functools.wraps(reset)
        def begun_again(iterator: Any, loader: Any, first_iter: bool = False) -> None:
            if not first_iter:
                iterator._pass = self._begin(loader)
            reset(iterator, loader, first_iter)

        base.__init__, base._reset = begun, begun_again

    def _watch_batches(self) -> None:
        base: Any = _BaseDataLoaderIter
        index, following = base._next_index, base.__next__

        @functools.wraps(index)
        def asked(iterator: Any) -> Any:
            found = index(iterator)
            if iterator._pass is not None:
                iterator._pass.batches.append(_numbers(found))
            return found

        @functools.wraps(following)
        def given(iterator: Any) -> Any:
            if iterator._pass is None:
                return following(iterator)
            try:
                if self._is_over(iterator._pass):
                    raise StopIteration
                batch = following(iterator)
            except StopIteration:
                self._open.pop(id(iterator._pass), None)
                raise
            self._note(iterator._pass, batch)
            return batch

        base._next_index, base.__next__ = asked, given

    def _begin(self, loader: Any) -> Pass | None:
        seen = loader.__dict__.get("_seen_as")
        if seen is None:
            return None
        one = Pass(seen, begin=self.clock)
        seen.passes.append(one)
        return one

    def _note(self, one: Pass, batch: Any) -> None:
        asked = one.batches[one.given] if one.given < len(one.batches) else None
        size = len(asked) if asked and asked[0] is not None else size_of(batch)
        one.sizes.append(size)
        one.given += 1
        self.clock += 1
        one.end = self.clock
        if torch.is_grad_enabled():
            one.since_step += size
            self._open[id(one)] = one

    def _is_over(self, one: Pass) -> bool:
        number = one.loader.number
        if number < len(self._samples) and self._samples[number]:
            return sum(one.sizes) * one.loader.replicas >= self._samples[number]
        return bool(self._limit) and one.given >= self._limit


def size_of(batch: Any) -> int:
    """Samples in a batch, by its first tensor or list."""
    if isinstance(batch, torch.Tensor):
        return batch.size(0) if batch.dim() else 1
    if isinstance(batch, dict):
        batch = list(batch.values())
    if isinstance(batch, list | tuple) and batch:
        return size_of(batch[0]) if not isinstance(batch[0], str | int | float) else len(batch)
    return 1


def _numbers(found: Any) -> list[Any]:
    """The samples' numbers, or names if they have none; None for a stream's."""
    items = found if isinstance(found, list | tuple) else [found]
    return [int(i) if isinstance(i, int | torch.Tensor) else i and str(i) for i in items]


def _described(loader: Any, number: int) -> Loader:
    """Replicas and seed are those of a sampler that shares among processes."""
    chain = itertools.islice(_samplers(loader), SAMPLER_DEPTH)
    sharing = next((item for item in chain if hasattr(item, "num_replicas")), None)
    replicas = int(sharing.num_replicas) if sharing else 1
    return Loader(number, replicas, getattr(sharing, "seed", None))


def _samplers(loader: Any) -> Iterator[Any]:
    """The loader's sampler, and those inside of it."""
    item = loader.batch_sampler or loader.sampler
    while item is not None:
        yield item
        item = item.__dict__.get("sampler") or item.__dict__.get("batch_sampler")
