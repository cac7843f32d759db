"""How gradients are reduced once before each step: what is written, and whether it is right."""

from __future__ import annotations

from dataclasses import dataclass

import libcst as cst

from migrate.edit import Edit, insert_before
from migrate.facts.models import may_have_batch_norm
from migrate.rule import Context
from migrate.rules._accumulating import (
    Choice,
    Forwards,
    Gradients,
    NotEdited,
    Run,
    always_runs,
)
from migrate.rules._step_condition import Now, changed, condition, ends_with_the_loop
from migrate.rules._training import are_exclusive, training
from migrate.rules._wrapping import CONVERTS
from migrate.source import Source
from migrate.syntax import (
    assigned_targets,
    block_statements,
    dotted,
    flat_targets,
    method_name,
    receiver,
    string_value,
)
from migrate.values import Value, Values


@dataclass(frozen=True, eq=False)
class Plan:
    """An edit that reduces the gradients of some models once before each step."""

    choice: Choice
    models: dict[str, Values]
    edits: tuple[Edit, ...]

    def trains_none_of(self, values: Values) -> bool:
        """Whether it is known that a piece of code runs other models."""
        own = frozenset[Value]().union(*self.models.values())
        return bool(values) and not own & values


class Planner:
    """Asks, for each loop, all that has to be known."""

    def __init__(self, context: Context, choices: list[Choice]) -> None:
        self.context = context
        self.know = training(context)
        self.choices = choices
        self.forwards = Forwards(self.know)
        self.gradients = Gradients(self.know)

    def plan(self, choice: Choice) -> Plan:
        """The edit for a loop.

        Raises:
            NotEdited: it would not be right, or that is not known.
        """
        source, loop = choice.source, choice.loop
        if source.parent(choice.node) is not loop.body:
            raise NotEdited(f"line {source.line_of(choice.node)} is inside another condition")
        backwards = self._backwards(choice)
        models = self._models(choice, backwards)
        now = condition(self.know, choice)
        self._only_here(choice, models)
        self._cleared(now)
        for run in models.values():
            self._same_buffers(run.values)
        place = self._place(now, models)
        name, need = self.context.helper(source, "sync_gradients")
        lines = [f"{name}({text}, {now.text})" for text in models]
        edits = (insert_before(source, place, lines), need)
        return Plan(choice, {text: run.values for text, run in models.items()}, edits)

    def left_out(self, plans: dict[cst.Call, Plan]) -> tuple[cst.Call, str] | None:
        """A loop whose models are also trained where gradients would then not be averaged."""
        for source, call in self.know.facts.backwards:
            if any(p.choice.source is source and source.contains(p.choice.loop, call)
                   for p in plans.values()):  # fmt: skip
                continue
            around = self.know.facts.loops_around(source, call)
            function = source.function_of(call)
            block = around[0].body if around else function.body if function else None
            runs = self.forwards.of(source, block).values() if block is not None else ()
            values = frozenset(value for run in runs for value in run.values)
            for first, plan in plans.items():
                if not plan.trains_none_of(values):
                    return first, f"line {source.line_of(call)} may train the same model"
        return None

    def _backwards(self, choice: Choice) -> list[cst.Call]:
        """The `backward()` of the loop, exactly one of which runs in every turn."""
        source, body = choice.source, choice.loop.body
        calls = [
            c for s, c in self.know.facts.backwards if s is source and source.contains(body, c)
        ]
        for call in calls:
            line = f"line {source.line_of(call)}"
            if method_name(call) != "backward" or self.know.facts.is_optimizer(
                source, receiver(call)
            ):
                raise NotEdited(f"{source.one_line(call.func)} changes gradients in its own way")
            scaled = [x for x in source.ancestors(call) if isinstance(x, cst.With)]
            if any("scale_loss" in source.code(i.item) for x in scaled for i in x.items):
                raise NotEdited(f"apex changes gradients after the backward() of {line}")
            if any(not are_exclusive(source, call, other) for other in calls if other is not call):
                raise NotEdited("several backward() run in one turn")
        if not always_runs(source, body, set(calls), whole=False):
            raise NotEdited("backward() may be left out in the turn of a step")
        return calls

    def _models(self, choice: Choice, backwards: list[cst.Call]) -> dict[str, Run]:
        """The models behind the `backward()`, by their expressions in the loop."""
        source, body = choice.source, choice.loop.body
        behind = [self.know.calls_behind(source, receiver(c) or c) for c in backwards]
        found: dict[str, Run] = {}
        for text, run in self.forwards.of(source, body).items():
            trained = [any(call in calls for call in run.calls) for calls in behind]
            if not any(trained):
                continue
            line = source.line_of(run.calls[0])
            if text is None or self._is_bound_in(source, body, text):
                raise NotEdited(f"which model line {line} runs is not seen there")
            if not run.certain or not all(trained):
                raise NotEdited(f"{text} may not be trained in the turn of a step")
            found[text] = run
        if not found:
            raise NotEdited("the forward pass behind backward() is not seen")
        return found

    def _is_bound_in(self, source: Source, body: cst.BaseSuite, text: str) -> bool:
        targets = [
            source.code(single)
            for kind in (cst.Assign, cst.AnnAssign, cst.For, cst.WithItem)
            for node in source.inside(body, kind)
            for target in assigned_targets(node)
            for single in flat_targets(target)
        ]
        return any(text == item or text.startswith(f"{item}.") for item in targets)

    def _only_here(self, choice: Choice, models: dict[str, Run]) -> None:
        """Nothing but what follows the choice takes steps, or reads or changes gradients."""
        own = frozenset(value for run in models.values() for value in run.values)
        for source, call in self.gradients.others(choice):
            if not self._is_covered(source, call):
                raise NotEdited(f"{self._line(choice, source, call)} takes a step as well")
        for source, node in self.gradients.uses:
            its = self.know.facts.models_in(source, node)
            if not self._is_covered(source, node) and (not its or its & own):
                line = self._line(choice, source, node)
                raise NotEdited(f"{line} reads or changes gradients at another time")

    def _cleared(self, now: Now) -> None:
        """`zero_grad()` finds no gradients that are not averaged yet, which it would not reach."""
        if not self.context.target.shards:
            return
        choice = now.choice
        for source, call in self.gradients.clears:
            if self._is_covered(source, call):
                continue
            in_loop = source is choice.source and source.contains(choice.loop, call)
            is_early = self.gradients.runs_once(source, call)
            if in_loop or not (is_early or ends_with_the_loop(now)):
                line = self._line(choice, source, call)
                raise NotEdited(f"zero_grad() of {line} would not reach gradients left over there")

    def _is_covered(self, source: Source, node: cst.CSTNode) -> bool:
        def covers(home: Source, place: cst.CSTNode) -> bool:
            return any(choice.covers(home, place) for choice in self.choices)

        return self.gradients.is_covered(source, node, covers)

    @staticmethod
    def _line(choice: Choice, source: Source, node: cst.CSTNode) -> str:
        where = "" if source is choice.source else f" of {source.path.name}"
        return f"line {source.line_of(node)}{where}"

    def _same_buffers(self, values: Values) -> None:
        """Buffers are shared with gradients, so they must be the same in all processes anyway."""
        if not self.context.target.has_wrapper:
            return
        facts = self.know.facts
        is_kept = self.context.options.batch_norm == "keep"
        wraps = [w for w in facts.wraps if w.distributed and w.inner & values]
        converted = [
            value
            for source, call in facts.calls_of(CONVERTS.pattern)
            for arg in call.args[:1]
            for value in self.know.flow.of(source, arg.value)
        ]
        is_plain = is_kept or any(not w.inner & set(converted) for w in wraps)
        if is_plain and may_have_batch_norm(facts, values):
            raise NotEdited("statistics of BatchNorm are shared when gradients are")
        for source in self.context.sources:
            for call in source.all(cst.Call):
                is_buffer = method_name(call) == "register_buffer"
                if is_buffer and self.know.batchwise.is_in_model(source, call):
                    self._is_constant(source, call)

    def _is_constant(self, source: Source, call: cst.Call) -> None:
        """Raises NotEdited for a buffer that is written after the constructor."""
        name = string_value(call.args[0].value) if call.args else None
        cls = source.class_of(call)
        for node in source.inside(cls, cst.Attribute) if cls is not None else ():
            function = source.function_of(node)
            in_constructor = function is not None and function.name.value == "__init__"
            if dotted(node) == f"self.{name}" and not in_constructor and _is_written(source, node):
                raise NotEdited(f"the buffer {name} is shared when gradients are")

    def _place(self, now: Now, models: dict[str, Run]) -> cst.CSTNode:
        """The first statement of the loop, or the first that runs a model."""
        source = now.choice.source
        statements = block_statements(now.choice.loop.body)
        calls = [call for run in models.values() for call in run.calls]
        first = next(s for s in statements if any(source.contains(s, call) for call in calls))
        for place in (statements[0], first):
            if changed(self.know, now, place) is None:
                return place
        name = changed(self.know, now, first)
        raise NotEdited(f"{name} changes between the forward pass and the step")


def _is_written(source: Source, node: cst.CSTNode) -> bool:
    """`self.x = …`, `self.x[i] += …`, `self.x.data.mul_(…)`."""
    for item in source.ancestors(node):
        match item:
            case cst.AssignTarget():
                return True
            case cst.AugAssign():
                return item.target is node
            case cst.Attribute() if item.attr.value.endswith("_"):
                return True
            case cst.Attribute() | cst.Subscript() if item.value is node:
                node = item
            case _:
                return False
    return False
