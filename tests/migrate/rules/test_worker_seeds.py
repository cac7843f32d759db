"""Rule MG703: loader workers are seeded by their number alone."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

HEAD = "import random\nimport time\nimport numpy as np\nimport torch\nimport torch.nn as nn\n"


@pytest.mark.parametrize(
    "function",
    ["lambda i: np.random.seed(3 + i)", "lambda i: random.seed(i)"],
)
def test_workers_of_other_processes_get_other_seeds(function: str) -> None:
    code = (
        f"{HEAD}from torch.utils.data import DataLoader\nDataLoader([1], worker_init_fn={function})"
    )
    assert "seed(rank_seed(" in rewritten(code, "MG703")
    assert not run(run(code, "MG703").files[0].after.decode(), "MG703").files[0].changed


def test_workers_seeded_from_torch_s_seed_differ_already() -> None:
    code = (
        f"{HEAD}from torch.utils.data import DataLoader\n"
        "DataLoader([1], worker_init_fn=lambda i: np.random.seed(torch.initial_seed() % 2**32))"
    )
    assert findings(code, "MG703") == []
