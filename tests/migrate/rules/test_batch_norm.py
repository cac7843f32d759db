"""Rule MG203: a model with BatchNorm is made parallel."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten

from migrate.finding import Applicability, Effect
from migrate.rule import Options

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 2), {layer})
"""


def wrapped(layer: str) -> str:
    return NET.format(layer=layer) + "model = nn.DataParallel(Net())\n"


@pytest.mark.parametrize(
    "layer", ["nn.BatchNorm1d(2)", "nn.BatchNorm2d(2)", "torch.nn.BatchNorm3d(2)"]
)
def test_batch_norm_of_the_models_class_is_synchronised(layer: str) -> None:
    text = rewritten(wrapped(layer), "MG203")
    assert "nn.DataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(Net()))" in text


def test_the_change_of_meaning_is_said() -> None:
    (found,) = findings(wrapped("nn.BatchNorm1d(2)"), "MG203")
    assert (found.applicability, found.effect) == (Applicability.POLICY, Effect.BETTER)
    assert "--bn keep" in found.assumption


def test_keep_leaves_the_statistics_of_each_part() -> None:
    options = Options(batch_norm="keep")
    assert findings(wrapped("nn.BatchNorm1d(2)"), "MG203", options=options) == []


def test_a_model_without_batch_norm_is_left_alone() -> None:
    assert findings(wrapped("nn.LayerNorm(2)"), "MG203") == []


def test_batch_norm_in_a_block_of_another_file() -> None:
    files = {
        "train.py": "import torch.nn as nn\nfrom net import Net\nmodel = nn.DataParallel(Net())\n"
        "loss = model(1)\nloss.backward()\n",
        "net.py": "import torch.nn as nn\nfrom block import Block\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        self.block = Block()\n",
        "block.py": "import torch.nn as nn\nclass Block(nn.Module):\n"
        "    def __init__(self, norm=nn.BatchNorm2d):\n        self.norm = norm(2)\n",
    }
    assert len(findings(files, "MG203")) == 1


@pytest.mark.parametrize(
    ("maker", "converted"),
    [("models.resnet18()", True), ("models.alexnet()", False), ("models.__dict__[name]()", True)],
)
def test_models_of_a_library_may_have_it(maker: str, converted: bool) -> None:
    code = "import torch\nimport torch.nn as nn\nfrom torchvision import models\n"
    found = findings(f"{code}model = nn.DataParallel({maker})\n", "MG203")
    assert bool(found) is converted


def test_a_model_that_is_converted_already_is_left_alone() -> None:
    code = NET.format(layer="nn.BatchNorm1d(2)") + (
        "model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())\nmodel = nn.DataParallel(model)\n"
    )
    assert findings(code, "MG203") == []
