"""Rule MG506: files that are opened for writing."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

IMPORTS = "import os, csv, codecs, gzip\nimport torch\nfrom pathlib import Path\n"


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ('f = open("a", "w")', 'f = open("a" if is_main_process() else os.devnull, "w")'),
        ("f = open(p, mode='a+')", "f = open(p if is_main_process() else os.devnull, mode='a+')"),
        ("f = open(file=p, mode='wb')",
         "f = open(file=p if is_main_process() else os.devnull, mode='wb')"),
        ("f = codecs.open(p, 'w', 'utf8')",
         "f = codecs.open(p if is_main_process() else os.devnull, 'w', 'utf8')"),
        ("f = open(a if x else b, 'w')",
         "f = open((a if x else b) if is_main_process() else os.devnull, 'w')"),
        ("f = open((p), 'w')", "f = open((p) if is_main_process() else os.devnull, 'w')"),
        ("f = open(p, 'a' if resume else 'w')",
         "f = open(p if is_main_process() else os.devnull, 'a' if resume else 'w')"),
        ("f = Path(p).open('w')", "f = open(Path(p) if is_main_process() else os.devnull, 'w')"),
    ],
)  # fmt: skip
def test_the_other_processes_open_the_null_device(line: str, new: str) -> None:
    assert rewritten(IMPORTS + line, "MG506").endswith(new + "\n")


@pytest.mark.parametrize(
    "line",
    [
        "open(p)", "open(p, 'r')", "open(p, 'rb')", "Path(p).open()", "image.open('w')",
        "open(p if rank == 0 else os.devnull, 'w')", "open(os.devnull, 'w')",
        "if is_main_process():\n    open(p, 'w')", "open(p, mode)",
    ],
)  # fmt: skip
def test_other_files_stay(line: str) -> None:
    assert findings(IMPORTS + line, "MG506") == []


def test_import_of_os_comes_along() -> None:
    text = run("import torch\nopen('a', 'w')", "MG506").files[0].after.decode()
    compile(text, "train.py", "exec")
    assert "import os\n" in text


@pytest.mark.parametrize(
    "line",
    ["open(p, 'x')", "import h5py\nh5py.File(p, 'w')",
     "import zipfile\nzipfile.ZipFile(p, mode='a')",
     "with open(p, mode) as f:\n    f.write('x')"],
)  # fmt: skip
def test_what_the_null_device_cannot_stand_in_for_is_manual(line: str) -> None:
    (finding,) = findings(IMPORTS + line, "MG506")
    assert finding.edits == ()


def test_a_second_run_changes_nothing() -> None:
    code = IMPORTS + "with open(os.path.join(a,\n    'b'), 'w') as f:\n    f.write('x')\n"
    once = run(code, "MG5").files[0].after.decode()
    assert not run(once, "MG5").files[0].changed
