"""Steps that are skipped on one process's own data."""

from __future__ import annotations

from rewriting import findings, rewritten, run

from migrate.snippets import common


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG802", to)]


HEAD = """import math
import random
import torch
import torch.nn as nn
from torch.utils.data import DataLoader
model = nn.DataParallel(nn.Linear(2, 1))
loader = DataLoader(data, batch_size=8, collate_fn=collate)
"""


def loop(*lines: str, head: str = HEAD) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return head + "for i, (x, boxes) in enumerate(loader):\n" + body


BACKWARD = "criterion(model(x), boxes).backward()"


def test_a_batch_that_may_be_empty_is_reported() -> None:
    for test in ("boxes is None", "len(boxes) == 0", "(boxes > 0).sum() == 0", "not boxes.any()"):
        assert len(said(loop(f"if {test}:", "    continue", BACKWARD))) == 1, test


def test_without_a_collate_function_batches_are_equally_long() -> None:
    head = HEAD.replace(", collate_fn=collate", "")
    for test in ("len(x) < 8", "x.size(0) != 8", "x.shape[0] == 1"):
        assert said(loop(f"if {test}:", "    continue", BACKWARD, head=head)) == [], test


def test_counters_and_settings_are_fine() -> None:
    for test in ("i >= args.max_iter", "args.debug", "i % 2 == 0", "epoch < 3", "i > 10 and fast"):
        assert said(loop(BACKWARD, f"if {test}:", "    break")) == [], test
        assert said(loop(f"if {test}:", "    continue", BACKWARD)) == [], test


def test_a_continue_below_the_backward_is_fine() -> None:
    assert said(loop(BACKWARD, "if (boxes > 0).any():", "    continue", "print(i)")) == []


def test_a_break_below_the_backward_is_reported() -> None:
    assert len(said(loop(BACKWARD, "if (boxes > 0).any():", "    break"))) == 1


def test_a_condition_round_the_backward_is_reported() -> None:
    assert len(said(loop("if (boxes > 0).any():", f"    {BACKWARD}"))) == 1
    both = loop("if (boxes > 0).any():", f"    {BACKWARD}", "else:", f"    {BACKWARD}")
    assert said(both) == []


def test_a_loop_over_something_else_is_left_alone() -> None:
    inner = ("for box in boxes:", "    if box.sum() > 3:", "        continue", "    print(box)")
    assert said(loop(*inner, BACKWARD)) == []


def test_random_steps_are_reported() -> None:
    assert len(said(loop("if random.random() < 0.5:", "    continue", BACKWARD))) == 1


def test_a_return_in_a_training_function_is_reported() -> None:
    code = (
        HEAD
        + """
def train_step(x, boxes):
    if (boxes > 0).sum() == 0:
        return
    criterion(model(x), boxes).backward()
for x, boxes in loader:
    train_step(x, boxes)
"""
    )
    assert len(said(code)) == 1


def test_a_check_for_nan_is_made_together() -> None:
    code = loop("y = model(x)", "if torch.isnan(y).any():", "    continue", "f(y).backward()")
    text = rewritten(code, "MG802")
    assert "if on_any_process(torch.isnan(y).any()):" in text


def test_a_check_made_together_is_left_alone() -> None:
    code = loop(
        "y = model(x)", "if not torch.isfinite(y).all():", "    continue", "f(y).backward()"
    )
    text = run(code, "MG802").files[0].after.decode()
    again = run({"train.py": text}, "MG802")
    assert "on_any_process(not torch.isfinite(y).all())" in text
    assert again.files[0].after.decode() == text
    assert again.manual == []


def test_a_finite_loss_as_a_condition_of_the_step_is_made_together() -> None:
    code = loop("y = model(x)", "if torch.isfinite(y).all():", "    f(y).backward()")
    assert "if on_every_process(torch.isfinite(y).all()):" in rewritten(code, "MG802")


def test_a_loss_that_is_averaged_anyway_is_fine() -> None:
    code = loop(
        "loss = nn.functional.mse_loss(model(x), boxes)",
        "if loss.item() > 100:",
        "    continue",
        "loss.backward()",
    )
    assert said(code) == []


def test_evaluation_is_left_alone() -> None:
    code = (
        loop(BACKWARD)
        + """
for x, boxes in DataLoader(held_out, collate_fn=collate):
    if boxes is None:
        continue
    print(model(x))
"""
    )
    assert said(code) == []


def test_one_process_decides_for_itself() -> None:
    assert common.on_any_process(True) is True
    assert common.on_any_process(0) is False
    assert common.on_every_process([1]) is True
    assert common.on_every_process(False) is False
