"""Measures `ckpt convert` against the frameworks' own converters and against `cp`.

Makes the checkpoints that it needs, runs every command alternately in one session with the page
cache warm, checks that ours and theirs wrote the same tensors, and writes ratios of medians into
benchmarks/README.md. `make bench` runs it; it needs Linux, 24 GB of memory and 30 GB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN = "<!-- results: begin (written by make bench) -->"
END = "<!-- results: end -->"

SAMPLE_INTERVAL_S = 0.02
TOUCHED_BYTES = 8 << 30
ENVIRONMENT = os.environ | {
    "DS_ACCELERATOR": "cpu",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}

# What the project promises, see the table in README.md.
MAX_OF_ZERO_TO_FP32 = 0.6
MAX_OF_DCP_TO_TORCH = 0.5
MAX_OF_COPY = 1.5
MAX_MEMORY_MB = 350
MAX_MEMORY_GROWTH = 1.10


@dataclass(frozen=True, slots=True)
class Job:
    """A command to measure and the path that it creates."""

    name: str
    command: tuple[str, ...]
    output: Path


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a measured number, and the most that it may be, if there is such."""

    what: str
    value: float
    target: float | None
    unit: str = ""

    @property
    def cells(self) -> tuple[str, str, str, str]:
        digits = 0 if self.unit else 2
        measured = f"{self.value:.{digits}f}{self.unit}"
        if self.target is None:
            return self.what, measured, "none", ""
        met = "yes" if self.value <= self.target else "**no**"
        return self.what, measured, f"at most {self.target:g}{self.unit}", met


def run(command: Iterable[str]) -> None:
    """Runs a command silently; its output is shown only when it fails."""
    words = list(command)
    result = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"$ {' '.join(words)}\n{result.stdout}{result.stderr}")


def delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def touch_free_memory() -> None:
    """Uses a part of the free memory and gives it back.

    A virtual machine's host takes free memory away and returns it page by page, at several times
    the cost of copying a page. Without this, who writes more, or after a pause, seems slow.
    """
    script = f"memory = b'1' * {TOUCHED_BYTES}"
    subprocess.run([sys.executable, "-c", script], check=True)


def seconds_of(job: Job) -> float:
    """Wall time of one run. The output is deleted, and nothing is left for the disk to write."""
    delete(job.output)
    os.sync()
    touch_free_memory()
    started = time.perf_counter()
    run(job.command)
    seconds = time.perf_counter() - started
    delete(job.output)
    return seconds


def anonymous_kb(pid: int) -> int:
    """RssAnon of a process and all below it, now; 0 for those that have ended."""
    total = 0
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            total = int(line.split()[1])
    return total + sum(anonymous_kb(child) for child in children)


def peak_anonymous_mb(job: Job) -> float:
    """The most anonymous memory that one run held, sampled every 20 ms, in MB."""
    delete(job.output)
    peak_kb = 0
    with subprocess.Popen(
        job.command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            peak_kb = max(peak_kb, anonymous_kb(process.pid))
            time.sleep(SAMPLE_INTERVAL_S)
    delete(job.output)
    if process.returncode != 0:
        sys.exit(f"exit status {process.returncode}: {' '.join(job.command)}")
    return peak_kb * 1024 / 1e6


def make_checkpoint(kind: str, millions: int, work: Path) -> Path:
    """The folder of a checkpoint: the one that --keep left, or a new one."""
    folder, unfinished = work / f"{kind}-{millions}", work / "unfinished"
    if not folder.is_dir():
        print(f"making {folder.name}", flush=True)
        delete(unfinished)
        torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        script = (str(HERE / "make_checkpoints.py"), kind, str(unfinished))
        run([*torchrun, "--nproc-per-node", "2", *script, "--millions", str(millions)])
        unfinished.rename(folder)
    return folder


def warm_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                while stream.read(1 << 24):
                    pass


def conversions(ckpt: str, zero3: Path, dcp: Path, work: Path) -> dict[str, Job]:
    """Ours and theirs, for the two questions that both can answer."""
    hf, fp32 = work / "ours-hf", work / "theirs-hf"
    pt, theirs_pt = work / "ours.pt", work / "theirs.pt"
    zero_to_fp32 = (sys.executable, str(zero3 / "zero_to_fp32.py"), str(zero3), str(fp32))
    format_utils = (sys.executable, "-m", "torch.distributed.checkpoint.format_utils")
    convert = (ckpt, "convert")
    jobs = [
        Job("ours-hf", (*convert, str(zero3), "--to", "hf", "-o", str(hf), "--quiet"), hf),
        Job("zero_to_fp32", (*zero_to_fp32, "--safe_serialization"), fp32),
        Job("ours-torch", (*convert, str(dcp), "--to", "torch", "-o", str(pt), "--quiet"), pt),
        Job("dcp_to_torch", (*format_utils, "dcp_to_torch", str(dcp), str(theirs_pt)), theirs_pt),
    ]
    return {job.name: job for job in jobs}


def tensors_in(value: Any) -> Iterable[Any]:
    """Every tensor of more than one element in nested containers."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "numel") and value.numel() > 1:
        yield value


def fingerprint(tensor: Any) -> tuple[str, tuple[int, ...], str]:
    content = tensor.detach().contiguous().numpy()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.blake2b(content).hexdigest()


def torch_contents(output: Path) -> Counter[Any]:
    """The tensors of a torch.save file, whatever the containers and keys around them."""
    import torch

    path = next(output.glob("*.pt")) if output.is_dir() else output
    loaded = torch.load(path, mmap=True, weights_only=True)
    return Counter(fingerprint(tensor) for tensor in tensors_in(loaded))


def hf_contents(output: Path) -> dict[str, Any]:
    """Name and content of each tensor of a folder of safetensors files."""
    from safetensors.torch import load_file

    return {
        name: fingerprint(tensor)
        for path in sorted(output.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def check_same(ours: Job, theirs: Job, contents: Callable[[Path], Any]) -> None:
    """Stops the benchmark unless both commands write the same tensors, bit for bit."""
    for job in (ours, theirs):
        delete(job.output)
        run(job.command)
    if contents(ours.output) != contents(theirs.output):
        sys.exit(f"{ours.name} and {theirs.name} wrote different tensors")
    delete(theirs.output)


def time_alternately(jobs: Mapping[str, Job], repeats: int) -> dict[str, float]:
    """Median wall time of each job, the jobs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    for turn in range(repeats):
        for name, job in jobs.items():
            times[name].append(seconds_of(job))
            print(f"  {turn + 1}/{repeats}  {name:<14}{times[name][-1]:7.2f} s", flush=True)
    return {name: statistics.median(taken) for name, taken in times.items()}


def time_rows(jobs: Mapping[str, Job], work: Path, repeats: int) -> list[Row]:
    check_same(jobs["ours-hf"], jobs["zero_to_fp32"], hf_contents)
    check_same(jobs["ours-torch"], jobs["dcp_to_torch"], torch_contents)
    delete(jobs["ours-torch"].output)

    original, copy = work / "converted", work / "copy"
    delete(original)
    jobs["ours-hf"].output.rename(original)
    turns = {
        **jobs,
        "cp": Job("cp", ("cp", "-r", "--reflink=never", str(original), str(copy)), copy),
        "start": Job("start", (jobs["ours-hf"].command[0], "--version"), work / "none"),
        "torch": Job("torch", (sys.executable, "-c", "import torch"), work / "none"),
    }
    seconds = time_alternately(turns, repeats)
    delete(original)

    # This conversion never imports torch, so the import alone takes longer than all of it. The
    # second comparison, for which no target was set, takes off the start of the command only.
    beyond_torch = seconds["ours-hf"] - seconds["torch"]
    beyond_start = seconds["ours-hf"] - seconds["start"]
    return [
        Row(
            "ZeRO-3 to safetensors: time / that of `zero_to_fp32.py --safe_serialization`",
            seconds["ours-hf"] / seconds["zero_to_fp32"],
            MAX_OF_ZERO_TO_FP32,
        ),
        Row(
            "DCP to `torch.save`: time / that of `format_utils dcp_to_torch`",
            seconds["ours-torch"] / seconds["dcp_to_torch"],
            MAX_OF_DCP_TO_TORCH,
        ),
        Row(
            "ZeRO-3 to safetensors, less `import torch`: time / that of `cp` of the output",
            beyond_torch / seconds["cp"],
            MAX_OF_COPY,
        ),
        Row(
            "ZeRO-3 to safetensors, less `ckpt --version`: time / that of `cp` of the output",
            beyond_start / seconds["cp"],
            None,
        ),
    ]


def memory_rows(peaks: Mapping[int, Mapping[str, float]]) -> list[Row]:
    small, large = sorted(peaks)
    rows = []
    for name, what in (("ours-hf", "ZeRO-3 to safetensors"), ("ours-torch", "DCP to `torch.save`")):
        for size in (small, large):
            peak = peaks[size][name]
            rows.append(Row(f"{what}: peak memory, {size} M", peak, MAX_MEMORY_MB, " MB"))
        growth = peaks[large][name] / peaks[small][name]
        rows.append(Row(f"{what}: peak memory, {large} M / {small} M", growth, MAX_MEMORY_GROWTH))
    return rows


def peer_lines(peaks: Mapping[int, Mapping[str, float]]) -> list[str]:
    """The peers' memory, for comparison; nothing is promised about it."""
    lines = ["", "| Peak memory of | " + " | ".join(f"{size} M" for size in sorted(peaks)) + " |"]
    lines.append("| --- |" + " ---: |" * len(peaks))
    for name in ("zero_to_fp32", "dcp_to_torch"):
        cells = " | ".join(f"{peaks[size][name]:,.0f} MB" for size in sorted(peaks))
        lines.append(f"| `{name}` | {cells} |")
    return lines


def machine() -> str:
    ram_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    packages = ", ".join(f"{name} {version(name)}" for name in ("shardport", "torch", "deepspeed"))
    return (
        f"{os.cpu_count()} cores, {ram_gib:.0f} GiB of memory, no GPU; "
        f"Python {platform.python_version()}, {packages}"
    )


def table(rows: Iterable[Row]) -> list[str]:
    lines = ["| What | Measured | Target | Met |", "| --- | ---: | ---: | --- |"]
    return lines + [f"| {' | '.join(row.cells)} |" for row in rows]


def write_results(lines: Iterable[str], begin: str = BEGIN, end: str = END) -> None:
    """Into README.md, between two marks."""
    before, rest = README.read_text().split(begin)
    after = rest.split(end)[1]
    README.write_text("\n".join([before + begin, *lines, end]) + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=HERE.parent / ".bench", help="scratch folder")
    parser.add_argument("--ckpt", default=str(Path(sys.executable).parent / "ckpt"))
    parser.add_argument("--repeats", type=int, default=5, help="runs of each command (default: 5)")
    parser.add_argument("--millions", type=int, nargs=2, default=(260, 520), metavar="M")
    parser.add_argument(
        "--keep", action="store_true", help="keep the checkpoints for the next time"
    )
    parser.add_argument("--print-only", action="store_true", help="do not write README.md")
    arguments = parser.parse_args()

    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    peaks: dict[int, dict[str, float]] = {}
    for millions in sorted(arguments.millions):
        zero3, dcp = (make_checkpoint(kind, millions, work) for kind in ("zero3", "dcp"))
        for folder in (zero3, dcp):
            warm_page_cache(folder)
        jobs = conversions(arguments.ckpt, zero3, dcp, work)
        if not rows:
            rows = time_rows(jobs, work, arguments.repeats)
        peaks[millions] = {}
        for name, job in jobs.items():
            peaks[millions][name] = peak_anonymous_mb(job)
            print(f"  {millions} M  {name:<14}{peaks[millions][name]:8.0f} MB", flush=True)
        if not arguments.keep:
            delete(zero3)
            delete(dcp)

    rows += memory_rows(peaks)
    lines = ["", f"{machine()}. Times: medians of {arguments.repeats}.", ""]
    lines += [*table(rows), *peer_lines(peaks), ""]
    print("\n".join(lines))
    if not arguments.print_only:
        write_results(lines)


if __name__ == "__main__":
    main()
