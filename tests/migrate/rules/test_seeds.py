"""Rule MG701: all processes draw the same random numbers."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

HEAD = "import random\nimport time\nimport numpy as np\nimport torch\nimport torch.nn as nn\n"

TRAIN = """
def main(loader, criterion):
    {seeds}
    model = nn.DataParallel(nn.Linear(2, 2))
    for epoch in range(3):
        {inside}
        for x, y in loader:
            criterion(model(x), y).backward()
"""


def script(seeds: str, inside: str = "pass") -> str:
    return HEAD + TRAIN.format(seeds=seeds, inside=inside)


@pytest.mark.parametrize(
    ("seeds", "arguments"),
    [
        ("torch.manual_seed(0)", "torch.manual_seed"),
        ("torch.cuda.manual_seed_all(0)", "torch.manual_seed"),
        ("torch.manual_seed(0); np.random.seed(0); random.seed(0)",
         "torch.manual_seed, np.random.seed, random.seed"),
    ],
)  # fmt: skip
def test_processes_part_before_the_training(seeds: str, arguments: str) -> None:
    code = script(seeds)
    assert f"    seed_ranks({arguments})\n    for epoch in" in rewritten(code, "MG701")
    assert not run(run(code, "MG701").files[0].after.decode(), "MG701").files[0].changed


@pytest.mark.parametrize("seeds", ["pass", "torch.manual_seed(1 + rank)"])
def test_no_seed_or_one_for_each_process_is_fine(seeds: str) -> None:
    assert findings(script(seeds), "MG701") == []


def test_numbers_that_steer_the_training_stay_alike() -> None:
    code = script("torch.manual_seed(0); random.seed(0)", "if random.random() < 0.5: continue")
    assert "seed_ranks(torch.manual_seed)\n" in rewritten(code, "MG701")


def test_seeding_in_the_training_is_reported() -> None:
    found = findings(script("pass", "torch.manual_seed(0)"), "MG701")
    assert any("in the training" in f.message and not f.edits for f in found)


def test_the_place_may_be_in_another_file() -> None:
    trainer = (
        "import torch\nimport torch.nn as nn\nclass Trainer:\n    def __init__(self):\n"
        "        self.m = nn.DataParallel(nn.Linear(2, 2))\n"
        "    def fit(self):\n        self.m(1).backward()\n"
    )
    entry = (
        "import numpy as np\nfrom trainer import Trainer\ndef main():\n    np.random.seed(0)\n"
        "    t = Trainer()\n    t.fit()\nmain()\n"
    )
    result = run({"train.py": entry, "trainer.py": trainer}, "MG701")
    assert b"    seed_ranks(np.random.seed)\n    t.fit()" in result.files[0].after
