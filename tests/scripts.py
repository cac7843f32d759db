"""The programs in fixtures/scripts: what they are, and what the rewriter makes of them.

`pytest tests/migrate/test_scripts.py --accept` writes the expected results anew; review the
difference.

Each case has `in.py` (or a folder `in/`), `case.json`, and for every target the expected program
beside it (`ddp.py` or `ddp/`) and the expected report (`ddp.txt`). Where the report leaves a point
open that the training depends on, `ddp.patch` is what the human does, following the advice.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from migrate.api import Result, rewrite
from migrate.finding import Applicability
from migrate.report import verdict

REPO = Path(__file__).resolve().parent.parent
FOLDER = REPO / "fixtures" / "scripts"
TARGETS = ("ddp", "fsdp")


@dataclass(frozen=True, eq=False)
class Case:
    """One program. `facts` is its case.json."""

    folder: Path
    facts: dict[str, Any]

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.name

    @property
    def entry(self) -> Path:
        """The file that is started."""
        return self.folder / str(self.facts["entry"])

    def expected_entry(self, target: str) -> Path:
        """The rewritten file that is started."""
        first, *rest = Path(str(self.facts["entry"])).parts
        return self.folder.joinpath(first.replace("in", target, 1), *rest)

    def expected(self, target: str) -> dict[str, bytes]:
        """The rewritten program: contents by path below its root."""
        root = self.folder / target if (self.folder / "in").is_dir() else self.folder
        if root is self.folder:
            return {self.entry.name: (self.folder / f"{target}.py").read_bytes()}
        files = sorted(root.rglob("*.py"))
        return {file.relative_to(root).as_posix(): file.read_bytes() for file in files}

    def arguments(self, target: str = "") -> list[str]:
        """The program's own arguments, and those it needs for a target."""
        return [*self.facts["args"], *self.facts.get(f"{target}_args", [])]

    def completed(self, target: str, folder: Path) -> Path:
        """The entry of the rewritten program in `folder`, with the human's part done."""
        for name, content in self.expected(target).items():
            (folder / name).write_bytes(content)
        patch = self.folder / f"{target}.patch"
        if patch.is_file():
            command = ["git", "apply", str(patch)]
            subprocess.run(command, cwd=folder, check=True, timeout=60)
        return folder / self.entry.name

    def report(self, target: str) -> Path:
        """The file with the expected findings."""
        return self.folder / f"{target}.txt"


def cases() -> list[Case]:
    """Every program, by name."""
    files = sorted(FOLDER.glob("*/case.json"))
    return [Case(file.parent, json.loads(file.read_text())) for file in files]


def rewritten(case: Case, target: str) -> Result:
    """What the rewriter makes of a program."""
    return rewrite([case.entry], target)


def contents(case: Case, result: Result) -> dict[str, bytes]:
    """A result's files by their path below the program's root."""
    root = case.entry.parent
    return {
        file.path.resolve().relative_to(root).as_posix(): file.after
        for file in sorted(result.files, key=lambda file: file.path)
    }


def report(result: Result) -> str:
    """The findings as the expected-report file has them: worst first, without the details."""
    marks = {Applicability.SAFE: "*", Applicability.POLICY: "~", Applicability.MANUAL: " ",
             Applicability.INFO: "i"}  # fmt: skip
    lines = [
        f"{f.path.name}:{f.line} {f.code} [{marks[f.applicability]}] {f.message}"
        + (f"\n    {f.advice}" if f.advice else "")
        for f in result.findings
    ]
    return "\n".join([*lines, verdict(result)]) + "\n"


def accept(case: Case, target: str, result: Result) -> None:
    """Writes the expected results of a case."""
    first = case.expected_entry(target).relative_to(case.folder).parts[0]
    is_folder = (case.folder / "in").is_dir()
    if is_folder:
        shutil.rmtree(case.folder / first, ignore_errors=True)
    for name, content in contents(case, result).items():
        place = case.folder / first / name if is_folder else case.folder / first
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    case.report(target).write_text(report(result))
