"""ckpt: read, compare and convert the training state of PyTorch and DeepSpeed jobs.

    import ckpt

    checkpoint = ckpt.open("zero3/")          # metadata only
    ckpt.convert("zero3/", to="hf", output="model/")

Everything is imported when it is first used; torch only where a conversion needs it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ckpt.api import Conversion, convert, prepare
    from ckpt.api import open_checkpoint as open  # noqa: A004
    from ckpt.comparison import diff
    from ckpt.errors import CkptError
    from ckpt.model import Checkpoint, Param, ParamGroup
    from ckpt.note import Note

__all__ = [
    "Checkpoint",
    "CkptError",
    "Conversion",
    "Note",
    "Param",
    "ParamGroup",
    "convert",
    "diff",
    "open",
    "prepare",
]

_HOMES = {
    "Checkpoint": ("ckpt.model", "Checkpoint"),
    "CkptError": ("ckpt.errors", "CkptError"),
    "Conversion": ("ckpt.api", "Conversion"),
    "Note": ("ckpt.note", "Note"),
    "Param": ("ckpt.model", "Param"),
    "ParamGroup": ("ckpt.model", "ParamGroup"),
    "convert": ("ckpt.api", "convert"),
    "diff": ("ckpt.comparison", "diff"),
    "open": ("ckpt.api", "open_checkpoint"),
    "prepare": ("ckpt.api", "prepare"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckpt' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(import_module(module), attribute)
