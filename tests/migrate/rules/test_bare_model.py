"""Rule MG204: a model is trained that nothing makes parallel."""

from __future__ import annotations

from rewriting import findings, rewritten

NET = """import torch
import torch.nn as nn
class Net(nn.Module):
    def __init__(self, width=2):
        super().__init__()
        self.layer = nn.Linear(width, width)
"""
STEP = "model(torch.ones(2, 2)).sum().backward()\n"


def test_the_model_is_made_parallel_where_it_is_complete() -> None:
    code = NET + "model = Net()\nmodel = model.cuda()\nmodel.load_state_dict(x)\nprint(model)\n"
    code += "opt = torch.optim.SGD(model.parameters(), 1)\n" + STEP
    assert "model.load_state_dict(x)\nmodel = wrap_model(model)\nprint(" in rewritten(code, "MG204")


def test_branches_that_choose_the_model_come_first() -> None:
    code = NET + "if big:\n    model = Net(4)\nelse:\n    model = Net()\nmodel.to(dev)\n"
    code += "opt = torch.optim.SGD(model.parameters(), 1)\n" + STEP
    text = rewritten(code, "MG204")
    assert "model.to(dev)\nmodel = wrap_model(model)\nopt" in text
    assert text.count("wrap_model(") == 1


def test_a_model_of_a_trainer_object() -> None:
    code = NET + (
        "class Trainer:\n    def __init__(self):\n        self.model = Net().cuda()\n"
        "        self.opt = torch.optim.SGD(self.model.parameters(), 1)\n"
        "    def fit(self):\n        self.model(1).backward()\nTrainer().fit()\n"
    )
    assert "        self.model = wrap_model(self.model)\n        self.opt" in rewritten(
        code, "MG204"
    )


def test_a_model_made_by_a_factory_is_wrapped_where_it_arrives() -> None:
    code = NET + (
        "def build():\n    net = Net()\n    return net\n"
        "def main():\n    model = build()\n"
        "    opt = torch.optim.SGD(model.parameters(), 1)\n    model(1).backward()\nmain()\n"
    )
    assert "    model = build()\n    model = wrap_model(model)\n" in rewritten(code, "MG204")


def test_batch_norm_of_one_device_saw_the_whole_batch() -> None:
    code = NET.replace("nn.Linear(width, width)", "nn.BatchNorm1d(width)") + "model = Net()\n"
    code += "opt = torch.optim.SGD(model.parameters(), 1)\n" + STEP
    text = rewritten(code, "MG204")
    assert "model = wrap_model(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))" in text


def test_two_models_with_an_optimizer_each() -> None:
    code = NET + (
        "net_g = Net()\nnet_d = Net()\nog = torch.optim.Adam(net_g.parameters())\n"
        "od = torch.optim.Adam(net_d.parameters())\nnet_d(net_g(1)).backward()\n"
    )
    text = rewritten(code, "MG204")
    assert "net_g = wrap_model(net_g)" in text
    assert "net_d = wrap_model(net_d)" in text


def test_a_model_that_a_branch_wraps_is_left_alone() -> None:
    code = NET + "model = Net()\nif n > 1:\n    model = nn.DataParallel(model)\n"
    code += "opt = torch.optim.SGD(model.parameters(), 1)\n" + STEP
    assert findings(code, "MG204") == []


def test_a_model_that_is_only_evaluated_is_left_alone() -> None:
    code = NET + "teacher = Net()\nmodel = nn.DataParallel(Net())\n"
    code += "opt = torch.optim.SGD(model.parameters(), 1)\n(model(1) - teacher(1)).backward()\n"
    assert findings(code, "MG204") == []


def test_once_is_enough() -> None:
    code = NET + "model = Net()\nopt = torch.optim.SGD(model.parameters(), 1)\n" + STEP
    once = rewritten(code, "MG204")
    assert "wrap_model(model)" in once
