"""Rule MG502: folders that every process makes."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

IMPORTS = "import os, shutil\nimport torch\nfrom pathlib import Path\n"
CHECK = "if not os.path.exists(p):\n    "


@pytest.mark.parametrize(
    ("line", "new"),
    [
        (CHECK + "os.makedirs(p)", CHECK + "os.makedirs(p, exist_ok=True)"),
        (CHECK + "os.mkdir(p)", CHECK + "os.makedirs(p, exist_ok=True)"),
        ("if not p.exists(): os.makedirs(p)", "if not p.exists(): os.makedirs(p, exist_ok=True)"),
        ("if not os.path.isdir(p):\n    os.makedirs(p, exist_ok=False)",
         "if not os.path.isdir(p):\n    os.makedirs(p, exist_ok=True)"),
        (CHECK + "Path(p).mkdir(parents=True)",
         CHECK + "Path(p).mkdir(parents=True, exist_ok=True)"),
        ("os.makedirs(p)", "if is_main_process():\n    os.makedirs(p)"),
        ("Path(p).mkdir()", "if is_main_process():\n    Path(p).mkdir()"),
        ("if os.path.exists(p):\n    shutil.rmtree(p)\nos.makedirs(p)",
         "if os.path.exists(p):\n    shutil.rmtree(p)\nif is_main_process():\n    os.makedirs(p)"),
    ],
)  # fmt: skip
def test_a_second_process_is_no_error(line: str, new: str) -> None:
    assert rewritten(IMPORTS + line, "MG502").endswith("\n" + new + "\n")


@pytest.mark.parametrize(
    "line",
    ["os.makedirs(p, exist_ok=True)", "os.makedirs(p, 0o777, True)", "Path(p).mkdir(exist_ok=True)",
     "os.makedirs(p, exist_ok=opt.exist)", "try:\n    os.makedirs(p)\nexcept OSError:\n    pass",
     "if rank == 0:\n    os.makedirs(p)", "ftp.mkdir(p)"],
)  # fmt: skip
def test_what_is_no_error_already_stays(line: str) -> None:
    assert findings(IMPORTS + line, "MG502") == []


def test_a_name_imported_alone_is_guarded() -> None:
    text = rewritten("import torch\nfrom os import mkdir\nif not exists(p):\n    mkdir(p)", "MG502")
    assert "if is_main_process():\n        mkdir(p)" in text


def test_a_second_run_changes_nothing() -> None:
    once = run(IMPORTS + CHECK + "os.mkdir(p)\nos.makedirs(q)\n", "MG502").files[0].after.decode()
    assert not run(once, "MG502").files[0].changed
