"""What a training program consists of: wraps, optimizers, steps, loaders."""

from __future__ import annotations

import textwrap
from pathlib import Path

import libcst as cst
import pytest

from migrate.facts.program import Facts
from migrate.flow import Flow
from migrate.project import load_project
from migrate.source import Source
from migrate.syntax import dotted

HEAD = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import DataLoader\n"


def facts(files: str | dict[str, str]) -> Facts:
    texts = {"train.py": HEAD + textwrap.dedent(files)} if isinstance(files, str) else files
    contents = {Path(name): text.encode() for name, text in texts.items()}
    project = load_project(contents, next(iter(contents)), contents)
    return Facts(project, Flow(project), ("common", "ddp"))


def call(found: Facts, name: str) -> tuple[Source, cst.Call]:
    """The first call of something spelled `name`."""
    places = [(s, c) for s in found.project.sources for c in s.all(cst.Call)]
    return next((s, c) for s, c in places if dotted(c.func) == name)


# Wraps


@pytest.mark.parametrize(
    "code",
    [
        "nn.DataParallel(m)",
        "torch.nn.DataParallel(m)",
        "torch.nn.parallel.DataParallel(m)",
        "nn.parallel.data_parallel.DataParallel(m)",
        "nn.DataParallel(module=m, device_ids=[0])",
        "from torch.nn import DataParallel\nDataParallel(m)",
        "from torch.nn import DataParallel as DP\nDP(m)",
        "import torch.nn.parallel as P\nP.DataParallel(m)",
        "from torch.nn.parallel import DataParallel\nDataParallel(m)",
        "DP = nn.DataParallel\nDP(m)",
        "W = {'dp': nn.DataParallel}\nW['dp'](m)",
        "def wrapper(): return nn.DataParallel\nwrapper()(m)",
        "W = nn.DataParallel if torch.cuda.is_available() else list\nW(m)",
        "class Own(nn.DataParallel): pass\nOwn(m)",
        "class Base(nn.DataParallel): pass\nclass Own(Base): pass\nOwn(m)",
    ],
)
def test_a_wrap_in_every_spelling(code: str) -> None:
    (wrap,) = facts(f"m = nn.Linear(1, 1)\n{code}\n").wraps
    assert wrap.model is not None
    assert wrap.source.code(wrap.model) == "m"
    assert len(wrap.inner) == 1
    assert (wrap.distributed, wrap.functional) == (False, False)
    assert (wrap.custom is not None) is ("Own" in code)


@pytest.mark.parametrize(
    ("code", "flag"),
    [
        ("nn.parallel.data_parallel(m, x)", "functional"),
        ("nn.parallel.DistributedDataParallel(m)", "distributed"),
        ("from torch.distributed.fsdp import fully_shard\nfully_shard(m)", "distributed"),
        ("from apex.parallel import DistributedDataParallel as D\nD(m)", "distributed"),
    ],
)
def test_other_ways_to_be_parallel_are_told_apart(code: str, flag: str) -> None:
    (wrap,) = facts(f"m = nn.Linear(1, 1)\n{code}\n").wraps
    assert getattr(wrap, flag) is True


@pytest.mark.parametrize(
    "code",
    ["DataParallel(m)", "other.DataParallel(m)", "nn.DataParallelTable(m)",
     "isinstance(m, nn.DataParallel)", "class DataParallel: pass\nDataParallel(m)"],
)  # fmt: skip
def test_what_only_looks_like_a_wrap_is_none(code: str) -> None:
    assert facts(f"import other\nm = nn.Linear(1, 1)\n{code}\n").wraps == []


def test_the_wrapper_and_what_is_in_it_are_known_wherever_they_go() -> None:
    files = {
        "train.py": HEAD + "from lib import wrap, use\nnet = wrap(nn.Linear(1, 1))\n"
        "use(net)\nother(nn.ReLU())\n",
        "lib.py": "import torch.nn as nn\ndef wrap(m):\n    return nn.DataParallel(m)\n"
        "def use(net):\n    net.module.eval()\n",
    }  # fmt: skip
    found = facts(files)
    lib, inner = call(found, "net.module.eval")
    assert isinstance(inner.func, cst.Attribute)
    assert found.may_be_wrapped(lib, inner.func.value)
    source, other = call(found, "other")
    assert not found.may_be_wrapped(source, other.args[0].value)


def test_the_wraps_of_an_earlier_run_count() -> None:
    own = (Path(__file__).parents[2] / "migrate" / "snippets" / "ddp.py").read_text()
    text = own[own.index("def wrap_model") : own.index("def share_weights")]
    found = facts(f"{text.strip()}\n\n\nm = nn.Linear(1, 1)\nw = wrap_model(m)\nuse(w)\n")
    assert len(found.own_wraps) == 1
    assert found.wraps == []
    source, use = call(found, "use")
    assert found.may_be_wrapped(source, use.args[0].value)
    assert [c for _, c in found.calls() if dotted(c.func) == "model.cuda"] == []


# Optimizers and steps


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("torch.optim.SGD(p)", 1),
        ("from torch import optim\noptim.AdamW(p)", 1),
        ("from torch.optim import Adam as A\nA(p)", 1),
        ("getattr(torch.optim, name)(p)", 0),
        ("{'a': torch.optim.Adam, 'b': torch.optim.SGD}[k](p)", 0),
        ("from transformers import AdamW\nAdamW(p)", 1),
        ("from timm.optim import create_optimizer\ncreate_optimizer(a, m)", 1),
        ("torch.optim.lr_scheduler.StepLR(o, 1)", 0),
        ("torch.optim.swa_utils.AveragedModel(m)", 0),
        ("SGD(p)", 0),
    ],
)
def test_optimizers(code: str, count: int) -> None:
    assert len(facts(f"{code}\n").optimizers) == count


def test_an_optimizer_is_known_where_it_arrives() -> None:
    found = facts("def go(o):\n    o.step()\ngo(torch.optim.SGD(p))\ngo(list())\nbar.step()\n")
    source, step = call(found, "o.step")
    assert isinstance(step.func, cst.Attribute)
    assert found.is_optimizer(source, step.func.value)
    source, other = call(found, "bar.step")
    assert isinstance(other.func, cst.Attribute)
    assert not found.is_optimizer(source, other.func.value)


STEPS = {
    "train.py": "from engine import Engine\ndef main():\n    for e in range(2):\n"
    "        Engine().epoch()\n        evaluate()\ndef evaluate():\n    print(1)\nmain()\n",
    "engine.py": "class Engine:\n    def epoch(self):\n        for b in loader: self.step(b)\n"
    "    def step(self, b):\n        loss(b).backward()\n",
}


def test_functions_that_lead_to_a_backward_train() -> None:
    names = {node.name.value for node in facts(STEPS).training_functions}
    assert names == {"main", "epoch", "step"}


@pytest.mark.parametrize(
    ("name", "reaches"),
    [("Engine().epoch", True), ("evaluate", False), ("main", True), ("self.step", True)],
)
def test_what_runs_a_backward(name: str, reaches: bool) -> None:
    found = facts(STEPS)
    places = [(s, c) for s in found.project.sources for c in s.all(cst.Call)]
    source, node = next((s, c) for s, c in places if s.code(c.func) == name)
    assert found.reaches_backward(source, node) is reaches


def test_the_loops_around_a_node_stay_in_its_function() -> None:
    found = facts("for a in x:\n    def f():\n        while b:\n            for c in d: g()\n")
    source, node = call(found, "g")
    assert [type(loop) for loop in found.loops_around(source, node)] == [cst.For, cst.While]


# Loaders


@pytest.mark.parametrize(
    "code",
    [
        "for x in loader: step(x)",
        "for i, x in enumerate(loader): step(x)",
        "from tqdm import tqdm\nfor x in tqdm(loader): step(x)",
        "from tqdm import tqdm\nbar = tqdm(enumerate(loader))\nfor i, x in bar: step(x)",
        "it = iter(loader)\nfor _ in range(3):\n    x = next(it)\n    step(x)",
        "it = iter(loader)\nwhile True:\n    x = it.__next__()\n    step(x)",
        "for x, y in zip(loader, other): step(x)",
        "import itertools\nfor x in itertools.islice(loader, 3): step(x)",
        "def run(data):\n    for x in data: step(x)\nrun(loader)",
        "class T: pass\nT.l = loader\nfor x in T.l: step(x)",
        "loaders = {'train': loader}\nfor x in loaders['train']: step(x)",
        "def batches():\n    for x in loader: yield x\nfor x in batches(): step(x)",
    ],
)  # fmt: skip
def test_a_loader_that_is_trained_on(code: str) -> None:
    step = "def step(x):\n    loss(x).backward()\nother = [1]\n"
    found = facts(
        f"{step}loader = DataLoader(data)\nval = DataLoader(data)\nfor x in val: f(x)\n{code}\n"
    )
    assert [loader.trains for loader in found.loaders] == [True, False]


@pytest.mark.parametrize(
    "code",
    [
        "torch.utils.data.DataLoader(d)",
        "from torch.utils.data import DataLoader as DL\nDL(d)",
        "import torch.utils.data as data\ndata.DataLoader(d)",
        "from torch.utils import data\ndata.DataLoader(d)",
        "class Own(DataLoader): pass\nOwn(d)",
        "from torch_geometric.loader import NeighborLoader\nNeighborLoader(d)",
    ],
)
def test_a_loader_in_every_spelling(code: str) -> None:
    assert len(facts(f"{code}\n").loaders) == 1


# The rest


def test_names_that_are_the_same_variable() -> None:
    found = facts("x = 1\ndef f(x): print(x)\nprint(x)\na.x = f(x=2)\n")
    source = found.entry
    first = next(node for node in source.all(cst.Name) if node.value == "x")
    assert [source.line_of(node) for node in found.reads_of(source, first)] == [6]


def test_functions_know_their_class() -> None:
    found = facts("def f(): pass\nclass C:\n    def m(self): pass\n")
    assert [(f.node.name.value, f.owner is not None) for f in found.functions()] == [
        ("f", False),
        ("m", True),
    ]


def test_process_groups_and_the_main_guard() -> None:
    found = facts(
        "import torch.distributed as dist\ndist.init_process_group('nccl')\n"
        "if __name__ == '__main__':\n    main()\n"
    )
    assert len(found.process_groups) == 1
    assert found.main_guard is not None
    assert facts("x = 1\n").main_guard is None
