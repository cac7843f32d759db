"""Pickles that name classes: unpickled by Python itself they are instances of those classes."""

from __future__ import annotations

import io
import pickle
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import ckpt
from ckpt.model import Opaque
from ckpt.storage import safe_pickle, torch_file
from ckpt.storage.named_classes import NamingPickler

CLASSES = frozenset({"types.SimpleNamespace", "decimal.Decimal", "torch.Size", "not.installed.X"})


def pickled(tree: Any) -> bytes:
    target = io.BytesIO()
    NamingPickler(target, CLASSES).dump(tree)
    return target.getvalue()


def test_attributes_make_an_instance_without_a_constructor() -> None:
    found = pickle.loads(pickled([Opaque("types.SimpleNamespace", {"a": 1, "b": [2]})] * 2))
    assert found == [SimpleNamespace(a=1, b=[2])] * 2
    assert found[0] is found[1]


def test_arguments_call_the_class() -> None:
    tree = {"n": Opaque("decimal.Decimal", {"args": ("1.5",), "state": None})}
    assert pickle.loads(pickled(tree)) == {"n": Decimal("1.5")}


def test_a_class_that_is_not_installed_is_only_named() -> None:
    data = pickled([Opaque("not.installed.X", {"a": 1}), Opaque("not.installed.X", {"a": 2})])
    found = safe_pickle.loads(data, "here", data_classes=CLASSES)
    assert [(item.type_name, item.state) for item in found] == [
        ("not.installed.X", {"a": 1}),
        ("not.installed.X", {"a": 2}),
    ]
    assert data.count(b"cnot.installed\nX\n") == 1


def test_other_classes_are_refused() -> None:
    with pytest.raises(ckpt.CkptError, match=r"somebody\.Else cannot be written"):
        pickled(Opaque("somebody.Else", {}))


def test_a_torch_file_with_a_size_loads_as_torch_saved_it(tmp_path: Path) -> None:
    size = Opaque("torch.Size", {"args": ((2, 3),), "state": None})
    with (tmp_path / "file.pt").open("w+b") as stream:
        torch_file.lay_out(stream, {"shape": size}, CLASSES)
    found = torch.load(tmp_path / "file.pt", weights_only=False)["shape"]
    assert (type(found), found) == (torch.Size, torch.Size([2, 3]))
