"""Rule MG605: programs that wait for somebody."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

IMPORTS = "import torch, pdb, cv2\nimport matplotlib.pyplot as plt\n"


@pytest.mark.parametrize("line", ["x = input('a')", "pdb.set_trace()", "breakpoint()"])
def test_what_asks_is_manual(line: str) -> None:
    (finding,) = findings(IMPORTS + line, "MG605")
    assert finding.edits == ()


@pytest.mark.parametrize(
    "code", ["def chat():\n    input('a')", "def main():\n    input = 3\n    print(input)"]
)
def test_what_the_training_never_comes_to_is_nothing(code: str) -> None:
    assert findings(IMPORTS + code, "MG605") == []


@pytest.mark.parametrize("line", ["plt.show()", "cv2.imshow('a', x)"])
def test_windows_are_left_to_the_main_process(line: str) -> None:
    text = rewritten(IMPORTS + line, "MG605")
    assert text.endswith(f"if is_main_process():\n    {line}\n")
    assert not run(text, "MG605").files[0].changed
