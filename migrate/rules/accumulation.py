"""Gradients are accumulated over several batches before the weights change.

Why it matters: it is exact as it stands, because gradients are averaged after every `backward()`.
Only the last one before a step needs that, so time can be saved.

Safety: nothing is edited.

Before::

    for step, inputs in enumerate(DataLoader(dataset, batch_size=8)):
        loss = model(inputs).mean() / 4
        loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()

Finding::

    MG405 gradients are accumulated: exact as it is, but averaged after every backward()
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import method_name


class Accumulation(Rule):
    """Finds steps that are taken only every few batches."""

    code = "MG405"
    title = "gradients are accumulated over several batches"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every loop that does so."""
        seen: set[cst.CSTNode] = set()
        for source, call in context.facts.backwards:
            for loop in context.facts.loops_around(source, call)[:1]:
                if loop not in seen and _steps_rarely(source, loop) and not _is_done(source, loop):
                    seen.add(loop)
                    yield self._found(context, source, call)

    def _found(self, context: Context, source: Source, call: cst.Call) -> Finding:
        advice = (
            "to save time, call model.set_requires_gradient_sync(False) before all but the last"
        )
        if context.target.has_wrapper:
            advice = (
                "to save time, run forward and backward of all but the last under model.no_sync()"
            )
        return self.finding(
            source,
            call,
            "gradients are accumulated: exact as it is, but averaged after every backward()",
            applicability=Applicability.INFO,
            advice=advice,
        )


def _steps_rarely(source: Source, loop: cst.For | cst.While) -> bool:
    """Whether an optimizer's step stands under a condition on the number of the batch."""
    for call in source.inside(loop.body, cst.Call):
        if method_name(call) != "step":
            continue
        inside = [item for item in source.ancestors(call) if source.contains(loop.body, item)]
        for item in inside:
            if isinstance(item, cst.If) and _counts_batches(source, item, call):
                return True
    return False


def _counts_batches(source: Source, item: cst.If, call: cst.Call) -> bool:
    """`if (step + 1) % 4 == 0:` around a step, but not around the backward pass."""
    operations = source.inside(item.test, cst.BinaryOperation)
    is_every = any(isinstance(node.operator, cst.Modulo) for node in operations)
    names = {method_name(other) for other in source.inside(item, cst.Call)}
    return is_every and source.contains(item.body, call) and "backward" not in names


def _is_done(source: Source, loop: cst.For | cst.While) -> bool:
    names = {method_name(call) for call in source.inside(loop, cst.Call)}
    return bool(names & {"no_sync", "set_requires_gradient_sync"})
