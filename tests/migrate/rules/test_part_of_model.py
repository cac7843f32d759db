"""Rule MG205: only a part of a model is put into DataParallel."""

from __future__ import annotations

from rewriting import findings, rewritten

NET = """import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Linear(2, 2)
        self.head = nn.Linear(2, 2)
"""
TAIL = "opt = torch.optim.SGD(model.parameters(), 1)\nmodel(torch.ones(2)).sum().backward()\n"


def test_the_part_keeps_its_names_and_the_whole_is_parallel() -> None:
    code = NET + "model = Net()\nmodel.features = nn.DataParallel(model.features)\nmodel.cuda()\n"
    text = rewritten(code + TAIL, "MG20")
    assert "model.features = Prefixed(model.features)\nmodel.cuda()\n" in text
    assert "model.cuda()\nmodel = wrap_model(model)\n" in text


def test_device_arguments_go() -> None:
    code = NET + "model = Net()\nmodel.features = nn.DataParallel(model.features, [0, 1])\n"
    assert "Prefixed(model.features)\n" in rewritten(code + TAIL, "MG205")


def test_a_part_wrapped_in_the_models_own_class() -> None:
    code = NET.replace(
        "nn.Linear(2, 2)\n        self.head", "nn.DataParallel(nn.Linear(2, 2))\n        self.head"
    )
    text = rewritten(code + "model = Net()\n" + TAIL, "MG20")
    assert "self.features = Prefixed(nn.Linear(2, 2))" in text
    assert "model = wrap_model(model)" in text


def test_the_model_of_a_trainer_is_no_part() -> None:
    code = (
        NET
        + "class Trainer:\n    def __init__(self):\n        self.model = nn.DataParallel(Net())\n"
    )
    assert findings(code + "t = Trainer()\nt.model(1).backward()\n", "MG205") == []
