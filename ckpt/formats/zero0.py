"""DeepSpeed without ZeRO (stage 0): the module and its optimizer in one file.

Source: deepspeed 0.19.8 runtime/engine.py (`_save_checkpoint`); with an fp32 engine `optimizer` is
the optimizer's own state dict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.errors import MissingPart, Unsupported
from ckpt.format import Format, Match, ReadOptions
from ckpt.formats._deepspeed import MODEL, guess_kind, job_objects, locate, model_state, read_file
from ckpt.model import Checkpoint, Origin
from ckpt.optimizer_dict import is_optimizer
from ckpt.training_dict import read_training_dict


def _matches(path: Path) -> Match:
    return Match.YES if guess_kind(path) == "zero0" else Match.NO


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in a DeepSpeed checkpoint without ZeRO; metadata only."""
    save = locate(path, options.tag)
    file = save.ranks(MODEL)[0]
    content = read_file(file, "module")
    optimizer = content.get("optimizer")
    zero = (content.get("ds_config") or {}).get("zero_optimization") or {}
    if optimizer is None and isinstance(zero, Mapping) and zero.get("stage"):
        raise MissingPart(
            f"{save.folder}: saved under ZeRO stage {zero['stage']}, and no *_optim_states.pt file "
            "is there. Copy the files of every rank into one folder."
        )
    if optimizer is not None and not is_optimizer(optimizer) and options.need_optimizer:
        raise Unsupported(
            f"{file}: a 16-bit engine without ZeRO keeps its fp32 weights in a fused optimizer, "
            "which cannot be converted; --weights-only takes the 16-bit weights"
        )
    tree = {"module": model_state(content, file), **job_objects(content)}
    if is_optimizer(optimizer):
        tree["optimizer"] = optimizer
    origin = Origin(
        format="zero0",
        path=str(path),
        writer=f"deepspeed {content.get('ds_version')}",
        world_size=content.get("dp_world_size"),
    )
    inner = replace(options, tag=None, key="module")
    return read_training_dict(tree, inner, origin)


FORMAT = Format(
    name="zero0",
    title="DeepSpeed without ZeRO",
    matches=_matches,
    read=read,
    has_tags=True,
)
