"""From a script to a verdict: `verify` is what the command line and the tests call."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from migrate.api import rewrite
from migrate.errors import MigrateError
from migrate.project import load_project
from migrate.rule import Options
from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison
from migrate.verify.final import compare_final
from migrate.verify.launch import Setting, run_alone, run_torchrun
from migrate.verify.trace import Run
from migrate.verify.verdict import FAILS, Verdict, judge
from migrate.verify.workspace import Copy, copy_project

Say = Callable[[str], None]
SHOWN = 5
_MISSING_DATA = re.compile(r"dataset not found|no such file|URLError|HTTPError|connection", re.I)


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is to be compared, and how.

    Attributes:
        script: the original, below `cwd` or not.
        to: the target to rewrite it for; or `against`, the script that is to train the same.
        cwd: where the user would start it.
        device: `cpu`, `cuda` or `auto`: CUDA where there are as many GPUs as processes.
        steps: optimizer steps, 0 for all; passes over a loader then end after half of them.
        keep: a folder for the copies and records, which are otherwise deleted.
    """

    script: Path
    to: str | None = None
    against: Path | None = None
    args: tuple[str, ...] = ()
    cwd: Path
    environment: Mapping[str, str] = field(repr=False)
    options: Options = field(default_factory=Options)
    nproc: int = 2
    device: str = "auto"
    steps: int = 20
    seed: int = 0
    synthetic: int = 0
    tolerance: float = 1e-4
    timeout_s: float = 600.0
    stall_s: float = 60.0
    allow_write: tuple[Path, ...] = ()
    keep: Path | None = None


class CannotRun(MigrateError):
    """One of the two scripts does not run; `traceback` is the script's own."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


def verify(question: Question, say: Say = lambda message: None) -> Verdict:
    """Run both and compare them. The user's folders stay as they are.

    `say` is told what is being done.

    Raises:
        CannotRun: a script fails, or nothing can be compared.
        MigrateError: bad input; the message names the file.
    """
    with ExitStack() as stack:
        if question.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verify-")))
        else:
            folder = _empty_folder(question.keep)
        return _verified(question, folder.resolve(), say)


def _verified(question: Question, folder: Path, say: Say) -> Verdict:
    root = _root(question.script, question.cwd)
    original = _Place(copy_project(root, folder / "original"), question.script.resolve())
    candidate = _candidate(question, root, folder / "candidate")
    devices = _devices(question)
    mode = "whole" if candidate.synchronises else "dealt"
    setting = Setting(
        environment=question.environment,
        nproc=question.nproc,
        devices=devices,
        data_parallel=mode,
        seed=question.seed,
        steps=question.steps,
        pass_batches=(question.steps + 1) // 2,
        synthetic=question.synthetic,
        timeout_s=question.timeout_s,
        stall_s=question.stall_s,
        allow_write=question.allow_write,
        protect=(root, candidate.copy.root),
    )
    say(f"running {question.script} in one process")
    one = _run_original(question, original, folder / "original.record", setting)
    say(f"running {candidate.script.name} in {question.nproc} processes")
    setting = replace(setting, pass_samples=_pass_samples(one, setting))
    place = candidate.start(question.cwd)
    other = run_torchrun(
        candidate.script, question.args, place, folder / "candidate.record", setting
    )
    say("comparing")
    final = compare_final(one, other, question.environment) if other.is_good else None
    comparison = Comparison(one, other, question.tolerance, mode, final)
    conditions = _conditions(question, comparison, original.copy, devices)
    verdict = judge(comparison, [*candidate.remarks, *conditions])
    _refuse_what_did_not_run(verdict)
    if comparison.first_parting is None:
        return verdict
    say("running the original again, to see whether it repeats itself")
    fresh = replace(original, copy=copy_project(root, folder / "again"))
    again = _run_original(question, fresh, folder / "again.record", setting)
    return _unless_unsteady(verdict, again)


@dataclass(frozen=True)
class _Place:
    """A script in its working copy.

    `synchronises` says whether the program mentions SyncBatchNorm.
    """

    copy: Copy
    original_script: Path
    synchronises: bool = False
    remarks: tuple[str, ...] = ()

    @property
    def script(self) -> Path:
        return self.copy.folder / self.original_script.relative_to(self.copy.root)

    def start(self, cwd: Path) -> Path:
        """The folder in the copy that stands for the one where the user is."""
        cwd = cwd.resolve()
        inside = cwd.is_relative_to(self.copy.root)
        return self.copy.folder / cwd.relative_to(self.copy.root) if inside else self.copy.folder


def _root(script: Path, cwd: Path) -> Path:
    """The folder that is copied: where the user is, if the script is below it."""
    if not script.is_file():
        raise MigrateError(f"{script}: there is no such script; give the file that is started")
    script, cwd = script.resolve(), cwd.resolve()
    return cwd if script.is_relative_to(cwd) else script.parent


def _candidate(question: Question, root: Path, folder: Path) -> _Place:
    if question.against is not None:
        own = _root(question.against, root)
        texts = [source.text for source in load_project([question.against], None).sources]
        return _Place(copy_project(own, folder), question.against.resolve(), _synchronises(texts))
    assert question.to is not None
    copy = copy_project(root, folder)
    result = rewrite([question.script], question.to, options=question.options)
    for file in result.files:
        path = file.path.resolve()
        if not path.is_relative_to(root):
            raise MigrateError(
                f"{path}: the script imports it from outside of {root}; start from a folder that "
                "both are in"
            )
        (copy.folder / path.relative_to(root)).write_bytes(file.after)
    left = len(result.manual)
    remarks = (f"places that the rewriting leaves to a human: {left}",) if left else ()
    texts = [file.after.decode(errors="replace") for file in result.files]
    return _Place(copy, question.script.resolve(), _synchronises(texts), remarks)


def _synchronises(texts: Iterable[str]) -> bool:
    return any("SyncBatchNorm" in text for text in texts)


def _devices(question: Question) -> int:
    """GPUs to use: none or one for each process."""
    if question.device == "cpu":
        return 0
    there = _gpus(question.environment)
    if there >= question.nproc:
        return question.nproc
    if question.device == "cuda":
        raise MigrateError(
            f"--device cuda: {question.nproc} processes need as many GPUs, and {there} are "
            "visible; use --device cpu or another --nproc"
        )
    return 0


def _gpus(environment: Mapping[str, str]) -> int:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return 0
    code = "import torch; print(torch.cuda.device_count())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=dict(environment), capture_output=True, text=True, timeout=120
    )
    return int(done.stdout or 0) if done.returncode == 0 else 0


def _run_original(question: Question, place: _Place, record: Path, setting: Setting) -> Run:
    run = run_alone(place.script, question.args, place.start(question.cwd), record, setting)
    name = question.script
    if not run.is_good:
        raise _failure(f"{name}: the original itself does not run in one process", run)
    if not run.steps:
        raise CannotRun(
            f"{name}: the original took no optimizer step, so there is nothing to compare; give "
            "it arguments after -- with which it trains"
        )
    return run


def _failure(message: str, run: Run) -> CannotRun:
    raised = [rank for rank in run.ranks.values() if rank.traceback]
    text = raised[0].traceback if raised else run.stderr[-4000:]
    limits = {"timeout": "it ran into the time limit (--timeout)", "output": "it printed too much"}
    error = raised[0].error if raised else f"exit code {run.returncode}"
    hint = "; --synthetic stands in for public data sets" if _MISSING_DATA.search(error) else ""
    return CannotRun(f"{message}: {limits.get(run.ended, error)}{hint}", text)


def _refuse_what_did_not_run(verdict: Verdict) -> None:
    """A candidate that fails has no verdict, unless its processes waited for each other."""
    run = verdict.comparison.candidate
    if any(cause.name == FAILS for cause in verdict.causes):
        raise _failure("the candidate does not run under torchrun", run)


def _pass_samples(run: Run, setting: Setting) -> str:
    """Where the original's passes were ended early, in samples, by loader."""
    limits = []
    for loader in run.ranks[0].loaders:
        ended = [p for p in loader.passes if len(p.sizes) == setting.pass_batches]
        limits.append(sum(ended[0].sizes) if ended else 0)
    return ",".join(map(str, limits)) if any(limits) else ""


def _unless_unsteady(verdict: Verdict, again: Run) -> Verdict:
    """A script that does not repeat itself cannot be compared with another one."""
    first = verdict.comparison.original
    itself = Comparison(first, again, verdict.comparison.tolerance)
    row = itself.first_parting
    if row is None:
        return verdict
    cause = Cause(
        Place.PROCESSES,
        "not-repeatable",
        "the original does not repeat itself, so its training cannot be compared",
        f"two runs of it part at step {row.number} ({row.before.at}): loss "
        f"{row.loss_before:.6g}, then {row.loss_after:.6g}",
        "seed what it draws: random, numpy and torch; leave out what depends on the clock",
    )
    return replace(verdict, causes=(cause, *verdict.causes))


def _conditions(question: Question, c: Comparison, copy: Copy, devices: int) -> list[str]:
    """How the two were run, in sentences."""
    found = [
        f"{question.nproc} processes on as many GPUs"
        if devices
        else f"{question.nproc} processes on the CPU, with a stand-in for CUDA and NCCL",
        f"seed {question.seed}; the samplers give the same global batches; no dropout; what a data "
        "set draws depends on the sample alone",
    ]
    if question.steps:
        half = (question.steps + 1) // 2
        found.append(
            f"at most {question.steps} optimizer steps, and {half} batches in a pass over a loader"
        )
    wrapped = c.original.ranks[0].wraps.get("DataParallel") if c.original.ranks else None
    if wrapped and not devices:
        found.append(
            "DataParallel runs whole batches at once, as synchronised batch norm does"
            if c.data_parallel == "whole"
            else f"DataParallel runs {question.nproc} replicas, with samples dealt out in turn"
        )
    found += [f"synthetic: {item}" for item in c.original.ranks[0].synthetic]
    ranks = [*c.original.ranks.values(), *c.ranks]
    outside = sorted({item for rank in ranks for item in rank.outside})
    found += [f"outside of the copy: {action} {what}" for action, what in outside[:SHOWN]]
    refused = sorted({path for rank in ranks for _, path in rank.refused})
    found += [f"kept from writing {path} (--allow-write DIR allows it)" for path in refused[:SHOWN]]
    if copy.linked:
        count = len(copy.linked)
        found.append(f"large files and folders that are linked, to be read only: {count}")
    found += [f"not copied: {item.path} ({item.reason})" for item in copy.skipped[:SHOWN]]
    return found


def _empty_folder(path: Path) -> Path:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise MigrateError(f"{path}: --keep needs a folder that is new or empty")
    path.mkdir(parents=True, exist_ok=True)
    return path
