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

from migrate.edit import enclose
from migrate.facts import Wrap
from migrate.finding import Applicability, Effect, Finding
from migrate.models import may_have_batch_norm, submodule_wraps
from migrate.rule import Context, Rule
from migrate.rules._wrapping import CONVERT

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
        if context.options.batch_norm == "keep":
            return
        parts = submodule_wraps(context.facts)
        for wrap in context.facts.wraps:
            if wrap.functional or wrap.custom or wrap in parts or wrap.model is None:
                continue
            if may_have_batch_norm(context.facts, wrap.inner) and not _is_converted(context, wrap):
                yield self._convert(context, wrap)

    def _convert(self, context: Context, wrap: Wrap) -> Finding:
        assert wrap.model is not None
        source = wrap.source
        message = f"BatchNorm of {source.code(wrap.model)} is synchronised over the processes"
        edits = enclose(source, wrap.model, f"{CONVERT}(", ")")
        _, need = context.helper(source, context.target.wrap)
        return self.finding(
            source, wrap.call, message, [*edits, need], Applicability.POLICY,
            effect=Effect.BETTER, assumption=_ASSUMPTION,
        )  # fmt: skip


def _is_converted(context: Context, wrap: Wrap) -> bool:
    """Whether the program converts a model that may be this one."""
    for source, call in context.facts.calls_of(r"convert_sync(_)?batchnorm|convert_syncbn_model"):
        if call.args and context.flow.of(source, call.args[0].value) & wrap.inner:
            return True
    return False
