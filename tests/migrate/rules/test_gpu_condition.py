"""Rule MG202: DataParallel depends on a GPU list or switch."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten

MODEL = "model = nn.Linear(2, 2)\n"


@pytest.mark.parametrize(
    "test", ["len(args.gpu_ids) > 1", "args.cuda and not args.cpu", "use_gpu", "device == 'cuda'"]
)
def test_several_processes_wrap_whatever_the_condition_says(test: str) -> None:
    code = f"{MODEL}if {test}:\n    model = nn.DataParallel(model)\n"
    assert f"if process_count() > 1 or ({test}):" in rewritten(code, "MG202")


def test_a_conditional_expression() -> None:
    code = f"{MODEL}model = nn.DataParallel(model) if args.multi_gpu else model\n"
    assert "if process_count() > 1 or (args.multi_gpu) else" in rewritten(code, "MG202")


@pytest.mark.parametrize("test", ["torch.cuda.device_count() > 1", "n > 1", "args.n > 1"])
def test_the_number_of_gpus_is_another_rules(test: str) -> None:
    code = "n = torch.cuda.device_count()\nargs = make()\nargs.n = n\n"
    code += f"{MODEL}if {test}:\n    model = nn.DataParallel(model)\n"
    assert findings(code, "MG202") == []


def test_a_condition_on_something_else_is_left_alone() -> None:
    code = f"{MODEL}if args.resume:\n    model = nn.DataParallel(model)\n"
    assert findings(code, "MG202") == []


def test_the_other_branch_is_not_a_condition_for_the_wrap() -> None:
    code = f"{MODEL}if args.cpu_only:\n    pass\nelse:\n    model = nn.DataParallel(model)\n"
    assert findings(code, "MG202") == []


def test_once_is_enough() -> None:
    code = f"{MODEL}if args.gpus:\n    model = nn.DataParallel(model)\n"
    once = rewritten(code, "MG202")
    assert findings(once, "MG202") == []


def test_a_number_of_gpus_that_stays_does_not_decide() -> None:
    code = "n_gpu = torch.cuda.device_count() if use else 0\n"
    code += f"{MODEL}if n_gpu > 1:\n    model = nn.DataParallel(model)\n"
    assert "if process_count() > 1 or (n_gpu > 1):" in rewritten(code, "MG202")
