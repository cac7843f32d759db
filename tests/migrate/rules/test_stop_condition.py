"""Loops that stop by the clock or by a file."""

from __future__ import annotations

from rewriting import findings, rewritten, run


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG812", to)]


HEAD = """import datetime
import os
import time
import torch
import torch.nn as nn
model = nn.DataParallel(nn.Linear(2, 1))
start = time.time()
"""


def loop(*lines: str) -> str:
    return (
        HEAD
        + "for x in loader:\n    model(x).sum().backward()\n"
        + "".join(f"    {line}\n" for line in lines)
    )


def test_a_file_that_says_stop() -> None:
    code = loop("if os.path.exists('STOP'): break")
    assert "if from_main_process(os.path.exists('STOP')): break" in rewritten(code, "MG812")


def test_a_variable_that_holds_the_time() -> None:
    code = loop("elapsed = time.time() - start", "if elapsed > limit and i > 3:", "    break")
    assert "if from_main_process(elapsed > limit and i > 3):" in rewritten(code, "MG812")


def test_a_while_loop_on_the_clock() -> None:
    code = HEAD + "while time.time() - start < 60:\n    model(x).sum().backward()\n"
    assert "while from_main_process(time.time() - start < 60):" in rewritten(code, "MG812")


def test_it_is_done_once() -> None:
    text = run(loop("if time.time() > end:", "    break"), "MG812").files[0].after.decode()
    assert run({"train.py": text}, "MG812").files[0].after.decode() == text


def test_printing_and_saving_by_the_clock_is_fine() -> None:
    code = loop("if time.time() - last > 60:", "    print(time.time())", "    torch.save(x, f)")
    assert said(code) == []


def test_saving_by_the_clock_gathers_sharded_weights() -> None:
    code = loop("if time.time() - last > 60:", "    torch.save(model.state_dict(), f)")
    assert said(code) == []
    assert len(said(code, to="fsdp")) == 1


def test_files_outside_of_training_are_fine() -> None:
    assert said(HEAD + "if os.path.exists(f):\n    model(x).sum().backward()\n") == []


def test_things_made_with_a_time_in_their_name_are_fine() -> None:
    code = loop("stopper = Stopper(str(time.time()))", "if stopper.stop:", "    break")
    assert said(code) == []


def test_where_only_one_process_asks_it_is_reported() -> None:
    found = findings(
        loop("if rank == 0:", "    if os.path.exists('STOP'):", "        break"), "MG812"
    )
    assert [f.edits for f in found] == [()]
