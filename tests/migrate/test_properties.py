"""What holds for every program: training programs composed of parts, rewritten for both targets."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

from composing import programs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from migrate.api import Result, rewrite
from migrate.edit import Guard, Text
from migrate.report import FORMATS, diff, render

PATH = Path("train.py")
examples = settings(
    derandomize=True, deadline=None, max_examples=60, suppress_health_check=list(HealthCheck)
)
each_target = st.sampled_from(["ddp", "fsdp"])


def rewritten(content: bytes, target: str) -> Result:
    return rewrite([PATH], target, contents={PATH: content})


def untouched(result: Result) -> list[bytes]:
    """The lines that no edit changes, moves or inserts into."""
    touched: set[int] = set()
    for edit in [edit for finding in result.findings for edit in finding.edits]:
        source = edit.source
        if isinstance(edit, Guard):
            statement = source.statement_of(edit.statement)
            start, stop = source.span(statement)
        elif isinstance(edit, Text):
            start, stop = edit.start, edit.stop
        else:
            continue
        if start == stop == source.line_start(min(start, len(source.data) - 1)):
            continue
        first, last = source.line_of(start), source.line_of(max(start, stop - 1))
        touched.update(range(first, last + 1))
    lines = result.files[0].before.splitlines(keepends=True)
    return [line for number, line in enumerate(lines, 1) if number not in touched]


@examples
@given(programs(), each_target)
def test_the_composed_programs_are_programs(content: bytes, target: str) -> None:
    compile(content, "train.py", "exec")


@examples
@given(programs(), each_target)
def test_the_result_compiles_and_keeps_newlines_and_untouched_lines(
    content: bytes, target: str
) -> None:
    result = rewritten(content, target)
    after = result.files[0].after
    compile(after, "train.py", "exec")
    is_windows = b"\r\n" in content
    assert after.count(b"\r") == after.count(b"\n") * is_windows
    assert after.endswith(b"\n") is content.endswith(b"\n")
    kept = iter(after.splitlines(keepends=True))
    assert [line for line in untouched(result) if line not in kept] == []
    assert all([*(render(result, name) for name in FORMATS), diff(result.files)])


@examples
@given(programs(), each_target)
def test_rewriting_the_result_changes_nothing(content: bytes, target: str) -> None:
    first = rewritten(content, target)
    second = rewritten(first.files[0].after, target)
    assert second.files[0].after.decode() == first.files[0].after.decode()
    assert Counter(f.code for f in second.manual) <= Counter(f.code for f in first.manual)


def test_every_name_is_bound_that_was(tmp_path: Path) -> None:
    """One run of ruff over the programs and their results."""
    count = 0

    @examples
    @given(programs(), each_target)
    def write(content: bytes, target: str) -> None:
        nonlocal count
        count += 1
        for folder, text in (
            ("before", content),
            ("after", rewritten(content, target).files[0].after),
        ):
            place = tmp_path / folder / f"{count}.py"
            place.parent.mkdir(exist_ok=True)
            place.write_bytes(text)

    write()
    assert unbound(tmp_path / "after") <= unbound(tmp_path / "before")


def unbound(folder: Path) -> set[tuple[str, str]]:
    """What ruff says about names without a value, by file."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,F823",
               "--output-format", "json", str(folder)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return {(Path(item["filename"]).name, item["message"]) for item in json.loads(done.stdout)}
