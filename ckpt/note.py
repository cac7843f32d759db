"""What a conversion does to a training state besides copying it, said before it is done.

A `Note` is of a closed kind and names its subjects. `needs_consent` marks a loss that the target
format does not imply: the conversion stops unless the user allows it. Converting to a format that
holds weights only drops the optimizer by definition; that is said, not asked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

__all__ = ["Note", "NoteKind", "summarise"]

SHOWN_SUBJECTS = 4


class NoteKind(Enum):
    """What happened to something of the user's."""

    DROPPED = "dropped"
    CAST = "cast"
    SYNTHESISED = "synthesised"
    RENAMED = "renamed"
    TIED = "tied"
    KEPT_ONE = "one rank's"
    BY_RANK = "by rank"
    UNVERIFIED = "not verified"


@dataclass(frozen=True, slots=True)
class Note:
    """One remark: what kind, about which names, and why.

    Attributes:
        needs_consent: a loss that the conversion does not imply; `--allow-loss` agrees to it.
        of_job: about the optimizer or the rest of the job, so that a conversion of weights only
            implies it.
    """

    kind: NoteKind
    subjects: tuple[str, ...]
    detail: str
    needs_consent: bool = False
    of_job: bool = False

    def __str__(self) -> str:
        return f"{self.kind.value}: {summarise(self.subjects)}: {self.detail}"


def summarise(names: Iterable[str], shown: int = SHOWN_SUBJECTS) -> str:
    """A few names and how many more there are."""
    listed = list(names)
    rest = len(listed) - shown
    return ", ".join(listed[:shown]) + (f" and {rest} more" if rest > 0 else "")
