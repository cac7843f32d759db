"""Rule MG206: the model is called through the function data_parallel."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten

MODEL = "model = nn.Linear(2, 2)\n"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("nn.parallel.data_parallel(model, x, [0, 1])", "model(x)"),
        ("nn.parallel.data_parallel(model, x)", "model(x)"),
        ("nn.parallel.data_parallel(model, (x, y), range(2))", "model(x, y)"),
        ("nn.parallel.data_parallel(model, inputs=x, device_ids=ids)", "model(x)"),
    ],
)
def test_it_becomes_a_plain_call(call: str, expected: str) -> None:
    assert rewritten(f"{MODEL}out = {call}\n", "MG206") == f"{MODEL}out = {expected}\n"


def test_inputs_that_may_be_a_tuple_are_for_a_human() -> None:
    (found,) = findings(f"{MODEL}out = nn.parallel.data_parallel(model, f(x))\n", "MG206")
    assert found.edits == ()


def test_the_model_is_made_parallel_once() -> None:
    code = f"{MODEL}opt = torch.optim.SGD(model.parameters(), 1)\n"
    code += "nn.parallel.data_parallel(model, x).sum().backward()\n"
    text = rewritten(code, "MG20")
    assert "model = wrap_model(model)\n" in text
    assert "model(x).sum().backward()" in text
