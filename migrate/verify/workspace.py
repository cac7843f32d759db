"""The working copy that scripts are run on, so that the user's own folder stays as it is.

Small files are copied. Large ones and whole folders of data become links to the user's: they are
there to be read, and the runner keeps a script from writing through them.
"""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from migrate.errors import MigrateError

SMALL_BYTES = 2**20
"""The largest file that is copied; Python files always are."""
COPIED_BYTES = 200 * 2**20
"""Of all copies together; what comes later is linked."""
MADE_ENTRIES = 5_000
"""Files, links and folders that are made in a few seconds at most."""
CROWDED = (1000, 100, 10, 0)
"""Entries above which a folder is linked as a whole: the first number that makes few enough."""

_CACHES = {
    "__pycache__", ".hypothesis", ".ipynb_checkpoints", ".mypy_cache", ".nox", ".pytest_cache",
    ".ruff_cache", ".tox", "node_modules",
}  # fmt: skip
_LEFT_OUT = dict.fromkeys((".git", ".hg", ".svn"), "the history of the files") | dict.fromkeys(
    ("site-packages", "dist-packages"), "installed packages"
)


@dataclass(frozen=True, slots=True)
class Skipped:
    """Something of the user's folder that the copy lacks: its path in there, and why."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class Copy:
    """A working copy of a folder.

    Attributes:
        root: the user's folder, links resolved.
        folder: the copy, links resolved.
        linked: paths in the copy that are links to what lies outside of it.
        skipped: what is not in the copy; caches are not mentioned.
    """

    root: Path
    folder: Path
    linked: tuple[Path, ...]
    skipped: tuple[Skipped, ...]


def copy_project(root: Path, destination: Path) -> Copy:
    """The copy of `root` at `destination`, which must be new or empty; all of it is writable.

    Python files are real files in it. Raises MigrateError for a folder that cannot be read, or that
    holds the destination, and when the copy cannot be written.
    """
    source = _source(root)
    target = _target(source, destination)
    tree = _scan(source)
    if tree.problem:
        raise MigrateError(
            f"{root}: the script's folder is {tree.problem}, and a copy of it is needed to run "
            "the script; make it readable"
        )
    counts = ((limit, tree.made(limit)) for limit in CROWDED)
    limit = next((limit for limit, made in counts if made <= MADE_ENTRIES), CROWDED[-1])
    work = _Work(source, target, limit)
    try:
        work.copy(tree)
    except OSError as error:
        raise MigrateError(
            f"{target}: the working copy of {root} cannot be written: {error.strerror}; make room "
            "there, or set TMPDIR to a folder that has it"
        ) from error
    linked, skipped = sorted(work.linked), sorted(work.skipped, key=lambda item: item.path)
    return Copy(source, target, tuple(linked), tuple(skipped))


def _source(root: Path) -> Path:
    source = Path(os.path.realpath(root))
    if not source.is_dir():
        found = "a file" if source.exists() else "nothing"
        raise MigrateError(
            f"{root}: expected the folder that the script lies in, found {found}; "
            "pass the path of a script that exists"
        )
    return source


def _target(source: Path, destination: Path) -> Path:
    target = Path(os.path.realpath(destination))
    if target.is_relative_to(source):
        raise MigrateError(
            f"{source}: expected a folder that a copy can be made of, found that the copy would "
            f"lie in it, at {target}; move the script into a folder of its own, or set TMPDIR to a "
            "folder outside"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise MigrateError(
            f"{destination}: expected a new or empty folder for the working copy, found "
            f"{'a file' if target.is_file() else 'other files'} there; give another one"
        )
    return target


@dataclass(slots=True)
class _Folder:
    """What lies directly in a folder, by kind, and the folders below."""

    path: Path
    problem: str = ""
    has_python: bool = False
    """Here or anywhere below."""
    entries: int = 0
    files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    folders: list[_Folder] = field(default_factory=list)

    def is_linked(self, limit: int) -> bool:
        return self.entries > limit and not self.has_python

    def made(self, limit: int) -> int:
        """Entries that a copy makes when more crowded folders are linked."""
        parts = (1 if part.is_linked(limit) else part.made(limit) for part in self.folders)
        return self.entries + sum(parts)


def _scan(path: Path) -> _Folder:
    folder, names = _Folder(path), list[str]()
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                folder.entries += 1
                folder.has_python = folder.has_python or entry.name.endswith(".py")
                _kin(entry, folder, names).append(entry.name)
    except OSError as error:
        return _Folder(path, problem=_why(error))
    _scan_below(folder, names)
    return folder


def _kin(entry: os.DirEntry[str], folder: _Folder, names: list[str]) -> list[str]:
    """Where the names of the same kind are; `names` has those of folders."""
    if entry.is_symlink():
        return folder.links
    if entry.is_file(follow_symlinks=False):
        return folder.files
    return names if entry.is_dir(follow_symlinks=False) else folder.others


def _scan_below(folder: _Folder, names: list[str]) -> None:
    for name in sorted(set(names) - _CACHES):
        path = folder.path / name
        reason = _left_out(path)
        below = _Folder(path, problem=reason) if reason else _scan(path)
        if below.is_linked(CROWDED[0]):  # for certain: a million names need not be kept
            below.files, below.links, below.others, below.folders = [], [], [], []
        folder.folders.append(below)
        folder.has_python = folder.has_python or below.has_python


def _left_out(path: Path) -> str:
    """Why the folder is no part of the program; empty for most."""
    if (path / "pyvenv.cfg").exists() or (path / "conda-meta").exists():
        return "a virtual environment"
    return _LEFT_OUT.get(path.name, "")


class _Work:
    """One copy on its way."""

    def __init__(self, source: Path, target: Path, limit: int) -> None:
        self.source, self.target, self.limit = source, target, limit
        self.linked: list[Path] = []
        self.skipped: list[Skipped] = []
        self._copied_bytes = 0

    def copy(self, tree: _Folder) -> None:
        """Folders near the script first: what is small there is copied while there is room."""
        links = []
        for folder in self._folders(tree):
            place = self._place(folder.path)
            place.mkdir(parents=folder is tree, exist_ok=folder is tree)
            place.chmod(_mode(folder.path.stat()) | stat.S_IRWXU)
            for name in sorted(folder.files):
                self._file(folder.path / name)
            for name in folder.others:
                self._skip(folder.path / name, "neither a file nor a folder")
            links += [folder.path / name for name in folder.links]
        for path in links:  # when all is there that they may lead to
            self._link(path)

    def _folders(self, tree: _Folder) -> Iterator[_Folder]:
        """Those that are made anew; the others are linked or skipped."""
        waiting = deque([tree])
        while waiting:
            folder = waiting.popleft()
            if folder.problem:
                self._skip(folder.path, folder.problem)
            elif folder is not tree and folder.is_linked(self.limit):
                self._link_out(folder.path, folder.path)
            else:
                yield folder
                waiting.extend(folder.folders)

    def _file(self, path: Path) -> None:
        try:
            status = path.stat()
            if not self._is_copied(path, status.st_size):
                self._link_out(path, path)
                return
            content = path.read_bytes()
        except OSError as error:
            self._skip(path, _why(error))
            return
        self._copied_bytes += len(content)
        place = self._place(path)
        place.write_bytes(content)
        place.chmod(_mode(status) | stat.S_IRUSR | stat.S_IWUSR)
        os.utime(place, ns=(status.st_atime_ns, status.st_mtime_ns))

    def _is_copied(self, path: Path, size_bytes: int) -> bool:
        is_small = size_bytes <= SMALL_BYTES and self._copied_bytes + size_bytes <= COPIED_BYTES
        return is_small or path.suffix == ".py"

    def _link(self, path: Path) -> None:
        """A link of the user's: within the folder it leads to the copy's own part."""
        real = Path(os.path.realpath(path))
        if path.suffix == ".py" and real.is_file():
            self._file(path)
            return
        place = self._place(path)
        own = self._place(real) if real.is_relative_to(self.source) else None
        if own is None or (real.exists() and not own.exists()):
            self._link_out(path, real)
        else:
            place.symlink_to(os.path.relpath(own, place.parent))

    def _link_out(self, path: Path, target: Path) -> None:
        self._place(path).symlink_to(target)
        self.linked.append(path.relative_to(self.source))

    def _skip(self, path: Path, reason: str) -> None:
        self.skipped.append(Skipped(path.relative_to(self.source), reason))

    def _place(self, path: Path) -> Path:
        return self.target / path.relative_to(self.source)


def _mode(status: os.stat_result) -> int:
    return stat.S_IMODE(status.st_mode) & 0o777


def _why(error: OSError) -> str:
    return "not readable" if isinstance(error, PermissionError) else str(error.strerror).lower()
