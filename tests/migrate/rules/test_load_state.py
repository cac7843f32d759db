"""Rule MG504: saved states that are loaded."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

from migrate.rule import Options

MODEL = "model = nn.Linear(2, 2)\nmodel = nn.DataParallel(model)\n"
OPTIMIZER = "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"


@pytest.mark.parametrize(
    ("load", "new"),
    [
        ("model.load_state_dict(torch.load(p))",
         "model.load_state_dict(match_prefix(torch.load(p), model))"),
        ("c = torch.load(p)\nmodel.load_state_dict(c['model'])",
         "c = torch.load(p)\nmodel.load_state_dict(match_prefix(c['model'], model))"),
        ("c = torch.load(p)\nw = c['model']\nmodel.load_state_dict(w, strict=True)",
         "c = torch.load(p)\nw = c['model']\n"
         "model.load_state_dict(match_prefix(w, model), strict=True)"),
        ("model.load_state_dict(\n    torch.load(\n        p,\n    ),\n)",
         "model.load_state_dict(\n    match_prefix(torch.load(\n        p,\n    ), model),\n)"),
    ],
)  # fmt: skip
def test_files_with_and_without_prefix_load(load: str, new: str) -> None:
    assert rewritten(MODEL + load, "MG504") == MODEL + new + "\n"


@pytest.mark.parametrize(
    "load",
    [
        "model.load_state_dict(best)", "model.module.load_state_dict(torch.load(p))",
        "model.load_state_dict(torch.load(p), strict=False)",
        "other = nn.Linear(2, 2)\nother.load_state_dict(torch.load(p))",
        "c = torch.load(p)\nc = {k.replace('module.', ''): v for k, v in c.items()}\n"
        "def f():\n    w = {'module.' + k: v for k, v in torch.load(p).items()}\n"
        "    model.load_state_dict(w)",
    ],
)  # fmt: skip
def test_other_loads_stay(load: str) -> None:
    assert findings(MODEL + load, "MG504") == []


@pytest.mark.parametrize(
    ("load", "new"),
    [
        ("model.load_state_dict(torch.load(p))", "load_full_state(model, torch.load(p))"),
        ("model.module.load_state_dict(torch.load(p), strict=False)",
         "load_full_state(model.module, torch.load(p), strict=False)"),
        (OPTIMIZER + "optimizer.load_state_dict(torch.load(p)['o'])",
         OPTIMIZER + "load_full_optimizer_state(optimizer, torch.load(p)['o'])"),
        ("model.load_state_dict(\n    torch.load(p)\n)", "load_full_state(model, torch.load(p)\n)"),
    ],
)  # fmt: skip
def test_a_sharded_model_takes_its_part(load: str, new: str) -> None:
    assert rewritten(MODEL + load, "MG504", to="fsdp") == MODEL + new + "\n"


def test_states_that_never_leave_the_memory_stay_as_they_are() -> None:
    code = (
        f"import copy\n{MODEL}best = copy.deepcopy(model.state_dict())\nmodel.load_state_dict(best)"
    )
    assert findings("import torch\nimport torch.nn as nn\n" + code, "MG504", to="fsdp") == []


@pytest.mark.parametrize("to", ["ddp", "fsdp"])
def test_a_second_run_changes_nothing(to: str) -> None:
    code = f"{MODEL}{OPTIMIZER}c = torch.load(p)\nmodel.load_state_dict(c['m'])\n"
    code += "optimizer.load_state_dict(c['o'])\n"
    once = run(code, "MG5", to).files[0].after.decode()
    assert not run(once, "MG5", to).files[0].changed


@pytest.mark.parametrize(
    ("load", "new"),
    [
        ("model.load_state_dict(torch.load(q))", "load_full_state(model, load_sharded(q))"),
        ("c = torch.load(q, map_location='cpu')\nw = c['m']\nmodel.load_state_dict(w)",
         "c = load_sharded(q, map_location='cpu')\nw = c['m']\nload_full_state(model, w)"),
        (OPTIMIZER + "optimizer.load_state_dict(torch.load(\n    q\n)['o'])",
         OPTIMIZER + "load_full_optimizer_state(optimizer, load_sharded(\n    q\n)['o'])"),
        ("epoch = torch.load(p)['epoch']", "epoch = load_sharded(p)['epoch']"),
        ("data = torch.load(q)", "data = torch.load(q)"),
        ("other = nn.Linear(2, 2)\nother.load_state_dict(torch.load(q))",
         "other = nn.Linear(2, 2)\nother.load_state_dict(torch.load(q))"),
    ],
)  # fmt: skip
def test_what_may_be_a_folder_is_read_as_one(load: str, new: str) -> None:
    start = MODEL + "torch.save(model.module.state_dict(), p)\n"
    assert rewritten(start + load, "MG504", "fsdp", Options(save="sharded")) == start + new + "\n"


def test_without_a_folder_files_are_read_as_before() -> None:
    code = MODEL + "model.load_state_dict(torch.load(p))"
    text = rewritten(code, "MG504", "fsdp", Options(save="sharded"))
    assert text == MODEL + "load_full_state(model, torch.load(p))\n"
