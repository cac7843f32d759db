"""Rule MG603: log files."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

IMPORTS = "import logging, logging.handlers, os\nimport torch\n"
CHOICE = "p if is_main_process() else os.devnull"


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("logging.FileHandler(p)", f"logging.FileHandler({CHOICE})"),
        ("logging.FileHandler(filename=p, mode='w')",
         f"logging.FileHandler(filename={CHOICE}, mode='w')"),
        ("logging.basicConfig(level=10, filename=p)",
         f"logging.basicConfig(level=10, filename={CHOICE})"),
        ("logging.handlers.RotatingFileHandler(p)",
         f"logging.handlers.RotatingFileHandler({CHOICE})"),
    ],
)  # fmt: skip
def test_only_the_main_process_opens_the_log(line: str, new: str) -> None:
    assert rewritten(IMPORTS + line, "MG603").endswith(new + "\n")


@pytest.mark.parametrize(
    "line",
    ["logging.basicConfig(level=10)", "logging.StreamHandler()", "logging.info(p)",
     "logging.basicConfig(filename=None)", f"logging.FileHandler({CHOICE})",
     "if rank == 0:\n    logging.FileHandler(p)"],
)  # fmt: skip
def test_loggers_without_a_file_stay(line: str) -> None:
    assert findings(IMPORTS + line, "MG603") == []


def test_a_second_run_changes_nothing() -> None:
    once = run(IMPORTS + "h = logging.FileHandler(p)\n", "MG603").files[0].after.decode()
    assert not run(once, "MG603").files[0].changed
