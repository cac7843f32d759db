"""Everything that can go wrong with somebody's files, as one tree of exceptions.

    CkptError
    ├── UnknownFormat       the path is not a checkpoint that any format knows
    ├── AmbiguousSource     several readings fit; the user has to choose one
    ├── CorruptCheckpoint   a file is damaged, truncated or contradicts its neighbours
    ├── MissingPart         a file of the checkpoint, or something the target needs, is not there
    ├── UnsafePickle        a pickle names a class or function that is not plain training data
    ├── Unsupported         a layout that is recognised and cannot be converted
    ├── OutputExists        the output is there and may not be replaced
    ├── NoSpace             the disk is too small for the output
    └── LossRefused         the target cannot hold something and the user did not allow its loss

A message says what was read, where, what was expected and what to do. The command line prints it
as one line and exits with 2; a library user gets the exception.
"""

from __future__ import annotations

__all__ = [
    "AmbiguousSource",
    "CkptError",
    "CorruptCheckpoint",
    "LossRefused",
    "MissingPart",
    "NoSpace",
    "OutputExists",
    "UnknownFormat",
    "UnsafePickle",
    "Unsupported",
]


class CkptError(Exception):
    """A problem with a checkpoint or an output that its owner can act on.

    Attributes:
        problem: what was read, where, what was expected.
        hint: what to do, where that depends on what the user wants.
    """

    def __init__(self, problem: str, hint: str = "") -> None:
        super().__init__(f"{problem} {hint}".rstrip())
        self.problem, self.hint = problem, hint

    def __str__(self) -> str:  # those that are an OSError too would format an errno
        return f"{self.problem} {self.hint}".rstrip()


class UnknownFormat(CkptError, ValueError):
    """No format recognises the path."""


class AmbiguousSource(CkptError, ValueError):
    """More than one reading of the source fits; the message lists them and the option to choose."""


class CorruptCheckpoint(CkptError, ValueError):
    """A file is truncated, damaged, or does not belong to the others."""


class MissingPart(CkptError, FileNotFoundError):
    """A shard is missing, or the source lacks what the target needs."""


class UnsafePickle(CkptError, ValueError):
    """A pickle asks for a global that is not plain data; it was not executed."""


class Unsupported(CkptError, ValueError):
    """The layout is known, and there is no correct way to convert it."""


class OutputExists(CkptError, FileExistsError):
    """The output path is taken."""


class NoSpace(CkptError, OSError):
    """There is less free disk space than the output takes."""


class LossRefused(CkptError, ValueError):
    """Something would be lost that the user did not agree to lose."""
