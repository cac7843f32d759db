"""torch.save files: a state dict, or the dict that a script under DP, DDP or FSDP1 saves.

Read: bare state dicts, dicts with model, optimizer, scheduler and counters under any names,
wrapper prefixes in any place, legacy non-zip files, full state dicts of FSDP with an optimizer by
FQN (`fsdp-full`). Written: one `.pt` with clean names that a plain or DDP script loads with
`torch.load(weights_only=True)`: `model`, `optimizer` (numbers in group order, with `param_names`)
and the rest of the job under its own names.

Source: torch 2.13.0 torch/serialization.py, torch/optim/optimizer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.errors import UnknownFormat
from ckpt.format import Format, Match, ReadOptions, WriteOptions
from ckpt.formats._torch_dict import plan_torch_dict
from ckpt.model import Checkpoint, Origin, Plain, StoredTensor
from ckpt.plan import WritePlan
from ckpt.storage import torch_file
from ckpt.training_dict import read_training_dict

FSDP_FULL = "fsdp-full"  # what a file with states by name is called in descriptions


def _matches(path: Path) -> Match:
    return Match.MAYBE if path.is_file() and torch_file.is_torch_file(path) else Match.NO


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in a torch.save file; metadata only."""
    tree = torch_file.read(path)
    if not isinstance(tree, Mapping):
        raise UnknownFormat(
            f"{path}: holds {_what(tree)}, expected a state dict or a dict with one"
        )
    checkpoint = read_training_dict(tree, options, Origin("torch", str(path)))
    if checkpoint.has_optimizer and checkpoint.origin.repeats_ties:  # states by name
        return replace(checkpoint, origin=replace(checkpoint.origin, format=FSDP_FULL))
    return checkpoint


def _what(tree: Plain) -> str:
    return "a lone tensor" if isinstance(tree, StoredTensor) else f"a {type(tree).__name__}"


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """One `.pt` file with clean names."""
    return plan_torch_dict(checkpoint, options, prefix="")


FORMAT = Format(
    name="torch",
    title="torch.save file (DP, DDP, FSDP1 full, one GPU)",
    matches=_matches,
    read=read,
    plan=plan,
    output_suffix=".pt",
)
