"""The pipeline: which edits are made together, what is left to humans, how files are written."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
import pytest

from migrate import api
from migrate.api import Choice, Result, rewrite, write
from migrate.edit import Edit, insert_before, replace
from migrate.errors import MigrateError
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted

PATH = Path("train.py")
SCRIPT = """\
import torch
import torch.nn as nn

model = nn.Linear(2, 2)
model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.ones(4, 2)).mean()
loss.backward()
"""


class Renamed(Rule):
    """Writes another name over the callee of each call of `old`."""

    title = "calls of one name"

    def __init__(self, code: str, old: str, new: str, **others: object) -> None:
        self.code, self.old, self.new = code, old, new  # type: ignore[misc]
        self.others = others

    def check(self, context: Context) -> Iterator[Finding]:
        for source in context.sources:
            for call in source.all(cst.Call):
                if dotted(call.func) == self.old:
                    edits = self.edits(source, call)
                    yield self.finding(source, call, self.old, edits, **self.others)  # type: ignore[arg-type]

    def edits(self, source: Source, call: cst.Call) -> list[Edit]:
        """What is done to one call."""
        return [replace(source, call.func, self.new)] if self.new else []


def rewritten(
    monkeypatch: pytest.MonkeyPatch, rules: list[Rule], code: str, choice: Choice | None = None
) -> Result:
    """A program rewritten by some rules only."""
    monkeypatch.setattr(api, "rules", lambda: rules)
    content = (SCRIPT + code).encode()
    return rewrite([PATH], "ddp", choice=choice, contents={PATH: content})


def tail(result: Result) -> str:
    """What became of the code after the script."""
    return result.files[0].after.decode().removeprefix(SCRIPT)


def of(result: Result, code: str) -> list[Finding]:
    return [finding for finding in result.findings if finding.code == code]


def test_edits_of_several_rules_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    result = rewritten(
        monkeypatch, [Renamed("MG1", "a", "x"), Renamed("MG2", "b", "y")], "a(b(1))\n"
    )
    assert tail(result) == "x(y(1))\n"


def test_of_two_edits_that_collide_the_later_is_left_to_a_human(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules: list[Rule] = [
        Renamed("MG2", "a", "y"),
        Renamed("MG1", "a", "x"),
        Renamed("MG3", "b", "z"),
    ]
    result = rewritten(monkeypatch, rules, "a()\nb()\n")
    assert tail(result) == "x()\nz()\n"
    (left,) = of(result, "MG2")
    assert (left.applicability, left.edits) == (Applicability.MANUAL, ())
    assert "meets another one at train.py:9" in left.advice


def test_an_edit_that_needs_one_that_was_not_made_is_not_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules: list[Rule] = [Renamed("MG1", "a", ""), Renamed("MG2", "b", "y", requires=["MG1"])]
    result = rewritten(monkeypatch, rules, "a()\nb()\n")
    assert tail(result) == "a()\nb()\n"
    assert "needs MG1" in of(result, "MG2")[0].advice


def test_an_edit_that_needs_one_that_collided_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: list[Rule] = [
        Renamed("MG1", "a", "x"),
        Renamed("MG2", "a", "y"),
        Renamed("MG3", "b", "z", requires=["MG2"]),
    ]
    result = rewritten(monkeypatch, rules, "a()\nb()\n")
    assert tail(result) == "x()\nb()\n"
    assert of(result, "MG3")[0].applicability is Applicability.MANUAL


def test_an_edit_that_needs_a_rule_with_nothing_to_do_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rules: list[Rule] = [Renamed("MG1", "c", "x"), Renamed("MG2", "b", "y", requires=["MG1"])]
    assert tail(rewritten(monkeypatch, rules, "b()\n")) == "y()\n"


def test_safe_only_leaves_what_rests_on_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Renamed("MG1", "a", "x", applicability=Applicability.POLICY, assumption="so")
    result = rewritten(
        monkeypatch, [policy, Renamed("MG2", "b", "y")], "a()\nb()\n", Choice(safe_only=True)
    )
    assert tail(result) == "a()\ny()\n"
    assert of(result, "MG1")[0].applicability is Applicability.MANUAL


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (Choice(), "x()\ny()\n"),
        (Choice(select=("MG1",)), "x()\nb()\n"),
        (Choice(ignore=("MG1",)), "a()\ny()\n"),
        (Choice(select=("MG",), ignore=("MG12",)), "a()\ny()\n"),
    ],
)
def test_rules_are_chosen_by_the_beginning_of_their_code(
    monkeypatch: pytest.MonkeyPatch, choice: Choice, expected: str
) -> None:
    rules: list[Rule] = [Renamed("MG123", "a", "x"), Renamed("MG245", "b", "y")]
    assert tail(rewritten(monkeypatch, rules, "a()\nb()\n", choice)) == expected


@pytest.mark.parametrize(
    ("comment", "is_edited"),
    [
        ("# migrate: ignore", False),
        ("#migrate:ignore[MG1]", False),
        ("# noqa  # migrate: ignore[MG2, MG1] on purpose", False),
        ("# migrate: ignore[MG2]", True),
        ("# migrate: skip-file", True),
    ],
)
def test_comments_hold_edits_back(
    monkeypatch: pytest.MonkeyPatch, comment: str, is_edited: bool
) -> None:
    result = rewritten(monkeypatch, [Renamed("MG1", "a", "x")], f"a()  {comment}\n")
    assert tail(result).startswith("x()" if is_edited else "a()")
    assert of(result, "MG1")[0].suppressed is not is_edited


def test_a_comment_on_its_own_line_skips_the_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "a()\n  # migrate: skip-file\n"
    assert tail(rewritten(monkeypatch, [Renamed("MG1", "a", "x")], code)) == code


def todo(monkeypatch: pytest.MonkeyPatch, code: str, *names: str) -> str:
    rules: list[Rule] = [Renamed(f"MG{n}", name, "") for n, name in enumerate(names, 1)]
    return tail(rewritten(monkeypatch, rules, code, Choice(todo=True)))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a()\n", "#1\na()\n"),
        ("if b:\n\ta()\n", "if b:\n\t#1\n\ta()\n"),
        ("if b: a()\n", "#1\nif b: a()\n"),
        ("x = [\n    a(),\n]\n", "#1\nx = [\n    a(),\n]\n"),
        ("@a()\ndef f(): pass\n", "#1\n@a()\ndef f(): pass\n"),
        ("if b:\n    pass\nelif a():\n    pass\n", "if b:\n    pass\n#1\nelif a():\n    pass\n"),
        ("a(); a()\n", "#1\na(); a()\n"),
        ("b = '''\n'''; a()", "#1\nb = '''\n'''; a()"),
    ],
)
def test_a_comment_is_left_above_what_a_human_must_look_at(
    monkeypatch: pytest.MonkeyPatch, code: str, expected: str
) -> None:
    expected = expected.replace("#1", "# TODO[migrate] MG1: a")
    assert todo(monkeypatch, code, "a") == expected
    assert todo(monkeypatch, expected, "a") == expected


def test_several_comments_for_one_line_are_left_once(monkeypatch: pytest.MonkeyPatch) -> None:
    once = todo(monkeypatch, "a(b())\n", "a", "b")
    assert once == "# TODO[migrate] MG1: a\n# TODO[migrate] MG2: b\na(b())\n"
    assert todo(monkeypatch, once, "a", "b") == once


class Broken(Renamed):
    """An edit that makes nonsense."""

    def edits(self, source: Source, call: cst.Call) -> list[Edit]:
        """A line that is no Python."""
        return [insert_before(source, source.statement_of(call), ["(("])]


def test_text_that_would_not_parse_is_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MigrateError, match="this is a bug in migrate, nothing was written"):
        rewritten(monkeypatch, [Broken("MG1", "a", "x")], "a()\n")


def test_findings_come_worst_first(monkeypatch: pytest.MonkeyPatch) -> None:
    rules: list[Rule] = [
        Renamed("MG1", "a", "", applicability=Applicability.INFO),
        Renamed("MG2", "b", "x"),
        Renamed("MG3", "c", "x", applicability=Applicability.POLICY),
        Renamed("MG4", "d", ""),
    ]
    result = rewritten(monkeypatch, rules, "a()\nb()\nc()\nd()\nd()\n")
    assert [f.code for f in result.findings] == ["MG4", "MG4", "MG3", "MG2", "MG1"]
    assert [f.line for f in result.manual] == [12, 13]


# Bytes


def ddp(path: Path) -> Result:
    return rewrite([path], "ddp")


@pytest.mark.parametrize(
    ("head", "change"),
    [
        (b"# -*- coding: latin-1 -*-\ns = '\xe9'\n", lambda text: text),
        (b"\xef\xbb\xbfs = '\xc3\xa9'\n", lambda text: text),
        (b"s = 1\n", lambda text: text.replace(b"\n", b"\r\n")),
        (b"s = 1\n", lambda text: text.rstrip(b"\n")),
        (b"\x0c\ns = 1\n\x0c\n", lambda text: text),
        (b"if 1:\n\ts = 1\n", lambda text: text),
    ],
    ids=["latin-1", "byte order mark", "Windows", "no last newline", "form feeds", "tabs"],
)  # fmt: skip
def test_bytes_of_all_kinds_survive(tmp_path: Path, head: bytes, change: object) -> None:
    path = tmp_path / "train.py"
    assert callable(change)
    before = change(head + SCRIPT.encode())
    path.write_bytes(before)
    write(ddp(path))
    after = path.read_bytes()
    newline = b"\r\n" if b"\r\n" in before else b"\n"
    head = change(head)
    assert head.rstrip(b"\r\n") in after
    assert after[:3] == before[:3]
    assert after.count(newline) == after.count(b"\n")
    assert after.endswith(newline) is before.endswith(newline)
    assert b"model = wrap_model(model)" in after
    compile(after, "train.py", "exec")


def test_a_statement_after_a_form_feed_is_guarded_behind_it() -> None:
    code = SCRIPT + "if loss:\n\x0c    torch.save(1, 'x')\n"
    after = rewrite([PATH], "ddp", contents={PATH: code.encode()}).files[0].after
    assert b"if loss:\n    if is_main_process():\n\x0c        torch.save(1, 'x')\n" in after


def test_a_form_feed_that_cannot_be_kept_is_said() -> None:
    with pytest.raises(MigrateError, match="nothing was rewritten"):
        rewrite([PATH], "ddp", contents={PATH: (SCRIPT + "\x0cprint(loss)\n").encode()})


def test_an_encoding_without_the_letters_of_an_edit_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "rules", lambda: [Renamed("MG1", "a", "ż")])
    content = ("# coding: latin-1\n" + SCRIPT + "a()\n").encode()
    with pytest.raises(MigrateError, match="encoding iso-8859-1 cannot hold"):
        rewrite([PATH], "ddp", contents={PATH: content})


# Writing


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program of two files that both change."""
    (tmp_path / "train.py").write_text("import net\n" + SCRIPT)
    (tmp_path / "net.py").write_text(
        "import torch.nn as nn\ndef f(x):\n    return nn.DataParallel(x)\n"
    )
    return tmp_path / "train.py"


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_all_changed_files_are_written_and_nothing_else(program: Path) -> None:
    written = write(ddp(program))
    assert {path.name for path in written} == {"train.py", "net.py"}
    assert set(files(program.parent)) == {"train.py", "net.py"}
    assert write(ddp(program)) == []


def test_modes_of_files_are_kept(program: Path) -> None:
    program.chmod(0o750)
    write(ddp(program))
    assert stat.S_IMODE(program.stat().st_mode) == 0o750


def test_a_link_stays_a_link(program: Path, tmp_path: Path) -> None:
    link = tmp_path / "linked" / "train.py"
    link.parent.mkdir()
    link.symlink_to(program)
    write(ddp(link))
    assert link.is_symlink()
    assert b"wrap_model" in program.read_bytes()


@pytest.mark.parametrize("failing", ["write_bytes", "replace", "chmod"])
def test_a_write_that_fails_leaves_everything_as_it_was(
    program: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    result, before = ddp(program), files(program.parent)
    original = getattr(Path, failing)

    def fail_at_the_second(self: Path, *arguments: object) -> object:
        if "net" in self.name:
            raise OSError(28, "No space left on device")
        return original(self, *arguments)

    monkeypatch.setattr(Path, failing, fail_at_the_second)
    with pytest.raises(MigrateError, match=r"net\.py: cannot be written: No space left on device"):
        write(result)
    assert files(program.parent) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_is_read_only_leaves_everything_as_it_was(program: Path) -> None:
    result, before = ddp(program), files(program.parent)
    program.parent.chmod(0o500)
    with pytest.raises(MigrateError, match="cannot be written"):
        write(result)
    program.parent.chmod(0o700)
    assert files(program.parent) == before


def test_a_new_folder_gets_every_file(program: Path, tmp_path: Path) -> None:
    before = program.read_bytes()
    write(ddp(program), tmp_path / "out" / "deep")
    assert set(files(tmp_path / "out" / "deep")) == {"train.py", "net.py"}
    assert program.read_bytes() == before


def test_an_output_that_fails_leaves_no_new_files(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = ddp(program)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "net.py").mkdir()
    with pytest.raises(MigrateError, match="cannot be written"):
        write(result, tmp_path / "out")
    assert files(tmp_path / "out") == {}


# What is refused


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import torch\nprint(1)\n", "no training loop found"),
        ("import torch\nx = torch.ones(1)\nx.backward()\n", "no model is put into DataParallel"),
    ],
)
def test_what_is_no_training_is_refused(code: str, words: str) -> None:
    with pytest.raises(MigrateError, match=words):
        rewrite([PATH], "ddp", contents={PATH: code.encode()})


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(MigrateError, match="--to horovod: unknown; known are ddp, fsdp"):
        rewrite([PATH], "horovod", contents={PATH: SCRIPT.encode()})
