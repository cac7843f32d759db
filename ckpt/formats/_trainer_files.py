"""Files of a job that trainers put beside a checkpoint and that no format reads.

Source: transformers 5 trainer.py (`checkpoint-N` folders); accelerate 1.15 checkpointing.py.
"""

from __future__ import annotations

from pathlib import Path

from ckpt.note import Note, NoteKind

__all__ = ["notes_beside"]

PATTERNS = (
    "optimizer.*",
    "scheduler.*",
    "scaler.*",
    "trainer_state.json",
    "rng_state*",
    "random_states_*",
    "sampler*.bin",
    "custom_checkpoint_*",
)


def notes_beside(folder: Path) -> tuple[Note, ...]:
    """A note that names such files; a conversion of the whole job without them needs consent."""
    found = tuple(f.name for pattern in PATTERNS for f in sorted(folder.glob(pattern)))
    detail = "the trainer's files beside the weights, which are not read"
    note = Note(NoteKind.DROPPED, found, detail, needs_consent=True, of_job=True)
    return (note,) if found else ()
