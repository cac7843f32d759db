"""Rule MG503: what checkpoint files hold."""

from __future__ import annotations

import pytest
from rewriting import after, findings, rewritten, run

from migrate.rule import Options

MODEL = "model = nn.Linear(2, 2)\nmodel = nn.DataParallel(model)\n"
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
PREFIX = 'full_state(model.state_dict(), prefix="module.")'


def test_with_a_wrapper_the_file_has_the_names_it_had() -> None:
    code = f"{MODEL}torch.save(model.state_dict(), p)\ntorch.save(model.module.state_dict(), q)"
    assert findings(code, "MG503") == []


def test_clean_names_are_those_of_the_model() -> None:
    code = f"{MODEL}torch.save(dict(m=model.state_dict()), p)\n"
    code += "torch.save(model.module.state_dict(), q)"
    result = run(code, "MG503", options=Options(ckpt_keys="clean"))
    assert "torch.save(dict(m=model.module.state_dict()), p)" in after(result)
    assert "torch.save(model.module.state_dict(), q)" in after(result)
    assert [f.applicability.value for f in result.findings] == ["policy"]


@pytest.mark.parametrize(
    ("save", "new"),
    [
        ("torch.save(model.state_dict(), p)", f"torch.save({PREFIX}, p)"),
        ("torch.save({'a': 1, 'model': model.state_dict()}, p)",
         f"torch.save({{'a': 1, 'model': {PREFIX}}}, p)"),
        ("state = {}\nstate['m'] = model.state_dict()\ntorch.save(state, p)",
         f"state = {{}}\nstate['m'] = {PREFIX}\ntorch.save(state, p)"),
        ("import copy\nbest = copy.deepcopy(model.state_dict())\ntorch.save(best, p)",
         f"import copy\nbest = copy.deepcopy({PREFIX})\ntorch.save(best, p)"),
        ("torch.save(model.module.state_dict(), p)",
         "torch.save(full_state(model.module.state_dict()), p)"),
        ("net = model.module if n > 1 else model\ntorch.save(net.state_dict(), p)",
         "net = model.module if n > 1 else model\ntorch.save(full_state(net.state_dict()), p)"),
        ("if n > 1:\n    torch.save(model.module.state_dict(), p)\n"
         "else:\n    torch.save(model.state_dict(), p)",
         "if n > 1:\n    torch.save(full_state(model.module.state_dict()), p)\n"
         "else:\n    torch.save(full_state(model.state_dict()), p)"),
        (OPTIMIZER + "torch.save(optimizer.state_dict(), p)",
         OPTIMIZER + "torch.save(full_state(optimizer.state_dict()), p)"),
    ],
)  # fmt: skip
def test_sharded_states_are_gathered_with_the_names_they_had(save: str, new: str) -> None:
    assert rewritten(MODEL + save, "MG503", to="fsdp") == MODEL + new + "\n"


def test_a_state_that_is_handed_to_a_saving_function_in_another_file() -> None:
    files = {
        "train.py": "import torch\nimport torch.nn as nn\nfrom util import save\n"
        "model = nn.DataParallel(nn.Linear(2, 2))\nloss.backward()\n"
        "save({'m': model.state_dict()}, 'p')\n",
        "util.py": "import torch\ndef save(state, path):\n    torch.save(state, path)\n",
    }
    result = run(files, "MG503", to="fsdp")
    assert f"save({{'m': {PREFIX}}}, 'p')" in after(result)


@pytest.mark.parametrize(
    "line",
    ["other = nn.Linear(2, 2)\ntorch.save(other.state_dict(), p)", "model.state_dict()",
     "teacher.load_state_dict(model.state_dict())", f"torch.save({PREFIX}, p)",
     "scheduler = torch.optim.lr_scheduler.StepLR(o, 1)\ntorch.save(scheduler.state_dict(), p)"],
)  # fmt: skip
def test_other_states_stay(line: str) -> None:
    assert [f for f in findings(MODEL + line, "MG503", to="fsdp") if "whole" not in f.message] == []
    if "full_state" not in line:
        assert findings(MODEL + line, "MG503", to="fsdp") == []


def test_under_a_rank_guard_it_is_manual() -> None:
    code = f"{MODEL}if rank == 0:\n    torch.save(model.state_dict(), p)"
    (finding,) = findings(code, "MG503", to="fsdp")
    assert finding.edits == ()
    assert "all processes" in finding.advice


def test_a_second_run_changes_nothing() -> None:
    code = f"{MODEL}{OPTIMIZER}torch.save([model.state_dict(), optimizer.state_dict()], p)\n"
    once = run(code, "MG5", "fsdp").files[0].after.decode()
    assert not run(once, "MG5", "fsdp").files[0].changed
