"""Files: written by several processes, missing, or with other contents."""

from __future__ import annotations

import re
from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison

SHOWN = 5


def find(c: Comparison) -> Iterator[Cause]:
    """Races first, then files that one of the two lacks, then what is in them."""
    several = sorted(c.candidate.written_by_several())
    if several:
        yield Cause(
            Place.FILES,
            "written-twice",
            "several processes write the same file",
            _listed(several),
            "write on the main process only",
        )
    if c.candidate.is_good and c.original.is_good:
        yield from _missing(c)
    for file in c.final.files if c.final else ():
        if file.problem or file.difference > c.tolerance:
            problem = file.problem or f"largest difference of a tensor: {file.difference:.3g}"
            title = f"{file.path} has other contents than the original's"
            yield Cause(Place.FILES, "other-content", title, problem)


def _missing(c: Comparison) -> Iterator[Cause]:
    before = {_plain(path): path for rank in c.original.ranks.values() for path in rank.written}
    after = {_plain(path): path for rank in c.candidate.ranks.values() for path in rank.written}
    lost = sorted(path for name, path in before.items() if name not in after)
    new = sorted(path for name, path in after.items() if name not in before)
    if lost:
        yield Cause(
            Place.FILES,
            "files-missing",
            "files that the original writes are not written",
            _listed(lost),
            "look for a condition on the rank that is never true",
        )
    if new:
        yield Cause(
            Place.FILES,
            "files-added",
            "files are written that the original does not write",
            _listed(new),
            is_note=not lost,
        )


def _plain(path: str) -> str:
    """Without numbers, which may be the time of day."""
    return re.sub(r"\d+", "0", path)


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - SHOWN} more" if len(paths) > SHOWN else ""
    return ", ".join(paths[:SHOWN]) + more
