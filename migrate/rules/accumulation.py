"""Gradients are accumulated over several batches before the weights change.

Why it matters: gradients are averaged over the processes after every `backward()`. Only the last
one before a step needs that; the others can add up what each process has of its own.

Safety: safe, the sum is the same but for rounding. It is edited only where the condition of the
step is known before the forward pass and the same in all processes, and nothing else reads, changes
or clears gradients; else the script stays as it is, which is exact and slower. Where gradients are
sharded, those that are not averaged yet take the memory of the whole model's.

Before::

    model = nn.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, inputs in enumerate(DataLoader(dataset, batch_size=8)):
        loss = model(inputs).mean() / 4
        loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

After::

    model = nn.DataParallel(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, inputs in enumerate(DataLoader(dataset, batch_size=8)):
        sync_gradients(model, (step + 1) % 4 == 0)
        loss = model(inputs).mean() / 4
        loss.backward()
        if (step + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._accumulating import Choice, NotEdited, choice_in
from migrate.rules._reducing_once import Plan, Planner
from migrate.rules._training import training

_BY_HAND = frozenset({"no_sync", "set_requires_gradient_sync", "sync_gradients"})


class Accumulation(Rule):
    """Finds steps that are taken only every few batches."""

    code = "MG405"
    title = "gradients are accumulated over several batches"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every loop that does so."""
        choices = dict(_choices(context))
        if not choices:
            return
        planner = Planner(context, list(choices.values()))
        plans: dict[cst.Call, Plan] = {}
        reasons: dict[cst.Call, str] = {}
        for call, choice in choices.items():
            try:
                plans[call] = planner.plan(choice)
            except NotEdited as reason:
                reasons[call] = str(reason)
        while left := planner.left_out(plans):
            call, reasons[call] = left
            del plans[call]
        for call, choice in choices.items():
            edits = plans[call].edits if call in plans else ()
            yield self._found(context, choice, call, edits, reasons.get(call, ""))

    def _found(
        self, context: Context, choice: Choice, call: cst.Call, edits: tuple[Edit, ...], reason: str
    ) -> Finding:
        place = choice.source, call
        if edits:
            message = "gradients are accumulated: averaged only in the last batch before each step"
            if context.target.shards:
                message += "; until then they are whole in memory"
            return self.finding(*place, message, edits)
        way = "call model.set_requires_gradient_sync(False) before all but the last"
        if context.target.has_wrapper:
            way = "run forward and backward of all but the last under model.no_sync()"
        return self.finding(
            *place,
            "gradients are accumulated: exact as it is, but averaged after every backward()",
            applicability=Applicability.INFO,
            advice=f"to save time, {way}; not edited: {reason}",
        )


def _choices(context: Context) -> Iterator[tuple[cst.Call, Choice]]:
    """The first `backward()` of each loop that accumulates, unless it is done by hand."""
    seen: set[cst.CSTNode] = set()
    for source, call in context.facts.backwards:
        for loop in context.facts.loops_around(source, call)[:1]:
            names = {_last(other) for other in source.inside(loop, cst.Call)}
            if loop in seen or names & _BY_HAND or context.facts.definitions[source].is_own(call):
                continue
            seen.add(loop)
            choice = choice_in(training(context), source, loop)
            if choice is not None:
                yield call, choice


def _last(call: cst.Call) -> str:
    func = call.func.attr if isinstance(call.func, cst.Attribute) else call.func
    return func.value.rstrip("_") if isinstance(func, cst.Name) else ""
