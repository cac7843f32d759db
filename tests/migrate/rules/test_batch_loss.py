"""Rule MG404: the loss compares the samples of a batch with each other."""

from __future__ import annotations

import pytest
from rewriting import findings

from migrate.finding import Applicability, Effect

HEAD = """
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

model = nn.DataParallel(nn.Linear(2, 2))
"""


def step(loss: str) -> str:
    return HEAD + (
        "for x, y in DataLoader(data, batch_size=8):\n    z = model(x)\n"
        f"    {loss}\n    loss.mean().backward()\n"
    )


@pytest.mark.parametrize(
    "loss",
    [
        "loss = torch.mm(z, z.t())",
        "loss = torch.matmul(z, z.T) / 0.5",
        "loss = z @ z.t()",
        "loss = z.mm(z.transpose(0, 1))",
        "loss = torch.cdist(z, z)",
        "loss = torch.einsum('nc,kc->nk', z, z)",
        "loss = F.cosine_similarity(z.unsqueeze(1), z.unsqueeze(0), dim=2)",
        "loss = z.std(0)",
        "loss = torch.cov(z)",
    ],
)
def test_comparisons_are_reported(loss: str) -> None:
    (found,) = findings(step(loss), "MG404")
    assert found.applicability is Applicability.MANUAL
    assert found.effect is Effect.DIFFERENT


@pytest.mark.parametrize(
    "loss",
    [
        "loss = (z * y).sum(1)",
        "loss = F.pairwise_distance(z, y)",
        "loss = F.cosine_similarity(z, y)",
        "loss = torch.matmul(z, z.transpose(1, 2))",
        "loss = z.std(1)",
        "loss = F.linear(z, weight.t())",
        "loss = z @ weight.t()",
        "loss = torch.einsum('nc,nc->n', z, z)",
    ],
)
def test_what_concerns_one_sample_is_left_alone(loss: str) -> None:
    assert findings(step(loss), "MG404") == []


def test_a_loss_of_a_library_for_metric_learning_is_reported() -> None:
    code = step("loss = contrast(z, y)").replace(
        "import numpy", "from pytorch_metric_learning import losses\nimport numpy"
    )
    code = code.replace("for x", "contrast = losses.NTXentLoss()\nfor x")
    assert len(findings(code, "MG404")) == 1


def test_features_that_are_gathered_already_are_left_alone() -> None:
    code = "import torch.distributed as dist\n" + step(
        "z = torch.cat(dist.nn.functional.all_gather(z))\n    loss = z @ z.t()"
    )
    assert findings(code, "MG404") == []


def test_attention_inside_the_wrapped_model_is_left_alone() -> None:
    code = (
        HEAD
        + """
class Net(nn.Module):
    def forward(self, x):
        return x @ x.t()

net = nn.DataParallel(Net())
for x, y in DataLoader(data, batch_size=8):
    loss = net(x).mean()
    loss.backward()
"""
    )
    assert findings(code, "MG404") == []


def test_mixing_samples_is_worth_knowing() -> None:
    (found,) = findings(step("loss = z[torch.randperm(x.size(0))]"), "MG404")
    assert found.applicability is Applicability.INFO
