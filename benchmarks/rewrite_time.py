"""Measures `migrate rewrite --diff` on a script of about 1,000 lines.

The script is made of the longest programs in fixtures/scripts, with the names of their functions
and classes told apart. Time is the wall time of the whole command; `--write` puts it into
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import README, Row, machine, table, write_results

SCRIPTS = README.parent.parent / "fixtures" / "scripts"
TARGETS = ("ddp", "fsdp")
BEGIN, END = "<!-- rewrite: begin (written by rewrite_time.py) -->", "<!-- rewrite: end -->"
LINES = 1000
MAX_SECONDS = 2.0
"""What the project promises for 1,000 lines, target by target."""


def numbered(program: str, number: int) -> str:
    """A program whose own functions and classes have names of their own among several programs."""
    kinds = ast.FunctionDef | ast.ClassDef
    for name in [node.name for node in ast.parse(program).body if isinstance(node, kinds)]:
        program = re.sub(rf"(?<![\w.'\"]){name}\b(?!=[^=])", f"{name}_{number}", program)
    return program.replace("from __future__ import annotations\n", "")


def long_script() -> str:
    """The longest programs one after another, until there are lines enough."""
    programs = [path.read_text() for path in sorted(SCRIPTS.glob("*/in.py"))]
    programs.sort(key=lambda text: text.count("\n"), reverse=True)
    script = ""
    for number, program in enumerate(programs):
        if script.count("\n") < LINES:
            script += numbered(program, number)
    ast.parse(script)
    return script


def seconds(script: Path, target: str) -> float:
    """The wall time of one run; it may end with 1, which says that something is left to do."""
    command = [sys.executable, "-m", "migrate", "rewrite", str(script), "--to", target, "--diff"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(done.stderr)
    return time.perf_counter() - start


def rows(script: str, repeats: int) -> list[Row]:
    """A row for each target; the targets take turns."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(script)
        taken = [[seconds(path, target) for target in TARGETS] for _ in range(repeats)]
    what = f"`migrate rewrite --to {{}} --diff`, {script.count(chr(10)):,} lines: seconds"
    medians = [statistics.median(each) for each in zip(*taken, strict=True)]
    return [
        Row(what.format(target), median, MAX_SECONDS)
        for target, median in zip(TARGETS, medians, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="runs for each target (default: 5)")
    parser.add_argument("--write", action="store_true", help="write the table to README.md")
    arguments = parser.parse_args()
    found = table(rows(long_script(), arguments.repeats))
    lines = ["", f"{machine()}. Times: medians of {arguments.repeats}.", "", *found, ""]
    print("\n".join(lines))
    if arguments.write:
        write_results(lines, BEGIN, END)


if __name__ == "__main__":
    main()
