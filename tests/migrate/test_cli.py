"""The command `migrate`."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

from click.testing import CliRunner

from migrate.cli import main


def test_version_is_the_version_of_the_distribution() -> None:
    result = CliRunner().invoke(main, ["--version"])

    assert result.output == f"migrate, version {version('shardport')}\n"


def test_module_can_be_run() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "migrate", "--help"], capture_output=True, text=True, check=True
    )

    assert result.stdout.startswith("Usage: migrate ")


def test_command_imports_neither_torch_nor_ckpt() -> None:
    program = "import sys, migrate.cli; print(sorted({'torch', 'ckpt'} & set(sys.modules)))"

    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert result.stdout == "[]\n"
