"""What tests of real trainings share: run a program, run what it became, and judge both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from scripts import Case

from migrate.verify.comparison import Comparison
from migrate.verify.final import compare_final
from migrate.verify.launch import Setting, run_alone, run_torchrun
from migrate.verify.trace import Run
from migrate.verify.verdict import Verdict, judge

GPUS = torch.cuda.device_count()
NPROC = 2
SETTING = Setting(
    environment=dict(os.environ),
    nproc=NPROC,
    devices=NPROC if GPUS >= NPROC else 0,
    timeout_s=240,
    stall_s=20,
)


def folder() -> Path:
    """A new folder that a script may write to."""
    return Path(mkdtemp(prefix="scripts-")).resolve()


def start(
    script: Path, args: Sequence[str], cwd: Path | None = None, *, sees: int = NPROC, **changes: Any
) -> Run:
    """A script in one process, with `changes` to the setting."""
    cwd = cwd or folder()
    return run_alone(script, args, cwd, folder(), replace(SETTING, **changes), sees)


def start_several(
    script: Path, args: Sequence[str], cwd: Path | None = None, **changes: Any
) -> Run:
    """A script under torchrun."""
    return run_torchrun(script, args, cwd or folder(), folder(), replace(SETTING, **changes))


@cache
def original(case: Case, data_parallel: str = "whole") -> Run:
    """One run of the original for all tests of this process."""
    return start(case.entry, case.arguments(), data_parallel=data_parallel)


def verdict(one: Run, other: Run, data_parallel: str = "whole", tolerance: float = 1e-4) -> Verdict:
    """What `migrate verify` makes of two runs."""
    final = compare_final(one, other, os.environ) if one.is_good and other.is_good else None
    return judge(Comparison(one, other, tolerance, data_parallel, final))
