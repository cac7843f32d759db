"""Measures conversions of whole training states: against `ds_to_universal`, and against `cp -r`.

As bench.py does: real checkpoints of at least 250 M parameters with Adam, commands in turn in one
session with the page cache warm, medians, peaks of RssAnon; the table goes into README.md between
its own marks. `python benchmarks/bench_states.py`; it needs 24 GB of memory and 20 GB of disk.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from bench import (
    HERE,
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

CONVERSIONS = {
    "zero3 -> universal": ("zero3", "universal", ()),
    "zero3 -> dcp": ("zero3", "dcp", ()),
    "zero3 -> zero2": ("zero3", "zero2", ("--world-size", "2")),
    "dcp -> zero3": ("dcp", "zero3", ("--world-size", "2")),
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
    jobs["start"] = Job("start", (sys.executable, "-c", "import torch, ckpt.api"), work / "none")
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


def rows_of(seconds: Mapping[str, float], peaks: Mapping[str, float]) -> list[Row]:
    """The table: one ratio of times and one peak for each conversion."""
    peer = seconds["zero3 -> universal"] / seconds["ds_to_universal"]
    what = "zero3 -> universal: time / that of `ds_to_universal`, 2 + 2 workers"
    rows = [Row(what, peer, MAX_OF_DS_TO_UNIVERSAL)]
    for name, (source, target, _) in CONVERSIONS.items():
        beyond = (seconds[name] - seconds["start"]) / seconds[f"cp {source}"]
        limit = None if target == "universal" else MAX_OF_COPY
        rows.append(
            Row(f"{name}, less start-up: time / that of `cp -r` of the source", beyond, limit)
        )
    return rows + [
        Row(f"{name}: peak memory", peak, MAX_MEMORY_MB, " MB") for name, peak in peaks.items()
    ]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench", help="scratch folder")
    parser.add_argument("--ckpt", default=str(Path(sys.executable).parent / "ckpt"))
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command (default: 5)")
    parser.add_argument("--millions", type=int, default=260)
    parser.add_argument("--keep", action="store_true", help="keep the checkpoints")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    sources = {kind: make_checkpoint(kind, arguments.millions, work) for kind in ("zero3", "dcp")}
    for folder in sources.values():
        warm_page_cache(folder)
    jobs = jobs_of(arguments.ckpt, sources, work)
    check_nothing_is_lost(jobs, sources)
    seconds = time_alternately(jobs, arguments.repeats)
    peaks = {name: peak_anonymous_mb(jobs[name]) for name in CONVERSIONS}
    if not arguments.keep:
        for folder in sources.values():
            delete(folder)
    lines = ["", f"{machine()}. Times: medians of {arguments.repeats}.", ""]
    lines += [*table(rows_of(seconds, peaks)), ""]
    print("\n".join(lines))
    write_results(lines, BEGIN, END)


if __name__ == "__main__":
    main()
