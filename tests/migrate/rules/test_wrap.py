"""Rule MG201: the model is put into DataParallel."""

from __future__ import annotations

import pytest
from rewriting import expect, findings, rewritten

from migrate.rule import Options

MODEL = "model = nn.Linear(2, 2)\n"


@pytest.mark.parametrize(
    "spelling",
    ["nn.DataParallel", "torch.nn.DataParallel", "torch.nn.parallel.DataParallel"],
)
def test_every_spelling_is_found(spelling: str) -> None:
    assert rewritten(f"{MODEL}model = {spelling}(model)", "MG201") == expect(
        f"""
        {MODEL.strip()}
        model = wrap_model(model)
        """
    )


@pytest.mark.parametrize(
    "arguments",
    ["model, device_ids=[0, 1]", "model, [0, 1]", "model, args.gpus, dim=0",
     "module=model, device_ids=None", "model, device_ids=range(2), output_device=0"],
)  # fmt: skip
def test_arguments_about_devices_go(arguments: str) -> None:
    text = rewritten(f"{MODEL}model = nn.DataParallel({arguments})", "MG201")
    assert text.endswith(("= wrap_model(model)\n", "= wrap_model(module=model)\n"))


def test_a_model_that_is_distributed_already_is_left_alone() -> None:
    code = f"{MODEL}model = nn.parallel.DistributedDataParallel(model)"
    assert findings(code, "MG201") == []


NET = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(2, 2)
"""


def test_blocks_that_a_model_repeats_are_sharded_one_by_one() -> None:
    code = f"{NET}model = nn.DataParallel(Net(), device_ids=[0])\n"
    assert 'model = shard_model(Net(), blocks=["Block"])' in rewritten(code, "MG201", "fsdp")


def test_the_classes_of_blocks_can_be_given() -> None:
    options = Options(wrap_classes=("Layer", "Head"))
    text = rewritten(f"{NET}model = nn.DataParallel(Net())\n", "MG201", "fsdp", options)
    assert 'shard_model(Net(), blocks=["Layer", "Head"])' in text


def test_find_unused_parameters_on_request() -> None:
    options = Options(find_unused=True)
    text = rewritten(f"{MODEL}model = nn.DataParallel(model)", "MG201", options=options)
    assert "wrap_model(model, find_unused_parameters=True)" in text


def test_weights_are_sharded_above_an_optimizer_that_was_made_before_the_wrap() -> None:
    code = f"{MODEL}opt = torch.optim.SGD(model.parameters(), 1)\nmodel = nn.DataParallel(model)\n"
    assert rewritten(code, "MG201", "fsdp") == (
        f"{MODEL}shard_model(model)\nopt = torch.optim.SGD(model.parameters(), 1)\n"
    )


def test_an_optimizer_made_by_a_function_counts_as_well() -> None:
    code = (
        f"def build(net):\n    return torch.optim.SGD(net.parameters(), 1)\n{MODEL}"
        "opt = build(model)\nmodel = nn.DataParallel(model.cuda(), [0])\n"
    )
    text = rewritten(code, "MG201", "fsdp")
    assert "shard_model(model)\nopt = build(model)\nmodel = model.cuda()\n" in text


def test_a_wrapper_leaves_an_earlier_optimizer_where_it_is() -> None:
    code = f"{MODEL}opt = torch.optim.SGD(model.parameters(), 1)\nmodel = nn.DataParallel(model)\n"
    assert rewritten(code, "MG201") == code.replace("nn.DataParallel", "wrap_model")


def test_a_new_model_in_the_wrap_is_too_late_for_its_optimizer() -> None:
    code = (
        "net = nn.Linear(2, 2)\nopt = torch.optim.SGD(net.parameters(), 1)\n"
        "model = nn.DataParallel(pick(net))\ndef pick(x):\n    return x\n"
    )
    (found,) = findings(code, "MG201", "fsdp")
    assert "after the model is sharded" in found.advice


def test_batch_norm_is_synchronised_before_weights_are_sharded() -> None:
    code = "model = nn.BatchNorm1d(2)\nopt = torch.optim.SGD(model.parameters(), 1)\n"
    code += "model = nn.DataParallel(model)\n"
    text = rewritten(code, "MG20", "fsdp")
    assert "shard_model(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))\nopt" in text
    assert "DataParallel" not in text


def test_weights_are_sharded_above_the_place_that_lists_the_parameters() -> None:
    code = (
        f"{MODEL}groups = []\nfor name, p in model.named_parameters():\n    groups.append(p)\n"
        "opt = torch.optim.SGD(groups, 1)\nmodel = nn.DataParallel(model)\n"
    )
    assert "groups = []\nshard_model(model)\nfor name" in rewritten(code, "MG201", "fsdp")
