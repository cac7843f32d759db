"""A distributed sampler is not told the epoch.

Why it matters: DistributedSampler shuffles by its seed and the epoch's number. Without `set_epoch`
every epoch has the order of the first one; nothing says so.

Safety: safe. The call stands where a pass over the loader begins, before its iterator is made.
Where no variable counts the passes, the sampler counts them itself. A loader that is cycled once
with `itertools.cycle` repeated its first pass before, too, and is left alone.

Before::

    import torch
    from torch.utils.data import DataLoader, DistributedSampler
    def train(model, train_set):
        sampler = DistributedSampler(train_set)
        train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
        for epoch in range(10):
            for inputs in train_loader:
                model(inputs).mean().backward()

After::

    import torch
    from torch.utils.data import DataLoader, DistributedSampler
    def train(model, train_set):
        sampler = DistributedSampler(train_set)
        train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
        for epoch in range(10):
            train_loader.sampler.set_epoch(epoch)
            for inputs in train_loader:
                model(inputs).mean().backward()
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import insert_before, step
from migrate.facts.epochs import Epochs, Pass, is_simple
from migrate.facts.loader_plan import Plan, Way, plans
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import literal, method_name, receiver
from migrate.values import Made


class EpochOrder(Rule):
    """Finds passes over dealt-out loaders before which nothing calls set_epoch."""

    code = "MG303"
    title = "a distributed sampler is not told the epoch"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every place where a pass begins, or where set_epoch comes too late."""
        epochs = Epochs(context)
        seen: set[tuple[cst.CSTNode, str]] = set()
        for plan in plans(context):
            if not _shuffles(context, plan):
                continue
            calls = _set_epochs(context, plan)
            if calls:
                yield from self._late(context, plan, calls)
                continue
            for item, epoch in _places(epochs, plan):
                key = (_statement(item.source, item.node), item.source.code(item.loader))
                if key not in seen:
                    seen.add(key)
                    yield self._told(context, plan, item, epoch)

    def _told(self, context: Context, plan: Plan, item: Pass, epoch: str | None) -> Finding:
        source = item.source
        loader = source.code(item.loader)
        message = f"{loader} draws a new order in every epoch"
        is_new = epoch is None and _is_made_anew(context, plan, item)
        if not is_simple(item.loader) or is_new:
            return self.finding(
                source,
                item.node,
                f"{loader} would have the order of its first epoch in every epoch",
                advice="make the loader once, give it a name, and call its "
                "sampler.set_epoch(number of the pass) before every pass",
                effect=Effect.DIFFERENT,
            )
        line = f"{loader}.sampler.set_epoch({epoch or f'{loader}.sampler.epoch + 1'})"
        guard = _guard(context, plan, item)
        lines = [f"if {guard}:", step(source, item.node) + line] if guard else [line]
        edit = insert_before(source, _statement(source, item.node), lines)
        requires = ("MG301",) if plan.edited else ()
        return self.finding(source, item.node, message, [edit], requires=requires)

    def _late(
        self, context: Context, plan: Plan, calls: list[tuple[Source, cst.Call]]
    ) -> Iterator[Finding]:
        """The calls of set_epoch that come when the iterator has its order already."""
        bodies = [
            (loop.source, loop.node.body)
            for loop in plan.loader.loops
            if loop.trains and isinstance(loop.node, cst.For)
        ]
        for source, call in calls:
            if any(s is source and source.contains(body, call) for s, body in bodies):
                yield self.finding(
                    source,
                    call,
                    f"{source.code(call)} comes when the epoch's order is drawn already",
                    advice="call it before the loop over the loader",
                    effect=Effect.DIFFERENT,
                )


def _shuffles(context: Context, plan: Plan) -> bool:
    """Whether a DistributedSampler with an order of its own deals this loader out."""
    if plan.way in (Way.SHUFFLE, Way.SAMPLER):
        given = plan.argument("shuffle")
        is_new = plan.way is Way.SHUFFLE or plan.optional
        return is_new and given is not None and literal(given.value) not in (False, None)
    if plan.way is Way.PLAIN_SAMPLER and plan.sampler is not None:
        name = context.flow.qualified(plan.source, plan.sampler.func) or ""
        return name.endswith("RandomSampler")
    if plan.way is Way.DONE:
        return any(_is_shuffling(value) for value in _samplers(context, plan))
    return plan.way is Way.KEYWORDS


def _samplers(context: Context, plan: Plan) -> list[Made]:
    arg = plan.argument("sampler")
    made = context.flow.made_by(plan.source, arg.value) if arg else []
    return [value for value in made if value.name.endswith("DistributedSampler")]


def _is_shuffling(value: Made) -> bool:
    args = value.node.args if isinstance(value.node, cst.Call) else ()
    shuffle = [arg for arg in args if arg.keyword is not None and arg.keyword.value == "shuffle"]
    return not shuffle or literal(shuffle[0].value) is not False


def _set_epochs(context: Context, plan: Plan) -> list[tuple[Source, cst.Call]]:
    """The calls that tell this loader's sampler its epoch."""
    samplers = set(_samplers(context, plan))
    found = []
    for source, call in context.facts.calls():
        if method_name(call) != "set_epoch":
            continue
        of = receiver(call)
        loader = of.value if isinstance(of, cst.Attribute) else None
        is_its = loader is not None and plan.call in context.facts.loaders_of(source, loader)
        if is_its or samplers & context.flow.of(source, of):
            found.append((source, call))
    return found


def _places(epochs: Epochs, plan: Plan) -> Iterator[tuple[Pass, str | None]]:
    """Where the sampler is told, each with the variable that counts, if there is one."""
    passes = [item for item in epochs.passes(plan.loader) if epochs.repeats(item.source, item.node)]
    for item in passes:
        epoch = epochs.epoch_at(item.source, item.node)
        callers = epochs.at_callers(item) if epoch is None else []
        if callers:
            yield from callers
        else:
            yield item, epoch


def _statement(source: Source, node: cst.CSTNode) -> cst.CSTNode:
    """The statement before which a line can be written so that it runs before `node`."""
    statement = node
    for item in (node, *source.ancestors(node)):
        if isinstance(item, cst.SimpleStatementSuite):
            return item
        if isinstance(item, cst.SimpleStatementLine | cst.BaseCompoundStatement):
            statement = item
            break
    above = source.parent(statement)
    while isinstance(above, cst.If) and above.orelse is statement:
        statement, above = above, source.parent(above)
    return statement


def _is_made_anew(context: Context, plan: Plan, item: Pass) -> bool:
    """Whether the loader is made again for every pass, so that its sampler cannot count them."""
    loops = context.facts.loops_around(item.source, item.node)
    around = [loop for loop in loops if item.source.contains(loop.body, item.node)]
    return plan.source is item.source and any(plan.source.contains(x, plan.call) for x in around)


def _guard(context: Context, plan: Plan, item: Pass) -> str:
    """The condition under which the loader at this place has a DistributedSampler."""
    every = context.facts.loaders_of(item.source, item.loader)
    sure = {
        other.call
        for other in plans(context)
        if _shuffles(context, other) and not other.condition and not _is_conditional(context, other)
    }
    if every <= sure or (len(every) == 1 and plan.condition and _has_constant_key(item.loader)):
        return ""
    return f"hasattr({item.source.code(item.loader)}.sampler, 'set_epoch')"


def _has_constant_key(node: cst.BaseExpression) -> bool:
    index = node.slice[0].slice if isinstance(node, cst.Subscript) else None
    return isinstance(index, cst.Index) and isinstance(index.value, cst.SimpleString)


def _is_conditional(context: Context, plan: Plan) -> bool:
    """Whether the sampler can be another one, or none."""
    if plan.way is not Way.DONE:
        return plan.optional
    arg = plan.argument("sampler")
    if arg is None:
        return False
    values = context.flow.of(plan.source, arg.value)
    assigned = context.facts.loading.assigned(plan.source, arg.value) if isinstance(
        arg.value, cst.Name) else [arg.value]  # fmt: skip
    is_choice = any(isinstance(v, cst.IfExp) or literal(v) is None for v in assigned)
    return is_choice or len(values) != len(_samplers(context, plan))
