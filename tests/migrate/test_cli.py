"""The command `migrate`: what it prints, writes and returns."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from migrate.cli import main

SCRIPT = """\
import torch
import torch.nn as nn

model = nn.Linear(2, 2)
model = nn.DataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    loss = model(torch.ones(4, 2)).mean()
    loss.backward()
    optimizer.step()
"""


def migrate(*arguments: str | Path, stdin: bytes | None = None) -> Result:
    return CliRunner().invoke(main, [str(word) for word in arguments], input=stdin)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_version_is_the_version_of_the_distribution() -> None:
    assert migrate("--version").output == f"migrate, version {version('shardport')}\n"


def test_module_can_be_run() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "migrate", "--help"], capture_output=True, text=True, check=True
    )
    assert result.stdout.startswith("Usage: migrate ")


def test_command_imports_neither_torch_nor_ckpt() -> None:
    program = (
        "import sys, migrate.cli, migrate.registry, migrate.report; migrate.registry.rules(); "
        "print(sorted({'torch', 'ckpt'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert result.stdout == "[]\n"


def test_a_script_is_rewritten_in_place(script: Path) -> None:
    result = migrate("rewrite", script, "--to", "ddp")
    assert "wrap_model(model)" in script.read_text()
    assert "torchrun --standalone --nproc-per-node=N" in result.output
    assert list(script.parent.iterdir()) == [script]


def test_a_second_time_changes_nothing(script: Path) -> None:
    migrate("rewrite", script, "--to", "ddp")
    once = script.read_text()
    migrate("rewrite", script, "--to", "ddp")
    assert script.read_text() == once


def test_diff_prints_a_diff_and_writes_nothing(script: Path) -> None:
    result = migrate("rewrite", script, "--to", "ddp", "--diff")
    assert script.read_text() == SCRIPT
    assert "-model = nn.DataParallel(model)\n" in result.stdout
    assert "+model = wrap_model(model)\n" in result.stdout
    assert "MG201" in result.stderr


def test_a_diff_can_be_applied(script: Path, tmp_path: Path) -> None:
    patch = migrate("rewrite", script, "--to", "ddp", "--diff").stdout
    copy = tmp_path / "copy.py"
    copy.write_text(SCRIPT)
    patch = patch.replace(str(script), copy.name)
    command = ["git", "apply", "-p0", "-"]
    subprocess.run(command, cwd=tmp_path, input=patch, text=True, check=True, timeout=60)
    migrate("rewrite", script, "--to", "ddp")
    assert copy.read_text() == script.read_text()


def test_check_writes_nothing_and_fails_if_there_are_edits(script: Path) -> None:
    assert migrate("rewrite", script, "--to", "ddp", "--check").exit_code == 1
    assert script.read_text() == SCRIPT


def test_output_goes_elsewhere(script: Path, tmp_path: Path) -> None:
    migrate("rewrite", script, "--to", "ddp", "-o", tmp_path / "new" / "ddp.py")
    assert script.read_text() == SCRIPT
    assert "wrap_model" in (tmp_path / "new" / "ddp.py").read_text()


def test_stdin_goes_to_stdout() -> None:
    result = migrate("rewrite", "-", "--to", "ddp", stdin=SCRIPT.encode())
    assert "model = wrap_model(model)\n" in result.stdout
    assert "MG201" in result.stderr


def test_one_rule_can_be_chosen(script: Path) -> None:
    migrate("rewrite", script, "--to", "ddp", "--select", "MG9")
    assert script.read_text() == SCRIPT


def test_one_rule_can_be_left_out(script: Path) -> None:
    migrate("rewrite", script, "--to", "ddp", "--ignore", "MG201")
    assert "model = nn.DataParallel(model)" in script.read_text()


def test_a_comment_on_the_line_is_respected(script: Path) -> None:
    line = "model = nn.DataParallel(model)"
    script.write_text(SCRIPT.replace(line, f"{line}  # migrate: ignore[MG201] on purpose"))
    migrate("rewrite", script, "--to", "ddp")
    assert line in script.read_text()


def test_a_comment_for_the_whole_file_is_respected(script: Path) -> None:
    script.write_text("# migrate: skip-file\n" + SCRIPT)
    migrate("rewrite", script, "--to", "ddp")
    assert script.read_text() == "# migrate: skip-file\n" + SCRIPT


def test_what_is_left_to_a_human_is_exit_code_1_and_a_comment_on_request(script: Path) -> None:
    custom = "class Own(nn.DataParallel):\n    pass\n\nmodel = nn.Linear(2, 2)\nmodel = Own(model)"
    script.write_text(
        SCRIPT.replace("model = nn.Linear(2, 2)\nmodel = nn.DataParallel(model)", custom)
    )
    arguments = ("rewrite", script, "--to", "ddp", "--todo", "--select", "MG207")
    assert migrate(*arguments).exit_code == 1
    assert (
        "# TODO[migrate] MG207: Own is a DataParallel of your own\nmodel = Own"
        in script.read_text()
    )
    once = script.read_text()
    migrate(*arguments)
    assert script.read_text() == once


@pytest.mark.parametrize("output_format", ["json", "sarif", "github"])
def test_findings_for_programs(script: Path, output_format: str) -> None:
    result = migrate("rewrite", script, "--to", "ddp", "--check", "--output-format", output_format)
    assert "MG201" in result.output
    if output_format != "github":
        json.loads(result.stdout)


def test_quiet_says_only_what_is_left(script: Path) -> None:
    result = migrate("rewrite", script, "--to", "ddp", "--quiet")
    assert "MG201" not in result.output
    assert "train" in result.output


def test_rules_are_listed_and_shown() -> None:
    assert "MG201  the model is put into DataParallel\n" in migrate("rules").output
    page = migrate("rules", "mg201").output
    assert "Why it matters:" in page
    assert migrate("rules", "MG999").exit_code == 2


BAD = [
    (b"print 'x'\n", "Python 2 source"),
    (b"%matplotlib inline\nimport torch\n", "magic command"),
    (b"import torch\nx = (1,\n", "not valid Python 3"),
    (b"s = '\xff\xfe'\n", "not utf-8 text"),
    (b"# -*- coding: klingon -*-\nx = 1\n", "encoding"),
    (b"import torch\nprint(1)\n", "no training loop found"),
    (b"", "no training loop found"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.py"
    path.write_bytes(content)
    result = migrate("rewrite", path, "--to", "ddp")
    assert result.exit_code == 2
    assert result.output.startswith(f"Error: {path}")
    assert message in result.output
    assert result.output.count("\n") == 1
    assert path.read_bytes() == content


def test_a_missing_file_a_notebook_and_an_unknown_target(script: Path, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text("{}")
    for arguments in (("none.py", "ddp"), (tmp_path / "a.ipynb", "ddp"), (script, "horovod")):
        result = migrate("rewrite", arguments[0], "--to", arguments[1])
        assert (result.exit_code, result.output.count("\n")) == (2, 1)


def test_of_several_files_a_bad_one_leaves_all_as_they_were(script: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("x = (")
    assert migrate("rewrite", script, bad, "--to", "ddp").exit_code == 2
    assert script.read_text() == SCRIPT


def test_a_script_for_one_device_that_trains_nothing_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("import torch\nx = torch.ones(1, requires_grad=True)\nx.sum().backward()\n")
    result = migrate("rewrite", path, "--to", "ddp")
    assert result.exit_code == 2
    assert "no model" in result.output
    assert path.read_text().startswith("import torch\nx =")
