"""Rule MG403: the loss is a sum over the batch."""

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


def step(loss: str, backward: str = "loss.backward()") -> str:
    return f"{HEAD}for x, y in DataLoader(data, batch_size=8):\n    loss = {loss}\n    {backward}\n"


@pytest.mark.parametrize(
    "loss",
    [
        "F.mse_loss(model(x), y, reduction='sum')",
        "F.mse_loss(model(x), y, size_average=False)",
        "nn.MSELoss(reduction='sum')(model(x), y)",
        "(model(x) - y).pow(2).sum()",
        "torch.sum((model(x) - y) ** 2)",
        "(model(x) - y).pow(2).sum() / len(data)",
        "0.5 * (model(x) - y).pow(2).sum() / args.batch_size",
    ],
)
def test_sums_are_scaled(loss: str) -> None:
    code = step(loss)
    assert "(loss * process_count()).backward()" in rewritten(code, "MG403")
    again = run(code, "MG403").files[0].after.decode()
    assert findings(again, "MG403") == []


@pytest.mark.parametrize(
    "loss",
    [
        "F.mse_loss(model(x), y)",
        "(model(x) - y).pow(2).sum(1).mean()",
        "(model(x) - y).pow(2).sum() / x.size(0)",
        "(model(x) - y).pow(2).sum(dim=-1).mean()",
        "nn.KLDivLoss(reduction='batchmean')(model(x), y)",
        "something(model(x), y)",
    ],
)
def test_means_are_left_alone(loss: str) -> None:
    assert findings(step(loss), "MG403") == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("scaler.scale(loss).backward()", "scaler.scale(loss * process_count()).backward()"),
        ("(loss / 4).backward()", "((loss / 4) * process_count()).backward()"),
        (
            "loss.backward(retain_graph=True)",
            "(loss * process_count()).backward(retain_graph=True)",
        ),
    ],
)
def test_every_way_to_go_backward_is_scaled(before: str, after: str) -> None:
    assert after in rewritten(step("(model(x) - y).pow(2).sum()", before), "MG403")


@pytest.mark.parametrize(
    "backward",
    ["(loss * dist.get_world_size()).backward()", "(world_size * loss).backward()",
     "loss = loss * args.world_size; loss.backward()"],
)  # fmt: skip
def test_a_loss_that_is_scaled_by_hand_is_left_alone(backward: str) -> None:
    code = "import torch.distributed as dist\n" + step("(model(x) - y).pow(2).sum()", backward)
    assert findings(code, "MG403") == []


FORWARD = (
    HEAD
    + """
class Net(nn.Module):
    def forward(self, x, y):
        return F.mse_loss(x, y{reduction})

net = nn.DataParallel(Net())
for x, y in DataLoader(data, batch_size=8):
    loss = net(x, y){after}
    loss.backward()
"""
)


@pytest.mark.parametrize(
    ("reduction", "after", "scaled"),
    [("", ".mean()", False), ("", ".sum()", True), (", reduction='sum'", ".mean()", False),
     (", reduction='sum'", ".sum()", True)],
)  # fmt: skip
def test_losses_gathered_from_devices_count_as_dataparallel_counted_them(
    reduction: str, after: str, scaled: bool
) -> None:
    code = FORWARD.format(reduction=reduction, after=after)
    assert bool(findings(code, "MG403")) is scaled


def test_a_sum_added_to_a_mean_is_reported() -> None:
    code = step("(model(x) - y).pow(2).sum() + F.l1_loss(model(x), y)")
    (found,) = findings(code, "MG403")
    assert found.applicability is Applicability.MANUAL
    assert found.effect is Effect.DIFFERENT
