"""Small made-up data in place of torchvision's datasets and of `datasets.load_dataset`.

For a script whose data would have to be downloaded, or are not here. What the script gets has the
types, sizes and attributes of the real data and is the same in every process: image 7 of CIFAR10's
training set depends on nothing but these words. Nothing is read, downloaded or cached; only what
the script loads from files by itself stays real. Every split has the same number of samples, so a
script that insists on a size of its own (`random_split(train, [50000, 10000])`) needs that number.
Pretrained weights are not part of this: a script that downloads some still does so.

Both packages are changed when they are imported, and not at all if they never are. That is this
process's business: processes that are forked from it (DataLoader's workers) see the same, spawned
ones do not.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from migrate.runner.synthetic import hub, vision
from migrate.runner.synthetic.images import Order

Change = Callable[[ModuleType, Order], None]
CHANGES: dict[str, Change] = {
    "torchvision.datasets": vision.replace,
    "datasets": hub.replace,
}
_USED: dict[str, None] = {}


def install(samples: int) -> None:
    """Give every dataset of this process `samples` made-up samples, wherever it is imported."""
    if samples < 1:
        raise ValueError(f"no data set has {samples} samples")
    order = Order(samples, _note)
    for name in CHANGES.keys() & sys.modules.keys():
        CHANGES[name](sys.modules[name], order)
    sys.meta_path.insert(0, _Finder(order))


def used() -> list[str]:
    """What was replaced so far, in words: `torchvision.datasets.MNIST: 256 images of 28x28`."""
    return list(_USED)


def _note(line: str) -> None:
    _USED[line] = None


class _Finder(MetaPathFinder):
    """Finds modules as the other finders do; those that change come with a loader that does so."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in CHANGES:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader, CHANGES[fullname], self._order)
        return spec


class _Changing(Loader):
    """Loads a module as its own loader does, which it leaves in its place, and changes it."""

    def __init__(self, real: Loader, change: Change, order: Order) -> None:
        self._real, self._change, self._order = real, change, order

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._real
        if module.__spec__ is not None:
            module.__spec__.loader = self._real
        self._real.exec_module(module)
        self._change(module, self._order)
