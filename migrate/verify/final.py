"""Weights and checkpoint files at the end, compared in a child process that may import torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

from migrate.verify.comparison import FileState, FinalState
from migrate.verify.launch import RUNNER
from migrate.verify.trace import Run

TIMEOUT_S = 300.0
MAX_FILES = 50


def compare_final(one: Run, other: Run, environment: Mapping[str, str]) -> FinalState | None:
    """None if there is nothing to compare, or if that took too long."""
    names = sorted(_saved(one) & _saved(other))[:MAX_FILES]
    places = [f"{run.record}{os.pathsep}{run.cwd}" for run in (one, other)]
    command = [sys.executable, str(RUNNER.with_name("compare.py")), *places, *names]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        return None
    found = json.loads(done.stdout)
    files = tuple(FileState(**item) for item in found.pop("files"))
    return FinalState(**found, files=files)


def _saved(run: Run) -> set[str]:
    """Files that are there at the end."""
    written = {path for rank in run.ranks.values() for path in rank.written}
    return {path for path in written if (run.cwd / path).is_file()}
