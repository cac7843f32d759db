"""The loss is a sum over the batch, not a mean.

Why it matters: gradients are averaged over the processes. The average of means is the mean, but the
average of sums is the sum divided by the number of processes: the training would be slower by that
factor, without an error.

Safety: safe where the arithmetic shows a sum. The sum that DataParallel's outputs, one for each
device, were added up to is scaled in the same way. Where a sum is added to something that is none,
a human must scale the sum alone.

Before::

    criterion = nn.MSELoss(reduction="sum")
    for inputs, targets in DataLoader(dataset, batch_size=8):
        loss = criterion(model(inputs), targets)
        loss.backward()

After::

    criterion = nn.MSELoss(reduction="sum")
    for inputs, targets in DataLoader(dataset, batch_size=8):
        loss = criterion(model(inputs), targets)
        (loss * process_count()).backward()
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.batchwise import Batchwise
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.facts.kinds import Kind
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted, method_name, receiver


class SumLoss(Rule):
    """Finds `backward()` on sums over the batch."""

    code = "MG403"
    title = "the loss is a sum over the batch"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every `backward()` whose loss is not a mean."""
        batchwise = shared_batchwise(context.facts)
        for source, call in context.facts.backwards:
            loss = trained_loss(call)
            if loss is None or is_scaled(context, batchwise, source, loss):
                continue
            value = batchwise.of(source, loss)
            if value.is_sum:
                yield self._scaled(context, source, loss)
            elif value.kind is Kind.METRIC:
                yield self._mixed(context, source, loss)

    def _scaled(self, context: Context, source: Source, loss: cst.BaseExpression) -> Finding:
        name, need = context.helper(source, "process_count")
        is_argument = isinstance(source.parent(loss), cst.Arg)
        if isinstance(loss, cst.Name | cst.Attribute | cst.Call | cst.Subscript):
            before, after = ("", "") if is_argument else ("(", ")")
            around = enclose(source, loss, before, f" * {name}(){after}")
        else:
            around = enclose(source, loss, "(", f") * {name}()")
        edits: list[Edit] = [*around, need]
        code = source.code(loss)
        message = f"{code} is a sum over the batch: scaled, because gradients are averaged"
        return self.finding(source, loss, message, edits)

    def _mixed(self, context: Context, source: Source, loss: cst.BaseExpression) -> Finding:
        name, _ = context.helper(source, "process_count")
        return self.finding(
            source,
            loss,
            f"{source.code(loss)} adds a sum over the batch to something else; it is averaged",
            effect=Effect.DIFFERENT,
            advice=f"multiply the sum, and only the sum, by {name}() before it is added",
        )


def trained_loss(call: cst.Call) -> cst.BaseExpression | None:
    """`loss` in `loss.backward()` and in `scaler.scale(loss).backward()`."""
    loss = receiver(call)
    if isinstance(loss, cst.Call) and method_name(loss) == "scale" and loss.args:
        return loss.args[0].value
    if method_name(call) == "backward" and dotted(loss) == "torch.autograd":
        return None
    if isinstance(loss, cst.Name | cst.Attribute) and method_name(call) == "manual_backward":
        return None
    return loss


def is_scaled(
    context: Context, batchwise: Batchwise, source: Source, loss: cst.BaseExpression, depth: int = 0
) -> bool:
    """Whether a loss is multiplied by the number of processes already."""
    for operation in source.inside(loss, cst.BinaryOperation):
        sides = (operation.left, operation.right)
        is_product = isinstance(operation.operator, cst.Multiply)
        if is_product and any(_counts(context, source, side) for side in sides):
            return True
    names = source.inside(loss, cst.Name)
    bindings = [b for name in names for b in batchwise.reaching[source].of(name)]
    for binding in bindings if depth < 3 else ():
        value = getattr(binding.node, "value", None)
        if (
            isinstance(binding.node, cst.AugAssign)
            and isinstance(binding.node.operator, cst.MultiplyAssign)
            and _counts(context, source, binding.node.value)
        ):
            return True
        part = value if isinstance(value, cst.BinaryOperation) else None
        if part is not None and is_scaled(context, batchwise, source, part, depth + 1):
            return True
    return False


def _counts(context: Context, source: Source, node: cst.CSTNode) -> bool:
    """`process_count()`, `dist.get_world_size()`, or a variable that is called after it."""
    name, _ = context.helper(source, "process_count")
    for call in source.inside(node, cst.Call):
        full = context.facts.callee(source, call) or ""
        if dotted(call.func) == name or full.endswith("get_world_size"):
            return True
    return any("world_size" in item.value for item in source.inside(node, cst.Name))
