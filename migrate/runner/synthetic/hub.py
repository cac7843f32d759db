"""Hugging Face's `datasets.load_dataset`, made up: known names give real Dataset objects in memory.

A name that is a file or a folder, or that comes with files and is not known, is loaded as ever:
nobody could guess its columns. `load_from_disk` stays real too. Slices that ask for more samples
than there are (`train[:5000]`) give all there are.
"""

from __future__ import annotations

import functools
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from migrate.runner.synthetic.images import Order, labels
from migrate.runner.synthetic.tables import KNOWN, OWNERS, Row, Table

SLICE = re.compile(r"([\w.-]+)(?:\[(-?\d*)(%?):(-?\d*)(%?)\])?(?:\(\w+\))?")


def replace(module: ModuleType, order: Order) -> None:
    """Change `load_dataset`, if this is Hugging Face's module and not one of the script's."""
    real: Any = getattr(module, "load_dataset", None)
    if getattr(real, "__module__", None) != "datasets.load" or not hasattr(module, "DatasetDict"):
        return
    signature = inspect.signature(real)

    @functools.wraps(real)
    def load_dataset(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        path = str(given["path"])
        name = _bare(path)
        files = given["data_files"] or given["data_dir"]
        if Path(path).exists() or (files and name not in _names()):
            return real(*args, **kwargs)
        table = _table(path, name, given["name"])
        loaded = _Loaded(module, order, given["name"] or "", name, table)
        return loaded.chosen(given["split"], given["streaming"])

    module.load_dataset = module.load.load_dataset = load_dataset  # type: ignore[attr-defined]


class _Loaded:
    """The splits of one known data set."""

    def __init__(
        self, module: ModuleType, order: Order, config: str, name: str, table: Table
    ) -> None:
        self._module: Any = module
        self._order, self._table = order, table
        self._name = f"{name}/{config}" if config and f"{name}/{config}" in KNOWN else name

    def chosen(self, split: Any, streaming: bool) -> Any:
        """What the script asked for: one split or slice, a list of them, or all by name."""
        self._order.note(f"datasets {self._name}: {self._order.samples} rows in each split")
        if split is None:
            made = {each: self._whole(each) for each in self._table.splits}
            kind = self._module.IterableDatasetDict if streaming else self._module.DatasetDict
            return kind({each: _stream(rows, streaming) for each, rows in made.items()})
        if isinstance(split, list | tuple):
            return [_stream(self._read(str(each)), streaming) for each in split]
        words = split.to_spec() if hasattr(split, "to_spec") else str(split)
        return _stream(self._read(words), streaming)

    def _read(self, words: str) -> Any:
        """One split, a slice of it, or several joined by +."""
        if words == "all":
            words = "+".join(self._table.splits)
        parts = [self._slice(part.strip()) for part in words.split("+")]
        return parts[0] if len(parts) == 1 else self._module.concatenate_datasets(parts)

    def _slice(self, words: str) -> Any:
        found = SLICE.fullmatch(words)
        if found is None or found[1] not in self._table.splits:
            splits = ", ".join(self._table.splits)
            raise ValueError(f"unknown split {words!r} of {self._name}: it has {splits}")
        rows = self._whole(found[1])
        if found[2] is None:
            return rows
        count = len(rows)
        start, stop = _place(found[2], found[3], count), _place(found[4], found[5], count)
        return rows.select(range(count)[start:stop])

    def _whole(self, split: str) -> Any:
        name, columns = self._name, self._table.columns
        many = labels(name, split, self._order.samples, self._table.classes)
        rows = [Row(name, split, index, label) for index, label in enumerate(many)]
        made = {column: [kind.value(row) for row in rows] for column, kind in columns.items()}
        features = {column: kind.feature(self._module) for column, kind in columns.items()}
        return self._module.Dataset.from_dict(
            made,
            features=self._module.Features(features),
            split=self._module.NamedSplit(split),
        )


def _stream(rows: Any, streaming: bool) -> Any:
    return rows.to_iterable_dataset() if streaming else rows


def _place(number: str, percent: str, count: int) -> int | None:
    """A bound of a slice, in rows."""
    if not number:
        return None
    return round(int(number) * count / 100) if percent else int(number)


def _bare(path: str) -> str:
    """The name of a data set without its owner, if it is the one that we know."""
    owner, _, name = path.rpartition("/")
    return name if owner and owner in OWNERS.get(name, ()) else path


def _names() -> list[str]:
    return sorted({name.partition("/")[0] for name in KNOWN})


def _table(path: str, name: str, config: str | None) -> Table:
    configs = sorted(full.partition("/")[2] for full in KNOWN if full.startswith(f"{name}/"))
    table = KNOWN.get(f"{name}/{config}") or KNOWN.get(name)
    if table is not None:
        return table
    if configs:
        raise ValueError(f"--synthetic knows {name} as {', '.join(configs)}, not as {config!r}")
    raise ValueError(
        f"--synthetic does not know the data set {path!r}, so it cannot tell its columns."
        f" It knows {', '.join(_names())}."
        " Let the script load one of these or files of your own, or run without --synthetic"
    )
