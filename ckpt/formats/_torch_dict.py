"""The dict in a torch file that a plain, a DDP or an FSDP script loads; shared by their formats."""

from __future__ import annotations

from ckpt.errors import MissingPart
from ckpt.format import WriteOptions
from ckpt.model import Checkpoint, Plain
from ckpt.outgoing import (
    job_data,
    named_objects,
    optimizer_tree,
    plain_notes,
    state_dict,
    weight_notes,
)
from ckpt.plan import WritePlan
from ckpt.storage.torch_file import TorchFile

__all__ = ["plan_torch_dict"]

MODEL, OPTIMIZER = "model", "optimizer"


def plan_torch_dict(
    checkpoint: Checkpoint, options: WriteOptions, prefix: str, *, by_name: bool = False
) -> WritePlan:
    """One file with `model`, `optimizer` and the rest of the job under its own names.

    Args:
        prefix: before every name of the model.
        by_name: optimizer states and groups by FQN; else by number, with `param_names`.

    Raises:
        MissingPart: the source holds no weights.
    """
    if not checkpoint.order:
        raise MissingPart(f"{checkpoint.origin.path}: holds no weights to write")
    weights = state_dict(checkpoint, options)
    tree: dict[str, Plain] = {MODEL: {prefix + name: tensor for name, tensor in weights.items()}}
    for name, value in checkpoint.extra_state.items():
        tree[MODEL][prefix + name] = job_data(value)
    if checkpoint.has_optimizer:
        tree[OPTIMIZER] = optimizer_tree(
            checkpoint, lambda fqn, number: fqn if by_name else number, with_names=not by_name
        )
    for name, value in named_objects(checkpoint, (MODEL, OPTIMIZER)).items():
        tree[name] = job_data(value)
    notes = (
        *weight_notes(checkpoint, options),
        *plain_notes(checkpoint.objects, (MODEL, OPTIMIZER)),
    )
    return WritePlan(files=(TorchFile("", tree),), notes=notes, is_single_file=True)
