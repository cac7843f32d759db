"""Switches off or makes equal what is random in training, so that two runs can be compared.

Dropout keeps everything. What a data set draws for a sample, such as an augmentation, depends on
the sample alone: not on the process or the worker that loads it, nor on what was loaded before.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data._utils.fetch import _MapDatasetFetcher

DROPOUTS = (
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout",
)  # fmt: skip


def install() -> None:
    """Calm this process, and the workers that it forks."""
    for name in DROPOUTS:
        for module in (F, torch):
            if hasattr(module, name):
                setattr(module, name, _kept(getattr(module, name)))
    _calm_attention()
    _calm_recurrent()
    _calm_data()


def _kept(dropout: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(dropout)
    def keep(input: Any, *_args: Any, **_kwargs: Any) -> Any:  # noqa: A002 (torch's name)
        return input

    return keep


def _calm_attention() -> None:
    attention = F.scaled_dot_product_attention

    @functools.wraps(attention)
    def calm(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:
            args = (*args[:4], 0.0, *args[5:])
        return attention(*args, **{**kwargs, **({} if len(args) > 4 else {"dropout_p": 0.0})})

    F.scaled_dot_product_attention = calm


def _calm_recurrent() -> None:
    """RNN, LSTM and GRU hand their share of dropout to one function that has no other name."""
    start = nn.RNNBase.__init__

    @functools.wraps(start)
    def without_dropout(self: Any, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        self.dropout = 0.0

    nn.RNNBase.__init__ = without_dropout  # type: ignore[method-assign]


def _calm_data() -> None:
    def fetch(self: Any, indices: Any) -> Any:
        dataset = self.dataset
        if not self.auto_collation:
            with _drawn_for(indices):
                return self.collate_fn(dataset[indices])
        if getattr(dataset, "__getitems__", None):
            with _drawn_for(indices[0]):
                return self.collate_fn(dataset.__getitems__(indices))
        return self.collate_fn([_item(dataset, index) for index in indices])

    _MapDatasetFetcher.fetch = fetch  # type: ignore[method-assign]


def _item(dataset: Any, index: Any) -> Any:
    with _drawn_for(index):
        return dataset[index]


@contextlib.contextmanager
def _drawn_for(index: Any) -> Iterator[None]:
    """Random numbers that depend on the sample alone; afterwards all is as it was."""
    number = int(index) if isinstance(index, int | torch.Tensor) else hash(str(index)) % 2**31
    numpy = sys.modules.get("numpy")
    states = (torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state())
    torch.manual_seed(number)
    random.seed(number)
    if numpy:
        numpy.random.seed(number % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy:
            numpy.random.set_state(states[2])
