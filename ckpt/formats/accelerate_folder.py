"""Folders of HF Trainer (`checkpoint-N`) and accelerate's `save_state`: weights, optimizer, job.

Read, under DDP or on one GPU: `model.safetensors` or shards of it or `pytorch_model.bin`, with
`optimizer.pt` or `optimizer.bin`. Under FSDP: `pytorch_model_fsdp_0/` with `optimizer_0/` (DCP
folders, SHARDED_STATE_DICT), or `pytorch_model_fsdp.bin` with `optimizer.bin` (FULL_STATE_DICT).
Beside them `scheduler.bin`, `scheduler.pt`, `scaler.pt`, `trainer_state.json`, every rank's random
states and registered objects, each under its file's name. Files with objects of a class
(`sampler.bin`) are named and stay behind. ZeRO targets get all these files beside the shards too,
random states if there are as many ranks, so that both trainers resume from the output. Of several
models, `--key model_1` takes another one. With DeepSpeed these trainers write DeepSpeed's folders,
which are read as such.

Without FSDP the optimizer's states carry numbers, in the model's order inside each param group, and
safetensors files do not keep that order. It comes from `--param-order` or `--model`; else from
config.json, where transformers is installed and has a model of exactly these names and shapes,
which also gives tied names back (`lm_head.weight`); else the shapes alone have to leave one
possibility. `--weights-only` and targets that hold weights only need none of this.

Source: accelerate 1.15 utils/fsdp_utils.py (`save_fsdp_model`, `save_fsdp_optimizer`),
checkpointing.py (`save_accelerator_state`); transformers 5.24 trainer.py (`_save_checkpoint`,
`create_optimizer`: weights with decay first, then those without, both in the model's order).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.errors import CkptError, CorruptCheckpoint, MissingPart, UnknownFormat
from ckpt.format import Format, Match, ReadOptions
from ckpt.formats._config_model import CONFIG_FILE, model_of_config, notes_on_versions
from ckpt.formats._dcp_tree import rank_count, read_tree
from ckpt.formats._safetensors_folder import indexed_files, read_weights
from ckpt.formats._trainer_files import job_beside, left_out, rank_files, trainer_files
from ckpt.model import Checkpoint, Origin, Plain
from ckpt.names import clean_names
from ckpt.note import Note
from ckpt.storage import torch_file
from ckpt.training_dict import NameOrder, read_training_dict

NAME = "accelerate"
MODEL, OPTIMIZER = "model", "optimizer"
INDEX = ".index.json"

Pattern = re.Pattern[str]
FSDP_MODEL: tuple[Pattern, ...] = (
    re.compile(r"^pytorch_model_fsdp_(\d+)$"),
    re.compile(r"^pytorch_model_fsdp(?:_(\d+))?\.bin$"),
)
PLAIN_MODEL: tuple[Pattern, ...] = (
    re.compile(r"^model(?:_(\d+))?\.safetensors$"),
    re.compile(r"^model(?:_(\d+))?\.safetensors\.index\.json$"),
    re.compile(r"^pytorch_model(?:_(\d+))?\.bin$"),
    re.compile(r"^pytorch_model(?:_(\d+))?\.bin\.index\.json$"),
)
OPTIMIZERS: tuple[Pattern, ...] = (
    re.compile(r"^optimizer_(\d+)$"),
    re.compile(r"^optimizer(?:_(\d+))?\.(?:bin|pt)$"),
)


def _matches(path: Path) -> Match:
    if path.is_file():
        return Match.NO
    fsdp, plain = _found(path, MODEL, FSDP_MODEL), _found(path, MODEL, PLAIN_MODEL)
    sure = fsdp or (plain and _found(path, OPTIMIZER, OPTIMIZERS))
    return Match.YES if sure else Match.NO


def _found(folder: Path, kind: str, patterns: tuple[Pattern, ...]) -> dict[str, Path]:
    """`model`, `model_1` and so on, with where each lies; an earlier pattern comes first."""
    found: dict[str, Path] = {}
    entries = sorted(folder.iterdir())
    for pattern in patterns:
        for entry in entries:
            match = pattern.match(entry.name)
            if match:
                number = int(match[1] or 0)
                found.setdefault(f"{kind}_{number}" if number else kind, entry)
    return found


# --- reading ------------------------------------------------------------------------------------


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in the folder; metadata only.

    Raises:
        AmbiguousSource: several models, or nothing tells what the optimizer's numbers mean.
    """
    models = _found(path, MODEL, FSDP_MODEL) or _found(path, MODEL, PLAIN_MODEL)
    weights = {name: _weights(entry) for name, entry in models.items()}
    optimizers, lost = _optimizers(path, options)
    order, told = _order(path, models, weights, options)
    job, notes = job_beside(path, taken=[*weights, *optimizers])
    folders = (entry for entry in models.values() if entry.is_dir())
    ranks = max([1, rank_files(path), *(rank_count(folder) for folder in folders)])
    beside = trainer_files(path)
    origin = Origin(NAME, str(path), NAME, ranks, repeats_ties=True, trainer_files=beside)
    if options.key is None and len(models) == 1:  # registered objects may look like models
        options = replace(options, key=MODEL)
    checkpoint = read_training_dict(weights | optimizers | job, options, origin, order)
    return replace(checkpoint, notes=(*checkpoint.notes, *told, *lost, *notes))


def _optimizers(path: Path, options: ReadOptions) -> tuple[dict[str, Plain], tuple[Note, ...]]:
    """The optimizers' states; where only weights are needed, without those that cannot be read."""
    states: dict[str, Plain] = {}
    lost: list[str] = []
    for name, entry in _found(path, OPTIMIZER, OPTIMIZERS).items():
        try:
            states[name] = _state_dict(entry, OPTIMIZER)
        except CkptError:
            if options.need_optimizer:
                raise
            lost.append(entry.name)
    return states, left_out(lost)


def _order(
    path: Path, models: Mapping[str, Path], weights: Mapping[str, Plain], options: ReadOptions
) -> tuple[NameOrder, tuple[Note, ...]]:
    """What tells the order of the model's names."""
    if all(_keeps_order(entry) for entry in models.values()):
        return NameOrder(), ()
    if options.model or len(models) > 1:
        return NameOrder(is_kept=False), ()
    if not options.need_optimizer:
        why = f"{CONFIG_FILE} is not asked where weights are enough"
        return NameOrder(is_kept=False, why=why if (path / CONFIG_FILE).is_file() else ""), ()
    (tensors,) = weights.values()
    cleaned = clean_names(tensors)
    named = {cleaned[name]: tensor for name, tensor in tensors.items()}
    model, why = model_of_config(path, named)
    if model is None:
        return NameOrder(is_kept=False, why=why), ()
    notes = () if options.param_order else notes_on_versions(path)
    return NameOrder(model, f"the model of {CONFIG_FILE}"), notes


def _keeps_order(entry: Path) -> bool:
    """A torch file keeps the order of the dict; shards part it by size, safetensors sorts it."""
    return entry.is_dir() or entry.suffix == ".bin"


def _weights(entry: Path) -> Mapping[str, Plain]:
    """A model's state dict, a tied name with the tensor of its owner."""
    if entry.name.endswith((".safetensors", ".safetensors" + INDEX)):
        tensors, aliases = read_weights(entry)
        return tensors | {alias: tensors[owner] for alias, owner in aliases.items()}
    if not entry.name.endswith(INDEX):
        return _state_dict(entry, MODEL)
    content: dict[str, Plain] = {}
    for file in indexed_files(entry):
        inside = _state_dict(file, MODEL)
        twice = content.keys() & inside.keys()
        if twice:
            raise CorruptCheckpoint(f"{file}: {min(twice)} is also in another shard; mixed saves")
        content |= inside
    return content


def _state_dict(entry: Path, kind: str) -> Mapping[str, Plain]:
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
    title="accelerate or HF Trainer folder (DDP, FSDP, one GPU)",
    matches=_matches,
    read=read,
)
