"""Comments that keep rules away, and those that have nothing to keep away."""

from __future__ import annotations

import pytest
from rewriting import findings, run

from migrate.api import Choice
from migrate.finding import Applicability
from migrate.suppressions import UNUSED

WRAP = "model = nn.DataParallel(nn.Linear(2, 2))"


def unused(code: str, choice: Choice | None = None) -> list[tuple[int, str]]:
    """Line, counted in `code`, and message of every unused suppression."""
    result = run(code, choice=choice or Choice())
    return [(f.line - 3, f.message) for f in result.findings if f.code == UNUSED]


def test_a_suppression_that_nothing_needs_is_mentioned() -> None:
    (finding,) = [f for f in findings("x = 'é'  # migrate: ignore[MG305]\n") if f.code == UNUSED]
    assert finding.message == (
        "this suppression is not used: MG305 does not occur here with --to ddp"
    )
    assert (finding.line, finding.column) == (4, 10)
    assert finding.applicability is Applicability.INFO
    assert not finding.suppressed


def test_one_that_is_used_is_not_mentioned() -> None:
    assert unused(f"{WRAP}  # migrate: ignore[MG201]\n") == []
    assert unused(f"{WRAP}  # migrate: ignore\n") == []
    assert unused(f"{WRAP}  # MG305\n") == []


def test_each_code_counts_for_itself() -> None:
    ((line, message),) = unused(f"x = 1\n{WRAP}  # noqa  # migrate: ignore[MG201, MG305] so\n")
    assert line == 2
    assert "MG305 does not occur" in message


def test_a_comment_without_a_code_is_for_all_codes() -> None:
    assert unused("x = 1  # migrate: ignore\n") == [
        (1, "this suppression is not used: nothing occurs here with --to ddp")
    ]


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(), 1),
        (Choice(ignore=("MG3",)), 0),
        (Choice(ignore=("MG2",)), 1),
        (Choice(ignore=("MG0",)), 0),
        (Choice(select=("MG2",)), 0),
        (Choice(select=("MG0", "MG2")), 0),
        (Choice(select=("MG0", "MG3")), 1),
    ],
)
def test_nothing_is_said_of_rules_that_were_not_asked_for(choice: Choice, expected: int) -> None:
    assert len(unused("x = 1  # migrate: ignore[MG305]\n", choice)) == expected


def test_a_comment_for_all_codes_is_used_by_rules_that_were_not_asked_for() -> None:
    assert unused(f"{WRAP}  # migrate: ignore\n", Choice(ignore=("MG2",))) == []


def test_a_file_that_is_skipped_is_not_looked_at() -> None:
    assert unused("# migrate: skip-file\nx = 1  # migrate: ignore[MG305]\n") == []
