"""Starts users' scripts in child processes, through the runner, and watches over them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from migrate.verify.trace import Rank, Run, read_ranks

RUNNER = Path(__file__).resolve().parent.parent / "runner" / "__main__.py"
GRACE_S = 40.0  # torchrun kills workers that ignore its request after 30 s
LOOK_EVERY_S = 0.2
READ_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How scripts are run: the same for both, but for how many processes there are.

    Attributes:
        environment: of this process; the children's is made from it.
        devices: GPUs that are really to be used; 0 for the stand-in on the CPU.
        data_parallel: how the stand-in for DataParallel divides batches.
        steps: optimizer steps, 0 for all.
        pass_batches: batches of each pass over a loader, 0 for all.
        timeout_s: for one run.
        stall_s: without any progress, while a process waits in a collective call.
        output_bytes: of stdout and of stderr.
        allow_write: folders that scripts may write to, beside their own copy.
        protect: the user's folders, which stay untouched wherever they lie.
    """

    environment: Mapping[str, str] = field(repr=False)
    nproc: int = 2
    devices: int = 0
    data_parallel: str = "whole"
    seed: int | None = None
    steer: bool = True
    calm: bool = True
    steps: int = 0
    pass_batches: int = 0
    pass_samples: str = ""
    synthetic: int = 0
    timeout_s: float = 600.0
    stall_s: float = 60.0
    output_bytes: int = 50 * 2**20
    allow_write: tuple[Path, ...] = ()
    protect: tuple[Path, ...] = ()


def run_alone(
    script: Path, args: Sequence[str], cwd: Path, record: Path, setting: Setting, sees: int = 0
) -> Run:
    """The script in one process that sees `sees` GPUs, or as many as the other run has processes.

    `record` is the folder for its records; the script writes below `cwd`.
    """
    flags = ["--alone", "--devices", str(sees or setting.nproc)]
    return _run([sys.executable], flags, [str(script), *args], cwd, record, setting)


def run_torchrun(
    script: Path, args: Sequence[str], cwd: Path, record: Path, setting: Setting
) -> Run:
    """The script under torchrun, one process for each of `nproc` GPUs."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(setting.nproc)]
    flags = ["--devices", str(setting.nproc)]
    return _run(launcher, flags, [str(script), *args], cwd, record, setting)


def _run(
    launcher: Sequence[str],
    flags: Sequence[str],
    script: Sequence[str],
    cwd: Path,
    record: Path,
    setting: Setting,
) -> Run:
    record.mkdir(parents=True, exist_ok=True)
    options = ["--record", str(record), "--root", str(cwd), *flags, *_flags(setting)]
    command = [*launcher, str(RUNNER), *options, *script]
    code, ended = _watch(command, cwd, record, setting)
    return Run(
        returncode=code,
        ended=ended,
        stdout=(record / "stdout").read_text(errors="replace"),
        stderr=(record / "stderr").read_text(errors="replace"),
        cwd=cwd,
        record=record,
        ranks=read_ranks(record),
    )


def _flags(setting: Setting) -> list[str]:
    flags = ["--data-parallel", setting.data_parallel, "--steps", str(setting.steps)]
    flags += ["--pass-batches", str(setting.pass_batches), "--synthetic", str(setting.synthetic)]
    flags += ["--pass-samples", setting.pass_samples] if setting.pass_samples else []
    flags += ["--seed", str(setting.seed)] if setting.seed is not None else []
    flags += [f"--{name}" for name in ("steer", "calm") if getattr(setting, name)]
    for name, paths in (("allow-write", setting.allow_write), ("protect", setting.protect)):
        flags += [part for path in paths for part in (f"--{name}", str(path))]
    return flags


def _environment(setting: Setting) -> dict[str, str]:
    """Few threads, so that processes do not fight for the cores; only the GPUs that are meant."""
    environment = {
        **setting.environment,
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "TORCH_DISTRIBUTED_DEBUG": "OFF",
    }
    visible = environment.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(setting.devices)))
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[: setting.devices])
    return environment


def _watch(command: Sequence[str], cwd: Path, record: Path, setting: Setting) -> tuple[int, str]:
    """Exit code and why it ended; no process of the run is left."""
    with (record / "stdout").open("wb") as out, (record / "stderr").open("wb") as err:
        child = subprocess.Popen(
            command,
            cwd=cwd,
            env=_environment(setting),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            ended = _wait(child, record, setting)
        finally:  # also when the caller is interrupted: no process may outlive it
            _end(child, record)
        return child.wait(), ended


def _wait(child: subprocess.Popen[bytes], record: Path, setting: Setting) -> str:
    start_s = read_s = moved_s = time.monotonic()
    progress: object = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(LOOK_EVERY_S)
            return "itself"
        now_s = time.monotonic()
        if now_s - start_s > setting.timeout_s:
            return "timeout"
        if any((record / n).stat().st_size > setting.output_bytes for n in ("stdout", "stderr")):
            return "output"
        if now_s - read_s < READ_EVERY_S:
            continue
        read_s, ranks = now_s, read_ranks(record)
        latest = {number: rank.progress for number, rank in ranks.items()}
        if latest != progress or not _are_apart(ranks):
            progress, moved_s = latest, now_s
        elif now_s - moved_s > setting.stall_s:
            return "stall"


def _are_apart(ranks: Mapping[int, Rank]) -> bool:
    """Whether a process waits for others, or they are at different lines."""
    places = {rank.at for rank in ranks.values()}
    return len(ranks) > 1 and (len(places) > 1 or any(rank.waiting for rank in ranks.values()))


def _end(child: subprocess.Popen[bytes], record: Path) -> None:
    """Ask first: torchrun puts its workers into sessions of their own and ends them when asked."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        if child.poll() is None:
            os.killpg(child.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(patience_s)
    for rank in read_ranks(record).values():
        if rank.status == "running" and _is_ours(rank.pid, record):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)


def _is_ours(pid: int, record: Path) -> bool:
    """Whether the process is still the runner that writes into the folder; numbers are reused."""
    try:
        return os.fsencode(record) in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
