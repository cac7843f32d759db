"""Layers that only some calls use."""

from __future__ import annotations

from rewriting import findings, rewritten, run

from migrate.rule import Options


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG810", to)]


def net(*forward: str, call: str = "model(x)") -> str:
    body = "".join(f"        {line}\n" for line in forward)
    return f"""import random
import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self, deep=True):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)
        self.act = nn.ReLU()
        self.deep = deep
    def forward(self, x, task="a", y=None):
{body}model = nn.DataParallel(Net())
for x in loader:
    {call}.sum().backward()
"""


def test_a_random_branch_is_reported() -> None:
    for test in ("random.random() < 0.5", "self.training and torch.rand(1) < 0.5"):
        assert len(said(net(f"if {test}:", "    x = self.b(x)", "return self.a(x)"))) == 1, test


def test_a_random_number_in_a_variable_is_reported() -> None:
    code = net("p = torch.rand(1)", "if p < 0.5:", "    x = self.b(x)", "return self.a(x)")
    assert len(said(code)) == 1


def test_an_early_return_leaves_the_rest_out() -> None:
    code = net("x = self.a(x)", "if random.random() < 0.5:", "    return x", "return self.b(x)")
    assert said(code) == ["self.b is used only if random.random() < 0.5"]


def test_branches_of_the_same_layers_are_fine() -> None:
    code = net(
        "if random.random() < 0.5:", "    return self.b(self.a(x))", "return self.a(self.b(x))"
    )
    assert said(code) == []


def test_layers_without_parameters_are_fine() -> None:
    assert (
        said(net("if random.random() < 0.5:", "    x = self.act(x)", "return self.b(self.a(x))"))
        == []
    )


def test_switches_are_fine() -> None:
    for test in ("self.deep", "self.training", "y is not None", "x.shape[0] > 3", "task == 'b'"):
        assert said(net(f"if {test}:", "    x = self.b(x)", "return self.a(x)")) == [], test


def test_an_argument_that_changes_from_step_to_step_is_reported() -> None:
    code = net("if task == 'a':", "    return self.a(x)", "return self.b(x)",
               call="(model(x, 'a') + model(x, task='b'))")  # fmt: skip
    assert len(said(code)) == 1


def test_nothing_to_say_where_unused_parameters_are_looked_for() -> None:
    code = net("if random.random() < 0.5:", "    x = self.b(x)", "return self.a(x)")
    assert findings(code, "MG810", options=Options(find_unused=True)) == []
    assert len(findings(code, "MG810", "fsdp", Options(find_unused=True))) == 1


NET = """
import random
import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(2, 2)
        self.head = nn.Linear(2, 1)
    def forward(self, x):
        if random.random() < 0.8:
            x = self.block(x)
        return self.head(x)
"""
LOOP = "for images in loader:\n    model(images).sum().backward()\n"


def test_the_wrapper_looks_for_unused_parameters_whatever_else_goes() -> None:
    code = f"{NET}model = nn.DataParallel(Net(), device_ids=[0, 1])\n{LOOP}"
    text = rewritten(code, ("MG201", "MG810"))
    assert "model = wrap_model(Net(), find_unused_parameters=True)\n" in text
    assert (
        findings({"train.py": run(code, ("MG201", "MG810")).files[0].after.decode()}, "MG810") == []
    )


def test_a_wrapper_that_looks_already_needs_nothing() -> None:
    wrap = "nn.parallel.DistributedDataParallel(Net(), find_unused_parameters=True)"
    assert findings(f"{NET}model = {wrap}\n{LOOP}", "MG810") == []


def test_where_weights_are_sharded_a_human_decides() -> None:
    (found,) = findings(f"{NET}model = nn.DataParallel(Net())\n{LOOP}", "MG810", "fsdp")
    assert found.edits == ()
