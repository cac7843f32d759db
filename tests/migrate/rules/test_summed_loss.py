"""Losses that are reduced before backward()."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG904", to)]


HEAD = """import torch
import torch.nn as nn
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
"""


def loop(*lines: str) -> str:
    return HEAD + "for x in loader:\n" + "".join(f"    {line}\n" for line in lines)


def test_a_reduced_loss_is_reported() -> None:
    code = loop("loss = model(x).mean()", "dist.all_reduce(loss)", "loss.backward()")
    assert len(said(code)) == 1


def test_a_loss_that_is_divided_after_that_is_reported() -> None:
    code = loop("loss = model(x).mean()", "dist.all_reduce(loss)", "total = loss / 2",
                "total.backward()")  # fmt: skip
    assert len(said(code)) == 1


def test_a_loss_that_is_reduced_afterwards_is_fine() -> None:
    code = loop("loss = model(x).mean()", "loss.backward()", "dist.all_reduce(loss)")
    assert said(code) == []


def test_a_copy_for_printing_is_fine() -> None:
    code = loop("loss = model(x).mean()", "shown = loss.detach().clone()", "dist.all_reduce(shown)",
                "loss.backward()")  # fmt: skip
    assert said(code) == []


def test_a_number_that_scales_the_loss_is_fine() -> None:
    code = loop(
        "n = mask.sum()", "dist.all_reduce(n)", "loss = model(x).sum() / n", "loss.backward()"
    )
    assert said(code) == []
