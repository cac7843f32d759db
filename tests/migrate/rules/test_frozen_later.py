"""Freezing after the wrap."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG808", to)]


HEAD = """import torch
import torch.nn as nn
net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
"""
WRAP = "model = nn.DataParallel(net)\n"
FREEZE = "for p in model.module[0].parameters():\n    p.requires_grad = False\n"


def test_freezing_a_part_below_the_wrap_is_reported() -> None:
    assert said(HEAD + WRAP + FREEZE) == [
        "p.requires_grad is changed after model was made parallel"
    ]


def test_freezing_above_the_wrap_is_fine() -> None:
    assert said(HEAD + FREEZE.replace("model.module", "net") + WRAP) == []


def test_other_spellings() -> None:
    for line in (
        "model.module[0].requires_grad_(False)",
        "model.module[1].weight.requires_grad = False",
        "for n, p in model.named_parameters():\n    if 'a' in n:\n        p.requires_grad = False",
    ):
        assert len(said(HEAD + WRAP + line + "\n")) == 1, line


def test_unfreezing_in_a_later_epoch_is_reported() -> None:
    code = (
        HEAD
        + WRAP
        + """
def unfreeze(m):
    for name, p in m.named_parameters():
        if name.startswith("0"):
            p.requires_grad = True
for epoch in range(9):
    if epoch == 3:
        unfreeze(model)
    model(x).sum().backward()
"""
    )
    assert len(said(code)) == 1


def test_a_whole_model_that_is_switched_in_every_step_is_fine() -> None:
    code = (
        HEAD
        + WRAP
        + """
def switch(net, flag):
    for p in net.parameters():
        p.requires_grad = flag
for x in loader:
    switch(model, True)
    model(x).sum().backward()
    switch(model, False)
"""
    )
    assert said(code) == []


def test_inputs_and_other_models_are_fine() -> None:
    code = HEAD + WRAP + "teacher = nn.Linear(2, 1)\nx.requires_grad = True\n"
    assert said(code + "for p in teacher.parameters():\n    p.requires_grad = False\n") == []


def test_without_a_wrapper_there_is_no_such_problem() -> None:
    assert said(HEAD + WRAP + FREEZE, to="fsdp") == []
