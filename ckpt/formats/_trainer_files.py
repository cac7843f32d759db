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
    """A note that names such files; going on without them is asked for when they hold the job."""
    found = tuple(f.name for pattern in PATTERNS for f in sorted(folder.glob(pattern)))
    detail = "the trainer's files beside the weights, which are not read"
    return (Note(NoteKind.DROPPED, found, detail),) if found else ()
