"""What a name means in a file."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
import pytest

from migrate.names import Import, Names, parameters
from migrate.source import Source, parse_source


def names(text: str) -> Names:
    return Names(parse_source(Path("a.py"), text.encode()))


def use(found: Names, name: str, last: bool = True) -> cst.Name:
    nodes = [node for node in found.source.all(cst.Name) if node.value == name]
    return nodes[-1 if last else 0]


def owner(found: Names, name: str) -> str:
    """The name of the scope that the last use of `name` means."""
    scope = found.slot(use(found, name), name).owner
    if isinstance(scope, cst.FunctionDef | cst.ClassDef):
        return scope.name.value
    return type(scope).__name__


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\nprint(x)\n", "Module"),
        ("def f():\n    x = 1\n    print(x)\n", "f"),
        ("x = 1\ndef f():\n    print(x)\n", "Module"),
        ("def f(x):\n    print(x)\n", "f"),
        ("def f(*x):\n    print(x)\n", "f"),
        ("def f(a, /, *, x=1, **k):\n    print(x)\n", "f"),
        ("def f(x):\n    def g():\n        print(x)\n", "f"),
        ("def f():\n    global x\n    x = 1\n    print(x)\n", "Module"),
        ("def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 2\n", "f"),
        ("class C:\n    x = 1\n    y = x\n", "C"),
        ("x = 1\nclass C:\n    x = 2\n    def f(self):\n        print(x)\n", "Module"),
        ("x = 1\nclass C:\n    x = 2\n    def f(self, y=x): pass\n", "C"),
        ("def f(x=1): pass\nx = 2\ndef g(y=x): pass\n", "Module"),
        ("f = lambda x: x\n", "Lambda"),
        ("def f():\n    for x in y: print(x)\n", "f"),
        ("def f():\n    for a, (b, x) in y: print(x)\n", "f"),
        ("def f():\n    with y as x: print(x)\n", "f"),
        ("def f():\n    try: pass\n    except E as x: print(x)\n", "f"),
        ("def f():\n    if (x := 1): print(x)\n", "f"),
        ("def f():\n    x: int = 1\n    print(x)\n", "f"),
        ("def f():\n    import x.y\n    print(x)\n", "f"),
        ("def f():\n    from y import z as x\n    print(x)\n", "f"),
        ("def f():\n    def x(): pass\n    print(x)\n", "f"),
        ("def f():\n    a, *x = y\n    print(x)\n", "f"),
        ("print(x)\n", "Module"),
    ],
)  # fmt: skip
def test_the_scope_of_a_name(text: str, expected: str) -> None:
    assert owner(names(text), "x") == expected


def test_a_decorator_and_a_base_class_are_outside_of_what_they_belong_to() -> None:
    found = names("x = 1\n@x\nclass C(x):\n    x = 2\n")
    for node in [n for n in found.source.all(cst.Name) if n.value == "x"][:3]:
        assert isinstance(found.slot(node, "x").owner, cst.Module)


@pytest.mark.parametrize(
    ("statement", "name", "expected"),
    [
        ("import torch", "torch", Import("torch", 0, None)),
        ("import torch.nn", "torch", Import("torch", 0, None)),
        ("import torch.nn as nn", "nn", Import("torch.nn", 0, None)),
        ("from torch import nn", "nn", Import("torch", 0, "nn")),
        ("from torch.nn import DataParallel as DP", "DP", Import("torch.nn", 0, "DataParallel")),
        ("from . import utils", "utils", Import("", 1, "utils")),
        ("from ..a.b import c", "c", Import("a.b", 2, "c")),
        ("def f():\n    import torch", "torch", Import("torch", 0, None)),
        ("try:\n    import torch\nexcept ImportError: pass", "torch", Import("torch", 0, None)),
    ],
)
def test_what_an_import_binds(statement: str, name: str, expected: Import) -> None:
    assert names(f"{statement}\n").imports == {name: expected}


def test_star_imports_are_known_apart() -> None:
    found = names("from a import *\nfrom .b import *\n")
    assert found.starred == [Import("a", 0, None), Import("b", 1, None)]
    assert found.imports == {}


def test_the_names_a_module_binds_and_those_bound_anywhere() -> None:
    found = names("import a\ndef f(b):\n    c = 1\n")
    assert found.module_names == {"a", "f"}
    assert found.bound == {"a", "b", "c", "f"}


def test_whether_a_name_can_be_used_at_a_place() -> None:
    found = names("a = 1\ndef f(b):\n    print(b)\nprint(a)\n")
    inside, outside = use(found, "b"), use(found, "a")
    assert found.is_visible(inside, "a")
    assert found.is_visible(inside, "b")
    assert not found.is_visible(outside, "b")


def test_parameters_in_their_order() -> None:
    source: Source = names("def f(a, /, b, *c, d=1, **e): pass\n").source
    assert [p.name.value for p in parameters(source.all(cst.FunctionDef)[0])] == list("abdce")
    assert parameters(source.module) == []
