"""How a class of torchvision.datasets gets another constructor and other items."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from migrate.runner.synthetic.images import Order

Fill = Callable[[Any, dict[str, Any]], None]
SPLITS = (
    "train",
    "split",
    "image_set",
    "partition",
    "background",
    "annFile",
    "ann_file",
    "classes",
)
"""The arguments that choose a part of a dataset."""
TRANSFORMS = ("transforms", "transform", "target_transform")
NOT_KEPT = ("self", "root", "download", *TRANSFORMS)
"""The arguments that are not kept as attributes, or not under their own names."""


def construct(kind: Any, fill: Fill) -> None:
    """Give a class a constructor that takes what its own takes, and lets `fill` do the rest."""
    real = kind.__init__
    signature = inspect.signature(real)
    start = next(base for base in kind.__mro__ if base.__name__ == "VisionDataset").__init__

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        given.update(given.pop("kwargs", {}))
        start(self, given.get("root"), **{name: given.get(name) for name in TRANSFORMS})
        kept = {name: value for name, value in given.items() if name not in NOT_KEPT}
        vars(self).update(kept, **{f"_{name}": value for name, value in kept.items()})
        fill(self, given)

    kind.__init__ = init


def give_items(kind: Any, item: Callable[[Any, int], tuple[Any, Any]]) -> None:
    """Give a class items: `item` makes one, the dataset's own transforms are applied to it.

    Its instances keep the number of their samples in `_synthetic`.
    """
    joint = "transforms" in inspect.signature(kind.__init__).parameters

    def get(self: Any, index: int) -> tuple[Any, Any]:
        image, target = item(self, range(self._synthetic)[index])
        if joint:
            return (image, target) if self.transforms is None else self.transforms(image, target)
        if self.transform is not None:
            image = self.transform(image)
        if self.target_transform is not None:
            target = self.target_transform(target)
        return image, target

    kind.__getitem__ = get
    kind.__len__ = lambda self: self._synthetic


def split_of(given: dict[str, Any]) -> str:
    """A name for the part of the data that the arguments ask for."""
    return "-".join(Path(str(given[name])).name for name in SPLITS if name in given)


def note(order: Order, name: str, size: tuple[int, int]) -> None:
    """Say that a class of torchvision.datasets was replaced; `size` is width and height."""
    wide, high = size
    order.note(f"torchvision.datasets.{name}: {order.samples} images of {wide}x{high}")
