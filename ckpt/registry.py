"""The formats there are, found in `ckpt/formats/`, and which of them a path is."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from pathlib import Path

from ckpt.errors import AmbiguousSource, UnknownFormat
from ckpt.format import Format, Match

__all__ = ["detect", "formats", "is_checkpoint", "target"]

SHOWN_FILES = 6


@cache
def formats() -> tuple[Format, ...]:
    """Every format, by name. A module of `ckpt.formats` without leading underscore is one."""
    import ckpt.formats as package

    found = [
        importlib.import_module(f"{package.__name__}.{module.name}").FORMAT
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    ]
    return tuple(sorted(found, key=lambda item: str(item.name)))


def target(name: str) -> Format:
    """The format to write that is called `name`.

    Raises:
        UnknownFormat: no such format, or it is only read.
    """
    for item in formats():
        if name in (item.name, *item.aliases):
            if item.plan is None:
                raise UnknownFormat(f"--to {name}: this format can be read and not yet written")
            return item
    known = ", ".join(item.name for item in formats() if item.plan)
    raise UnknownFormat(f"--to {name}: unknown format; choose one of {known}")


def detect(path: Path) -> Format:
    """The format that recognises the path best.

    Raises:
        UnknownFormat: none does. AmbiguousSource: two are equally sure.
    """
    if not path.exists():
        raise UnknownFormat(f"{path}: no such file or folder")
    readable = [item for item in formats() if item.read is not None]
    sure = {item.name: item.matches(path) for item in readable}
    best = max(sure.values(), default=Match.NO)
    if best is Match.NO:
        raise UnknownFormat(f"{path}: not a checkpoint that shardport knows; {_contents(path)}")
    chosen = [item for item in readable if sure[item.name] is best]
    if len(chosen) > 1:
        names = " and ".join(item.name for item in chosen)
        raise AmbiguousSource(f"{path}: looks like {names}; give the inner folder or file itself")
    return chosen[0]


def is_checkpoint(path: Path) -> bool:
    """True when some format recognises the path."""
    return any(item.matches(path) is not Match.NO for item in formats())


def _contents(path: Path) -> str:
    """What is there instead, and which of it could be given."""
    if path.is_file():
        return f"a file of {path.stat().st_size} bytes. `ckpt formats` lists what can be read."
    entries = sorted(path.iterdir())
    if not entries:
        return "the folder is empty."
    usable = [entry.name for entry in entries if is_checkpoint(entry)]
    if usable:
        return f"inside it {', '.join(usable[:SHOWN_FILES])} could be; give one of them."
    names = [entry.name for entry in entries]
    shown = ", ".join(names[:SHOWN_FILES]) + (", ..." if len(names) > SHOWN_FILES else "")
    return f"the folder holds {shown}. `ckpt formats` lists what can be read."
