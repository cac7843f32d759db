"""BatchNorm layers that are looked for by class."""

from __future__ import annotations

from rewriting import findings, rewritten, run

from migrate.rule import Options


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG814", to)]


HEAD = """import torch
import torch.nn as nn
from torch.nn import BatchNorm2d
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
"""
WRAP = "model = nn.DataParallel(model)\n"


def check(test: str) -> str:
    return f"for m in model.modules():\n    if {test}:\n        m.eval()\n"


def test_every_spelling() -> None:
    for before, after in (
        ("isinstance(m, nn.BatchNorm2d)", "isinstance(m, (nn.BatchNorm2d, nn.SyncBatchNorm))"),
        ("isinstance(m, BatchNorm2d)", "isinstance(m, (BatchNorm2d, torch.nn.SyncBatchNorm))"),
        (
            "isinstance(m, (nn.BatchNorm2d, nn.GroupNorm))",
            "isinstance(m, (nn.BatchNorm2d, nn.GroupNorm, nn.SyncBatchNorm))",
        ),
        ("type(m) == nn.BatchNorm2d", "type(m) in (nn.BatchNorm2d, nn.SyncBatchNorm)"),
    ):
        assert f"    if {after}:" in rewritten(HEAD + WRAP + check(before), "MG814")


def test_checks_above_the_wrap_are_fine() -> None:
    assert said(HEAD + check("isinstance(m, nn.BatchNorm2d)") + WRAP) == []


def test_the_base_class_and_finished_checks_are_fine() -> None:
    for test in ("isinstance(m, nn.modules.batchnorm._BatchNorm)",
                 "isinstance(m, (nn.BatchNorm2d, nn.SyncBatchNorm))",
                 "isinstance(m, nn.BatchNorm2d) or isinstance(m, nn.SyncBatchNorm)",
                 "isinstance(m, nn.Conv2d)"):  # fmt: skip
        assert said(HEAD + WRAP + check(test)) == [], test


def test_a_function_that_is_applied_later() -> None:
    code = HEAD + "def freeze(m):\n    if isinstance(m, nn.BatchNorm2d):\n        m.eval()\n"
    assert len(said(code + WRAP + "model.apply(freeze)\n")) == 1
    assert said(code + "model.apply(freeze)\n" + WRAP) == []


def test_the_train_method_of_a_model() -> None:
    code = """
import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm2d(3)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                nn.init.ones_(m.weight)
    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
model = nn.DataParallel(Net())
"""
    assert [f.line for f in findings(code, "MG814")] == [13]


def test_kept_batch_norm_needs_nothing() -> None:
    code = HEAD + WRAP + check("isinstance(m, nn.BatchNorm2d)")
    assert findings(code, "MG814", options=Options(batch_norm="keep")) == []


def test_it_is_done_once() -> None:
    code = HEAD + WRAP + check("isinstance(m, nn.BatchNorm2d)")
    text = run(code, "MG814").files[0].after.decode()
    assert run({"train.py": text}, "MG814").files[0].after.decode() == text
