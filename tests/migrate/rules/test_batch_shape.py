"""Rule MG307: the batch size is written into the shape of a tensor in the training loop."""

from __future__ import annotations

import pytest
from rewriting import PATH, findings, rewritten, run

DP = "model = nn.DataParallel(nn.Linear(2, 2))\n"
LOADER = "loader = DataLoader(a, batch_size=opt.batch)\n"
LOOP = "for x in loader:\n    model(x).mean().backward()\n"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("torch.randn(opt.batch, 3)", "torch.randn(per_process(opt.batch), 3)"),
        ("torch.full((opt.batch,), 1)", "torch.full((per_process(opt.batch),), 1)"),
        ("x.view(opt.batch, -1)", "x.view(per_process(opt.batch), -1)"),
        ("x[: opt.batch]", "x[: per_process(opt.batch)]"),
        ("step * opt.batch", "step * opt.batch"),
        ("print(opt.batch)", "print(opt.batch)"),
        ("torch.randn(other.batch, 3)", "torch.randn(other.batch, 3)"),
    ],
)
def test_shapes_follow_the_batch(given: str, wanted: str) -> None:
    text = rewritten(f"{DP}{LOADER}{LOOP}    y = {given}\n", "MG307")
    assert text.endswith(f"    y = {wanted}\n")


def test_a_function_that_makes_a_tensor_with_the_number() -> None:
    code = "def noise(n, dim):\n    return torch.randn(n, dim)\ndef show(n):\n    print(n)\n"
    code += f"{DP}{LOADER}{LOOP}    y = noise(opt.batch, 3)\n    show(opt.batch)\n"
    text = rewritten(code, "MG307")
    assert "    y = noise(per_process(opt.batch), 3)\n    show(opt.batch)\n" in text


def test_outside_the_loop_the_number_stays() -> None:
    code = f"{DP}{LOADER}fixed = torch.randn(opt.batch, 3)\n{LOOP}"
    assert findings(code, "MG307") == []


def test_batches_of_two_streams_are_reported() -> None:
    code = (
        "class TwoStreams(torch.utils.data.Sampler):\n    pass\n"
        f"{DP}sampler = TwoStreams(a, b, opt.batch, opt.labeled)\n"
        f"loader = DataLoader(c, batch_sampler=sampler)\n{LOOP}    y = x[: opt.labeled]\n"
    )
    (found,) = findings(code, "MG307")
    assert found.message.startswith("cuts a whole batch at opt.labeled")
    assert found.edits == ()


def test_what_was_split_stays() -> None:
    text = run(f"{DP}{LOADER}{LOOP}    y = torch.randn(opt.batch)\n", "MG3").files[0].after.decode()
    assert "torch.randn(per_process(opt.batch))" in text
    assert not run({PATH.name: text}, "MG3").files[0].changed
