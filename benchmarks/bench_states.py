"""Measures conversions of whole training states: against `ds_to_universal`, and against `cp -r`.

As bench.py does: real checkpoints of at least 250 M parameters with Adam, commands in turn in one
session with the page cache warm, medians, peaks of RssAnon and of the disk; the table goes into
README.md between its own marks. `python benchmarks/bench_states.py`; it needs 24 GB of memory and
30 GB of disk.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bench import (
    ENVIRONMENT,
    HERE,
    SAMPLE_INTERVAL_S,
    Job,
    Row,
    delete,
    machine,
    make_checkpoint,
    peak_anonymous_mb,
    run,
    table,
    time_alternately,
    warm_page_cache,
    write_results,
)

import ckpt

BEGIN = "<!-- states: begin (written by bench_states.py) -->"
END = "<!-- states: end -->"
WORKERS = 2

# What the project promises.
MAX_OF_DS_TO_UNIVERSAL = 0.25
MAX_OF_COPY = 2.0
MAX_MEMORY_MB = 400
MAX_MEMORY_GROWTH = 1.10
MAX_DISK = 1.01
BLOCK_BYTES = 512  # stat's

CONVERSIONS = {
    "zero3 -> universal": ("zero3", "universal", ()),
    "zero3 -> dcp": ("zero3", "dcp", ()),
    "zero3 -> zero2": ("zero3", "zero2", ("--world-size", "2")),
    "dcp -> zero3": ("dcp", "zero3", ("--world-size", "2")),
}

# What a command has to import before it can begin: its start-up.
IMPORTS = {
    "torch": "import torch, ckpt.api",
    "dcp": "import torch.distributed.checkpoint, ckpt.api",
}


def jobs_of(command: str, sources: Mapping[str, Path], work: Path) -> dict[str, Job]:
    """Our conversions, the peer's, and a copy of each source."""
    jobs = {}
    for name, (source, target, options) in CONVERSIONS.items():
        output = work / f"ours-{target}"
        words = (command, "convert", str(sources[source]), "--to", target, *options)
        jobs[name] = Job(name, (*words, "-o", str(output), "--quiet"), output)
    for source, folder in sources.items():
        copy = work / f"copy-{source}"
        words = ("cp", "-r", "--reflink=never", str(folder), str(copy))
        jobs[f"cp {source}"] = Job(f"cp {source}", words, copy)
    for name, words in IMPORTS.items():
        jobs[f"start {name}"] = Job(f"start {name}", (sys.executable, "-c", words), work / "none")
    jobs["ds_to_universal"] = _peer(sources["zero3"], work / "theirs-universal")
    return jobs


def _peer(zero3: Path, output: Path) -> Job:
    script = (sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal")
    folder = zero3 / (zero3 / "latest").read_text().strip()
    workers = ("--num_extract_workers", str(WORKERS), "--num_merge_workers", str(WORKERS))
    words = (*script, "--input_folder", str(folder), "--output_folder", str(output), *workers)
    return Job("ds_to_universal", words, output)


def check_nothing_is_lost(jobs: Mapping[str, Job], sources: Mapping[str, Path]) -> None:
    """Stops the benchmark unless each output holds its source's training state, bit for bit."""
    for name, (source, _, _) in CONVERSIONS.items():
        delete(jobs[name].output)
        run(jobs[name].command)
        found = ckpt.diff(ckpt.open(sources[source]), ckpt.open(jobs[name].output))
        wrong = [str(item) for item in found if not str(item).startswith("job ")]
        if wrong:
            sys.exit(f"{name}: {wrong[:5]}")
        delete(jobs[name].output)


def disk_used(folder: Path) -> int:
    """Bytes on the disk below a folder, now."""
    total = 0
    for inner, _, files in os.walk(folder):  # what goes away meanwhile is passed over
        for file in files:
            with suppress(FileNotFoundError):
                total += (Path(inner) / file).lstat().st_blocks * BLOCK_BYTES
    return total


def peak_disk(job: Job) -> float:
    """The most disk that one run took, temporary files included, as a multiple of its output."""
    delete(job.output)
    with tempfile.TemporaryDirectory(dir=job.output.parent) as temporary:
        before, peak = disk_used(job.output.parent), 0
        with subprocess.Popen(
            job.command, env=ENVIRONMENT | {"TMPDIR": temporary}, stdout=subprocess.DEVNULL
        ) as process:
            while process.poll() is None:
                peak = max(peak, disk_used(job.output.parent))
                time.sleep(SAMPLE_INTERVAL_S)
    if process.returncode != 0:
        sys.exit(f"exit status {process.returncode}: {' '.join(job.command)}")
    size = disk_used(job.output)
    delete(job.output)
    return (peak - before) / size


def time_rows(seconds: Mapping[str, float]) -> list[Row]:
    """The ratios of times."""
    peer = seconds["zero3 -> universal"] / seconds["ds_to_universal"]
    what = "zero3 -> universal: time / that of `ds_to_universal`, 2 + 2 workers"
    rows = [Row(what, peer, MAX_OF_DS_TO_UNIVERSAL)]
    for name, (source, target, _) in CONVERSIONS.items():
        start = seconds["start dcp" if target == "dcp" else "start torch"]
        beyond = (seconds[name] - start) / seconds[f"cp {source}"]
        limit = None if target == "universal" else MAX_OF_COPY
        rows.append(
            Row(f"{name}, less start-up: time / that of `cp -r` of the source", beyond, limit)
        )
    return rows


def space_rows(memory: Mapping[int, Mapping[str, float]], disk: Mapping[str, float]) -> list[Row]:
    """Peaks of memory at both sizes, and of the disk at the smaller one."""
    small, large = sorted(memory)
    rows = []
    for name in CONVERSIONS:
        for size in (small, large):
            peak = memory[size][name]
            rows.append(Row(f"{name}: peak memory, {size} M", peak, MAX_MEMORY_MB, " MB"))
        growth = memory[large][name] / memory[small][name]
        rows.append(Row(f"{name}: peak memory, {large} M / {small} M", growth, MAX_MEMORY_GROWTH))
        rows.append(Row(f"{name}: most disk while it runs / output", disk[name], MAX_DISK))
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench", help="scratch folder")
    parser.add_argument("--ckpt", default=str(Path(sys.executable).parent / "ckpt"))
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command (default: 5)")
    parser.add_argument("--millions", type=int, nargs=2, default=(260, 520), metavar="M")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    memory: dict[int, dict[str, float]] = {}
    disk: dict[str, float] = {}
    for millions in sorted(arguments.millions):
        sources = {kind: make_checkpoint(kind, millions, work) for kind in ("zero3", "dcp")}
        for folder in sources.values():
            warm_page_cache(folder)
        jobs = jobs_of(arguments.ckpt, sources, work)
        if not rows:
            check_nothing_is_lost(jobs, sources)
            rows = time_rows(time_alternately(jobs, arguments.repeats))
            disk = {name: peak_disk(jobs[name]) for name in CONVERSIONS}
        memory[millions] = {name: peak_anonymous_mb(jobs[name]) for name in CONVERSIONS}
        if not arguments.keep:
            for folder in sources.values():
                delete(folder)
    rows += space_rows(memory, disk)
    lines = ["", f"{machine()}. Times: medians of {arguments.repeats}.", ""]
    lines += [*table(rows), ""]
    print("\n".join(lines))
    write_results(lines, BEGIN, END)


if __name__ == "__main__":
    main()
