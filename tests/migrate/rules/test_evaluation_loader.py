"""Rule MG305: a DataLoader that is only evaluated on is read whole by every process."""

from __future__ import annotations

import pytest
from rewriting import PREAMBLE, after, findings, rewritten, run

from migrate.finding import Applicability
from migrate.rule import Options

SHARDED = Options(evaluation="sharded")
CODE = (
    "model = nn.DataParallel(nn.Linear(2, 2))\nloader = DataLoader(a, 8)\nval = DataLoader(b, 8)\n"
    "test = DataLoader(c, 8)\nfor x in loader:\n    model(x).mean().backward()\n"
    "for x in val:\n    model(x)\nfor x in test:\n    model(x)\n"
)
TRAIN = (
    "model = nn.DataParallel(nn.Linear(2, 2))\nfor x in DataLoader(a, 8):\n"
    "    model(x).mean().backward()\nval = DataLoader(b, 8)\n"
)


def sharded(code: str, to: str = "ddp") -> str:
    """What comes after the training of `TRAIN`, with sharded evaluation."""
    text = rewritten(TRAIN + code, "MG305", to, SHARDED)
    assert text.startswith(TRAIN)
    return text.removeprefix(TRAIN)


def whole(code: str) -> str:
    """Why a loader stays whole; nothing is edited."""
    result = run(TRAIN + code, "MG305", options=SHARDED)
    (found,) = result.findings
    assert after(result) == TRAIN + code
    assert found.message == "every process evaluates on all of b"
    assert found.applicability is Applicability.INFO
    return found.advice


def test_it_is_said_once() -> None:
    (found,) = findings(CODE, "MG305")
    assert found.message == "every process evaluates on all of b, c"
    assert found.applicability is Applicability.INFO


@pytest.mark.parametrize("to", ["ddp", "fsdp"])
def test_sharded_evaluation_computes_parts_in_every_loop(to: str) -> None:
    result = run(CODE, "MG305", to, SHARDED)
    assert [f.message for f in result.findings] == [
        "every process computes its part of model(x)"
    ] * 2
    assert {f.applicability for f in result.findings} == {Applicability.SAFE}
    assert not result.manual
    assert after(result) == CODE.replace("    model(x)\n", "    on_parts(model)(x)\n")
    again = run({"train.py": result.files[0].after.decode()}, "MG305", to, SHARDED)
    assert again.files[0].after == again.files[0].before
    assert not again.findings


def test_a_program_in_parts_is_left_alone_without_the_option() -> None:
    first = run(CODE, "MG305", options=SHARDED)
    again = run({"train.py": first.files[0].after.decode()}, "MG305")
    assert again.files[0].after == again.files[0].before
    assert not again.findings


def test_nothing_else_changes_with_the_option() -> None:
    code = (
        TRAIN + "total = 0\nfor x, y in val:\n    out = model(x)\n"
        "    total += nn.functional.mse_loss(out, y).item() * len(x)\nprint(total / len(b))\n"
    )
    plain, parts = run(code), run(code, options=SHARDED)
    assert after(parts) == after(plain).replace("out = model(x)", "out = on_parts(model)(x)")
    said = [[(f.code, f.message) for f in r.findings if f.code != "MG305"] for r in (plain, parts)]
    assert said[0] == said[1]


def test_calls_of_every_form() -> None:
    code = (
        "for i, (x, y) in enumerate(val):\n    with torch.no_grad(): out = model(\n"
        "        x, mask=y,  # both\n    ).argmax(1); print(out)\n"
    )
    assert sharded(code) == code.replace("model(", "on_parts(model)(")
    assert (
        sharded("outs = [model(x) for x in val]\n") == "outs = [on_parts(model)(x) for x in val]\n"
    )


def test_a_model_in_an_attribute() -> None:
    code = """\
class Trainer:
    def __init__(self, model, train, val):
        self.model = nn.DataParallel(model)
        self.train, self.val = DataLoader(train, 8), DataLoader(val, 8)

    def fit(self):
        for x in self.train:
            self.model(x).mean().backward()

    def test(self):
        for x in self.val:
            self.model(x)


Trainer(nn.Linear(2, 2), a, b).fit()
"""
    new = "        for x in self.val:\n            on_parts(self.model)(x)\n"
    assert new in rewritten(code, "MG305", options=SHARDED)


def test_functions_called_from_the_loop_alone() -> None:
    code = "def predict(x):\n    return model(x)\n\n\nfor x in val:\n    predict(x)\n"
    assert sharded(code) == code.replace("model(", "on_parts(model)(")
    assert "no forward pass" in whole(code + "predict(torch.zeros(2, 2))\n")


def test_the_function_in_another_file() -> None:
    result = run(
        {
            "train.py": f"{PREAMBLE}from other import validate\n{TRAIN}validate(model, val)\n",
            "other.py": "import torch\n\n\n@torch.no_grad()\ndef validate(net, loader):\n"
            "    for x in loader:\n        net(x)\n",
        },
        "MG305",
        options=SHARDED,
    )
    assert "        on_parts(net)(x)\n" in after(result, "other.py")


def test_the_model_without_its_wrapper_stays_whole() -> None:
    assert "no forward pass" in whole("for x in val:\n    model.module(x)\n")
    assert "no forward pass" in whole("for x in val:\n    model.forward(x)\n")
    assert "no forward pass" in whole("other = nn.Linear(2, 2)\nfor x in val:\n    other(x)\n")


def test_where_not_all_processes_are_sure_to_come_it_stays_whole() -> None:
    assert "no forward pass" in whole(
        "rank = 0\nfor x in val:\n    if rank == 0:\n        model(x)\n"
    )
    assert "no forward pass" in whole(
        "rank = 0\ndef test():\n    for x in val:\n        model(x)\nif rank == 0:\n    test()\n"
    )
    assert "no forward pass" in whole(
        "for x in val:\n    try:\n        model(x)\n    except RuntimeError:\n        pass\n"
    )


def test_batches_in_a_random_order_stay_whole() -> None:
    code = "for x in DataLoader(b, 8, shuffle=True):\n    model(x)\n"
    result = run(TRAIN + code, "MG305", options=SHARDED)
    assert after(result) == TRAIN + code
    assert "random" in result.findings[0].advice


def test_a_loop_that_trains_too_stays_whole() -> None:
    code = """\
model = nn.DataParallel(nn.Linear(2, 2))
loaders = {"train": DataLoader(a, 8), "val": DataLoader(b, 8)}
for phase in ["train", "val"]:
    for x in loaders[phase]:
        loss = model(x).mean()
        if phase == "train":
            loss.backward()
"""
    result = run(code, "MG305", options=SHARDED)
    assert after(result) == code
    assert not result.manual


def test_a_loader_that_was_dealt_out_by_hand_is_done() -> None:
    part = "torch.utils.data.Subset(b, range(process_rank(), len(b), process_count()))"
    code = CODE.replace("DataLoader(b, 8)", f"DataLoader({part}, 8)")
    (found,) = findings(code, "MG305")
    assert "all of c" in found.message
    text = rewritten(code, "MG305", options=SHARDED)
    assert "for x in val:\n    model(x)\nfor x in test:\n    on_parts(model)(x)\n" in text


def test_forward_hooks_would_see_a_part() -> None:
    assert "hooks" in whole("model.register_forward_hook(print)\nfor x in val:\n    model(x)\n")


def test_a_model_that_was_not_parallel_may_keep_things() -> None:
    code = CODE.replace("nn.DataParallel(nn.Linear(2, 2))", "nn.Linear(2, 2).cuda()")
    code = code.replace(
        "loader =", "optimizer = torch.optim.SGD(model.parameters(), 0.1)\nloader ="
    )
    code += "optimizer.step()\n"
    found = run(code, ("MG1", "MG2", "MG305"), options=SHARDED).findings
    parts = [f for f in found if f.code == "MG305"]
    assert {f.applicability for f in parts} == {Applicability.POLICY}
    assert parts[0].assumption.startswith("nothing that model keeps of a batch")


def test_gradients_that_are_recorded_are_pointed_out() -> None:
    code = TRAIN + "for x in val:\n    model(x)\n"
    (found,) = findings(code, "MG305", options=SHARDED)
    assert "torch.no_grad()" in found.advice
    quiet = [
        TRAIN + "with torch.no_grad():\n    [model(x) for x in val]\n",
        TRAIN + "@torch.no_grad()\ndef f():\n    for x in val:\n        model(x)\nf()\n",
        code.replace("for x in val", "torch.set_grad_enabled(False)\nfor x in val"),
    ]
    for text in quiet:
        (found,) = findings(text, "MG305", options=SHARDED)
        assert not found.advice
