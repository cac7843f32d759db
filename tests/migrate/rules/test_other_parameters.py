"""Random weights after the wrap."""

from __future__ import annotations

from rewriting import findings, rewritten, run


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG807", to)]


INIT = """import torch
import torch.nn as nn
def weights_init(m):
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
def zero(m):
    if isinstance(m, nn.Linear):
        m.weight.data.zero_()
"""


def test_every_process_gets_the_main_ones_weights_again() -> None:
    code = (
        INIT + "net = nn.DataParallel(nn.Linear(2, 2))\nnet.apply(weights_init)  # DCGAN\nx = 1\n"
    )
    assert "net.apply(weights_init)  # DCGAN\nshare_weights(net)\nx = 1" in rewritten(code, "MG807")


def test_it_is_done_once() -> None:
    code = INIT + "net = nn.DataParallel(nn.Linear(2, 2))\nnet.apply(weights_init)\n"
    text = run(code, "MG807").files[0].after.decode()
    assert run({"train.py": text}, "MG807").files[0].after.decode() == text


def test_an_initialisation_before_the_wrap_is_fine() -> None:
    code = INIT + "net = nn.Linear(2, 2)\nnet.apply(weights_init)\nnet = nn.DataParallel(net)\n"
    assert said(code) == []


def test_constants_are_fine() -> None:
    assert said(INIT + "net = nn.DataParallel(nn.Linear(2, 2))\nnet.apply(zero)\n") == []


def test_an_attribute_in_a_method() -> None:
    code = (
        INIT
        + """
class Trainer:
    def __init__(self):
        self.net = nn.DataParallel(nn.Linear(2, 2))
        self.net.apply(weights_init)
"""
    )
    assert "        share_weights(self.net)" in rewritten(code, "MG807")


def test_on_one_line_it_is_reported() -> None:
    code = INIT + "net = nn.DataParallel(nn.Linear(2, 2)).apply(weights_init)\n"
    assert "share_weights" not in rewritten(code, "MG807")


def test_weights_are_drawn_before_they_are_sharded() -> None:
    code = INIT + "net = nn.Linear(2, 2)\nif n > 1:\n    net = nn.DataParallel(net)\n"
    text = rewritten(code + "net.apply(weights_init)\n", "MG807", "fsdp")
    assert "net.apply(weights_init)\nif n > 1:\n    net = nn.DataParallel(net)\n" in text
    assert text.count("net.apply") == 1


def test_a_model_that_is_made_in_the_wrap_is_left_to_a_human() -> None:
    code = INIT + "net = nn.DataParallel(nn.Linear(2, 2))\nnet.apply(weights_init)\n"
    said_of_shards = said(code, to="fsdp")
    assert said_of_shards == ["net.apply(weights_init) draws other weights than one process would"]


def test_another_models_wrap_above_does_not_count() -> None:
    code = INIT + (
        "first = nn.DataParallel(nn.Linear(2, 2))\nnet = nn.Linear(2, 2)\n"
        "net.apply(weights_init)\nnet = nn.DataParallel(net)\n"
    )
    assert said(code) == []
