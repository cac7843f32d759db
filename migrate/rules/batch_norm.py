"""A model with BatchNorm is made parallel.

Why it matters: DataParallel normalises each device's part of the batch by itself and keeps the
first device's running statistics. SyncBatchNorm normalises the whole batch, as training on one
large device would: better, and a change of meaning, so it is reported.

Safety: policy. `--bn keep` leaves DataParallel's numerics: a process normalises its own part, and
the first process's running statistics are kept. A model that cannot contain BatchNorm is left out;
the conversion leaves everything else in a model alone.

Before::

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model = nn.DataParallel(model)

After::

    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model = nn.DataParallel(torch.nn.SyncBatchNorm.convert_sync_batchnorm(model))
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.edit import Edit, enclose
from migrate.facts.models import submodule_wraps
from migrate.facts.program import Wrap
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._wrapping import CONVERT, early_optimizer, synchronises

_ASSUMPTION = (
    "BatchNorm statistics over the whole batch are wanted (SyncBatchNorm); --bn keep normalises "
    "each process's part, as DataParallel did"
)


class BatchNormOfParts(Rule):
    """Finds wraps of models that contain, or may contain, BatchNorm."""

    code = "MG203"
    title = "a model with BatchNorm is made parallel"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such wrap."""
        parts = submodule_wraps(context.facts)
        for wrap in context.facts.wraps:
            if wrap not in parts and synchronises(context, wrap):
                yield self._convert(context, wrap)

    def _convert(self, context: Context, wrap: Wrap) -> Finding:
        source, model = wrap.source, wrap.model or wrap.call
        message = f"BatchNorm of {source.code(model)} is synchronised over the processes"
        _, need = context.helper(source, context.target.wrap)
        edits: list[Edit] = [need]
        if early_optimizer(context, wrap) is None:  # else it is part of the wrap above that
            edits += enclose(source, model, f"{CONVERT}(", ")")
        return self.finding(
            source, wrap.call, message, edits, Applicability.POLICY,
            effect=Effect.BETTER, assumption=_ASSUMPTION,
        )  # fmt: skip
