"""What has to be known to reduce accumulated gradients only once before each step.

Gradients may stay unreduced as long as nobody looks at them. So in the turn of a loop in which a
step is taken, every model has to run forward and backward, and nothing but that turn's last
statements may read or change gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import libcst as cst

from migrate.names import parameters
from migrate.rules._training import Training, without_gradients
from migrate.source import Source
from migrate.syntax import block_statements, dotted, method_name, receiver
from migrate.values import Function, Values, is_decorated

Loop = cst.For | cst.While
_MAY_NOT_RUN = (
    cst.IfExp, cst.BooleanOperation, cst.Lambda, cst.ListComp, cst.SetComp, cst.DictComp,
    cst.GeneratorExp, cst.FunctionDef, cst.ClassDef,
)  # fmt: skip
_LEAVES = (cst.Return, cst.Break, cst.Continue, cst.Raise)
_SCHEDULER = re.compile(r"sched|lr_|profil|writer", re.I)
_MAX_DEPTH = 5


class NotEdited(Exception):
    """Gradients have to be reduced after every `backward()`; the text says why."""


@dataclass(frozen=True, eq=False)
class Choice:
    """The `if` that decides whether this turn of the loop takes a step.

    Attributes:
        leaves: it is `if …: continue` above the step.
        region: the statements that run only where a step is taken.
    """

    source: Source
    loop: Loop
    node: cst.If
    leaves: bool
    region: tuple[cst.CSTNode, ...]

    def covers(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether a place runs only where a step is taken."""
        return source is self.source and any(source.contains(item, node) for item in self.region)


@dataclass
class Run:
    """A model that a piece of code runs: what it can be, and whether it always runs."""

    values: Values
    calls: list[cst.Call] = field(default_factory=list)
    certain: bool = False


def choice_in(know: Training, source: Source, loop: Loop) -> Choice | None:
    """The condition, on the number of the batch, under which a loop takes a step."""
    for node in source.inside(loop.body, cst.If):
        if know.facts.loops_around(source, node)[:1] != [loop] or not _is_every(know, source, node):
            continue
        if _takes_step(source, node.body):
            return Choice(source, loop, node, False, (node.body,))
        siblings = source.siblings(node)
        rest = tuple(siblings[siblings.index(node) + 1 :]) if node in siblings else ()
        last = source.inside(node.body, cst.Continue)
        if len(last) == 1 and node.orelse is None and any(_takes_step(source, x) for x in rest):
            return Choice(source, loop, node, True, rest)
    return None


def _is_every(know: Training, source: Source, node: cst.If) -> bool:
    """`if (step + 1) % 4 == 0:`, or a name for that."""
    tests: list[cst.CSTNode] = [node.test]
    if isinstance(node.test, cst.Name):
        tests = [getattr(b.node, "value", b.node) for b in know.reaching[source].of(node.test)]
    return any(
        isinstance(item.operator, cst.Modulo)
        for test in tests
        if not isinstance(test, cst.For | cst.CompFor | cst.Param)
        for item in source.inside(test, cst.BinaryOperation)
    )


def _takes_step(source: Source, root: cst.CSTNode) -> bool:
    names = {method_name(call) for call in source.inside(root, cst.Call)}
    return "step" in names and "backward" not in names


class Forwards:
    """Which models a piece of code runs with gradients, and by which expression it knows them."""

    def __init__(self, know: Training) -> None:
        self.know = know
        self.flow = know.flow

    def of(self, source: Source, block: cst.BaseSuite, depth: int = 0) -> dict[str | None, Run]:
        """The models by the text of their expression in `block`; under None those without one."""
        found: dict[str | None, Run] = {}
        sure: dict[str | None, set[cst.CSTNode]] = {}
        for call in source.inside(block, cst.Call):
            for text, run in self._of_call(source, call, depth).items():
                entry = found.setdefault(text, Run(frozenset()))
                entry.values |= run.values
                entry.calls.append(call)
                if run.certain:
                    sure.setdefault(text, set()).add(call)
        for text, run in found.items():
            run.certain = always_runs(source, block, sure.get(text, set()), depth > 0)
        return found

    def _of_call(self, source: Source, call: cst.Call, depth: int) -> dict[str | None, Run]:
        if without_gradients(source, call) or self.know.facts.definitions[source].is_own(call):
            return {}
        values = self.know.model_of(source, call)
        if values:
            return {self._text(source, call): Run(values, certain=True)}
        found: dict[str | None, Run] = {}
        for callee in self.flow.callees.get(call, ()) if depth < _MAX_DEPTH else ():
            if callee.node.name.value == "__init__":
                continue
            for text, run in self.of(callee.source, callee.node.body, depth + 1).items():
                mapped = text and self._at_call(source, call, callee, text)
                found[mapped] = Run(run.values, certain=run.certain)
        return found

    def _text(self, source: Source, call: cst.Call) -> str | None:
        """The expression of the model that is called; None if that is not the wrapper itself."""
        text = dotted(call.func)
        is_past = text is None or re.search(r"\.(module|forward)\b", text)
        is_inside = self.know.batchwise.is_in_model(source, call)
        is_functional = (self.know.facts.callee(source, call) or "").endswith("data_parallel")
        return None if is_past or is_inside or is_functional else text

    def _at_call(self, source: Source, call: cst.Call, callee: Function, text: str) -> str | None:
        """What the caller of a function calls an object that the function calls `text`."""
        root, dot, rest = text.partition(".")
        names = [p.name.value for p in parameters(callee.node)]
        is_method = callee.owner is not None and not is_decorated(callee, "staticmethod")
        if self._is_rebound(callee, root):
            return None
        if root not in names:
            same = callee.source is source and root in self.flow.names[source].module_names
            return text if same and not self._is_local(source, call, root) else None
        if is_method and root == names[0]:
            base = dotted(receiver(call))
        else:
            index = names.index(root) - is_method
            given = [arg for arg in call.args if arg.keyword and arg.keyword.value == root]
            given = given or [arg for arg in call.args[index : index + 1] if not arg.keyword]
            base = dotted(given[0].value) if given and not any(a.star for a in call.args) else None
        return f"{base}{dot}{rest}" if base else None

    def _is_rebound(self, callee: Function, name: str) -> bool:
        inside = callee.source.inside(callee.node.body, cst.Name)
        node = next((item for item in inside if item.value == name), None)
        if node is None:
            return True
        slot = self.flow.names[callee.source].slot(node, name)
        bound = self.know.reaching[callee.source].bindings.get(slot, [])
        return any(callee.source.contains(callee.node.body, item.name) for item in bound)

    def _is_local(self, source: Source, node: cst.CSTNode, name: str) -> bool:
        return self.flow.names[source].slot(node, name).owner is not source.module


def always_runs(source: Source, block: cst.CSTNode, calls: set[cst.CSTNode], whole: bool) -> bool:
    """Whether one of some calls runs in every way through a block.

    Ways that leave the block before count if it is `whole`, the body of a function.
    """
    for statement in block_statements(block):  # type: ignore[arg-type]
        if _runs(source, statement, calls, whole):
            return True
        if whole and _may_leave(source, statement, calls):
            return False
    return False


def _runs(source: Source, statement: cst.CSTNode, calls: set[cst.CSTNode], whole: bool) -> bool:
    match statement:
        case cst.With():
            heads = any(_is_sure(source, c, item) for item in statement.items for c in calls)
            return heads or always_runs(source, statement.body, calls, whole)
        case cst.If():
            if any(_is_sure(source, call, statement.test) for call in calls):
                return True
            other = statement.orelse
            if other is None or not always_runs(source, statement.body, calls, whole):
                return False
            if isinstance(other, cst.If):
                return _runs(source, other, calls, whole)
            return always_runs(source, other.body, calls, whole)
        case cst.BaseCompoundStatement():
            return False
    return any(_is_sure(source, call, statement) for call in calls)


def _is_sure(source: Source, call: cst.CSTNode, root: cst.CSTNode) -> bool:
    """Whether a call in an expression or a simple statement runs whenever that does."""
    for item in (call, *source.ancestors(call)):
        if isinstance(item, _MAY_NOT_RUN):
            return False
        if item is root:
            return True
    return False


def _may_leave(source: Source, statement: cst.CSTNode, calls: set[cst.CSTNode]) -> bool:
    """Whether a function may be left in a statement without one of the calls."""
    if not any(source.inside(statement, kind) for kind in (cst.Return,)):
        return False
    return not (
        isinstance(statement, cst.If)
        and statement.orelse is None
        and always_runs(source, statement.body, calls, True)
    )


class Gradients:
    """Where a program takes steps, and reads, changes and clears gradients."""

    def __init__(self, know: Training) -> None:
        self.know = know
        self.facts = know.facts

    @cached_property
    def steps(self) -> list[tuple[Source, cst.Call]]:
        """The calls that may be an optimizer's step."""
        calls = [(s, c) for s, c in self.facts.calls() if method_name(c) == "step"]
        return [(s, c) for s, c in calls if self._optimizers(s, c) or not self._is_other(s, c)]

    def _is_other(self, source: Source, call: cst.Call) -> bool:
        """A scheduler's step, by what it is or, where that is not seen, by its name."""
        values = self.know.flow.made_by(source, receiver(call))
        if values:
            return not any("GradScaler" in v.name or "ptim" in v.name for v in values) or any(
                "lr_scheduler" in v.name for v in values
            )
        return bool(_SCHEDULER.search(source.code(call.func)))

    def _optimizers(self, source: Source, call: cst.Call) -> set[cst.CSTNode]:
        made = {call for _, call in self.facts.optimizers}
        nodes = [receiver(call), *(arg.value for arg in call.args)]
        values = [v for node in nodes for v in self.know.flow.made_by(source, node)]
        return {value.node for value in values if value.node in made}

    def others(self, choice: Choice) -> Iterator[tuple[Source, cst.Call]]:
        """The steps outside a choice, unless they are those of other optimizers elsewhere."""
        inside = [(s, c) for s, c in self.steps if choice.covers(s, c)]
        own = {made for s, c in inside for made in self._optimizers(s, c)}
        for source, call in self.steps:
            its = self._optimizers(source, call)
            in_loop = source is choice.source and source.contains(choice.loop, call)
            if not choice.covers(source, call) and (in_loop or not its or not own or its & own):
                yield source, call

    @cached_property
    def uses(self) -> list[tuple[Source, cst.BaseExpression]]:
        """The places that read or change gradients, or ask to be told about them."""
        pattern = re.compile(r"clip_grad_\w+|clip_grad|register_hook|unscale_|synchronize"
                             r"|register_(full_backward|post_accumulate_grad)_hook")  # fmt: skip
        found: list[tuple[Source, cst.BaseExpression]] = [
            (source, call)
            for source, call in self.facts.calls()
            if pattern.fullmatch((dotted(call.func) or method_name(call) or "").split(".")[-1])
            and not (self.facts.callee(source, call) or "").startswith("torch.cuda.")
        ]
        for source in self.know.context.sources:
            own = self.facts.definitions[source]
            for node in source.all(cst.Attribute):
                is_read = node.attr.value == "grad" and source.code(node.value) != "torch.autograd"
                if is_read and not own.is_own(node):
                    found.append((source, node))
        return found

    @cached_property
    def clears(self) -> list[tuple[Source, cst.Call]]:
        """The calls of `zero_grad()`."""
        return [(s, c) for s, c in self.facts.calls() if method_name(c) == "zero_grad"]

    def is_covered(
        self, source: Source, node: cst.CSTNode, covers: Callable[[Source, cst.CSTNode], bool],
        seen: frozenset[cst.CSTNode] = frozenset(),
    ) -> bool:  # fmt: skip
        """Whether a place is covered, or its function is called from covered places only."""
        if covers(source, node):
            return True
        function = source.function_of(node)
        calls = self.facts.callers.get(function, []) if function is not None else []
        if function is None or function in seen or not calls:
            return False
        return all(self.is_covered(s, call, covers, seen | {function}) for s, call in calls)

    def runs_once(
        self, source: Source, node: cst.CSTNode, seen: frozenset[cst.CSTNode] = frozenset()
    ) -> bool:
        """Whether a place runs once in a program: in no loop, its function called in one place."""
        function = source.function_of(node)
        if self.facts.loops_around(source, node) or function in seen:
            return False
        calls = self.facts.callers.get(function, []) if function is not None else []
        seen |= {function} if function is not None else set()
        return len(calls) <= 1 and all(self.runs_once(s, call, seen) for s, call in calls)
