"""Rule MG405: gradients are accumulated over several batches."""

from __future__ import annotations

import pytest
from rewriting import findings

from migrate.finding import Applicability

CODE = """
for step, x in enumerate(DataLoader(data, batch_size=8)):
    loss = model(x).mean() / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("to", "word"), [("ddp", "no_sync"), ("fsdp", "set_requires_gradient_sync")]
)
def test_accumulation_is_exact_and_could_be_faster(to: str, word: str) -> None:
    (found,) = findings(CODE, "MG405", to)
    assert found.applicability is Applicability.INFO
    assert word in found.advice


def test_a_step_in_every_batch_is_no_accumulation() -> None:
    assert findings(CODE.replace("(step + 1) % 4 == 0", "scaled"), "MG405") == []


def test_what_is_done_already_is_not_repeated() -> None:
    code = CODE.replace("    loss.backward()", "    with model.no_sync():\n        loss.backward()")
    assert findings(code, "MG405") == []
