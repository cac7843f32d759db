"""The dict that was saved into a DCP folder, from the paths of its entries.

Source: torch 2.13.0 torch/distributed/checkpoint/_nested_dict.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt.model import Plain
from ckpt.storage.dcp_files import DATA_SUFFIX, read_items

__all__ = ["KeyPath", "rank_count", "read_tree"]

KeyPath = tuple[str | int, ...]


def read_tree(folder: Path) -> dict[str, Plain]:
    """What was saved, tensors in their files; see `read_items` for errors."""
    tree: dict[str, Plain] = {}
    for item in read_items(folder):
        _insert(tree, item.path, item.value)
    return {key: _with_lists(value) for key, value in tree.items()}


def rank_count(folder: Path) -> int:
    """How many ranks have files in the folder."""
    return len({name.name.split("_")[2] for name in folder.glob(f"__*{DATA_SUFFIX}")})


def _insert(tree: dict[Any, Plain], path: KeyPath, value: Plain) -> None:
    """Put a value at its path; numbers in a path are positions in a list."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value


def _with_lists(tree: Plain) -> Any:
    """Dicts whose keys are all positions, as lists."""
    if not isinstance(tree, dict):
        return tree
    done = {key: _with_lists(value) for key, value in tree.items()}
    if done and all(isinstance(key, int) for key in done):
        return [done[key] for key in sorted(done)]
    return done
