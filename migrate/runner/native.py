"""Functions that write files in compiled code, of which Python raises no event.

They are wrapped where they are defined, as soon as their module has been imported.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple


class Writer(NamedTuple):
    """A function and the argument that holds its path, by number and by name.

    One that can read as well also has an argument for the mode; "r" is its default.
    """

    function: str
    number: int
    name: str
    mode: tuple[int, str] | None = None


WRITERS = {
    "torch": (Writer("save", 1, "f"),),
    "torch.serialization": (Writer("save", 1, "f"),),
    "torch.jit": (Writer("save", 1, "f"),),
    "torch.jit._script": (Writer("RecursiveScriptModule.save", 1, "f"),),
    "torch.autograd.profiler": (Writer("profile.export_chrome_trace", 1, "path"),),
    "torchvision.io.image": (
        Writer("write_file", 0, "filename"),
        Writer("write_png", 1, "filename"),
        Writer("write_jpeg", 1, "filename"),
    ),
    "safetensors.torch": (Writer("save_file", 1, "filename"),),
    "safetensors.numpy": (Writer("save_file", 1, "filename"),),
    "cv2": (Writer("imwrite", 0, "filename"),),
    "h5py._hl.files": (Writer("File.__init__", 1, "name", (2, "mode")),),
}
Heard = Callable[[Any, str], None]
"""Is told a path and how it is opened, as `open` would be; it may raise."""


def watch(heard: Heard) -> None:
    """Have `heard` called before any of the writers runs."""
    for name in WRITERS:
        if name in sys.modules:
            _wrap(sys.modules[name], heard)
    sys.meta_path.insert(0, _AfterImport(heard))


class _AfterImport:
    """Finds modules as the others do, and wraps their writers when they have been run."""

    def __init__(self, heard: Heard) -> None:
        self._heard = heard

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec; None for all modules without writers."""
        if name not in WRITERS:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_wrap(module: ModuleType) -> None:
                run(module)
                _wrap(module, self._heard)

            spec.loader.exec_module = run_and_wrap  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, heard: Heard) -> None:
    for writer in WRITERS[module.__name__]:
        *owners, name = writer.function.split(".")
        owner: Any = module
        for part in owners:
            owner = getattr(owner, part, None)
        function = getattr(owner, name, None)
        if function is not None:
            setattr(owner, name, _telling(function, writer, heard))


def _telling(function: Callable[..., Any], writer: Writer, heard: Heard) -> Callable[..., Any]:
    @functools.wraps(function)
    def telling(*args: Any, **kwargs: Any) -> Any:
        mode = _argument(args, kwargs, *writer.mode) or "r" if writer.mode else "w"
        if mode != "r":
            heard(_argument(args, kwargs, writer.number, writer.name), mode)
        return function(*args, **kwargs)

    return telling


def _argument(args: Sequence[Any], kwargs: dict[str, Any], number: int, name: str) -> Any:
    return args[number] if len(args) > number else kwargs.get(name)
