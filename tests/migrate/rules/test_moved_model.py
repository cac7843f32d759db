"""Parallel models that are moved, replaced or copied."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG809", to)]


HEAD = (
    "import copy\nimport torch\nimport torch.nn as nn\nmodel = nn.DataParallel(nn.Linear(2, 1))\n"
)
LOOP = HEAD + "for epoch in range(3):\n    model(x).sum().backward()\n"


def test_moves_between_steps_are_reported() -> None:
    for move in ("model.cpu()", "model.to('cpu')", "model.module.cpu()", "model.half()",
                 "torch.save(model.module.to(torch.device('cpu')).state_dict(), f)"):  # fmt: skip
        assert len(said(LOOP + f"    {move}\n")) == 1, move


def test_moves_after_training_are_fine() -> None:
    assert said(LOOP + "torch.save(model.cpu().state_dict(), f)\n") == []


def test_moves_to_the_device_are_fine() -> None:
    for move in ("model.cuda()", "model.to(device)", "model.train()", "out = model(x).cpu()",
                 "s = model.state_dict()['weight'].cpu()"):  # fmt: skip
        assert said(LOOP + f"    {move}\n") == [], move


def test_another_number_type_right_after_the_wrap_is_reported() -> None:
    assert len(said(HEAD + "model.half()\nmodel(x).sum().backward()\n")) == 1
    before = HEAD.replace("nn.Linear(2, 1)", "nn.Linear(2, 1).half()")
    assert said(before + "model(x).sum().backward()\n") == []


def test_rounding_the_weights_leaves_their_type() -> None:
    assert said(LOOP + "    model.half().float()\n") == []


def test_a_new_layer_is_reported() -> None:
    code = HEAD + "model.module.head = nn.Linear(2, 2)\nmodel.module.name = 'x'\n"
    assert said(code) == ["model.module.head is replaced after model was made parallel"]


def test_copies_are_reported_where_weights_are_sharded() -> None:
    code = LOOP + "    best = copy.deepcopy(model)\n"
    assert said(code) == []
    assert said(code, to="fsdp") == ["copy.deepcopy(model) fails: sharded models cannot be copied"]


def test_copies_of_the_state_are_fine() -> None:
    assert said(LOOP + "    best = copy.deepcopy(model.state_dict())\n", to="fsdp") == []
