"""Starts users' scripts in child processes, through the runner, and returns what they did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

TESTS = Path(__file__).resolve().parent.parent
GRACE_S = 40.0  # torchrun kills workers that ignore its request after 30 s
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a script: `files` and `records` are by rank, files as (action, path)."""

    returncode: int
    timed_out: bool
    stdout: str
    stderr: str
    cwd: Path
    files: Mapping[int, Sequence[tuple[str, str]]]
    records: Mapping[int, Mapping[str, Any]]

    def written(self, rank: int = 0) -> set[str]:
        """Paths that the rank opened for writing or renamed something to."""
        return {path for action, path in self.files.get(rank, ()) if action == "write"}

    def written_by_several(self) -> set[str]:
        """Paths that more than one rank wrote: a race, whatever came out this time."""
        ranks = list(self.files)
        return {
            path
            for index, first in enumerate(ranks)
            for second in ranks[index + 1 :]
            for path in self.written(first) & self.written(second)
        }


def run_original(
    script: Path,
    args: Sequence[str],
    cwd: Path,
    *,
    devices: int = 2,
    data_parallel: str = "whole",
    steer: bool = True,
    timeout_s: float = 120,
) -> Run:
    """The script in one process that sees `devices` GPUs, real ones where there are enough."""
    flags = ["--devices", str(devices), "--data-parallel", data_parallel]
    flags += ["--steer"] if steer else []
    return _run([sys.executable], flags, [str(script), *args], cwd, devices, timeout_s)


def run_torchrun(
    script: Path,
    args: Sequence[str],
    cwd: Path,
    *,
    nproc: int = 2,
    steer: bool = True,
    timeout_s: float = 180,
) -> Run:
    """The script under torchrun, one process for each of `nproc` GPUs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(nproc)]
    flags = ["--devices", str(nproc), *(["--steer"] if steer else [])]
    return _run(launcher, flags, [str(script), *args], cwd, nproc, timeout_s)


def run_single(
    script: Path, args: Sequence[str], cwd: Path, *, steer: bool = True, timeout_s: float = 120
) -> Run:
    """The script without torchrun, in one process that sees one GPU."""
    return run_original(script, args, cwd, devices=1, steer=steer, timeout_s=timeout_s)


def _run(
    launcher: Sequence[str],
    flags: Sequence[str],
    script: Sequence[str],
    cwd: Path,
    devices: int,
    timeout_s: float,
) -> Run:
    with tempfile.TemporaryDirectory(prefix="shim-") as name:
        folder = Path(name)
        command = [*launcher, "-m", "shim.run", "--record", name, *flags, *script]
        code, timed_out = _watch(command, cwd, folder, _environment(devices), timeout_s)
        records = _records(folder)
        return Run(
            returncode=code,
            timed_out=timed_out,
            stdout=(folder / "stdout").read_text(errors="replace"),
            stderr=(folder / "stderr").read_text(errors="replace"),
            cwd=cwd,
            files={r: [(a, p) for a, p in record["files"]] for r, record in records.items()},
            records=records,
        )


def _environment(devices: int) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    paths = [str(TESTS), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
    }
    visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    real = torch.cuda.device_count() >= max(2, devices)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:devices]) if real else ""
    return environment


def _watch(
    command: Sequence[str],
    cwd: Path,
    folder: Path,
    environment: Mapping[str, str],
    timeout_s: float,
) -> tuple[int, bool]:
    """Exit code, and whether the time was over; no process of the run is left."""
    with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        timed_out = False
        try:
            child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            timed_out = True
        finally:  # also when pytest is interrupted: no process may outlive the test
            _end(child, folder)
        return child.wait(), timed_out


def _end(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Ask first: torchrun puts its workers into sessions of their own and ends them when asked."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if child.poll() is None:
            os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(patience_s)
    for record in _records(folder).values():
        if record["status"] == "running" and _is_ours(record["pid"], folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(record["pid"], signal.SIGKILL)


def _is_ours(pid: int, folder: Path) -> bool:
    """Whether the process is still the runner that writes into the folder; numbers are reused."""
    try:
        return os.fsencode(folder) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _records(folder: Path) -> dict[int, dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    return {record["rank"]: record for record in found}
