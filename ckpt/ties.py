"""Tied weights that a format saved twice, found again.

DCP folders and FSDP's full state dicts hold a tied weight under both names. The optimizer tells
them apart: only one name is in its param groups. A weight outside of them that equals, bit for bit,
a weight of the same shape inside is taken to be tied to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ckpt.assemble import equal
from ckpt.model import Checkpoint, Param
from ckpt.note import Note, NoteKind

__all__ = ["tie_equal_weights"]

MIN_DIMS = 2  # vectors are often equal without being tied: all zeros, all ones


def tie_equal_weights(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with the twice-saved tied weights it shows, as aliases, and a note.

    Reads the weights of the candidates, which are few: those outside of all param groups that
    have the shape of one inside.
    """
    found = dict(_pairs(checkpoint))
    if not found:
        return checkpoint
    pairs = tuple(f"{alias} = {owner}" for alias, owner in found.items())
    note = Note(NoteKind.TIED, pairs, "saved twice with equal bits, one of them in the optimizer")
    return replace(
        checkpoint,
        params={fqn: param for fqn, param in checkpoint.params.items() if fqn not in found},
        ties={**checkpoint.ties, **found},
        notes=(*checkpoint.notes, note),
    )


def _pairs(checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Aliases and owners.

    A frozen module that is a copy of a trained one, such as a target network, must not be taken
    for tied: an alias stands alone in its module (its bias, if any, is trained), and its owner has
    taken optimizer steps, after which a frozen copy is no longer equal.
    """
    frozen = set(checkpoint.frozen)
    owners = {
        fqn: param
        for fqn, param in checkpoint.params.items()
        if fqn not in frozen and param.state and _is_large(param)
    }
    for fqn in checkpoint.frozen:
        param, module = checkpoint.params[fqn], fqn.rpartition(".")[0]
        siblings = [name for name in frozen if name.rpartition(".")[0] == module]
        if len(siblings) > 1 or not _is_large(param):
            continue
        for owner, other in owners.items():
            if other.shape == param.shape and equal(param.weight, other.weight):
                yield fqn, owner
                break


def _is_large(param: Param) -> bool:
    return len(param.shape) >= MIN_DIMS and param.weight.numel > 1
