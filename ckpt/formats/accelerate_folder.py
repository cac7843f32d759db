"""Folders of accelerate's `save_state` and of HF Trainer with FSDP: weights, optimizer and the job.

Read: `pytorch_model_fsdp_0/` with `optimizer_0/` (DCP folders, SHARDED_STATE_DICT), or
`pytorch_model_fsdp.bin` with `optimizer.bin` (FULL_STATE_DICT), and beside them `scheduler.bin`,
`scheduler.pt`, `scaler.pt`, `trainer_state.json`, every rank's random states and registered
objects, each under its file's name. Files with objects of a class (`sampler.bin`) are named and
stay behind. Of several models, `--key model_1` takes another one. With DeepSpeed these trainers
write DeepSpeed's folders, under DDP safetensors: those are read as such.

Source: accelerate 1.15 utils/fsdp_utils.py (`save_fsdp_model`, `save_fsdp_optimizer`),
checkpointing.py; transformers 5 trainer.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.errors import MissingPart, UnknownFormat
from ckpt.format import Format, Match, ReadOptions
from ckpt.formats._dcp_tree import rank_count, read_tree
from ckpt.formats._trainer_files import job_beside
from ckpt.model import Checkpoint, Origin, Plain
from ckpt.storage import torch_file
from ckpt.training_dict import read_training_dict

NAME = "accelerate"
MODEL, OPTIMIZER = "model", "optimizer"
FOLDERS = {
    MODEL: re.compile(r"^pytorch_model_fsdp_(\d+)$"),
    OPTIMIZER: re.compile(r"^optimizer_(\d+)$"),
}
FILES = {
    MODEL: re.compile(r"^pytorch_model_fsdp(?:_(\d+))?\.bin$"),
    OPTIMIZER: re.compile(r"^optimizer(?:_(\d+))?\.bin$"),
}


def _matches(path: Path) -> Match:
    if path.is_file():
        return Match.NO
    return Match.YES if any(name.startswith(MODEL) for name, _ in _parts(path)) else Match.NO


def _parts(folder: Path) -> Iterator[tuple[str, Path]]:
    """Models and optimizers, `model` and `model_1` and so on, with where they lie."""
    for entry in sorted(folder.iterdir()):
        for kind, pattern in (FOLDERS if entry.is_dir() else FILES).items():
            match = pattern.match(entry.name)
            if match:
                number = int(match[1] or 0)
                yield (f"{kind}_{number}" if number else kind), entry


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in the folder; metadata only."""
    tree: dict[str, Plain] = {}
    ranks = 1
    for name, entry in _parts(path):
        tree[name] = _content(entry, name.partition("_")[0])
        ranks = max(ranks, rank_count(entry) if entry.is_dir() else 1)
    job, notes = job_beside(path, taken=tree)
    origin = Origin(NAME, str(path), NAME, ranks, repeats_ties=True)
    checkpoint = read_training_dict(tree | job, options, origin)
    return replace(checkpoint, notes=(*checkpoint.notes, *notes))


def _content(entry: Path, kind: str) -> Mapping[str, Plain]:
    """A state dict, out of a DCP folder that holds it under `model` or `optimizer`, or a file."""
    if not entry.is_dir():
        content = torch_file.read(entry)
        if not isinstance(content, Mapping):
            raise UnknownFormat(f"{entry}: holds no dict, expected a state dict")
        return content
    tree = read_tree(entry)
    if kind not in tree:
        raise MissingPart(f"{entry}: holds {', '.join(tree)}, expected {kind!r}")
    inner: Mapping[str, Plain] = tree[kind]
    return inner


FORMAT = Format(
    name=NAME,
    title="accelerate or HF Trainer folder with FSDP",
    matches=_matches,
    read=read,
)
