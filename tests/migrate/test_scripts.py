"""The programs in fixtures/scripts are rewritten as reviewed, and once is enough.

`pytest tests/migrate/test_scripts.py --accept` writes the expectation anew after a change that is
meant.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts import TARGETS, Case, accept, cases, contents, report, rewritten

from migrate.api import rewrite

CASES = cases()
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
each_target = pytest.mark.parametrize("target", TARGETS)


def lines(content: bytes) -> list[bytes]:
    return content.splitlines(keepends=True)


@each_target
@each_case
def test_the_program_is_rewritten_as_reviewed(
    case: Case, target: str, request: pytest.FixtureRequest
) -> None:
    result = rewritten(case, target)
    if request.config.getoption("--accept"):
        accept(case, target, result)
    assert contents(case, result) == case.expected(target)
    assert report(result) == case.report(target).read_text()


@each_target
@each_case
def test_rewriting_the_result_changes_nothing(case: Case, target: str, tmp_path: Path) -> None:
    for name, content in case.expected(target).items():
        (tmp_path / name).write_bytes(content)
    first = rewritten(case, target)
    second = rewrite([tmp_path / case.entry.name], target)
    assert [f.path.name for f in second.files if f.changed] == []
    known = {(f.code, f.message) for f in first.manual}
    assert {(f.code, f.message) for f in second.manual} <= known


@each_target
@each_case
def test_newlines_stay_as_they_were(case: Case, target: str) -> None:
    files = case.entry.parent.rglob("*.py") if case.entry.parent.name == "in" else [case.entry]
    for before in files:
        name = before.name
        after = case.expected(target)[name if name in case.expected(target) else case.entry.name]
        is_windows = before.read_bytes().count(b"\r\n") > 0
        assert (after.count(b"\r\n") == after.count(b"\n")) is is_windows
