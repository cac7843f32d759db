"""Which values an expression can have, wherever they come from."""

from __future__ import annotations

import libcst as cst
import pytest
from probing import flow, probe, probes, shown

from migrate.flow import call_arguments
from migrate.values import Class


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("probe(len)", "len"),
        ("import torch.nn as nn\nprobe(nn.Linear)", "torch.nn.Linear"),
        ("from torch import nn\nprobe(nn.Linear)", "torch.nn.Linear"),
        ("import torch\nprobe(torch.nn.Linear)", "torch.nn.Linear"),
        ("import torch.nn\nprobe(torch.optim.SGD)", "torch.optim.SGD"),
        ("from torch.nn import DataParallel as DP\nprobe(DP)", "torch.nn.DataParallel"),
        ("import torch\nDP = torch.nn.DataParallel\nprobe(DP)", "torch.nn.DataParallel"),
        ("import torch\nprobe(torch.load('a').get('b'))", "torch.load().get"),
        ("def f():\n    import torch\n    probe(torch.save)", "torch.save"),
        ("try:\n    import a as x\nexcept ImportError:\n    x = 1\nprobe(x)", "a"),
    ],
)
def test_external_things_have_their_full_name(code: str, expected: str) -> None:
    assert probe(code) == {expected}


ARRIVES = """\
probe((x := m()))
---
x = dict(a=m())
probe(x['a'])
---
probe(m() if a else None)
---
probe(None or m())
---
x = list([m()])
probe(x[0])
---
x = list()
x.append(m())
probe(x[0])
---
def fill(x): x.append(m())
x = [1]
fill(x)
probe(x[-1])
---
def f(x): probe(x)
f(m())
---
def f(a, x): probe(x)
f(1, x=m())
---
def f(a, *, x): probe(x)
f(1, x=m())
---
def f(x):
    def g(): probe(x)
    g()
f(m())
---
def f():
    def g(): return m()
    return g
probe(f()())
---
async def f(): return m()
async def g(): probe(await f())
---
def f(n): return f(n - 1) if n else m()
probe(f(3))
---
def f(n): return g(n)
def g(n):
    if n: return f(n)
    return m()
probe(f(3))
---
def deco(f): return f
@deco
def f(): return m()
probe(f())
---
@torch.no_grad()
def f(): return m()
probe(f())
---
from functools import partial
def f(): return m()
probe(partial(f)())
---
MODELS = {'a': m}
probe(MODELS[name]())
---
def a(): return m()
probe({'a': a}['a']())
---
class C:
    x = m()
probe(C.x)
---
class C:
    x = m()
probe(C().x)
---
class C:
    def __init__(self): self.x = m()
probe(C().x)
---
class C:
    def set(self): self.x = m()
    def get(self): probe(self.x)
---
class C:
    def __init__(self, x): self.x = x
    def get(self): return self.x
probe(C(m()).get())
---
class A:
    def __init__(self): self.x = m()
class B(A):
    def get(self): probe(self.x)
---
class A:
    def __init__(self, x): self.x = x
class B(A):
    def __init__(self, x):
        super().__init__(x)
        probe(self.x)
B(m())
---
class A:
    def get(self): return m()
class B(A): pass
probe(B().get())
---
class A:
    def go(self): probe(self.make())
class B(A):
    def make(self): return m()
B().go()
---
class C:
    @staticmethod
    def get(x): return x
probe(C.get(m()))
---
class C:
    @classmethod
    def get(cls, x): return x
probe(C.get(m()))
---
class C:
    @property
    def x(self): return m()
probe(C().x)
---
class C:
    def __call__(self): return m()
probe(C()())
---
class C:
    def f(self, x): probe(x)
C.f(C(), m())
---
class C: pass
c = C()
c.x = m()
probe(c.x)
---
class C:
    def __init__(self): self.d = {}
    def put(self): self.d['a'] = m()
    def get(self): probe(self.d['a'])
---
x = None
def f():
    g(m())
def g(y):
    probe(y)
"""


@pytest.mark.parametrize("code", ARRIVES.strip().split("\n---\n"))
def test_a_value_arrives(code: str) -> None:
    assert "lib.make" in probe(f"from lib import make as m\n{code}\n")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(x): probe(x)\nf(1)\ndef g(x): pass\ng(m())", set()),
        ("x = m()\ndef f(x): probe(x)", set()),
        ("def f():\n    x = m()\nx = 1\nprobe(x)", set()),
        ("a = {'x': m(), 'y': n()}\nprobe(a['x'])", {"lib.make"}),
        ("a, b = m(), n()\nprobe(b)", {"lib.other"}),
        ("a, b = [], []\na.append(m())\nb.append(n())\nprobe(b[0])", {"lib.other"}),
        ("a = n()\na.append(m())\nprobe(a[0])", set()),
        ("x = m()\ny = n()\nx, y = y, x\nprobe(x)", {"lib.make", "lib.other"}),
    ],
)
def test_a_value_arrives_only_where_it_can(code: str, expected: set[str]) -> None:
    assert probe(f"from lib import make as m, other as n\n{code}\n") == expected


NET = """
import torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(1, 1)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("probe(Net)", {"class Net"}),
        ("probe(Net())", {"Net()"}),
        ("probe(Net().cuda().to(d).train())", {"Net()"}),
        ("probe(Net().part)", {"torch.nn.Linear"}),
        ("probe(Net().forward)", set()),
        ("probe(nn.DataParallel(Net()))", {"torch.nn.DataParallel"}),
        ("probe(nn.DataParallel(Net()).module)", {"Net()"}),
        ("probe(nn.DataParallel(Net()).cuda().module.part)", {"torch.nn.Linear"}),
        ("probe(Net()(x))", {"forward"}),
        ("import torch\nprobe(torch.compile(Net()))", {"Net()"}),
        ("probe(nn.Sequential(Net()).parameters())", {"torch.nn.Sequential().parameters"}),
        ("probe(Net().parameters())", {"Net().parameters"}),
        ("def f(n):\n    return nn.DataParallel(n)\nprobe(f(Net()))", {"torch.nn.DataParallel"}),
        ("probe({'a': Net, 'b': nn.ReLU}[n]())", {"Net()", "torch.nn.ReLU"}),
        ("n = Net() if a else nn.ReLU()\nprobe(n)", {"Net()", "torch.nn.ReLU"}),
    ],
)
def test_models_and_what_is_made_of_them(code: str, expected: set[str]) -> None:
    assert probe(f"{NET}{code}\n") == expected


def test_objects_are_told_apart_by_the_call_that_made_them() -> None:
    found = flow(f"{NET}a = Net()\nb = Net()\nprobe(a)\nprobe(b)\n")
    first, second = (found.of(source, call.args[0].value) for source, call in probes(found))
    assert not first & second


def test_a_dict_made_by_argparse_is_nothing_known() -> None:
    code = "import argparse\nargs = argparse.ArgumentParser().parse_args()\nprobe(args.lr)\n"
    assert probe(code) == set()


def test_what_is_put_into_a_namespace_comes_out_of_it() -> None:
    code = (
        "import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
        "args.model = open('x')\ndef f(options): probe(options.model)\nf(args)\n"
    )
    assert probe(code) == {"open"}


MODULES = {
    "lib/__init__.py": "from .nets import Net\nfrom . import tools\n",
    "lib/nets.py": NET + "DEFAULT = Net()\n",
    "lib/tools.py": "from .nets import *\ndef wrap(x):\n    return nn.DataParallel(x)\n",
}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from lib.nets import Net\nprobe(Net())", {"Net()"}),
        ("from lib.nets import Net as N\nprobe(N())", {"Net()"}),
        ("from lib import Net\nprobe(Net())", {"Net()"}),
        ("from lib.nets import *\nprobe(Net())", {"Net()"}),
        ("from lib.nets import *\nprobe(nn.ReLU)", {"torch.nn.ReLU"}),
        ("from lib.tools import *\nprobe(DEFAULT)", {"Net()"}),
        ("import lib.nets\nprobe(lib.nets.Net())", {"Net()"}),
        ("import lib\nprobe(lib.Net())", {"Net()"}),
        ("import lib\nprobe(lib.tools.wrap(1))", {"torch.nn.DataParallel"}),
        ("import lib.nets as n\nprobe(n.Net())", {"Net()"}),
        ("from lib import nets\nprobe(nets.DEFAULT.part)", {"torch.nn.Linear"}),
        ("from lib import nets\nprobe(nets)", {"file lib/nets.py"}),
        ("from lib.tools import wrap\nfrom lib import Net\nprobe(wrap(Net()).module)", {"Net()"}),
        ("from lib import missing\nprobe(missing)", {"lib.missing"}),
    ],
)
def test_values_cross_files(code: str, expected: set[str]) -> None:
    assert probe({"train.py": f"{code}\n", **MODULES}) == expected


def test_an_attribute_set_in_another_file_arrives() -> None:
    files = {
        "train.py": "import state\nimport torch\nstate.model = torch.load('x')\nimport use\n",
        "state.py": "model = None\n",
        "use.py": "import state\nprobe(state.model)\n",
    }
    assert probe(files) == {"None", "torch.load"}


def test_a_class_and_its_base_in_another_file_share_attributes() -> None:
    files = {
        "train.py": "from base import Base\nclass Own(Base):\n"
        "    def fit(self): probe(self.net)\nOwn(open('x'))\n",
        "base.py": "class Base:\n    def __init__(self, net):\n        self.net = net\n",
    }
    assert probe(files) == {"open"}


def test_the_names_of_bases_go_through_the_projects_classes() -> None:
    found = flow(f"{NET}class Own(Net, dict): pass\nprobe(Own)\n")
    source, call = probes(found)[0]
    (cls,) = found.of(source, call.args[0].value)
    assert isinstance(cls, Class)
    classes, names = found.bases(cls)
    assert [item.node.name.value for item in classes] == ["Own", "Net"]
    assert names == {"dict", "torch.nn.Module"}


def test_classes_that_are_each_others_base_end() -> None:
    found = flow("class A(B): pass\nclass B(A): pass\nprobe(A().x)\nA().f()\n")
    source, call = probes(found)[0]
    assert found.of(source, call.args[0].value) == frozenset()


def test_files_that_import_each_other_end() -> None:
    files = {
        "train.py": "from b import *\nprobe(x)\n",
        "b.py": "from train import *\nx = open(1)\n",
    }
    assert probe(files) == {"open"}
    assert probe({"train.py": "from b import x\nprobe(x)\n", "b.py": "from train import x\n"})


def test_a_qualified_name_is_told_only_if_there_is_one() -> None:
    found = flow("import a, b\nx = a.f if b else b.g\nprobe(x)\nprobe(a.f)\nprobe(1)\n")
    asked = [found.qualified(source, call.args[0].value) for source, call in probes(found)]
    assert asked == [None, "a.f", None]


def test_the_functions_a_call_can_enter() -> None:
    found = flow("def f(): pass\ndef g(): pass\nh = f if a else g\nprobe(h())\n")
    _, call = probes(found)[0]
    inner = call.args[0].value
    assert isinstance(inner, cst.Call)
    assert {function.node.name.value for function in found.callees[inner]} == {"f", "g"}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(a, b): pass\nprobe(f(1, 2))", "2"),
        ("def f(a, b): pass\nprobe(f(b=3, a=1))", "3"),
        ("class C:\n    def f(self, b): pass\nprobe(C().f(4))", "4"),
        ("class C:\n    def f(self, a, b=0): pass\nprobe(C().f(4))", None),
        ("class C:\n    @staticmethod\n    def f(a, b): pass\nprobe(C.f(1, 5))", "5"),
        ("class C:\n    @classmethod\n    def f(cls, a, b): pass\nprobe(C.f(1, 6))", "6"),
    ],
)
def test_the_argument_that_becomes_a_parameter(code: str, expected: str | None) -> None:
    found = flow(f"{code}\n")
    source, outer = probes(found)[0]
    call = outer.args[0].value
    assert isinstance(call, cst.Call)
    (function,) = found.callees[call]
    arg = call_arguments(call, function, "b")
    assert (source.code(arg.value) if arg else None) == expected


def test_keys_and_elements_of_a_dict() -> None:
    found = flow("d = {'train': open(1)}\nd['val'] = input()\nprobe(d)\n")
    source, call = probes(found)[0]
    values = found.of(source, call.args[0].value)
    assert {key for value in values for key in found.keys(value)} == {"train", "val"}
    assert {shown(v) for v in found.elements(values, "['train']")} == {"open"}
    assert {shown(v) for v in found.elements(values)} == {"open", "input"}


def test_what_a_loader_factory_gives_is_told_apart_by_its_calls() -> None:
    code = (
        "from torch.utils.data import DataLoader\n"
        "def make(data): return DataLoader(data)\n"
        "a, b = make(1), make(2)\nprobe(a)\nprobe(b)\n"
    )
    found = flow(code)
    first, second = (found.of(source, call.args[0].value) for source, call in probes(found))
    assert {shown(v) for v in first} == {"torch.utils.data.DataLoader", "loader()"}
    assert len(first & second) == 1
