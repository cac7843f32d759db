"""Rule MG409: a memory of past batches is updated from a part of the batch."""

from __future__ import annotations

from rewriting import findings

HEAD = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

bank = torch.zeros(100, 2)
model = nn.DataParallel(nn.Linear(2, 2))
"""


def test_a_bank_in_the_script_is_reported_once() -> None:
    code = (
        HEAD
        + """
for x, index in DataLoader(data, batch_size=8):
    z = model(x)
    z.mean().backward()
    bank[index] = z.detach()
    bank[index] = z.detach() * 2
"""
    )
    (found,) = findings(code, "MG409")
    assert "bank" in found.message


def test_what_evaluation_collects_is_left_alone() -> None:
    code = (
        HEAD
        + """
for x in DataLoader(data, batch_size=8):
    model(x).mean().backward()
for x, index in DataLoader(data, batch_size=8):
    bank[index] = model(x)
"""
    )
    assert findings(code, "MG409") == []


def test_what_lives_for_one_batch_is_left_alone() -> None:
    code = (
        HEAD
        + """
for x, index in DataLoader(data, batch_size=8):
    one_hot = torch.zeros(8, 10)
    one_hot[index] = x
    model(x).mean().backward()
"""
    )
    assert findings(code, "MG409") == []


def test_buffers_that_forward_writes_matter_where_nothing_sends_them_out() -> None:
    code = (
        HEAD
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(2))
    def forward(self, x):
        self.center.mul_(0.9)
        return x

net = nn.DataParallel(Net())
for x in DataLoader(data, batch_size=8):
    net(x).mean().backward()
"""
    )
    assert findings(code, "MG409", "ddp") == []
    assert len(findings(code, "MG409", "fsdp")) == 1
