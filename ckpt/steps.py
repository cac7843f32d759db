"""How many steps an optimizer has taken, and whether all its parameters agree."""

from __future__ import annotations

from ckpt.model import Checkpoint
from ckpt.note import Note, NoteKind
from ckpt.values import read_number

__all__ = ["differing_steps", "step_of"]

COUNTERS = ("global_steps", "global_step", "step", "iteration")


def step_of(checkpoint: Checkpoint) -> float | int | None:
    """The largest step count of the optimizer, else the job's own counter, else None."""
    numbers = _steps(checkpoint)
    if numbers:
        largest = max(numbers)
        return int(largest) if largest == int(largest) else largest
    counters = [checkpoint.objects.get(name) for name in COUNTERS]
    return next((value for value in counters if isinstance(value, int)), None)


def differing_steps(checkpoint: Checkpoint) -> list[Note]:
    """A note when parameters have taken different numbers of steps.

    That is right for parameters that joined late or rarely get a gradient; it is also all that
    shows when files of two saves of one job lie in a DCP folder.
    """
    numbers = _steps(checkpoint)
    if len(numbers) < 2:
        return []
    detail = (
        f"parameters have taken {min(numbers):g} to {max(numbers):g} steps: some joined late or "
        "got no gradients at times, or files of two saves are mixed"
    )
    return [Note(NoteKind.UNVERIFIED, ("optimizer steps",), detail)]


def _steps(checkpoint: Checkpoint) -> set[float | int]:
    """The different step counts; a value that parameters share is read once."""
    values = {
        id(v): v for p in checkpoint.params.values() if (v := p.state.get("step")) is not None
    }
    numbers = (read_number(value) for value in values.values())
    return {number for number in numbers if number is not None}
