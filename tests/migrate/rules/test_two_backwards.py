"""Several backward() through forwards made before the first."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG804", to)]


WRAP = "import torch\nimport torch.nn as nn\nmodel = nn.DataParallel(nn.Linear(2, 1))\n"
LOOP = WRAP + "for a, b in loader:\n"


def step(*lines: str) -> str:
    return LOOP + "".join(f"    {line}\n" for line in lines)


TWO_LOSSES = step("x = model(a).mean()", "y = model(b).mean()", "x.backward()", "y.backward()")


def test_two_forwards_and_two_backwards_are_reported_once() -> None:
    assert len(said(TWO_LOSSES)) == 1


def test_sharded_models_have_no_such_problem() -> None:
    assert said(TWO_LOSSES, to="fsdp") == []


def test_forward_backward_forward_backward_is_exact() -> None:
    code = step("x = model(a).mean()", "x.backward()", "x = model(b).mean()", "x.backward()")
    assert said(code) == []


def test_one_backward_of_the_sum_is_exact() -> None:
    assert said(step("x = model(a).mean()", "y = model(b).mean()", "(x + y).backward()")) == []


def test_a_second_backward_through_one_forward_is_reported() -> None:
    code = step("out = model(a)", "out.mean().backward(retain_graph=True)", "out.sum().backward()")
    assert len(said(code)) == 1


def test_a_backward_in_a_loop_through_a_forward_outside_is_reported() -> None:
    code = step("outs = model(a)", "for out in outs:", "    out.mean().backward(retain_graph=True)")
    assert "again and again" in said(code)[0]


def test_branches_that_exclude_each_other_are_fine() -> None:
    code = step(
        "loss = model(a).mean()",
        "if amp:",
        "    scaler.scale(loss).backward()",
        "else:",
        "    loss.backward()",
    )
    assert said(code) == []


def test_the_steps_of_a_gan_are_fine() -> None:
    code = (
        WRAP
        + """
D = nn.DataParallel(nn.Linear(1, 1))
for real, z in loader:
    loss_real = D(real).mean()
    loss_real.backward()
    fake = model(z)
    loss_fake = D(fake.detach()).mean()
    loss_fake.backward()
    loss_g = D(fake).mean()
    loss_g.backward()
"""
    )
    assert said(code) == []


def test_a_generator_that_the_discriminator_trains_through_is_reported() -> None:
    code = (
        WRAP
        + """
D = nn.DataParallel(nn.Linear(1, 1))
for real, z in loader:
    fake = model(z)
    loss_d = D(real).mean() - D(fake).mean()
    loss_d.backward(retain_graph=True)
    loss_g = D(fake).mean()
    loss_g.backward()
"""
    )
    assert ["loss_g" in m and "model ran" in m for m in said(code)] == [True]


def test_two_models_with_a_loss_each_are_fine() -> None:
    code = (
        WRAP
        + """
other = nn.DataParallel(nn.Linear(2, 1))
for a, b in loader:
    x, y = model(a).mean(), other(b).mean()
    x.backward()
    y.backward()
"""
    )
    assert said(code) == []
