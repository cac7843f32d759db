"""Pickles that name classes which need not be installed where they are written.

DeepSpeed's loading code expects instances of its own classes (a loss scaler, an enum) in its
files. pickle's own `save_global` imports a class before it writes the class's name; here the name
is written as it stands, and nothing of the class is needed.

Source: Python 3.11 Lib/pickle.py (`_Pickler.save`, `save_reduce`), Lib/copyreg.py (`__newobj__`).
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any, BinaryIO

from ckpt.errors import Unsupported
from ckpt.model import Opaque

__all__ = ["NamingPickler"]

PROTOCOL = 2  # that of torch.save


class _ClassName:
    """A class that a pickle refers to by name only."""

    def __init__(self, full_name: str) -> None:
        self.full_name = full_name


class NamingPickler(pickle._Pickler):
    """A pickler that writes `Opaque` data as instances of the classes they are named after.

    Data with arguments is a call of the class (`torch.Size((2, 3))`, an enum's value); data
    without is an empty instance that is given its attributes, which runs no constructor.
    """

    memo: Any  # what typeshed leaves out of pickle._Pickler
    get: Any
    memoize: Any
    write: Any

    def __init__(self, target: BinaryIO, classes: frozenset[str]) -> None:
        """Classes outside of `classes` are refused."""
        super().__init__(target, protocol=PROTOCOL)
        self._classes = classes
        self._names: dict[str, _ClassName] = {}

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        """Write one object; see pickle."""
        if isinstance(obj, _ClassName):
            self._save_name(obj)
        elif isinstance(obj, Opaque):
            self._save_instance(obj)
        else:
            pickle._Pickler.save(self, obj, save_persistent_id)  # type: ignore[attr-defined]

    def _save_name(self, name: _ClassName) -> None:
        if id(name) in self.memo:
            self.write(self.get(self.memo[id(name)][0]))
            return
        module, _, qualified = name.full_name.rpartition(".")
        self.write(pickle.GLOBAL + f"{module}\n{qualified}\n".encode())
        self.memoize(name)

    def _save_instance(self, instance: Opaque) -> None:
        if id(instance) in self.memo:
            self.write(self.get(self.memo[id(instance)][0]))
            return
        if instance.type_name not in self._classes:
            raise Unsupported(f"{instance.type_name} cannot be written to a torch file")
        args, state = _parts(instance)
        name = self._names.setdefault(instance.type_name, _ClassName(instance.type_name))
        self.save(name)
        self.save(args)
        self.write(pickle.REDUCE if args else pickle.NEWOBJ)
        self.memoize(instance)
        if state is not None:
            self.save(state)
            self.write(pickle.BUILD)


def _parts(instance: Opaque) -> tuple[tuple[Any, ...], Any]:
    """Arguments and attributes, as `ckpt.storage.pickle_data` gives them."""
    state = instance.state
    if isinstance(state, Mapping) and set(state) == {"args", "state"}:
        return tuple(state["args"]), state["state"]
    return (), state
