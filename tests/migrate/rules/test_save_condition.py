"""Rule MG510: conditions on which sharded weights are gathered."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

from migrate.rule import Options

MODEL = "model = nn.DataParallel(nn.Linear(2, 2))\n"
SAVE = "\n    torch.save(model.state_dict(), p)\n"


@pytest.mark.parametrize(
    ("test", "new"),
    [
        ("if acc > best:", "if from_main_process(acc > best):"),
        ("if acc > best and epoch > 3:", "if from_main_process(acc > best and epoch > 3):"),
        ("best = acc > old\nif best:", "best = acc > old\nif from_main_process(best):"),
        ("if acc < best:\n    pass\nelse:", "if from_main_process(acc < best):\n    pass\nelse:"),
    ],
)  # fmt: skip
def test_the_main_process_decides(test: str, new: str) -> None:
    assert rewritten(MODEL + test + SAVE, "MG510", to="fsdp") == MODEL + new + SAVE


def test_also_in_the_functions_that_come_to_it() -> None:
    code = """
    model = nn.DataParallel(nn.Linear(2, 2))
    def save():
        torch.save(model.state_dict(), p)
    for epoch in range(3):
        loss = evaluate(model)
        if loss < best:
            save()
    """
    assert "if from_main_process(loss < best):" in rewritten(code, "MG510", to="fsdp")


@pytest.mark.parametrize(
    "test",
    ["for epoch in range(3):\n  if epoch > 1:", "for i in range(9):\n  if (i + 1) % 3 == 0:",
     "if model is None:", "if rank == 0:",
     "import argparse\nargs = argparse.ArgumentParser().parse_args()\nif args.save > 0:",
     "step = 0\nstep += 1\nif step > 10:"],
)  # fmt: skip
def test_conditions_that_cannot_differ_stay(test: str) -> None:
    code = "import torch\nimport torch.nn as nn\n" + MODEL + test + SAVE
    assert findings(code, "MG510", to="fsdp") == []


def test_other_targets_need_none_of_this() -> None:
    assert findings(MODEL + "if acc > best:" + SAVE, "MG510") == []


def test_a_second_run_changes_nothing() -> None:
    once = run(MODEL + "if acc > best:" + SAVE, "MG5", "fsdp").files[0].after.decode()
    assert not run(once, "MG5", "fsdp").files[0].changed


def test_a_folder_needs_all_processes_where_it_is_saved() -> None:
    code = (
        MODEL + "state = {'m': model.state_dict()}\nif acc > best:\n    torch.save(state, p)\n"
        "if acc > 0.5:\n    first = model.state_dict()\n    torch.save(3, q)\n"
    )
    text = rewritten(code, "MG510", "fsdp", Options(save="sharded"))
    assert text == code.replace("acc > best", "from_main_process(acc > best)")
