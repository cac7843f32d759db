"""Rule MG402: gathered losses are taken apart by device."""

from __future__ import annotations

import pytest
from rewriting import findings

from migrate.finding import Applicability

HEAD = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

class Net(nn.Module):
    def forward(self, x):
        return x.mean()

n_gpu = torch.cuda.device_count()
model = nn.DataParallel(Net())
for x in DataLoader(data, batch_size=8):
    loss = model(x)
"""


@pytest.mark.parametrize("use", ["print(loss[0])", "loss = loss.view(n_gpu, -1)"])
def test_parts_by_device_are_reported(use: str) -> None:
    (found,) = findings(f"{HEAD}    {use}\n    loss.mean().backward()\n", "MG402")
    assert found.applicability is Applicability.MANUAL


@pytest.mark.parametrize(
    "use",
    ["loss = loss.mean()", "if n_gpu > 1: loss = loss.mean()", "loss = torch.mean(loss)",
     "loss = sum(l.mean() for l in [loss])", "print(x[0])"],
)  # fmt: skip
def test_what_stays_right_is_left_alone(use: str) -> None:
    assert findings(f"{HEAD}    {use}\n    loss.backward()\n", ("MG402", "MG403")) == []
