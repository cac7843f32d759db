"""Rule MG308: data is split or shuffled at random, and nothing seeds the draw."""

from __future__ import annotations

import pytest
from rewriting import findings

HEAD = (
    "import random\nimport numpy as np\nimport torch\nimport torch.nn as nn\n"
    "from sklearn.model_selection import train_test_split\n"
    "from torch.utils.data import DataLoader, random_split\n"
    "model = nn.DataParallel(nn.Linear(2, 2))\n"
)
LOOP = "for x in DataLoader(a, batch_size=8):\n    model(x).mean().backward()\n"
DRAWS = ["a, b = random_split(data, [3, 4])", "a, b = train_test_split(data)",
         "random.shuffle(files)", "np.random.shuffle(files)"]  # fmt: skip


@pytest.mark.parametrize("draw", DRAWS)
def test_an_unseeded_draw_is_reported(draw: str) -> None:
    (found,) = findings(f"{HEAD}{draw}\n{LOOP}", "MG308")
    assert "draws other samples in every process" in found.message
    assert found.advice.endswith("(0)")
    assert "\\" not in found.advice and "?" not in found.advice


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("seed", [
    "torch.manual_seed(1)\nnp.random.seed(1)\nrandom.seed(1)\n",
    "from tools import set_seed\nset_seed(1)\n",
])  # fmt: skip
def test_a_seeded_draw_is_fine(draw: str, seed: str) -> None:
    assert findings(f"{HEAD}{seed}{draw}\n{LOOP}", "MG308") == []


@pytest.mark.parametrize(
    "draw",
    [
        "a, b = random_split(data, [3, 4], generator=g)",
        "a, b = train_test_split(a, random_state=1)",
    ],
)
def test_a_draw_with_its_own_seed_is_fine(draw: str) -> None:
    assert findings(f"{HEAD}{draw}\n{LOOP}", "MG308") == []


def test_augmentation_is_left_alone() -> None:
    code = "class Data:\n    def __getitem__(self, i):\n        random.shuffle(self.parts)\n"
    assert findings(f"{HEAD}{code}{LOOP}    order = np.random.permutation(3)\n", "MG308") == []
