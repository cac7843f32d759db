"""The model is put into a DataParallel class of the script's own.

Why it matters: such classes change how batches are scattered, where the loss is computed or what is
gathered. What of that a process per device still needs, only their author can tell.

Safety: not edited.

Before::

    class Balanced(nn.DataParallel):
        pass
    model = Balanced(nn.Linear(2, 2))

Finding::

    MG207 Balanced is a DataParallel of your own
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule


class CustomDataParallel(Rule):
    """Finds wraps by project classes that derive from DataParallel."""

    code = "MG207"
    title = "a DataParallel class of the script's own"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every use."""
        name, _ = context.helper(context.project.entry, context.target.wrap)
        for wrap in context.facts.wraps:
            if wrap.custom is not None and not wrap.distributed:
                custom = wrap.custom.node.name.value
                yield self.finding(
                    wrap.source, wrap.call, f"{custom} is a DataParallel of your own",
                    advice=f"use {name}(model) if it only scatters and gathers; move what it does "
                    "beyond that into the training step of one process",
                    effect=Effect.DIFFERENT,
                )  # fmt: skip
