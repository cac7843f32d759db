"""Rule MG505: whole models that are pickled."""

from __future__ import annotations

import pytest
from rewriting import after, findings, rewritten, run

from migrate.rule import Options

MODEL = "model = nn.DataParallel(nn.Linear(2, 2))\n"


@pytest.mark.parametrize(
    ("save", "new"),
    [
        ("torch.save(model, p)", "torch.save(as_data_parallel(model), p)"),
        ("torch.save({'net': model, 'n': 1}, p)",
         "torch.save({'net': as_data_parallel(model), 'n': 1}, p)"),
    ],
)  # fmt: skip
def test_the_file_keeps_the_wrapper_it_had(save: str, new: str) -> None:
    assert rewritten(MODEL + save, "MG505") == MODEL + new + "\n"


@pytest.mark.parametrize(
    "save",
    ["torch.save(model.module, p)", "torch.save(model.state_dict(), p)", "torch.save(epoch, p)",
     "net = nn.Linear(2, 2)\ntorch.save(net, p)"],
)  # fmt: skip
def test_what_holds_no_wrapper_stays(save: str) -> None:
    assert findings(MODEL + save, "MG505") == []


def test_clean_is_the_model_itself() -> None:
    result = run(MODEL + "torch.save(model, p)", "MG505", options=Options(ckpt_keys="clean"))
    assert "torch.save(model.module, p)" in after(result)


def test_a_sharded_model_is_manual() -> None:
    (finding,) = findings(MODEL + "torch.save(model, p)", "MG505", to="fsdp")
    assert "full_state(model.state_dict())" in finding.advice


def test_a_second_run_changes_nothing() -> None:
    once = run(MODEL + "torch.save(model, p)\n", "MG505").files[0].after.decode()
    assert not run(once, "MG505").files[0].changed
