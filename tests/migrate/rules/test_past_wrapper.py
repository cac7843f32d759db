"""The model runs past its wrapper."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG806", to)]


NET = """import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)
        self.size = 3
    def encode(self, x):
        return self.fc(x)
    def describe(self):
        return self.size
    def forward(self, x):
        return self.encode(x)
model = nn.DataParallel(Net())
"""


def step(*lines: str) -> str:
    return NET + "for x in loader:\n" + "".join(f"    {line}\n" for line in lines)


def test_a_forward_of_the_inner_model_is_reported() -> None:
    for call in ("model.module(x)", "model.module.forward(x)", "model.module.encode(x)"):
        assert len(said(step(f"{call}.sum().backward()"))) == 1, call


def test_a_method_of_a_model_that_is_wrapped_by_us_is_reported() -> None:
    code = step("model.encode(x).sum().backward()", "optimizer.step()")
    code = code.replace("nn.DataParallel(Net())", "Net().cuda()\noptimizer = torch.optim.SGD("
                        "model.parameters(), 0.1)")  # fmt: skip
    assert len(said(code)) == 1


def test_what_runs_no_layers_is_fine() -> None:
    assert said(step("n = model.module.describe()", "model(x).sum().backward()")) == []


def test_evaluation_is_fine() -> None:
    assert (
        said(
            step("model(x).sum().backward()")
            + """
with torch.no_grad():
    model.module.encode(x)
for x in test_loader:
    print(model.module(x))
"""
        )
        == []
    )


def test_where_the_wrapper_runs_too_it_is_harmless() -> None:
    code = step("y = model.module.encode(x)", "(model(x) + y).sum().backward()")
    assert said(code) == []


def test_sharded_weights_need_forward_in_any_case() -> None:
    code = step("y = model.module.encode(x)", "(model(x) + y).sum().backward()")
    found = findings(code, "MG806", "fsdp")
    assert len(found) == 1
    assert "'encode'" in found[0].advice
    assert said(step("model.module(x).sum().backward()"), to="fsdp") == []
