"""Rule MG511: what is done with the path of a checkpoint that becomes a folder."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

from migrate.rule import Options

FOLDERS = Options(save="sharded")
START = (
    "import os, shutil\nimport torch\nimport torch.nn as nn\n"
    "model = nn.DataParallel(nn.Linear(2, 2))\n"
)
SAVE = "torch.save({'m': model.state_dict()}, path)\n"


def changed(line: str) -> str:
    """What a line becomes after a save to `path`."""
    text = rewritten(START + SAVE + line, "MG511", "fsdp", FOLDERS)
    return text.split(SAVE)[1].replace("def unrelated_step", "\n").split("\n\n")[0].strip("\n")


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("shutil.copyfile(path, best)", "copy_saved(path, best)"),
        ("shutil.copy(path, best)", "copy_saved(path, best)"),
        ("shutil.copy2(path,\n    best)", "copy_saved(path,\n    best)"),
        ("os.rename(path, best)", "move_saved(path, best)"),
        ("os.replace(path, best)", "move_saved(path, best)"),
        ("shutil.move(path, best)", "move_saved(path, best)"),
        ("os.remove(path)", "remove_saved(path)"),
        ("os.unlink(old.pop(0))", "remove_saved(old.pop(0))"),
        ("for old in os.listdir():\n    os.remove(old)",
         "for old in os.listdir():\n    remove_saved(old)"),
        ("found = os.path.isfile(path)", "found = os.path.exists(path)"),
        ("import os.path as o\nx = o.isfile(path)", "import os.path as o\nx = o.exists(path)"),
        ("if os.path.isfile(resume):\n    model.load_state_dict(torch.load(resume))",
         "if os.path.exists(resume):\n    model.load_state_dict(torch.load(resume))"),
    ],
)  # fmt: skip
def test_what_takes_files_takes_folders_too(line: str, new: str) -> None:
    assert changed(line) == new


@pytest.mark.parametrize(
    "line",
    ["shutil.copyfile(config, best)", "os.path.isfile(config)", "os.path.exists(path)",
     "os.remove('lock')", "torch.save(3, log)\nos.remove(log)", "os.path.getsize(config)",
     "os.rename(a, b)", "os.remove(prefix + '.txt')"],
)  # fmt: skip
def test_other_files_stay(line: str) -> None:
    assert findings(START + SAVE + line, "MG511", "fsdp", FOLDERS) == []


@pytest.mark.parametrize(
    "line",
    ["os.path.getsize(path)", "shutil.copyfile(src=path, dst=best)",
     "from os.path import isfile\nisfile(path)"],
)  # fmt: skip
def test_what_cannot_be_edited_is_said(line: str) -> None:
    (finding,) = findings(START + SAVE + line, "MG511", "fsdp", FOLDERS)
    assert finding.edits == ()
    assert finding.advice


def test_a_pathlib_path() -> None:
    code = START + "from pathlib import Path\npath = Path('a.pt')\n" + SAVE + "path.is_file()"
    assert "path.exists()" in rewritten(code, "MG511", "fsdp", FOLDERS)


@pytest.mark.parametrize(("to", "options"), [("fsdp", Options()), ("ddp", FOLDERS)])
def test_files_that_stay_files(to: str, options: Options) -> None:
    assert findings(START + SAVE + "os.remove(path)", "MG511", to, options) == []


def test_the_copy_is_left_to_the_main_process() -> None:
    code = START + "def keep(path, is_best):\n    torch.save(model.state_dict(), path)\n"
    code += "    if is_best:\n        shutil.copyfile(path, 'best.pt')\n"
    text = rewritten(code, "MG5", "fsdp", FOLDERS)
    assert "        if is_main_process():\n            copy_saved(path, 'best.pt')" in text


def test_a_second_run_changes_nothing() -> None:
    lines = "shutil.copyfile(path, best)\nos.remove(path)\nprint(os.path.isfile(path))\n"
    once = run(START + SAVE + lines, "MG5", "fsdp", FOLDERS).files[0].after.decode()
    second = run(once, "MG5", "fsdp", FOLDERS)
    assert not second.files[0].changed
    assert second.manual == []
