"""What is printed about a result, in every format."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from migrate.api import FileResult, Result
from migrate.edit import Need
from migrate.finding import Applicability, Effect, Finding
from migrate.report import as_github, as_json, as_sarif, diff, launch_command, render, text, verdict
from migrate.source import parse_source

PATH = Path("train.py")
EDIT = Need(parse_source(PATH, b""), "print")
MANUAL = Finding("MG105", "look at this", PATH, 7, 3, Applicability.MANUAL, advice="do that")
POLICY = Finding(
    "MG301", "split the batch", PATH, 5, 1, Applicability.POLICY, (EDIT,), assumption="it is global"
)
SAFE = Finding("MG201", "wrapped", PATH, 12, 10, Applicability.SAFE, (EDIT,))
INFO = Finding("MG402", "good to know", PATH, 1, 1, Applicability.INFO)
FILE = FileResult(PATH, b"a\nb\n", b"a\nc\n")


def result(*findings: Finding, files: tuple[FileResult, ...] = (FILE,)) -> Result:
    return Result("ddp", PATH, files, findings)


def test_the_text_of_a_result() -> None:
    assert text(result(MANUAL, POLICY, SAFE, INFO)) == (
        "train.py\n"
        "       7:3 MG105 [ ] look at this\n"
        "                     do that\n"
        "       5:1 MG301 [~] split the batch\n"
        "     12:10 MG201 [*] wrapped\n"
        "       1:1 MG402 [i] good to know\n"
        "\n"
        "Assumed:\n"
        "  it is global\n"
        "\n"
        "2 edits in 1 file. [*] safe, [~] as assumed above, [ ] for a human, [i] good to know.\n"
        "Start it with: torchrun --standalone --nproc-per-node=N train.py\n"
        "This trains the same only if the open points hold; 1 place for a human to look at.\n"
    )


def test_the_text_of_a_result_with_nothing_in_it() -> None:
    shown = text(result(files=(replace(FILE, after=FILE.before),)))
    assert shown.startswith("0 edits in 0 files.")
    assert "Assumed" not in shown


def test_files_come_one_after_the_other_in_the_order_of_their_worst_finding() -> None:
    other = replace(MANUAL, path=Path("net.py"))
    shown = text(result(other, MANUAL, replace(SAFE, path=Path("net.py")), SAFE))
    headings = [line for line in shown.split("\n") if line.endswith(".py") and line[0] != "S"]
    assert headings == ["net.py", "train.py"]


def test_an_assumption_is_said_once_and_only_if_something_rests_on_it() -> None:
    unused = replace(POLICY, edits=(), assumption="never mind")
    shown = text(result(POLICY, replace(POLICY, line=9), unused))
    assert shown.count("it is global") == 1
    assert "never mind" not in shown


def test_quiet_says_only_what_is_left_and_the_verdict() -> None:
    assert text(result(MANUAL, POLICY, SAFE), quiet=True) == (
        "train.py\n       7:3 MG105 [ ] look at this\n                     do that\n\n"
        "This trains the same only if the open points hold; 1 place for a human to look at.\n"
    )


def test_suppressed_findings_are_not_shown() -> None:
    hidden = replace(SAFE, suppressed=True, edits=(), message="hidden", effect=Effect.DIFFERENT)
    assert "hidden" not in text(result(hidden))
    assert "hidden" not in as_github(result(hidden))
    assert verdict(result(hidden)).startswith("This trains the same:")


@pytest.mark.parametrize(
    ("effects", "start"),
    [
        ([], "This trains the same: same global batches"),
        ([Effect.SAME], "This trains the same: same global batches"),
        ([Effect.IF_EQUAL_PARTS], "This trains the same as long as all processes' parts"),
        ([Effect.UNKNOWN, Effect.IF_EQUAL_PARTS], "This trains the same only if the open points"),
        ([Effect.DIFFERENT, Effect.UNKNOWN], "This will train differently until"),
    ],
)
def test_the_verdict_is_about_the_worst_effect(effects: list[Effect], start: str) -> None:
    found = result(*(replace(SAFE, effect=effect) for effect in effects))
    assert verdict(found).startswith(start)
    assert verdict(found).endswith(".")


def test_the_verdict_says_what_was_changed_on_purpose_and_how_much_is_left() -> None:
    better = replace(SAFE, effect=Effect.BETTER)
    norms, half = replace(better, code="MG203"), replace(better, code="MG408")
    assert verdict(result(norms)).endswith("not of one device's part.")
    assert verdict(result(norms, half)).endswith("device's part; changed on purpose: MG408.")
    assert verdict(result(MANUAL, MANUAL)).endswith("; 2 places for a human to look at.")


def test_paths_are_said_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    inside = replace(result(), entry=tmp_path / "a" / "train.py")
    assert launch_command(inside).endswith("=N a/train.py")
    outside = replace(result(), entry=tmp_path.parent / "train.py")
    assert launch_command(outside).endswith(f"=N {tmp_path.parent / 'train.py'}")


def test_a_path_with_a_space_can_be_pasted() -> None:
    assert launch_command(replace(result(), entry=Path("my code/train.py"))).endswith(
        "=N 'my code/train.py'"
    )


def test_json_has_everything() -> None:
    document = json.loads(as_json(result(MANUAL, SAFE)))
    assert (document["target"], document["entry"]) == ("ddp", "train.py")
    assert document["files"] == [{"path": "train.py", "changed": True}]
    assert document["launch"].startswith("torchrun")
    assert document["verdict"] == verdict(result(MANUAL, SAFE))
    first, second = document["findings"]
    assert {key: first[key] for key in ("code", "line", "column", "applicability", "edited")} == {
        "code": "MG105", "line": 7, "column": 3, "applicability": "manual", "edited": False
    }  # fmt: skip
    assert second["edited"]
    assert first["fingerprint"] != second["fingerprint"]


def test_a_fingerprint_does_not_depend_on_the_line() -> None:
    moved = replace(MANUAL, line=99)
    prints = [
        json.loads(as_json(result(item)))["findings"][0]["fingerprint"] for item in (MANUAL, moved)
    ]
    assert prints[0] == prints[1]


def test_sarif_has_rules_places_and_levels() -> None:
    document = json.loads(as_sarif(result(MANUAL, replace(SAFE, suppressed=True))))
    (run,) = document["runs"]
    assert document["version"] == "2.1.0"
    assert "MG201" in {rule["id"] for rule in run["tool"]["driver"]["rules"]}
    first, second = run["results"]
    assert (first["level"], second["level"]) == ("warning", "note")
    assert first["message"]["text"] == "look at this. do that"
    assert first["locations"][0]["physicalLocation"] == {
        "artifactLocation": {"uri": "train.py"}, "region": {"startLine": 7, "startColumn": 3}
    }  # fmt: skip
    assert second["suppressions"] == [{"kind": "inSource"}]


def test_github_annotations() -> None:
    strange = replace(SAFE, message="100% of: it")
    lines = as_github(result(MANUAL, strange)).splitlines()
    assert lines[0] == "::warning file=train.py,line=7,col=3,title=MG105::look at this. do that"
    assert lines[1] == "::notice file=train.py,line=12,col=10,title=MG201::100%25 of: it"
    assert lines[2].startswith("::notice::This trains")


def test_github_paths_are_escaped() -> None:
    odd = replace(MANUAL, path=Path("a,b:c%.py"))
    assert "file=a%2Cb%3Ac%25.py,line=7" in as_github(result(odd))


def test_a_diff_says_where_a_last_newline_is_missing() -> None:
    changed = FileResult(PATH, b"a\nb", b"a\nc")
    assert diff((changed,)) == (
        b"--- train.py\n+++ train.py\n@@ -1,2 +1,2 @@\n a\n"
        b"-b\n\\ No newline at end of file\n+c\n\\ No newline at end of file\n"
    )


def test_a_diff_keeps_bytes_and_leaves_unchanged_files_out() -> None:
    changed = FileResult(PATH, b"\xe9\r\n", b"\xe8\r\n")
    assert diff((changed, FileResult(Path("x.py"), b"1\n", b"1\n"))) == (
        b"--- train.py\n+++ train.py\n@@ -1 +1 @@\n-\xe9\r\n+\xe8\r\n"
    )


@pytest.mark.parametrize(
    ("name", "function"), [("json", as_json), ("github", as_github), ("sarif", as_sarif)]
)
def test_a_format_is_chosen_by_its_name(name: str, function: object) -> None:
    assert callable(function)
    assert render(result(MANUAL), name) == function(result(MANUAL))
    assert render(result(MANUAL), "text") == text(result(MANUAL))
