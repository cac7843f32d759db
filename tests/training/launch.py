"""Starts the scripts beside it under torchrun for pytest, with the standard library alone."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TAIL = 6000
GRACE_S = 45.0  # torchrun kills workers that ignore its request after 30 s


def run_training(
    out_dir: Path, cases: Sequence[str], world_size: int, timeout_s: float = 300
) -> None:
    """Train the cases; each leaves `out_dir/<case>/` with ckpt, truth.safetensors, truth.json."""
    out_dir.mkdir(parents=True, exist_ok=True)
    log = out_dir / f"train_w{world_size}.log"
    _torchrun([str(HERE / "train.py"), str(out_dir), *cases], world_size, log, timeout_s)


def run_resume(
    kind: str,
    checkpoint: Path,
    out: Path,
    world_size: int,
    *,
    model_options: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    timeout_s: float = 120,
) -> dict[str, Any]:
    """Resume from the checkpoint; what was loaded is in `out`, the groups are returned.

    `flags` are resume.py's: --plain, --flat, --optimizer sgd, --next-steps N.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [str(HERE / "resume.py"), kind, str(checkpoint), str(out)]
    command += ["--model-options", json.dumps(dict(model_options or {})), *flags]
    _torchrun(command, world_size, out.with_suffix(".log"), timeout_s)
    meta: dict[str, Any] = json.loads(out.with_suffix(".json").read_text())
    return meta


def run_fsdp_saves(out_dir: Path, world_size: int, timeout_s: float = 300) -> None:
    """Train under FSDP and save in many ways; see fsdp_saves.py for what is left there."""
    out_dir.mkdir(parents=True, exist_ok=True)
    log = out_dir / "saves.log"
    _torchrun([str(HERE / "fsdp_saves.py"), str(out_dir)], world_size, log, timeout_s)


def run_fsdp_loads(
    jobs: Sequence[Mapping[str, str]], folder: Path, world_size: int, timeout_s: float = 240
) -> None:
    """Load full state dicts into live jobs; see fsdp_loads.py for the jobs and what they leave."""
    folder.mkdir(parents=True, exist_ok=True)
    listed, log = folder / f"jobs_w{world_size}.json", folder / f"loads_w{world_size}.log"
    listed.write_text(json.dumps(list(jobs)))
    _torchrun([str(HERE / "fsdp_loads.py"), str(listed)], world_size, log, timeout_s)


def run_universal_loads(
    jobs: Sequence[Mapping[str, Any]], folder: Path, world_size: int, timeout_s: float = 240
) -> None:
    """Load universal checkpoints into live DeepSpeed jobs; see universal_loads.py."""
    folder.mkdir(parents=True, exist_ok=True)
    listed, log = folder / f"jobs_w{world_size}.json", folder / f"universal_w{world_size}.log"
    listed.write_text(json.dumps(list(jobs)))
    _torchrun([str(HERE / "universal_loads.py"), str(listed)], world_size, log, timeout_s)


def run_zero_jobs(
    what: str, where: Path, log: Path, world_size: int, timeout_s: float = 300
) -> None:
    """Train or load DeepSpeed jobs; see zero_jobs.py for both."""
    log.parent.mkdir(parents=True, exist_ok=True)
    _torchrun([str(HERE / "zero_jobs.py"), what, str(where)], world_size, log, timeout_s)


def run_jobs(
    script: Path,
    jobs: Sequence[Mapping[str, Any]],
    folder: Path,
    name: str,
    world_size: int,
    timeout_s: float,
) -> None:
    """Run a script that takes a JSON list of jobs; `folder` gets the list and a log."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / f"{name}.json"
    listed.write_text(json.dumps(list(jobs)))
    _torchrun([str(script), str(listed)], world_size, folder / f"{name}.log", timeout_s)


def _torchrun(script: list[str], world_size: int, log: Path, timeout_s: float) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world_size), *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no end after {timeout_s} s: {command}\n{_tail(log)}") from None
        finally:  # also when pytest is interrupted: no process may outlive the test
            _end(child)
    if code != 0:
        raise AssertionError(f"exit code {code}: {command}\n{_tail(log)}")


def _end(child: "subprocess.Popen[bytes]") -> None:
    """Ask first: torchrun puts its workers into sessions of their own and ends them when asked."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if child.poll() is not None:
            return
        os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)


def _tail(log: Path) -> str:
    return log.read_bytes()[-TAIL:].decode(errors="replace")
