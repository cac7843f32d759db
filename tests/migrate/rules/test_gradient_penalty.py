"""Second derivatives of parallel models."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG805", to)]


HEAD = "import torch\nimport torch.nn as nn\nD = nn.DataParallel(nn.Linear(2, 1))\n"
TOGETHER = (
    HEAD
    + """
for x in loader:
    score = D(x)
    g = torch.autograd.grad(outputs=score.sum(), inputs=x, create_graph=True)[0]
    loss = D(x).mean() + (g.norm(dim=1) - 1).pow(2).mean()
    loss.backward()
"""
)
ALONE = TOGETHER.replace("D(x).mean() + ", "")
IN_A_FUNCTION = (
    HEAD
    + """
def penalty(D, x):
    score = D(x)
    g = torch.autograd.grad(score.sum(), x, create_graph=True, retain_graph=True)[0]
    return g.pow(2).mean()
for x in loader:
    loss = D(x).mean()
    loss.backward()
    gp = penalty(D, x)
    gp.backward()
"""
)


def test_a_penalty_in_the_sum_of_losses_is_exact() -> None:
    assert said(TOGETHER) == []


def test_a_penalty_with_its_own_backward_is_reported() -> None:
    assert said(ALONE) == ["loss.backward() goes through the gradient of D alone"]


def test_a_penalty_from_a_function_is_reported_where_it_is_trained() -> None:
    assert said(IN_A_FUNCTION) == ["gp.backward() goes through the gradient of D alone"]


def test_every_second_derivative_of_sharded_weights_is_reported() -> None:
    assert len(said(TOGETHER, to="fsdp")) == 1
    assert len(said(IN_A_FUNCTION, to="fsdp")) == 1


def test_a_gradient_that_is_not_trained_on_is_fine() -> None:
    assert said(ALONE.replace("create_graph=True", "create_graph=False")) == []
    assert said(ALONE.replace(", create_graph=True", ""), to="fsdp") == []


def test_a_gradient_of_another_function_is_fine() -> None:
    assert said(ALONE.replace("score = D(x)", "score = x * 2"), to="fsdp") == []
