"""A folder of safetensors files: one file, or shards that an index lists; and what both leave out.

A safetensors file names its tensors alphabetically, or in the order of somebody's dict: it does not
tell the order of the model's parameters. A tied weight is in it once. transformers says nowhere
under which other names it is known; `save_model` of safetensors says so in the header's metadata.

Source: transformers 5 modeling_utils.py, huggingface_hub serialization (file names, index);
safetensors 0.8 torch.py `save_model`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ckpt.errors import CorruptCheckpoint, MissingPart
from ckpt.model import StoredTensor
from ckpt.note import summarise
from ckpt.storage import safetensors_file

__all__ = ["INDEX_FILE", "SINGLE_FILE", "SUFFIX", "indexed_files", "read_weights"]

SUFFIX = ".safetensors"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_weights(path: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """The tensors by name, in no order that means anything, and alias -> owner as headers tell.

    Args:
        path: a folder, one safetensors file, or an index.

    Raises:
        MissingPart: shards that the index lists, or the index; several files and no index.
        CorruptCheckpoint: a damaged file or index, or shards of several saves.
    """
    tensors: dict[str, StoredTensor] = {}
    metadata: dict[str, str] = {}
    for file in _files(path):
        inside, about = safetensors_file.read(file)
        twice = tensors.keys() & inside.keys()
        if twice:
            raise CorruptCheckpoint(f"{file}: {min(twice)} is also in another shard; mixed saves")
        tensors |= inside
        metadata |= about
    return tensors, {a: o for a, o in metadata.items() if o in tensors and a not in tensors}


def _files(path: Path) -> Sequence[Path]:
    """The safetensors files of a path, as its index lists them where there is one."""
    if path.is_file() and path.suffix == SUFFIX:
        return [path]
    index = path if path.is_file() else path / INDEX_FILE
    return indexed_files(index) if index.exists() else _unindexed(path)


def indexed_files(index: Path) -> Sequence[Path]:
    """The shards that an index lists, by name.

    Raises:
        CorruptCheckpoint: not an index, or one of files elsewhere. MissingPart: a shard.
    """
    folder = index.parent
    try:
        listed = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as problem:
        raise CorruptCheckpoint(f"{index}: not an index of shards") from problem
    if any(Path(name).name != name for name in listed):
        raise CorruptCheckpoint(f"{index}: lists files outside of its folder")
    missing = [name for name in listed if not (folder / name).is_file()]
    if missing:
        raise MissingPart(f"{folder}: {summarise(missing)} missing, which {index.name} lists")
    return [folder / name for name in listed]


def _unindexed(folder: Path) -> Sequence[Path]:
    files = sorted(folder.glob(f"*{SUFFIX}"))
    shards = [file for file in files if "-of-" in file.name]
    if shards:
        raise MissingPart(f"{folder}: shards without {INDEX_FILE}; copy the index too")
    if (folder / SINGLE_FILE) in files:
        return [folder / SINGLE_FILE]
    if len(files) > 1:
        names = summarise([file.name for file in files])
        raise MissingPart(f"{folder}: several safetensors files ({names}); name one of them")
    return files
