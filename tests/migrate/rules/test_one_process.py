"""Collective calls under a rank condition."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG801", to)]


HEAD = """import torch
import torch.nn as nn
import torch.distributed as dist
dist.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
def validate(m, x):
    return m(x)
def log(x):
    print(x)
"""


def test_collectives_of_one_process_are_reported() -> None:
    for test in ("rank == 0", "dist.get_rank() == 0", "args.local_rank in [-1, 0]", "not rank",
                 "is_main_process()", "rank == 0 and epoch > 1"):  # fmt: skip
        assert len(said(HEAD + f"if {test}:\n    dist.barrier()\n")) == 1, test


def test_conditions_that_hold_everywhere_are_fine() -> None:
    for test in ("rank >= 0", "args.local_rank != -1", "rank == 0 or args.all", "epoch == 0",
                 "not is_main_process()", "world_size > 1",
        "from_main_process(best)"):  # fmt: skip
        assert said(HEAD + f"if {test}:\n    dist.barrier()\n") == [], test


def test_a_validation_through_the_wrapper_is_reported() -> None:
    assert len(said(HEAD + "if rank == 0:\n    validate(model, x)\n")) == 1


def test_a_validation_past_the_wrapper_is_fine() -> None:
    assert said(HEAD + "if rank == 0:\n    model.module(x)\n    log(x)\n") == []


def test_after_the_others_have_left() -> None:
    code = HEAD + "def f():\n    if rank != 0:\n        return\n    dist.barrier()\n"
    assert len(said(code)) == 1


def test_the_main_process_may_go_first() -> None:
    assert (
        said(
            HEAD
            + """
if rank not in [-1, 0]:
    dist.barrier()
data = load()
if rank == 0:
    dist.barrier()
"""
        )
        == []
    )


def test_collectives_of_everyone_are_fine() -> None:
    assert said(HEAD + "dist.barrier()\nif rank == 0:\n    print(1)\n") == []
