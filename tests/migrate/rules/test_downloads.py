"""Rule MG106: who downloads."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

TV = "import os\nimport torch\nimport torchvision\n"


def test_the_main_process_downloads_first_and_only_once() -> None:
    code = TV + "d = torchvision.datasets.MNIST('x', download=True)"
    assert "= main_process_first(torchvision.datasets.MNIST)('x', download=True)" in rewritten(
        code, "MG106"
    )
    assert not run(run(code, "MG106").files[0].after.decode(), "MG106").files[0].changed


@pytest.mark.parametrize(
    "line",
    ["torchvision.datasets.MNIST('x', download=False)", "torchvision.datasets.MNIST('x')",
     "if rank == 0:\n    torchvision.datasets.MNIST('x', download=True)", "os.system('ls')"],
)  # fmt: skip
def test_what_does_not_download_everywhere_stays(line: str) -> None:
    assert findings(TV + line, "MG106") == []
