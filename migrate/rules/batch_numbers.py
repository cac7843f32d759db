"""A number of the training loop is computed from this process's part of the batch.

Why it matters: after the rewrite a process sees a part of every batch, so a printed loss, a count
or a running average would be that of the part, and decisions taken on it would differ between
processes.

Safety: safe where the arithmetic shows a mean or a sum over the batch; under the stated assumption
where a loss comes from outside the files. The numbers are averaged, or added up, over the processes
with one small all-reduce. Evaluation runs whole on every process; its numbers are left alone.

Before::

    loader = DataLoader(dataset, batch_size=8)
    criterion = nn.CrossEntropyLoss()
    for inputs, targets in loader:
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        running += loss.item()
        correct += outputs.argmax(1).eq(targets).sum().item()
        total += targets.size(0)

After::

    loader = DataLoader(dataset, batch_size=8)
    criterion = nn.CrossEntropyLoss()
    for inputs, targets in loader:
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        running += global_mean(loss).item()
        correct += global_sum(outputs.argmax(1).eq(targets).sum()).item()
        total += global_sum(targets.size(0))
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.edit import Edit, enclose
from migrate.facts.batchwise import Batchwise
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.facts.kinds import Batch, Kind
from migrate.facts.leaving import Reduction, Reductions
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._process import short
from migrate.source import Source


class BatchNumbers(Rule):
    """Finds numbers that a training step gives out, and makes them those of the whole batch."""

    code = "MG401"
    title = "a number of the training loop is computed from a part of the batch"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every number; those that cannot be edited once for each variable."""
        batchwise = shared_batchwise(context.facts)
        seen: set[tuple[Source, str]] = set()
        for reduction in Reductions(context.facts, batchwise).all():
            source, node = reduction.source, reduction.node
            if not reduction.obstacle:
                yield self._edited(context, batchwise, reduction)
                continue
            key = (source, source.code(node))
            if key not in seen:
                seen.add(key)
                yield self._manual(context, reduction)

    def _edited(self, context: Context, batchwise: Batchwise, reduction: Reduction) -> Finding:
        source, node, value = reduction.source, reduction.node, reduction.value
        name, need = context.helper(source, "global_mean" if value.is_mean else "global_sum")
        closing = ")"
        if value.is_sum and reduction.phase:
            closing = f", sharded={reduction.phase})"
        edits: list[Edit] = [*enclose(source, node, f"{name}(", closing), need]
        what = "averaged" if value.is_mean else "added up"
        message = f"{short(source, node)} is of a part of the batch: {what} over the processes"
        assumption = _assumption(batchwise, reduction, source.code(node))
        return self.finding(
            source,
            node,
            message,
            edits,
            Applicability.POLICY if assumption else Applicability.SAFE,
            assumption=assumption,
        )

    def _manual(self, context: Context, reduction: Reduction) -> Finding:
        source, node = reduction.source, reduction.node
        name, _ = context.helper(source, "global_mean" if reduction.value.is_mean else "global_sum")
        code = short(source, node)
        advice = f"compute {name}({code}) before, where every process comes by, and use it here"
        if reduction.value.kind is Kind.METRIC:
            advice = "gather its inputs from all processes first, then compute it"
        return self.finding(
            source,
            node,
            f"{code} is of this process's part of the batch, {reduction.obstacle}",
            applicability=Applicability.INFO if reduction.by_rank else Applicability.MANUAL,
            effect=Effect.SAME,
            advice=advice,
        )


def _assumption(batchwise: Batchwise, reduction: Reduction, code: str) -> str:
    value: Batch = reduction.value
    if value.is_mean and value.assumed:
        return f"{' '.join(code.split())} is a mean over the batch, as losses are by default"
    known = [batchwise.dealt_out(origin) for origin in value.origins]
    if value.is_sum and None in known:
        return "the batches of this loop are dealt out to the processes"
    return ""
