"""Carrying out a plan: a hidden folder beside the output, filled, then renamed into place.

The output's name appears only when everything is there; commit files are written last. A run that
was killed leaves the hidden folder and a journal of finished records, and the same conversion,
started again, goes on from there. A run that fails or is interrupted takes its folder with it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from threading import Lock
from typing import BinaryIO

from ckpt.copying import copy
from ckpt.errors import NoSpace, OutputExists
from ckpt.model import Record
from ckpt.moves import Move, moves_of
from ckpt.note import summarise
from ckpt.plan import WritePlan
from ckpt.registry import formats

__all__ = ["check_output", "check_replaceable", "check_space", "execute"]

JOURNAL_FILE = ".journal"
JOURNAL_INTERVAL_S = 10.0
SPARE_BYTES = 16 << 20
SINGLE = "output"


def check_output(output: Path, source: Path, *, overwrite: bool) -> None:
    """Refuses an output that is there, or that overlaps the source.

    Raises:
        OutputExists: see above; the message says what to do.
    """
    ours, theirs = output.resolve(), source.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise OutputExists(
            f"{output}: is the source, holds it or is a part of it; choose another with -o"
        )
    if not output.exists():
        return
    if not (output.is_file() or output.is_dir()):
        raise OutputExists(f"{output}: is neither a file nor a folder; choose another with -o")
    if not overwrite:
        raise OutputExists(f"{output}: already exists; choose another with -o, or use --overwrite")


def check_replaceable(plan: WritePlan, output: Path) -> None:
    """Refuses to replace a folder that holds anything but files of a checkpoint.

    Raises:
        OutputExists: names what would be deleted.
    """
    if not output.is_dir():
        return
    ours = {file.path for file in plan.files}
    ours |= {file.path for file in plan.commit} | {file.path for file in plan.copied}
    patterns = [pattern for item in formats() for pattern in item.outputs]
    strangers = [
        entry.name
        for entry in sorted(output.iterdir())
        if entry.name not in ours
        and not (entry.is_dir() and _holds_only(entry, ours))
        and (entry.is_dir() or not any(fnmatch(entry.name, pattern) for pattern in patterns))
    ]
    if strangers:
        raise OutputExists(
            f"{output}: a folder that is not only a checkpoint ({summarise(strangers)}) is not "
            "replaced, even with --overwrite; choose another output with -o"
        )


def _holds_only(folder: Path, ours: set[str]) -> bool:
    """True for a folder in which every file is one that the plan writes anew."""
    found = [path for path in folder.rglob("*") if not path.is_dir()]
    names = (path.relative_to(folder.parent).as_posix() for path in found)
    return bool(found) and all(name in ours for name in names)


def check_space(plan: WritePlan, output: Path) -> None:
    """Refuses a conversion that the disk cannot hold.

    Raises:
        NoSpace: with the bytes needed and free.
    """
    needed = plan.nbytes + sum(Path(file.source).stat().st_size for file in plan.copied)
    folder = next(parent for parent in output.absolute().parents if parent.exists())
    begun = folder / f".{output.name}.partial"
    held = sum(f.stat().st_blocks * 512 for f in begun.rglob("*") if f.is_file())
    free = shutil.disk_usage(folder).free + held
    if needed + SPARE_BYTES > free:
        raise NoSpace(
            f"{folder}: {free / 1e9:.2f} GB free, the output takes {needed / 1e9:.2f} GB; "
            "free some space or choose another disk with -o"
        )


def execute(
    plan: WritePlan, output: Path, digest: str, progress: Callable[[int], None] | None = None
) -> None:
    """Write the plan's files under the output's name.

    Args:
        digest: identifies source and options; only a partial output of the same is continued.
        progress: called with the bytes written since the last call, from any thread.

    Raises:
        CorruptCheckpoint: a source turns out to be damaged. OSError: the disk refuses.
        Either way, and on KeyboardInterrupt, nothing is left behind.
    """
    partial = output.absolute().with_name(f".{output.name}.partial")
    made = [folder for folder in partial.parents if not folder.exists()]
    with _locked(partial):
        try:
            journal = _Journal(partial, digest)
            _fill(plan, partial, journal, progress)
            journal.remove()
            _publish(partial / SINGLE if plan.is_single_file else partial, output)
        except BaseException:
            _discard(partial)
            with suppress(OSError):
                for folder in made:
                    folder.rmdir()
            raise
    if plan.is_single_file:
        partial.rmdir()


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Holds the hidden folder, which is made if need be, against a second conversion.

    Raises:
        OutputExists: another process holds it.
    """
    while True:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY)
        try:
            _lock(descriptor, partial)
            if partial.exists() and partial.stat().st_ino == os.fstat(descriptor).st_ino:
                yield
                return
        finally:
            os.close(descriptor)


def _lock(descriptor: int, partial: Path) -> None:
    try:
        with _unsupported_is_fine():
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as problem:
        raise OutputExists(
            f"{partial}: another conversion is writing this output; wait for it, or choose "
            "another with -o"
        ) from problem


def _discard(partial: Path) -> None:
    """Delete a hidden folder, its journal first: data that is gone must not count as done."""
    (partial / JOURNAL_FILE).unlink(missing_ok=True)
    shutil.rmtree(partial, ignore_errors=True)


class _Journal:
    """Which records are done, for a run that gets killed; synced to disk every few seconds."""

    def __init__(self, partial: Path, digest: str) -> None:
        self._path = partial / JOURNAL_FILE
        self._lock, self._pending, self._saved_at = Lock(), list[str](), time.monotonic()
        self._files: list[Path] = []
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        if not lines or lines[0] != digest:
            self.remove()
            for entry in partial.iterdir():
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            self._path.write_text(digest + "\n")
            lines = []
        self._done = set(lines[1:])

    def watch(self, files: Sequence[Path]) -> None:
        """The output files to sync before a record counts as done; called before laying out."""
        self._files = list(files)
        if not all(file.exists() for file in files):
            self._done.clear()

    def is_done(self, record: Record) -> bool:
        """True for a record whose bytes a killed run has already moved."""
        return _line(record) in self._done

    def finish(self, record: Record) -> None:
        """Note a record; every few seconds, sync the output and write the notes down."""
        with self._lock:
            self._pending.append(_line(record))
            if time.monotonic() - self._saved_at < JOURNAL_INTERVAL_S:
                return
            for file in self._files:
                with file.open("rb") as stream:
                    os.fsync(stream.fileno())
            with self._path.open("a") as stream:
                stream.writelines(line + "\n" for line in self._pending)
            self._pending.clear()
            self._saved_at = time.monotonic()

    def remove(self) -> None:
        """Nothing counts as done any more, or everything does and the output is complete."""
        self._path.unlink(missing_ok=True)


def _line(record: Record) -> str:
    return json.dumps([record.path, record.offset, record.length])


def _fill(
    plan: WritePlan, partial: Path, journal: _Journal, progress: Callable[[int], None] | None
) -> None:
    spans, moves = {}, list[Move]()
    targets = {file.path: partial / (file.path or SINGLE) for file in plan.files}
    journal.watch(list(targets.values()))
    for file in plan.files:
        target = targets[file.path]
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("r+b" if target.exists() else "w+b") as stream:
            layout = file.lay_out(stream)
            _allocate(stream)
        spans[file.path] = layout.spans
        moves += moves_of(str(target), layout.placements)
    left = [move for move in moves if not journal.is_done(move.record)]
    if progress:
        progress(sum(move.nbytes for move in moves) - sum(move.nbytes for move in left))
    copy(left, progress, journal.finish)
    for copied in plan.copied:
        shutil.copyfile(copied.source, partial / copied.path)
    for commit in plan.commit:
        (partial / commit.path).write_bytes(commit.render(spans))


def _allocate(stream: BinaryIO) -> None:
    """Claim the disk blocks of a laid-out file: a full disk shows now, and copying into allocated
    blocks from several places is as fast as writing from front to back."""
    size = stream.seek(0, os.SEEK_END)
    if size and hasattr(os, "posix_fallocate"):
        with _unsupported_is_fine():
            os.posix_fallocate(stream.fileno(), 0, size)


@contextmanager
def _unsupported_is_fine() -> Iterator[None]:
    """Ignores the refusal of a file system that cannot allocate; a full disk is not that."""
    try:
        yield
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


def _publish(finished: Path, output: Path) -> None:
    """Rename into place; an output that is to be replaced goes only when the new one is there."""
    if output.is_dir() and not output.is_symlink():
        old = output.absolute().with_name(f".{output.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        output.rename(old)
        try:
            finished.rename(output)
        except BaseException:
            old.rename(output)
            raise
        shutil.rmtree(old)
        return
    if output.exists() and finished.is_dir():
        output.unlink()
    finished.replace(output)
