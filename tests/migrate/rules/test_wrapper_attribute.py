"""Rule MG211: an attribute of a model that has a wrapper now."""

from __future__ import annotations

import pytest
from rewriting import rewritten

NET = """import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
"""
MADE = "model = Net()\nopt = torch.optim.SGD(model.parameters(), 1)\n"
STEP = "model(torch.ones(2, 2)).sum().backward()\n"


@pytest.mark.parametrize(
    "read", ["layer.weight", "encode(x)", "state_dict()", "load_state_dict(s)"]
)
def test_what_a_wrapper_hides_is_read_through_it(read: str) -> None:
    assert f"y = model.module.{read}\n" in rewritten(
        f"{NET}{MADE}{STEP}y = model.{read}\n", "MG211"
    )


@pytest.mark.parametrize("read", ["parameters()", "train()", "eval()", "zero_grad()", "training"])
def test_what_a_wrapper_passes_on_is_left_alone(read: str) -> None:
    assert f"y = model.{read}\n" in rewritten(f"{NET}{MADE}{STEP}y = model.{read}\n", "MG211")


def test_before_the_wrap_there_is_no_wrapper() -> None:
    code = f"{NET}model = Net()\nmodel.load_state_dict(s)\n" + MADE.partition("\n")[2] + STEP
    assert "model.load_state_dict(s)\n" in rewritten(code, "MG211")


def test_a_function_that_is_called_later_gets_the_wrapper() -> None:
    code = f"{NET}def save(net):\n    torch.save(net.state_dict(), 'a')\n{MADE}{STEP}save(model)\n"
    assert "torch.save(net.module.state_dict(), 'a')" in rewritten(code, "MG211")


def test_a_function_that_is_called_before_does_not() -> None:
    code = f"{NET}def load(net):\n    net.load_state_dict(s)\n"
    code += "def build():\n    net = Net()\n    load(net)\n    return net\nmodel = build()\n"
    code += "opt = torch.optim.SGD(model.parameters(), 1)\n" + STEP
    assert "net.load_state_dict(s)" in rewritten(code, "MG211")


def test_the_models_own_methods_are_left_alone() -> None:
    net = NET + "    def forward(self, x):\n        return self.layer(x)\n"
    assert "return self.layer(x)" in rewritten(net + MADE + STEP, "MG211")


def test_without_a_wrapper_nothing_is_hidden() -> None:
    code = f"{NET}{MADE}{STEP}y = model.layer\n"
    assert "y = model.layer\n" in rewritten(code, "MG211", to="fsdp")
