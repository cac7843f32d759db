"""A number is read from a training loader that means a part now.

Why it matters: `loader.sampler` and `loader.batch_size` belong to one process; averages and counts
made with them would be off by the number of processes. `len(loader)` and `len(loader.dataset)` stay
what they were: ceil(ceil(n/p)/(b/p)) = ceil(n/b).

Safety: safe for the length of a sampler that drew every sample once, and for a batch size that is
multiplied by a number of batches. A batch size that is used in another way is reported: as the
shape of a tensor it has to stay the process's own.

Before::

    def train(model, train_set):
        train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
        total = 0.0
        for inputs in train_loader:
            loss = model(inputs).mean()
            loss.backward()
            total += loss.item()
        return total / len(train_loader.sampler)

After::

    def train(model, train_set):
        train_loader = DataLoader(train_set, batch_size=8, shuffle=True)
        total = 0.0
        for inputs in train_loader:
            loss = model(inputs).mean()
            loss.backward()
            total += loss.item()
        return total / len(train_loader.dataset)
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose, replace
from migrate.facts.loader_plan import Plan, Way, plans
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted


class LoaderNumbers(Rule):
    """Finds `len(loader.sampler)`, `len(sampler)` and `loader.batch_size` of dealt-out loaders."""

    code = "MG306"
    title = "a number of a training loader means a part of the data"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such place."""
        every = {plan.call: plan for plan in plans(context) if plan.edited}
        if not every:
            return
        for source, call in context.facts.calls():
            if dotted(call.func) == "len" and len(call.args) == 1:
                yield from self._length(context, source, call.args[0].value, every)
        for source in context.sources:
            own = context.facts.definitions[source]
            for node in source.all(cst.Attribute):
                if node.attr.value == "batch_size" and not own.is_own(node):
                    its = context.facts.loaders_of(source, node.value)
                    if its and any(call in every for call in its):
                        yield from self._batch_size(context, source, node, its <= set(every))

    def _length(
        self,
        context: Context,
        source: Source,
        node: cst.BaseExpression,
        every: dict[cst.Call, Plan],
    ) -> Iterator[Finding]:
        """`len(loader.sampler)`, or `len(sampler)` of a sampler that is changed."""
        if isinstance(node, cst.Attribute) and node.attr.value == "sampler":
            its = [every[c] for c in context.facts.loaders_of(source, node.value) if c in every]
            if not its:
                return
            if all(plan.way in (Way.SHUFFLE, Way.PLAIN_SAMPLER) for plan in its):
                edit = replace(source, node.attr, "dataset")
                message = f"len({source.code(node)}) counts the samples of all processes"
                yield self.finding(source, node, message, [edit], requires=("MG301",))
                return
            yield self.finding(
                source,
                node,
                f"len({source.code(node)}) is the number of samples of one process",
                advice=f"len({source.code(node)}.sampler) is the one of all processes",
                effect=Effect.DIFFERENT,
            )
            return
        changed = {plan.sampler for plan in every.values() if plan.sampler is not None}
        if any(value.node in changed for value in context.flow.made_by(source, node)):
            start = source.code(node)
            edits = enclose(source, node, "", ".dataset")
            message = f"len({start}) counts the samples of all processes"
            yield self.finding(source, node, message, edits, requires=("MG301",))

    def _batch_size(
        self, context: Context, source: Source, node: cst.Attribute, only_training: bool
    ) -> Iterator[Finding]:
        if context.options.batch == "per-rank" or _is_written(source, node):
            return
        parent = source.parent(node)
        text = source.code(node)
        if only_training and isinstance(parent, cst.BinaryOperation) and _counts(parent, node):
            name, need = context.helper(source, "process_count")
            edits: list[Edit] = [need, *enclose(source, node, "(", f" * {name}())")]
            message = f"{text} is one process's: times their number it is the global one"
            yield self.finding(source, node, message, edits, requires=("MG302",))
            return
        yield self.finding(
            source,
            node,
            f"{text} is the batch size of one process",
            advice=f"right as the shape of a tensor; to count samples, multiply it: "
            f"{text} * process_count()",
            effect=Effect.UNKNOWN,
        )


def _is_written(source: Source, node: cst.Attribute) -> bool:
    return isinstance(source.parent(node), cst.AssignTarget)


def _counts(operation: cst.BinaryOperation, node: cst.CSTNode) -> bool:
    """Whether a batch size is multiplied by the number of a batch, or by the number of batches."""
    if not isinstance(operation.operator, cst.Multiply):
        return False
    other = operation.right if operation.left is node else operation.left
    if isinstance(other, cst.Call):
        return dotted(other.func) == "len"
    if isinstance(other, cst.BinaryOperation) and isinstance(other.operator, cst.Add):
        other = other.left
    return isinstance(other, cst.Name) and other.value in (
        "i", "idx", "step", "batch_idx", "batch_index", "iteration", "it", "batch_i", "b", "k",
    )  # fmt: skip
