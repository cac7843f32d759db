"""What every rank of a job saved in its own way, such as the state of its random number generators.

An object of the job is rank 0's, as a script finds it after loading. Beside these, `by_rank` lists
the values of all ranks of those that differ: `objects["by_rank"]["rng"][rank]`. It goes along like
any other object; a format with a file for each rank gives every rank its own again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ckpt.model import Checkpoint, Plain, StoredTensor, walk
from ckpt.note import Note, NoteKind
from ckpt.values import is_small, read_bytes

__all__ = ["BY_RANK", "content_of", "fitting", "gathered", "objects_of"]

BY_RANK = "by_rank"


def gathered(checkpoint: Checkpoint, jobs: Sequence[Mapping[str, Plain]]) -> Checkpoint:
    """The checkpoint with `by_rank`, and a note, where ranks saved different values.

    Args:
        jobs: what each rank saved beside the model and the optimizer, in rank order.
    """
    names = tuple(
        name
        for name in checkpoint.objects
        if all(name in job for job in jobs)
        and any(content_of(job[name]) != content_of(jobs[0][name]) for job in jobs)
    )
    if not names:
        return checkpoint
    if BY_RANK in checkpoint.objects:  # a script's own
        detail = f"the ranks saved different values; rank 0's is taken, for {BY_RANK} is in use"
        note = Note(NoteKind.KEPT_ONE, names, detail, of_job=True)
        return replace(checkpoint, notes=(*checkpoint.notes, note))
    values = {name: [job[name] for job in jobs] for name in names}
    detail = f"every rank saved its own; all are kept, under {BY_RANK} where ranks have no files"
    note = Note(NoteKind.BY_RANK, names, detail, of_job=True)
    objects = {**checkpoint.objects, BY_RANK: values}
    return replace(checkpoint, objects=objects, notes=(*checkpoint.notes, note))


def fitting(checkpoint: Checkpoint, world_size: int) -> tuple[Checkpoint, list[Note]]:
    """The checkpoint for a job of so many ranks: values of other ranks mean nothing to them."""
    values = _values(checkpoint.objects)
    names = tuple(name for name, of_ranks in values.items() if len(of_ranks) != world_size)
    if not names:
        return checkpoint, []
    kept = {name: of_ranks for name, of_ranks in values.items() if name not in names}
    objects = {name: value for name, value in checkpoint.objects.items() if name != BY_RANK}
    count = len(values[names[0]])
    detail = f"{count} ranks had their own, the job has {world_size}; rank 0's is for all"
    note = Note(NoteKind.DROPPED, names, detail, of_job=True)
    return replace(checkpoint, objects=objects | ({BY_RANK: kept} if kept else {})), [note]


def objects_of(rank: int, objects: Mapping[str, Plain]) -> dict[str, Plain]:
    """The job's objects as that rank saved them."""
    own = {name: of_ranks[rank] for name, of_ranks in _values(objects).items()}
    return {name: value for name, value in objects.items() if name != BY_RANK or not own} | own


def _values(objects: Mapping[str, Plain]) -> dict[str, Sequence[Plain]]:
    """The lists in `by_rank`; none where a script uses the name for something of its own."""
    found = objects.get(BY_RANK)
    if not isinstance(found, Mapping) or not all(isinstance(v, list) for v in found.values()):
        return {}
    return {str(name): of_ranks for name, of_ranks in found.items() if name in objects}


def content_of(tree: Plain) -> Sequence[object]:
    """What a value is, for comparison: its tensors by their checksums."""
    return [
        (path, leaf.shape, _mark(leaf)) if isinstance(leaf, StoredTensor) else (path, repr(leaf))
        for path, leaf in walk(tree)
    ]


def _mark(tensor: StoredTensor) -> object:
    """Checksum of a tensor's bytes; where there is none, small ones are read, others differ."""
    place = tensor.chunks[0]
    if place.record.crc32 is not None:
        return place.record.crc32, place.start, place.strides
    return read_bytes(tensor) if is_small(tensor) else place.record
