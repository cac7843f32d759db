"""Functions that are tested instead of called."""

from __future__ import annotations

from rewriting import findings, rewritten


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG903", to)]


HEAD = """import torch
import torch.distributed as dist
def is_main_process():
    return dist.get_rank() == 0
def rank_of(group):
    return 0
"""


def test_the_call_is_added() -> None:
    for before, after in (
        ("is_main_process", "is_main_process()"),
        ("not is_main_process", "not is_main_process()"),
        ("x and is_main_process or y", "x and is_main_process() or y"),
        ("dist.is_initialized", "dist.is_initialized()"),
        ("torch.cuda.is_available", "torch.cuda.is_available()"),
    ):
        text = rewritten(HEAD + f"if {before}: print(1)\n", "MG903")
        assert f"if {after}: print(1)" in text


def test_called_functions_and_other_conditions_are_fine() -> None:
    for test in ("is_main_process()", "rank_of", "callback", "args.rank", "dist"):
        assert said(HEAD + f"if {test}:\n    print(1)\n") == [], test


def test_a_variable_of_the_same_name_is_fine() -> None:
    assert (
        said("import torch\nis_main_process = rank == 0\nif is_main_process:\n    print(1)\n") == []
    )


def test_a_condition_in_an_expression() -> None:
    code = HEAD + "name = 'a' if is_main_process else 'b'\n"
    assert "if is_main_process() else" in rewritten(code, "MG903")
