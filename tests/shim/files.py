"""Records what a process writes, makes, renames and removes below its working folder."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch

WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC
ONE_PATH = {
    "os.mkdir": "make",
    "os.remove": "remove",
    "os.rmdir": "remove",
    "os.truncate": "write",
    "shutil.rmtree": "remove",
}
TWO_PATHS = ("os.rename", "os.link", "os.symlink", "shutil.move")


class Files:
    """The (action, path) pairs of this process; actions are write, make, rename, remove."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.realpath(root)
        self._seen: dict[tuple[str, str], None] = {}

    def watch(self) -> None:
        """Start; Python cannot take an audit hook away again."""
        sys.addaudithook(self._hear)
        save, jit_save = torch.save, torch.jit.save

        @functools.wraps(save)
        def seen_save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            self._note("write", f)  # its zip files are written by C++, which raises no event
            return save(obj, f, *args, **kwargs)

        @functools.wraps(jit_save)
        def seen_jit_save(m: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            self._note("write", f)
            return jit_save(m, f, *args, **kwargs)

        torch.save, torch.jit.save = seen_save, seen_jit_save

    def listed(self) -> list[tuple[str, str]]:
        """In the order of their first appearance, paths relative to the root."""
        return list(self._seen)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and _is_writing(args[1], args[2]):
            self._note("write", args[0])
        elif event in ONE_PATH:
            self._note(ONE_PATH[event], args[0])
        elif event in TWO_PATHS:
            self._note("rename" if event != "os.link" else "make", args[0])
            self._note("write", args[1])

    def _note(self, action: str, path: Any) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # a descriptor or an open file, whose opening was heard
        absolute = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 (keeps links)
        full = os.path.realpath(absolute.parent) + os.sep + absolute.name
        below = full.startswith(self._root + os.sep)
        if below and "__pycache__" not in full:
            self._seen.setdefault((action, full[len(self._root) + 1 :]))


def _is_writing(mode: str | None, flags: int | None) -> bool:
    if mode is not None:
        return any(letter in mode for letter in "wax+")
    return bool((flags or 0) & WRITING_FLAGS)
