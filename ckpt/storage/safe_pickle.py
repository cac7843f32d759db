"""Unpickling that cannot execute anything: every global maps to a stand-in from `pickle_data`.

Python's own unpickler calls what `find_class` returns. Here that is a constructor of plain data
from a closed list, so a hostile pickle can at worst build odd data. Tensors become `StoredTensor`
descriptions: no tensor data is read, and torch is not imported. Classes that frameworks are known
to put into checkpoints (loss scalers, enums, DCP metadata, argparse.Namespace) become `Opaque`
data by name, so DeepSpeed need not be installed to read its files.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

from ckpt.errors import CkptError, CorruptCheckpoint, UnsafePickle, Unsupported
from ckpt.storage.pickle_data import StorageRef, data_class, finished, lookup, python_3_name

__all__ = ["StorageRef", "load", "loads"]

PICKLE_PROBLEMS = (
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    OverflowError,
    MemoryError,
    RecursionError,
)

DATA_CLASSES = frozenset(
    {
        "argparse.Namespace",
        "pathlib.PosixPath",
        "pathlib.PurePosixPath",
        "pathlib._local.PosixPath",
        "pathlib.WindowsPath",
        "datetime.datetime",
        "datetime.date",
        "datetime.timedelta",
        "datetime.timezone",
        "_io.BytesIO",
        "_io.StringIO",
        "builtins.range",
        "collections.deque",
        "decimal.Decimal",
        "types.SimpleNamespace",
        "uuid.UUID",
        "omegaconf.dictconfig.DictConfig",
        "omegaconf.listconfig.ListConfig",
    }
)
"""Classes of plain data that training scripts put into their dicts."""

PICKLED_MODEL_PREFIXES = ("torch.nn.modules.", "torch.nn.parallel.", "torch.fx.")
SHARDED_TENSOR_PREFIXES = (
    "torch.distributed._shard.",
    "torch.distributed._tensor.",
    "torch.distributed.tensor.",
)

PersistentLoad = Callable[[Any], StorageRef]


def loads(
    data: bytes,
    where: str,
    persistent_load: PersistentLoad | None = None,
    data_classes: frozenset[str] = frozenset(),
) -> Any:
    """The plain data in a pickle; see `load`."""
    return load(io.BytesIO(data), where, persistent_load, data_classes)


def load(
    stream: BinaryIO,
    where: str,
    persistent_load: PersistentLoad | None = None,
    data_classes: frozenset[str] = frozenset(),
) -> Any:
    """The plain data in the pickle at the stream's position.

    Args:
        where: the file, for messages.
        persistent_load: turns a persistent id, `("storage", ...)`, into a `StorageRef`; the
            element type in it has a `dtype`.
        data_classes: full names of further classes to read as `Opaque`.

    Raises:
        UnsafePickle: a global that is not known to be data.
        CorruptCheckpoint: not a pickle, or a truncated one.
    """
    start = stream.tell()
    copyreg.clear_extension_cache()  # what is cached there would not go through find_class
    unpickler = _Unpickler(stream, where, persistent_load, DATA_CLASSES | data_classes)
    try:
        return finished(unpickler.load())
    except UnsafePickle:
        stream.seek(start)
        _explain_refusal(stream, where)
        raise
    except CkptError as problem:
        if where in problem.problem:
            raise
        raise type(problem)(f"{where}: {problem.problem}") from problem
    except PICKLE_PROBLEMS as problem:
        raise CorruptCheckpoint(
            f"{where}: the pickled part cannot be read ({problem}); the file is damaged or not a "
            "checkpoint. Copy it again from the machine that wrote it."
        ) from problem


class _Unpickler(pickle.Unpickler):
    def __init__(
        self,
        stream: BinaryIO,
        where: str,
        persistent_load: PersistentLoad | None,
        data_classes: frozenset[str],
    ) -> None:
        super().__init__(stream, encoding="latin-1")
        self._where = where
        self._persistent_load = persistent_load
        self._data_classes = data_classes

    def find_class(self, module: str, name: str) -> Any:
        found = lookup(module, name)
        if found is not None:
            return found
        full_name = python_3_name(module, name)
        if full_name in self._data_classes:
            return data_class(full_name)
        raise UnsafePickle(
            f"{self._where}: the pickle asks for {module}.{name}, which is not plain training "
            "data; nothing was executed. Save again with torch.save of tensors, numbers, strings, "
            "dicts and lists only."
        )

    def persistent_load(self, pid: Any) -> StorageRef:
        if self._persistent_load is None:
            raise CorruptCheckpoint(f"{self._where}: the pickle points to storages it cannot have")
        return self._persistent_load(pid)


def _explain_refusal(stream: BinaryIO, where: str) -> None:
    """Raises a better message when the pickle is a whole nn.Module or holds sharded tensors."""
    try:
        names = {str(arg).replace(" ", ".") for _, arg, _ in pickletools.genops(stream) if arg}
    except ValueError:  # what pickletools raises on a broken stream; the plain refusal stands
        return
    if any(name.startswith(PICKLED_MODEL_PREFIXES) for name in names):
        raise UnsafePickle(
            f"{where}: holds a pickled whole model, which needs its source code and runs it when "
            "loaded. In the project that wrote it run "
            "torch.save(torch.load(FILE, weights_only=False).state_dict(), NEW_FILE) "
            "and convert NEW_FILE."
        )
    if any(name.startswith(SHARDED_TENSOR_PREFIXES) for name in names):
        raise Unsupported(
            f"{where}: holds one rank's sharded tensors (DTensor or ShardedTensor) saved with "
            "torch.save. Give the folder with the files of all ranks, each with its rank at the "
            "end of its name (model_rank0.pt), or save with torch.distributed.checkpoint.save."
        )
