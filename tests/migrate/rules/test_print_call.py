"""Rule MG601: what is printed."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

from migrate.finding import Finding


def found(code: str) -> list[Finding]:
    return findings("import torch, sys, pprint\n" + code, "MG601")


def test_a_file_that_prints_gets_a_print_of_its_own_once() -> None:
    result = run("print(1)\nprint(2)\n", "MG601")
    text = result.files[0].after.decode()
    assert text.count("def print(") == 1
    assert [f.message for f in result.findings] == [
        "only the main process prints (this file does in 2 places)"
    ]
    assert not run(text, "MG601").files[0].changed


@pytest.mark.parametrize(
    "code",
    ["x = 1", "if rank == 0:\n    print(1)", "def print(x):\n    pass\nprint(1)",
     "import builtins\nbuiltins.print = quiet\nprint(1)", "from utils import print\nprint(1)"],
)  # fmt: skip
def test_files_that_see_to_it_themselves_stay(code: str) -> None:
    assert found(code) == []


def test_print_may_be_handed_on() -> None:
    assert len(found("list(map(print, [1]))")) == 1


def test_every_file_gets_its_own() -> None:
    files = {
        "train.py": "import torch\nimport util\nloss.backward()\nprint(1)\n",
        "util.py": "print(2)\n",
    }
    assert all(b"def print(" in file.after for file in run(files, "MG601").files)


@pytest.mark.parametrize("call", ["sys.stdout.write('a')", "pprint.pprint({})"])
def test_other_ways_to_the_screen_are_guarded(call: str) -> None:
    text = rewritten(f"import torch, sys, pprint\n{call}", "MG601")
    assert text.endswith(f"if is_main_process():\n    {call}\n")


def test_the_print_is_silent_elsewhere(capsys: pytest.CaptureFixture[str],
                                       monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    from migrate.snippets import common

    common.print("main")
    monkeypatch.setenv("RANK", "1")
    common.print("other")
    assert capsys.readouterr().out == "main\n"
