"""What one process did, kept as JSON for the process that watches it.

A thread writes it now and then, also while the script waits for others: of a process that hangs or
is killed, the last record says where it was.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

EVERY_S = 0.5
SHARE = 0.05
"""The most of its time that a process may spend on writing."""


class Waits(Protocol):
    """Knows the collective call in which the script waits, if it does."""

    def waiting(self) -> dict[str, Any] | None:
        """The call and where it stands."""


class Record:
    """Writes `folder/rank<r>.json`, now and then and at the end, from one process alone."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.ask: Callable[[], dict[str, Any]] = dict
        self.steps: list[dict[str, Any]] = []
        self._pid = os.getpid()  # a forked worker has another one, and nothing to say
        self._main = threading.main_thread().ident or 0
        self._writing = threading.Lock()
        self._ended = threading.Event()

    def start(self, calls: Waits) -> None:
        """Begin to write."""
        self._calls = calls
        self._write("running")
        threading.Thread(target=self._go_on, daemon=True).start()

    def end(self, status: str, exit_code: int, error: str = "", traceback: str = "") -> None:
        """Write the last record, once."""
        if os.getpid() == self._pid and not self._ended.is_set():
            self._ended.set()
            self._write(status, exit_code, error, traceback)

    def _go_on(self) -> None:
        pause_s = EVERY_S
        while not self._ended.wait(pause_s):
            start_s = time.perf_counter()
            self._write("running")
            pause_s = max(EVERY_S, (time.perf_counter() - start_s) / SHARE)

    def _write(
        self, status: str, exit_code: int | None = None, error: str = "", traceback: str = ""
    ) -> None:
        content = {
            "rank": self.rank,
            "pid": self._pid,
            "status": status,
            "exit_code": exit_code,
            "error": error,
            "traceback": traceback,
            "at": line_of(sys._current_frames().get(self._main)),
            "waiting": self._calls.waiting(),
            "steps": self.steps,
        }
        with self._writing:
            if status == "running" and self._ended.is_set():
                return
            content |= self.ask()
            path = self.folder / f"rank{self.rank}.json"
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(content))
            partial.replace(path)


def line_of(frame: FrameType | None) -> str:
    """`file:line` of the innermost frame that is the script's own, not a library's."""
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_library(name, frame.f_globals.get("__name__", "")):
            return f"{os.path.relpath(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_library(file: str, module: str) -> bool:
    is_runner = module.startswith("migrate.runner") or file.endswith("migrate/runner/__main__.py")
    installed = file.startswith(("<", sys.prefix, sys.base_prefix)) or "site-packages" in file
    return is_runner or installed or module == "runpy"
