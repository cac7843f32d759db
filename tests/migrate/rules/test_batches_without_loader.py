"""Rule MG304: weights are trained on batches that no visible DataLoader gives."""

from __future__ import annotations

import pytest
from rewriting import findings

DP = "model = nn.DataParallel(nn.Linear(2, 2))\n"
STEP = "model(x).mean().backward()\n"


@pytest.mark.parametrize(
    "loop",
    ["for i in range(0, len(data), 8):", "while step < 100:", "for x in [1, 2, 3]:"],
)
def test_batches_made_by_hand_are_reported(loop: str) -> None:
    (found,) = findings(f"{DP}{loop}\n    {STEP}", "MG304")
    assert found.message.startswith("no DataLoader feeds this loop")
    assert found.line == 5


def test_a_loop_over_something_unseen_says_so() -> None:
    code = f"import torch\nimport torch.nn as nn\nfrom data import batches\n{DP}"
    code += f"for x in batches:\n    {STEP}"
    (found,) = findings(code, "MG304")
    assert "where batches comes from is not seen" in found.message


def test_loops_over_loaders_are_fine() -> None:
    code = (
        f"def step(x):\n    {STEP}def epoch(loader):\n    for x in loader:\n        step(x)\n"
        f"{DP}loader = DataLoader(a, 8)\nfor e in range(3):\n    epoch(loader)\n"
    )
    assert findings(code, "MG304") == []


def test_iterators_over_loaders_are_fine() -> None:
    code = f"{DP}it = iter(DataLoader(a, 8))\nfor step in range(9):\n    x = next(it)\n    {STEP}"
    assert findings(code, "MG304") == []


def test_a_loop_that_was_adapted_by_hand_is_fine() -> None:
    code = f"{DP}for i in range(rank, len(data), world_size):\n    {STEP}"
    assert findings(code, "MG304") == []


def test_a_backward_that_nothing_calls_is_no_loop() -> None:
    assert findings(f"{DP}def step(x):\n    {STEP}", "MG304") == []


@pytest.mark.parametrize(
    ("name", "count"), [("train_loader", 1), ("val_loader", 0)]
)  # fmt: skip
def test_a_shuffled_loader_that_is_read_nowhere_is_reported(name: str, count: int) -> None:
    code = f"{DP}{name} = DataLoader(a, 8, shuffle=True)\nfit(model, {name})\n"
    assert len(findings(code, "MG304")) == count
