"""Rule MG817: one process alone changes the weights."""

from __future__ import annotations

import pytest
from rewriting import findings

HEAD = """
import torch
import torch.nn as nn
import torch.distributed as dist
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
"""
STEP = "model(torch.ones(1, 2)).sum().backward()\n"


@pytest.mark.parametrize(
    "guard", ["dist.get_rank() == 0", "rank == 0", "args.local_rank in [-1, 0]"]
)
def test_a_load_under_a_rank_condition_is_reported(guard: str) -> None:
    code = f"{HEAD}if {guard}:\n    model.load_state_dict(state)\n{STEP}"
    assert [f.line for f in findings(code, "MG817")] == [6]


def test_a_load_in_every_process_is_fine() -> None:
    assert findings(f"{HEAD}model.load_state_dict(state)\n{STEP}", "MG817") == []


def test_a_load_before_the_model_is_parallel_is_fine() -> None:
    code = HEAD.replace("model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))\n", "")
    code += "net = nn.Linear(2, 2)\nif rank == 0:\n    net.load_state_dict(state)\n"
    code += "model = nn.parallel.DistributedDataParallel(net)\n" + STEP
    assert findings(code, "MG817") == []
