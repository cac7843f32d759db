"""torchvision's datasets, made up: the real classes, with other constructors.

The classes stay what they are, so `isinstance` holds and a script's own subclasses work. All are
replaced, data that are here too. Datasets of arrays get their arrays and keep the rest of their
code. Datasets of folders read real files, written to a temporary folder that goes when the process
ends; `root` stays what the script gave. If the script's folder is here, its subfolders name the
classes and its first image says how large the images are. Videos, flows and stereo stay real.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from migrate.runner.synthetic import scenes
from migrate.runner.synthetic.classes import construct, note, split_of
from migrate.runner.synthetic.images import (
    CIFAR10,
    Order,
    encoded,
    labels,
    numbered,
    picture,
    stack,
)

STL10 = (
    "airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck",
)  # fmt: skip


@dataclass(frozen=True)
class Arrays:
    """A dataset that holds all its images in one array, `data`."""

    side: int
    channels: str
    """Where they are in the array: first, last, or none for grey images."""
    labels: str
    """The attribute for the labels; `targets` is a list, `labels` an array."""
    classes: int = 10
    names: Sequence[str] = ()


ARRAYS = {
    "CIFAR10": Arrays(32, "last", "targets", names=CIFAR10),
    "CIFAR100": Arrays(32, "last", "targets", 100, numbered(100)),
    "SVHN": Arrays(32, "first", "labels"),
    "STL10": Arrays(96, "first", "labels", names=STL10),
    "USPS": Arrays(16, "none", "targets"),
    "SEMEION": Arrays(16, "none", "labels"),
}
MNISTS = ("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "QMNIST")
FOLDERS = {
    "ImageNet": (1000, (500, 375)),
    "Country211": (211, (500, 375)),
    "EuroSAT": (10, (64, 64)),
}
ANY_FOLDER = (2, (500, 375))
"""Two classes where nothing names them: every classifier has room for two."""


def replace(module: ModuleType, order: Order) -> None:
    """Change the classes of torchvision.datasets in place."""
    here = {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
    if "VisionDataset" not in here:
        return
    for name in here.keys() & ARRAYS.keys():
        _hold_arrays(here[name], ARRAYS[name], order)
    for name in MNISTS:
        if name in here:
            _load_grey_digits(here[name], order)
    _read_written_folders(here, order)
    scenes.replace(here, order)


def _hold_arrays(kind: Any, spec: Arrays, order: Order) -> None:
    import numpy as np

    shape = (spec.side, spec.side) if spec.channels == "none" else (spec.side, spec.side, 3)

    def fill(self: Any, given: dict[str, Any]) -> None:
        split = split_of(given)
        numbers = labels(kind.__name__, split, order.samples, spec.classes)
        data = stack(kind.__name__, split, numbers, shape)
        self.data = np.moveaxis(data, 3, 1).copy() if spec.channels == "first" else data
        if split.endswith("unlabeled"):
            numbers = [-1] * len(numbers)
        made = numbers if spec.labels == "targets" else np.asarray(numbers, np.int64)
        setattr(self, spec.labels, made)
        if spec.names:
            self.classes = list(spec.names)
            self.class_to_idx = {name: number for number, name in enumerate(spec.names)}
        note(order, kind.__name__, (spec.side, spec.side))

    construct(kind, fill)


def _load_grey_digits(kind: Any, order: Order) -> None:
    """The constructors of this family stay real: they take what `_load_data` returns."""
    import torch

    def load(self: Any) -> tuple[Any, Any]:
        split = repr([vars(self).get(name) for name in ("train", "split", "what")])
        names = self.classes_split_dict[self.split] if kind.__name__ == "EMNIST" else range(10)
        first = 1 if vars(self).get("split") == "letters" else 0  # its class 0 has no samples
        numbers = labels(kind.__name__, split, order.samples, len(names) - first)
        data = torch.from_numpy(stack(kind.__name__, split, numbers, (28, 28)))
        targets = torch.tensor(numbers, dtype=torch.int64, device="cpu") + first
        if kind.__name__ == "QMNIST":  # the label, and seven numbers on who wrote it
            targets = torch.nn.functional.pad(targets[:, None], (0, 7))
        note(order, kind.__name__, (28, 28))
        return data, targets

    kind._load_data = load
    kind._check_exists = lambda self: True
    kind._check_legacy_exist = lambda self: False
    kind.download = lambda self: None


def _read_written_folders(here: dict[str, Any], order: Order) -> None:
    real = here["DatasetFolder"].__init__
    signature = inspect.signature(real)
    written = functools.cache(functools.partial(_written, order.samples))

    @functools.wraps(real)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        root = bound.arguments["root"]
        bases = [base.__name__ for base in type(self).__mro__]
        name = next(
            base for base in bases if base in FOLDERS or base in ("ImageFolder", "DatasetFolder")
        )
        suffixes = bound.arguments.get("extensions") or (".jpg",)
        suffix = suffixes if isinstance(suffixes, str) else suffixes[0]
        folder, size = written(name, os.fspath(root), suffix)
        bound.arguments.update(root=folder, allow_empty=True)
        real(*bound.args, **bound.kwargs)
        self.root = root
        note(order, name, size)

    here["DatasetFolder"].__init__ = init
    if "ImageNet" in here:
        _know_no_archives(here["ImageNet"])
    for name in here.keys() & {"Country211", "EuroSAT"}:
        here[name]._check_exists = lambda self: True
        here[name].download = here[name]._download = lambda self: None


def _know_no_archives(kind: Any) -> None:
    """ImageNet's constructor stays real as well, but it asks a file for the names of classes."""
    kind.parse_archives = lambda self: None
    inspect.unwrap(kind.__init__).__globals__["load_meta_file"] = lambda *args: (_Names(), [])


class _Names(dict[str, tuple[str, ...]]):
    """Every class is called by its folder's name."""

    def __missing__(self, folder: str) -> tuple[str, ...]:
        return (folder,)


def _written(samples: int, name: str, root: str, suffix: str) -> tuple[str, tuple[int, int]]:
    """A new folder of labelled files, and the size of their images."""
    count, size = FOLDERS.get(name, ANY_FOLDER)
    names, size = _seen(Path(root), suffix, size)
    names = names or numbered(count)
    folder = Path(tempfile.mkdtemp(prefix="synthetic-"))
    atexit.register(_remove, folder, os.getpid())
    for each in names:
        (folder / each).mkdir()
    split = Path(root).name
    for index, label in enumerate(labels(name, split, samples, len(names))):
        image = picture(name, split, index, label, size)
        _write(image, folder / names[label] / f"{index:06d}{suffix}")
    return str(folder), size


def _seen(root: Path, suffix: str, size: tuple[int, int]) -> tuple[list[str], tuple[int, int]]:
    """The classes of the script's own folder, and the size of its first image; none if not here."""
    from PIL import Image

    if not root.is_dir():
        return [], size
    names = sorted(entry.name for entry in root.iterdir() if entry.is_dir())
    files = (file for name in names for file in (root / name).rglob("*") if file.is_file())
    first = next(files, None)
    if first is not None and first.suffix.lower() in Image.registered_extensions():
        with Image.open(first) as image:
            size = image.size
    return names, size


def _write(image: Any, path: Path) -> None:
    import numpy as np
    import torch
    from PIL import Image

    kind = Image.registered_extensions().get(path.suffix.lower())
    if kind is not None:
        path.write_bytes(encoded(image, kind))
    elif path.suffix == ".npy":
        np.save(path, np.asarray(image))
    elif path.suffix in (".pt", ".pth"):
        torch.save(torch.from_numpy(np.array(image)), path)
    else:
        raise ValueError(
            f"--synthetic makes images, .npy and .pt files, but no {path.suffix} files:"
            " run without it, on the real data"
        )


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a process that was forked from this one
        shutil.rmtree(folder, ignore_errors=True)
