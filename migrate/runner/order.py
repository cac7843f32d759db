"""Steers samplers, so that a script and its rewrite see the same samples in the same batches.

The order numbered k is the same everywhere. A random sampler gives order k in its k-th iteration;
a distributed sampler in the k-th epoch that it was told of, so that one which is never told
repeats order 0. Both draw one number of the global random state, as RandomSampler does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler


def install() -> None:
    """Steer the samplers of this process."""
    random_order = RandomSampler.__iter__

    def steered(self: Any) -> Iterator[int]:
        if self.replacement or self._num_samples is not None:
            return random_order(self)
        return _random(self)

    random: Any = RandomSampler
    distributed: Any = DistributedSampler
    random.__iter__, distributed.__iter__ = steered, _distributed


def permutation(n: int, number: int) -> list[int]:
    """Order `number` of n samples."""
    order: list[int] = torch.randperm(n, generator=torch.Generator().manual_seed(number)).tolist()
    return order


def _draw() -> None:
    torch.empty((), dtype=torch.int64).random_()


def _random(sampler: Any) -> Iterator[int]:
    """A generator, because RandomSampler too draws only when the first sample is asked for."""
    n = len(sampler.data_source)
    number = sampler.__dict__.get("_iterations", 0)
    sampler._iterations = number + 1
    if sampler.generator is None:
        _draw()
    else:
        for _ in range(2):  # RandomSampler permutes twice: whole rounds, and what is left
            torch.randperm(n, generator=sampler.generator)
    yield from permutation(n, number)


def _distributed(sampler: Any) -> Iterator[int]:
    """torch/utils/data/distributed.py, DistributedSampler.__iter__, with another order."""
    n = len(sampler.dataset)
    indices = list(range(n))
    if sampler.shuffle:
        _draw()
        epochs: list[int] = sampler.__dict__.setdefault("_epochs", [])
        if sampler.epoch not in epochs:
            epochs.append(sampler.epoch)
        indices = permutation(n, epochs.index(sampler.epoch))
    rounds = math.ceil(sampler.total_size / n)
    padded = list(itertools.chain(*[indices] * rounds))[: sampler.total_size]
    return iter(padded[sampler.rank :: sampler.num_replicas])
