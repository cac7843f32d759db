"""Where a script that runs on a copy of its folder may write."""

from __future__ import annotations

import enum
import os
import tempfile
from collections.abc import Container, Sequence
from pathlib import Path

CACHES = (
    "~/.cache", "~/.triton", "~/.config/matplotlib", "~/.matplotlib", "~/nltk_data",
    "~/Library/Caches", "$XDG_CACHE_HOME", "$TORCH_HOME", "$TORCH_EXTENSIONS_DIR",
    "$TORCHINDUCTOR_CACHE_DIR", "$TRITON_CACHE_DIR", "$HF_HOME", "$HF_HUB_CACHE",
    "$HF_DATASETS_CACHE", "$TRANSFORMERS_CACHE", "$MPLCONFIGDIR", "$NUMBA_CACHE_DIR", "$NLTK_DATA",
)  # fmt: skip
"""Folders that libraries keep downloads and compiled code in, for all programs of the user."""
DEVICES = ("/dev/", "/proc/self/")


class Place(enum.Enum):
    """What a path is to the script; `REFUSED` is where it may not write."""

    OWN = "the working copy, or the runner's own record"
    GIVEN = "a folder that the user allows"
    CACHE = "a library's cache"
    PASSING = "a temporary file or a device"
    REFUSED = "anything else"


class Places:
    """The folders of one run; of two that hold a path, the inner one decides.

    `protect` are folders never written to, though they lie in the system's folder for temporary
    files: the user's own project.
    """

    def __init__(self, own: Sequence[Path], allow: Sequence[Path], protect: Sequence[Path]) -> None:
        refused = (*protect, _real("~"))
        passing = (tempfile.gettempdir(), "/dev")
        self._fixed: dict[Path, Place] = {}
        for place, paths in (
            (Place.REFUSED, refused),
            (Place.PASSING, passing),
            (Place.GIVEN, allow),
            (Place.OWN, own),
        ):
            self._fixed |= {_real(path): place for path in paths}

    def of(self, path: Path) -> Place:
        """The place of a path without links in it."""
        folder = _innermost(path, self._fixed)
        place = self._fixed[folder] if folder else Place.REFUSED
        if place is Place.REFUSED:
            cache = _innermost(path, _caches())
            if cache and (folder is None or folder in cache.parents):
                return Place.CACHE
        return place

    def lead_below(self, path: Path) -> bool:
        """Whether an allowed folder lies below the path, which is then made on the way to it."""
        given = [folder for folder, place in self._fixed.items() if place is Place.GIVEN]
        return any(path in folder.parents for folder in (*given, *_caches()))


def _innermost(path: Path, folders: Container[Path]) -> Path | None:
    return next((folder for folder in (path, *path.parents) if folder in folders), None)


def _caches() -> set[Path]:
    """As the environment names them now: scripts set such variables themselves."""
    texts = [os.path.expandvars(text) for text in CACHES]
    paths = {_real(text) for text in texts if text and not text.startswith("$")}
    home = _real("~")
    return {path for path in paths if path != home and path not in home.parents}


def _real(path: str | Path) -> Path:
    # Path.expanduser raises where there is no home.
    return Path(os.path.realpath(os.path.expanduser(path)))  # noqa: PTH111
