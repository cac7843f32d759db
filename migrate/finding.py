"""What a rule has to say about one place, and the edits it makes there."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

from migrate.edit import Edit


class Applicability(Enum):
    """How far an edit can be trusted."""

    SAFE = "safe"
    """Provable from the files."""
    POLICY = "policy"
    """Right under an assumption that the finding states; an option switches it."""
    MANUAL = "manual"
    """Not edited: a human must look."""
    INFO = "info"
    """Nothing to do: something worth knowing, such as where equality is only approximate."""


class Effect(Enum):
    """What the place means for the equality of the training, worst first."""

    DIFFERENT = "trains differently"
    UNKNOWN = "may train differently"
    IF_EQUAL_PARTS = "the same if the processes' batches are equal"
    BETTER = "changed on purpose"
    SAME = "trains the same"


@dataclass(frozen=True, eq=False)
class Finding:
    """One place, by file and by line of the original text.

    A finding's edits are applied together or not at all. `requires` names rules without whose edits
    these would be wrong.
    """

    code: str
    message: str
    path: Path
    line: int
    column: int
    applicability: Applicability
    edits: tuple[Edit, ...] = ()
    effect: Effect = Effect.SAME
    advice: str = ""
    assumption: str = ""
    requires: frozenset[str] = field(default_factory=frozenset)
    suppressed: bool = False

    def without_edits(self, reason: str) -> Finding:
        """The same place as work for a human, who is told why nothing was edited."""
        advice = f"{self.advice} ({reason})" if self.advice else f"not edited: {reason}"
        return replace(self, edits=(), applicability=Applicability.MANUAL, advice=advice)
