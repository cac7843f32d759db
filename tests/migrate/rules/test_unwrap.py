"""Rule MG507: models that are taken out of their wrapper."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

MODEL = "model = nn.DataParallel(nn.Linear(2, 2))\n"
BOTH = "(nn.DataParallel, nn.parallel.DistributedDataParallel)"


@pytest.mark.parametrize("to", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("net = model.module if n_gpu > 1 else model",
         'net = model.module if hasattr(model, "module") else model'),
        ("w = model.module.state_dict() if len(ids) > 1 else model.state_dict()",
         'w = model.module.state_dict() if hasattr(model, "module") else model.state_dict()'),
        ("if n_gpu > 1:\n    model = model.module",
         'if hasattr(model, "module"):\n    model = model.module'),
        ("if cuda:\n    save(model.module.x)  # a\nelse:\n    save(model.x)",
         'if hasattr(model, "module"):\n    save(model.module.x)  # a\nelse:\n    save(model.x)'),
    ],
)  # fmt: skip
def test_questions_about_gpus_become_questions_about_the_wrapper(
    line: str, new: str, to: str
) -> None:
    assert rewritten(MODEL + line, "MG507", to) == MODEL + new + "\n"


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("isinstance(model, nn.DataParallel)", f"isinstance(model, {BOTH})"),
        ("isinstance(model, (nn.DataParallel,))", f"isinstance(model, {BOTH})"),
        ("isinstance(model, torch.nn.parallel.DataParallel)",
         "isinstance(model, (torch.nn.parallel.DataParallel, "
         "torch.nn.parallel.DistributedDataParallel))"),
    ],
)  # fmt: skip
def test_isinstance_asks_for_the_new_wrapper_too(line: str, new: str) -> None:
    assert rewritten(MODEL + line, "MG507") == MODEL + new + "\n"


@pytest.mark.parametrize(
    "line",
    ["net = model.module if hasattr(model, 'module') else model", f"isinstance(model, {BOTH})",
     "isinstance(layer, nn.Linear)", "model.module.eval()", "other.module.x if n > 1 else 3"],
)  # fmt: skip
def test_what_is_right_already_stays(line: str) -> None:
    assert findings(MODEL + line, "MG507") == []


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("model.module.weight", "model.weight"),
        ("x = model.module", "x = model"),
        ("p = (model).module.weight", "p = (model).weight"),
        ("net = model.module if hasattr(model, 'module') else model",
         "net = model.module if hasattr(model, 'module') else model"),
        ("if isinstance(model, nn.DataParallel):\n    net = model.module",
         "if isinstance(model, nn.DataParallel):\n    net = model.module"),
    ],
)  # fmt: skip
def test_without_a_wrapper_there_is_no_module(line: str, new: str) -> None:
    assert rewritten(MODEL + line, "MG507", to="fsdp") == MODEL + new + "\n"


def test_a_model_that_has_a_module_of_its_own_keeps_it() -> None:
    code = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = nn.Linear(2, 2)
        def forward(self, x):
            return self.module(x)
    model = nn.DataParallel(Net())
    """
    assert findings(code, "MG507", to="fsdp") == []


@pytest.mark.parametrize("to", ["ddp", "fsdp"])
def test_a_second_run_changes_nothing(to: str) -> None:
    code = MODEL + "net = model.module if n > 1 else model\nisinstance(model, nn.DataParallel)\n"
    once = run(code + "model.module.weight\n", "MG507", to).files[0].after.decode()
    assert not run(once, "MG507", to).files[0].changed
