"""Rule MG406: a sharded gradient or weight is read."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

HEAD = """
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

model = nn.DataParallel(nn.Linear(2, 2))
for x in DataLoader(data, batch_size=8):
    model(x).mean().backward()
"""
CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


def edited(lines: str) -> str:
    code = HEAD + "".join(f"    {line}\n" for line in lines.splitlines())
    again = run(code, "MG406", "fsdp").files[0].after.decode()
    assert findings(again, "MG406", "fsdp") == []
    return rewritten(code, "MG406", "fsdp").split("backward()\n")[1].replace("\n    ", "\n").strip()


def test_a_norm_that_is_used_is_gathered() -> None:
    assert edited(f"norm = {CLIP}") == f"norm = whole({CLIP})"
    assert edited(f"print({CLIP}.item())") == f"print(whole({CLIP}).item())"
    assert edited(CLIP) == CLIP


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "total += p.grad.data.norm(2).item()",
            "total += whole(p.grad).data.norm(2).item()",
        ),
        ("size += p.data.norm().item()", "size += whole(p.data).norm().item()"),
        ("bad = torch.isnan(p.grad).any()", "bad = torch.isnan(whole(p.grad)).any()"),
        ("p.grad.data.clamp_(-1, 1)", "p.grad.data.clamp_(-1, 1)"),
        ("p.grad = None", "p.grad = None"),
        ("p.grad.to_local().norm()", "p.grad.to_local().norm()"),
    ],
)
def test_gradients_that_are_looked_at_are_gathered(before: str, after: str) -> None:
    assert edited(f"for p in model.parameters():\n    {before}").splitlines()[1].strip() == after


def test_gradients_of_another_model_are_left_alone() -> None:
    line = "for p in other.parameters():\n    total += p.grad.norm()"
    assert edited("other = nn.Linear(2, 2)\n" + line).endswith("p.grad.norm()")


def test_whole_gradients_need_nothing() -> None:
    assert findings(HEAD + f"    norm = {CLIP}\n", "MG406", "ddp") == []


def test_nothing_is_gathered_where_one_process_comes() -> None:
    (found,) = findings(HEAD + f"    if rank == 0:\n        norm = {CLIP}\n", "MG406", "fsdp")
    assert not found.edits
