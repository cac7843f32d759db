"""Which models are trained, which nothing wraps yet, and what they are made of."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrate.facts.models import (
    bare_models,
    may_have_batch_norm,
    parts_of,
    repeated_blocks,
    submodule_wraps,
    trained_models,
)
from migrate.facts.program import Facts
from migrate.flow import Flow
from migrate.project import load_project
from migrate.values import Instance, Made, Value

HEAD = "import torch\nimport torch.nn as nn\nimport torchvision\n"
NET = "class Net(nn.Module):\n    def __init__(self):\n        self.body = nn.Linear(1, 1)\n"
SGD = "opt = torch.optim.SGD(model.parameters(), 1)\n"
STEP = "model(x).backward()\n"


def facts(files: str | dict[str, str]) -> Facts:
    texts = {"train.py": HEAD + files} if isinstance(files, str) else files
    contents = {Path(name): text.encode() for name, text in texts.items()}
    project = load_project(contents, next(iter(contents)), contents)
    return Facts(project, Flow(project), ("common", "ddp"))


def shown(value: Value) -> str:
    if isinstance(value, Instance):
        return value.cls.node.name.value
    assert isinstance(value, Made)
    return value.name


# Trained


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (SGD, {"Net"}),
        ("opt = torch.optim.SGD([p for p in model.parameters() if p.grad], 1)\n", {"Net"}),
        ("opt = torch.optim.SGD([{'params': model.body.parameters()}], 1)\n", {"torch.nn.Linear"}),
        ("opt = torch.optim.SGD(filter(f, model.parameters()), 1)\n", {"Net"}),
        ("ps = list(model.parameters())\nopt = torch.optim.SGD(ps, 1)\n", {"Net"}),
        ("def groups(m):\n    return [{'params': m.parameters()}]\n"
         "opt = torch.optim.SGD(groups(model), 1)\n", {"Net"}),
        ("def f(m): return torch.optim.SGD(m.parameters(), 1)\nopt = f(model)\n", {"Net"}),
        ("ps = []\nfor n, p in model.named_parameters(): ps.append(p)\n"
         "opt = torch.optim.SGD(ps, 1)\n", {"Net"}),
        ("head = nn.Linear(1, 1)\n"
         "opt = torch.optim.SGD(list(model.parameters()) + list(head.parameters()), 1)\n",
         {"Net", "torch.nn.Linear"}),
        ("other = nn.Linear(1, 1)\nother.parameters()\n", set()),
    ],
)  # fmt: skip
def test_models_whose_parameters_an_optimizer_is_given(code: str, expected: set[str]) -> None:
    found = trained_models(facts(f"{NET}model = Net()\n{code}"))
    assert {shown(value) for value in found} == expected


# Bare


def bare(code: str | dict[str, str]) -> list[tuple[str, str]]:
    """Name of each bare model, and the first line of the statement after which it is complete."""
    found = bare_models(facts(code))
    return [(b.name, b.source.code(b.statement).split("\n")[0]) for b in found]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("model = Net()\n", "model = Net()"),
        ("model = Net()\nmodel.cuda()\n", "model.cuda()"),
        ("model = Net()\nmodel = model.to(d)\nprint(model)\n", "model = model.to(d)"),
        ("model = Net()\nmodel.load_state_dict(s)\n", "model.load_state_dict(s)"),
        ("model = Net()\nmodel.body.weight = w\n", "model.body.weight = w"),
        ("if a:\n    model = Net()\nelse:\n    model = nn.Linear(1, 1)\n", "if a:"),
        ("model = Net()\nif c:\n    model = model.cuda()\n", "if c:"),
        ("model: nn.Module = Net()\n", "model: nn.Module = Net()"),
    ],
)
def test_a_model_nothing_wraps_is_bare_from_where_it_is_complete(code: str, expected: str) -> None:
    assert set(bare(f"{NET}{code}{SGD}{STEP}")) == {("model", expected)}


@pytest.mark.parametrize(
    "code",
    [
        f"model = nn.DataParallel(Net())\n{SGD}",
        f"model = Net()\nmodel = nn.DataParallel(model)\n{SGD}",
        f"model = Net()\n{SGD}model = nn.DataParallel(model)\n",
        f"model = Net()\nif a:\n    model = nn.DataParallel(model)\n{SGD}",
        f"model = nn.parallel.DistributedDataParallel(Net())\n{SGD}",
        "net = Net()\nmodel = nn.DataParallel(net)\nopt = torch.optim.SGD(net.parameters(), 1)\n",
        f"def wrap(m): return nn.DataParallel(m)\nmodel = wrap(Net())\n{SGD}",
        "model = Net()\n",
    ],
)  # fmt: skip
def test_a_model_that_is_wrapped_somewhere_or_not_trained_is_not_bare(code: str) -> None:
    assert bare(f"{NET}{code}{STEP}") == []


def test_a_model_in_an_attribute_is_bare_under_its_whole_name() -> None:
    code = (
        f"{NET}class T:\n    def __init__(self):\n        self.model = Net()\n"
        "        self.opt = torch.optim.SGD(self.model.parameters(), 1)\n"
        "    def fit(self):\n        self.model(x).backward()\n"
    )
    assert bare(code) == [("self.model", "self.model = Net()")]


def test_a_model_from_elsewhere_is_known_by_a_call_through_data_parallel() -> None:
    made = f"from lib import make\nmodel = make().cuda()\n{SGD}"
    assert bare(f"{made}nn.parallel.data_parallel(model, x).backward()\n") == [
        ("model", "model = make().cuda()")
    ]
    assert bare(f"{made}model(x).backward()\n") == []


def test_of_two_models_the_one_without_a_wrapper_is_bare() -> None:
    code = (
        f"{NET}model = nn.DataParallel(Net())\n{SGD}critic = Net()\n"
        f"opt2 = torch.optim.SGD(critic.parameters(), 1)\n{STEP}"
    )
    assert [name for name, _ in bare(code)] == ["critic"]


def test_a_model_with_a_wrapped_part_is_told_by_its_part() -> None:
    code = f"{NET}model = Net()\nmodel.body = nn.DataParallel(model.body)\n{SGD}{STEP}"
    found = facts(code)
    assert len(submodule_wraps(found)) == 1
    assert [item.name for item in bare_models(found)] == ["model"]


def test_a_wrap_of_a_whole_model_is_not_one_of_a_part() -> None:
    found = facts(f"{NET}class T: pass\nt = T()\nt.model = nn.DataParallel(Net())\n")
    assert submodule_wraps(found) == []


# Parts


IN_A_CLASS = "class B(nn.Module):\n    def __init__(self, n=nn.BatchNorm2d):\n"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("model = Net()", False),
        ("model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))", True),
        ("model = nn.Sequential(nn.Linear(1, 1), nn.LayerNorm(1))", False),
        (f"{IN_A_CLASS}        self.n = n(1)\nmodel = B()", True),
        ("class B(Net):\n    n = nn.BatchNorm2d(1)\nmodel = B()", True),
        ("class B(Net):\n    n = Net()\nmodel = B()", False),
        ("def f(): return nn.BatchNorm1d(1)\nclass B(Net):\n    b = f()\nmodel = B()", True),
        ("class C(Net):\n    b = nn.BatchNorm1d(1)\nclass B(Net):\n    c = C()\nmodel = B()", True),
        ("model = torchvision.models.resnet18()", True),
        ("model = torchvision.models.alexnet()", False),
        ("model = torchvision.models.vgg16()", False),
        ("model = torchvision.models.vgg16_bn()", True),
        ("from transformers import AutoModel\nmodel = AutoModel.from_pretrained('a')", False),
        ("import timm\nmodel = timm.create_model(n)", True),
        ("from lib import make\nmodel = make()", True),
    ],
)
def test_whether_a_model_may_have_batch_norm(code: str, expected: bool) -> None:
    found = facts(f"{NET}{code}\nuse(model)\n")
    call = found.entry.all(type(found.calls()[0][1]))[-1]
    values = found.flow.of(found.entry, call.args[0].value)
    assert may_have_batch_norm(found, values) is expected


def test_parts_in_other_files_count() -> None:
    files = {
        "train.py": "from net import Net\nuse(Net())\n",
        "net.py": "import torch.nn as nn\nfrom block import Block\nclass Net(nn.Module):\n"
        "    def __init__(self):\n        self.a = Block()\n",
        "block.py": "import torch.nn as nn\nclass Block(nn.Module):\n"
        "    def __init__(self):\n        self.a = nn.BatchNorm2d(1)\n",
    }
    found = facts(files)
    use = found.calls()[0][1]
    (value,) = found.flow.of(found.entry, use.args[0].value)
    classes, names = parts_of(found, value)
    assert {cls.node.name.value for cls in classes} >= {"Block"}
    assert "torch.nn.BatchNorm2d" in names


BLOCK = "class Block(nn.Module):\n    pass\nclass Head(nn.Module):\n    pass\n"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("self.b = nn.ModuleList([Block() for _ in range(3)])", ["Block"]),
        ("self.b = nn.Sequential(*[Block() for _ in range(3)])", ["Block"]),
        ("self.b = nn.Sequential(*(Block() for _ in range(3)))", ["Block"]),
        ("self.b = nn.Sequential(Block(), Block())", ["Block"]),
        ("self.b = nn.Sequential(Block(), Head())", []),
        ("self.b, self.h = Block(), Head()", []),
        ("for i in range(3): self.add_module(str(i), Block())", ["Block"]),
        ("bs = []\n        for i in range(3):\n            bs.append(Block())", ["Block"]),
        ("self.b = nn.ModuleList([nn.Linear(1, 1) for _ in range(3)])", []),
        ("kind = Block\n        self.b = nn.ModuleList([kind() for _ in range(3)])", ["Block"]),
        ("self.sizes = [dict() for _ in range(3)]", []),
    ],
)
def test_classes_of_blocks_that_a_model_repeats(body: str, expected: list[str]) -> None:
    code = f"{BLOCK}class Net(nn.Module):\n    def __init__(self):\n        {body}\nuse(Net())\n"
    found = facts(code)
    call = next(c for s, c in found.calls() if s.code(c.func) == "use")
    values = found.flow.of(found.entry, call.args[0].value)
    assert repeated_blocks(found, values) == expected
