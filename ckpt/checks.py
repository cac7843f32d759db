"""Does a checkpoint agree with itself? A few small reads before a conversion and in `inspect`.

Files of two saves of one job can fit together in every name and size. What then disagrees are step
counts, and fp32 master weights with the weights that the model computed with.
"""

from __future__ import annotations

from dataclasses import replace

from ckpt.chunks import row_major_strides
from ckpt.model import Checkpoint, StoredTensor
from ckpt.note import Note, NoteKind
from ckpt.values import read_number, read_run

__all__ = ["remarks", "step_of"]

SAMPLE = 64
ROUNDING = 2.0**-8  # bf16 keeps 8 bits, fp16 keeps 11
TINY = 1e-7  # half of fp16's smallest number and then some
COUNTERS = ("global_steps", "global_step", "step", "iteration")


def step_of(checkpoint: Checkpoint) -> float | int | None:
    """The largest step count of the optimizer, else the job's own counter, else None."""
    numbers = _steps(checkpoint)
    if numbers:
        largest = max(numbers)
        return int(largest) if largest == int(largest) else largest
    counters = [checkpoint.objects.get(name) for name in COUNTERS]
    return next((value for value in counters if isinstance(value, int)), None)


def remarks(checkpoint: Checkpoint) -> list[Note]:
    """Notes about what disagrees inside a checkpoint; reads step counts and a few elements."""
    return [*_differing_steps(checkpoint), *_differing_masters(checkpoint)]


def _differing_steps(checkpoint: Checkpoint) -> list[Note]:
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


def _differing_masters(checkpoint: Checkpoint) -> list[Note]:
    """A note when fp32 master weights are not the model's weights.

    Every optimizer step ends with the model's weights set to the rounded master weights.
    """
    sampled: set[object] = set()
    strange = tuple(
        fqn
        for fqn, param in checkpoint.params.items()
        if param.master and param.value and not _agree(param.master, param.value, sampled)
    )
    detail = (
        "the fp32 weights in the shards are not the module's weights: shards of two saves are "
        "mixed (DeepSpeed 0.9 also does this before the first step)"
    )
    return [Note(NoteKind.UNVERIFIED, strange, detail, needs_consent=True)] if strange else []


def _agree(master: StoredTensor, value: StoredTensor, sampled: set[object]) -> bool:
    """Whether the first elements of each record of the master, once a record, round to `value`."""
    strides, whole = row_major_strides(master.shape), value.chunks[0]
    if whole.strides or not master.dtype.is_floating_point:
        return True
    for part in master.chunks:
        if part.record in sampled or part.strides:
            continue
        sampled.add(part.record)
        count = min(part.chunk.numel, SAMPLE)
        at = sum(o * s for o, s in zip(part.chunk.offsets, strides, strict=True))
        ours = read_run(part, master.dtype, count)
        theirs = read_run(replace(whole, start=whole.start + at), value.dtype, count)
        exact = value.dtype is master.dtype
        if not all(_rounds_to(a, b, exact) for a, b in zip(ours, theirs, strict=True)):
            return False
    return True


def _rounds_to(master: float, value: float, exact: bool) -> bool:
    gap = 0.0 if exact else ROUNDING * abs(master) + TINY
    return master == value or abs(master - value) <= gap or master != master
