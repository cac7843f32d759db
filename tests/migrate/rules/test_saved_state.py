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


FOLDERS = Options(save="sharded")


@pytest.mark.parametrize(
    ("save", "new"),
    [
        ("torch.save(model.module.state_dict(), p)", "save_sharded(model.module.state_dict(), p)"),
        ("torch.save(model.state_dict(), p)", "save_sharded(add_prefix(model.state_dict()), p)"),
        (OPTIMIZER + "torch.save({'e': 1, 'o': optimizer.state_dict()}, f=p)",
         OPTIMIZER + "save_sharded({'e': 1, 'o': optimizer.state_dict()}, f=p)"),
        ("if best: torch.save(model.module.state_dict(), p); n = 0",
         "if best: save_sharded(model.module.state_dict(), p); n = 0"),
        ("torch.save(\n\tmodel.module.state_dict(),\n\tp,\n)",
         "save_sharded(\n\tmodel.module.state_dict(),\n\tp,\n)"),
        ("def save(state):\n    torch.save(state, p)\nsave(model.module.state_dict())",
         "def save(state):\n    save_sharded(state, p)\nsave(model.module.state_dict())"),
        ("class T:\n    def save(self):\n        torch.save(model.module.state_dict(), self.p)",
         "class T:\n    def save(self):\n        save_sharded(model.module.state_dict(), self.p)"),
    ],
)  # fmt: skip
def test_a_folder_that_all_processes_write(save: str, new: str) -> None:
    code = f"{MODEL}{save}"
    assert rewritten(code, ("MG501", "MG503"), "fsdp", FOLDERS) == MODEL + new + "\n"


def test_a_folder_that_a_function_of_another_file_writes() -> None:
    files = {
        "train.py": "import torch\nimport torch.nn as nn\nfrom util import save\n"
        "model = nn.DataParallel(nn.Linear(2, 2))\nloss.backward()\n"
        "save({'m': model.module.state_dict()}, 'p')\n",
        "util.py": "import torch\ndef save(state, path):\n    torch.save(state, path)\n",
    }
    result = run(files, "MG50", "fsdp", FOLDERS)
    assert "    save_sharded(state, path)" in after(result, "util.py")
    assert "full_state" not in result.files[0].after.decode()


def test_clean_names_need_no_prefix_in_a_folder() -> None:
    options = Options(save="sharded", ckpt_keys="clean")
    text = rewritten(f"{MODEL}torch.save(model.state_dict(), p)", "MG503", "fsdp", options)
    assert text == f"{MODEL}save_sharded(model.state_dict(), p)\n"


@pytest.mark.parametrize(
    "save",
    ["import pickle\npickle.dump(model.module.state_dict(), open(p, 'wb'))",
     "torch.save(model.module.state_dict(), open(p, 'wb'))",
     "import io\nb = io.BytesIO()\ntorch.save(model.module.state_dict(), b)",
     "torch.save({k: v.half() for k, v in model.module.state_dict().items()}, p)",
     "s = model.module.state_dict()\nif rank == 0:\n    torch.save(s, p)",
     "torch.save(*pair(model.module.state_dict()))",
     "s = model.module.state_dict()\ntorch.save(s, p)\nimport joblib\njoblib.dump(s, q)",
     "torch.save(full_state(model.module.state_dict()), p)",
     "torch.save({'epoch': 3}, p)"],
)  # fmt: skip
def test_what_stays_a_file_is_gathered(save: str) -> None:
    code = f"import torch\nimport torch.nn as nn\n{MODEL}{save}"
    sharded = run(code, "MG5", "fsdp", FOLDERS).files[0].after
    assert sharded == run(code, "MG5", "fsdp").files[0].after


def test_one_save_to_a_file_keeps_the_others_of_that_state_files() -> None:
    code = f"{MODEL}s = model.module.state_dict()\ntorch.save(s, p)\ntorch.save(s, open(q, 'wb'))\n"
    assert "save_sharded" not in rewritten(code, "MG5", "fsdp", FOLDERS)


def test_other_targets_say_once_that_nothing_is_sharded() -> None:
    code = f"{MODEL}torch.save(model.state_dict(), p)\ntorch.save(model.state_dict(), q)"
    (finding,) = findings(code, "MG503", options=FOLDERS)
    assert finding.message == "--save sharded: nothing is sharded"
    assert finding.applicability.value == "info"


@pytest.mark.parametrize("options", [FOLDERS, Options()])
def test_a_second_run_leaves_folders(options: Options) -> None:
    code = f"{MODEL}{OPTIMIZER}torch.save([model.state_dict(), optimizer.state_dict()], p)\n"
    code += "c = torch.load(p)\nmodel.load_state_dict(c[0])\noptimizer.load_state_dict(c[1])\n"
    once = run(code, "MG5", "fsdp", FOLDERS).files[0].after.decode()
    second = run(once, "MG5", "fsdp", options)
    assert not second.files[0].changed
    assert second.manual == []
