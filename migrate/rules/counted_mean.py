"""The loss is a mean over a number that depends on the data, such as the unmasked tokens.

Why it matters: the parts of a batch hold different numbers of tokens, boxes or weighted samples.
The mean of the parts' means is then not the mean of the whole batch.

Safety: right if the divisor does not depend on the model: it becomes the average of the processes'
divisors, so that the averaged gradients are those of the whole batch. The divisor of a loss with
class weights or `ignore_index` is hidden in torch; such a loss is reported only.

Before::

    for inputs, targets, mask in DataLoader(dataset, batch_size=8):
        error = (model(inputs) - targets) ** 2
        loss = (error * mask).sum() / mask.sum()
        loss.backward()

After::

    for inputs, targets, mask in DataLoader(dataset, batch_size=8):
        error = (model(inputs) - targets) ** 2
        loss = (error * mask).sum() / global_mean(mask.sum())
        loss.backward()
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.batchwise import Batchwise
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.facts.kinds import Kind
from migrate.facts.losses import loss_maker, loss_reduction
from migrate.facts.obstacles import Obstacles
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source


class CountedMean(Rule):
    """Finds losses divided by a number of the data."""

    code = "MG410"
    title = "the loss is a mean over a number that depends on the data"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every division, and for every loss that divides inside."""
        batchwise = shared_batchwise(context.facts)
        seen: set[cst.CSTNode] = set()
        for source, expression in batchwise.trained_expressions:
            for division in source.inside(expression, cst.BinaryOperation):
                if division not in seen and self._is_counted(batchwise, source, division):
                    seen.add(division)
                    yield self._division(context, batchwise, source, division)
            for call in source.inside(expression, cst.Call):
                yield from self._hidden(context, batchwise, source, call, seen)

    def _is_counted(self, batchwise: Batchwise, source: Source, node: cst.BinaryOperation) -> bool:
        left, right = batchwise.of(source, node.left), batchwise.of(source, node.right)
        divides = isinstance(node.operator, cst.Divide)
        if not divides or batchwise.is_in_model(source, node) or right.number:
            return False
        return left.is_sum and right.kind is Kind.SUM and not batchwise.is_whole(right)

    def _division(
        self, context: Context, batchwise: Batchwise, source: Source, node: cst.BinaryOperation
    ) -> Finding:
        name, need = context.helper(source, "global_mean")
        code = source.one_line(node.right)
        message = f"the loss is divided by {code}, which differs between the processes"
        obstacle = Obstacles(context.facts, batchwise).obstacle(source, node)
        if obstacle:
            advice = f"divide by {name}({code}), computed where every process comes by"
            return self.finding(source, node, message, effect=Effect.DIFFERENT, advice=advice)
        edits: list[Edit] = [*enclose(source, node.right, f"{name}(", ")"), need]
        return self.finding(
            source,
            node,
            message + ": their average is taken",
            edits,
            Applicability.POLICY,
            assumption=f"{code} does not depend on the model's weights",
        )

    def _hidden(
        self, context: Context, batchwise: Batchwise, source: Source, call: cst.Call,
        seen: set[cst.CSTNode],
    ) -> Iterator[Finding]:  # fmt: skip
        made = loss_maker(context.flow, source, call)
        if made is None or loss_reduction(context.flow, source, call) != "ratio":
            return
        home, maker, name = made
        if maker in seen or batchwise.is_in_model(source, call):
            return
        seen.add(maker)
        helper, _ = context.helper(source, "global_mean")
        yield self.finding(
            home,
            maker,
            f"{name.rpartition('.')[2]} divides by the labels' weights in this part of the batch",
            effect=Effect.DIFFERENT,
            advice='to train exactly the same, use reduction="sum" and divide by '
            f"{helper}(the sum of the weights of the labels that count)",
        )
