"""Rule MG410: the loss is a mean over a number that depends on the data."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

from migrate.finding import Applicability, Effect

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

model = nn.DataParallel(nn.Linear(2, 2))
"""


def step(loss: str) -> str:
    return HEAD + (
        "for x, y, mask in DataLoader(data, batch_size=8):\n"
        f"    loss = {loss}\n    loss.backward()\n"
    )


def test_the_divisor_becomes_the_average_one() -> None:
    code = step("((model(x) - y) * mask).sum() / mask.sum()")
    assert "/ global_mean(mask.sum())" in rewritten(code, "MG410")
    (found,) = findings(code, "MG410")
    assert found.applicability is Applicability.POLICY
    again = run(code, "MG410").files[0].after.decode()
    assert findings(again, ("MG410", "MG403")) == []


def test_a_loss_class_of_the_project_is_seen_through() -> None:
    code = (
        HEAD
        + """
class Masked(nn.Module):
    def forward(self, output, target, mask):
        loss = (output - target).abs() * mask
        return loss.sum() / mask.sum()

criterion = Masked()
for x, y, mask in DataLoader(data, batch_size=8):
    loss = criterion(model(x), y, mask)
    loss.backward()
"""
    )
    assert "return loss.sum() / global_mean(mask.sum())" in rewritten(code, "MG410")


def test_a_loss_inside_the_wrapped_model_was_computed_on_parts_before() -> None:
    code = (
        HEAD
        + """
class Net(nn.Module):
    def forward(self, x, mask):
        return (x * mask).sum() / mask.sum()

net = nn.DataParallel(Net())
for x, mask in DataLoader(data, batch_size=8):
    loss = net(x, mask).mean()
    loss.backward()
"""
    )
    assert findings(code, "MG410") == []


@pytest.mark.parametrize(
    "loss",
    [
        "F.cross_entropy(model(x), y, weight=weights)",
        "F.cross_entropy(model(x), y, ignore_index=255)",
        "nn.CrossEntropyLoss(ignore_index=0)(model(x), y)",
        "nn.NLLLoss(weight=weights)(model(x), y)",
    ],
)
def test_hidden_divisors_are_reported(loss: str) -> None:
    (found,) = findings(step(loss), "MG410")
    assert found.applicability is Applicability.MANUAL
    assert found.effect is Effect.DIFFERENT


@pytest.mark.parametrize(
    "loss",
    ["F.cross_entropy(model(x), y)", "nn.CrossEntropyLoss()(model(x), y)",
     "(model(x) - y).sum() / x.size(0)", "nn.BCEWithLogitsLoss(pos_weight=w)(model(x), y)",
     "nn.CrossEntropyLoss(weight=w, reduction='sum')(model(x), y)"],
)  # fmt: skip
def test_other_losses_are_left_alone(loss: str) -> None:
    assert findings(step(loss), "MG410") == []
