"""What can be wrong with the files a user gives; every message stands in one line."""

from __future__ import annotations

from pathlib import Path


class MigrateError(Exception):
    """Bad input. `str(error)` names the file, the line where there is one, and what to do."""


class SourceError(MigrateError):
    """A file that cannot be read as Python 3 source."""

    def __init__(self, path: Path, line: int | None, problem: str) -> None:
        place = f"{path}:{line}" if line else f"{path}"
        super().__init__(f"{place}: {problem}")


class NothingToDo(MigrateError):
    """Input without a training loop, or without anything the rewriter is for."""
