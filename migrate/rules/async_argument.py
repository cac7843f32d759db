"""A tensor is moved with the argument `async`.

Why it matters: `async` is a keyword since Python 3.7, so the file is no longer Python; torch calls
the argument `non_blocking` since 0.4.

Safety: safe: the same argument under its present name.

Before::

    x = x.cuda(async=True)

After::

    x = x.cuda(non_blocking=True)
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule


class AsyncArgument(Rule):
    """Finds the lines that had to be repaired before the file could be parsed."""

    code = "MG109"
    title = "the argument async, a keyword since Python 3.7"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such line; the text was changed when it was read."""
        for source in context.sources:
            for line in source.repaired:
                yield Finding(
                    self.code, "async= is non_blocking= since torch 0.4", source.path, line, 1,
                    Applicability.SAFE,
                )  # fmt: skip
