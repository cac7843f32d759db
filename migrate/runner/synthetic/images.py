"""Pictures and labels that are the same in every process, and that a model can learn from.

A class is a colour and a wave across the picture, a sample is noise upon it. numpy is imported when
something is made: whoever has torchvision or Hugging Face's datasets has it.
"""

from __future__ import annotations

import functools
import io
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

CIFAR10 = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
"""Its classes, under whatever name it is loaded."""
NOISE = 64
"""How many of the 256 levels of a pixel are noise."""


@dataclass(frozen=True)
class Order:
    """How many samples a split has, and who wants to hear what was replaced."""

    samples: int
    note: Callable[[str], None]


def generator(*key: object) -> Any:
    """Random numbers that depend on these words alone."""
    import numpy as np

    return np.random.default_rng(zlib.crc32(repr(key).encode()))


def labels(name: str, split: str, samples: int, classes: int) -> list[int]:
    """Labels in no order, every class as often as every other."""
    rounds = range(-(-samples // classes))
    drawn = (generator(name, split, number).permutation(classes).tolist() for number in rounds)
    return [label for one in drawn for label in one][:samples]


def numbered(classes: int) -> list[str]:
    """Names for classes."""
    width = len(str(classes - 1))
    return [f"class_{number:0{width}d}" for number in range(classes)]


def pixels(name: str, split: str, index: int, label: int, shape: Sequence[int]) -> Any:
    """One picture as an array of bytes, of (height, width) or (height, width, channels)."""
    import numpy as np

    drawn = generator(name, split, index).bytes(math.prod(shape))
    noise = np.frombuffer(drawn, np.uint8).reshape(shape) % NOISE
    return _pattern(name, label, tuple(shape)) + noise


def stack(name: str, split: str, classes: Sequence[int], shape: Sequence[int]) -> Any:
    """The pictures of samples with these labels, as one array."""
    import numpy as np

    made = [pixels(name, split, index, label, shape) for index, label in enumerate(classes)]
    return np.stack(made)


def picture(
    name: str, split: str, index: int, label: int, size: tuple[int, int], mode: str = "RGB"
) -> Any:
    """One picture as PIL's image; `size` is its width and height."""
    from PIL import Image

    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    image = Image.fromarray(pixels(name, split, index, label, shape))
    return image if mode in ("RGB", "L") else image.convert(mode)


def encoded(image: Any, kind: str) -> bytes:
    """The bytes of its file."""
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


@functools.lru_cache(maxsize=64)
def _pattern(name: str, label: int, shape: tuple[int, ...]) -> Any:
    """Its bytes leave room for noise."""
    import numpy as np

    draw = generator(name, "class", label)
    turns = draw.uniform(-4, 4, 2)
    down, across = (
        np.exp(2j * np.pi * turn * np.linspace(0, 1, side, dtype=np.float32))
        for turn, side in zip(turns, shape[:2], strict=True)
    )
    wave = np.outer(down.real, across.real) - np.outer(down.imag, across.imag)
    levels = draw.uniform(0.2, 0.8, shape[2:]) + 0.2 * wave.reshape(
        *wave.shape, *[1] * len(shape[2:])
    )
    return (levels * (256 - NOISE)).astype(np.uint8)
