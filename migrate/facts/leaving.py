"""Where numbers of a batch leave a training step: printed, added up, kept, decided on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.facts.batchwise import Batchwise
from migrate.facts.kinds import Batch, Kind
from migrate.facts.obstacles import Obstacles
from migrate.facts.program import Facts
from migrate.facts.trained import SAME_VALUE, own_sum
from migrate.source import Source
from migrate.syntax import dotted, literal, method_name, receiver

_KEEPING = frozenset(
    [
        "update",
        "append",
        "add",
        "add_scalar",
        "add_scalars",
        "log",
        "set_postfix",
        "set_description",
        "info",
        "debug",
        "warning",
        "plot",
        "line",
        "log_metric",
        "log_metrics",
        "step",
        "format",
        "write",
        "critical",
        "error",
        "set_postfix_str",
    ]
)
_SHOWING = frozenset(
    [
        "print",
        "format",
        "info",
        "debug",
        "warning",
        "set_postfix",
        "set_description",
        "write",
        "log",
    ]
)
_CHECKS = re.compile(r"^(torch|math|numpy)\.(isnan|isinf|isfinite)$")


@dataclass(frozen=True)
class Reduction:
    """A number of a part of the batch that should be the whole batch's.

    Attributes:
        node: the expression that a call goes round.
        phase: the condition under which the loop trains, if it also evaluates.
        obstacle: why no call of all processes may stand here; empty if it may.
        by_rank: it is read where the script lets the process's number decide who comes.
    """

    source: Source
    node: cst.BaseExpression
    value: Batch
    phase: str = ""
    obstacle: str = ""
    by_rank: bool = False


class Reductions:
    """Finds the numbers of a program."""

    def __init__(self, facts: Facts, batchwise: Batchwise) -> None:
        self.facts = facts
        self.batchwise = batchwise
        self.obstacles = Obstacles(facts, batchwise)

    def all(self) -> Iterator[Reduction]:
        """Every number, once, in the order of the files."""
        for source in self.facts.project.sources:
            wanted: dict[cst.CSTNode, cst.BaseExpression] = {}
            for node in (*self._extracted(source), *self._left(source)):
                for inner in self._targets(source, node):
                    wanted.setdefault(inner, inner)
            for node in sorted(wanted.values(), key=lambda item: source.span(item).start):
                around = [item for item in source.ancestors(node) if item in wanted]
                if not around:
                    yield from self._reduction(source, node)

    # Where numbers are made

    def _extracted(self, source: Source) -> Iterator[cst.BaseExpression]:
        """`.item()`, `float()` and the like, and what arithmetic makes of them."""
        own = self.facts.definitions[source]
        nodes = [*source.all(cst.Call), *source.all(cst.Subscript)]
        for node in nodes:
            if own.is_own(node) or self._in_helper(source, node):
                continue
            value = self.batchwise.of(source, node)
            if not (value.is_local and value.number and value.kind is not Kind.COUNT):
                continue
            if isinstance(node, cst.Subscript) and not _is_legacy(node):
                continue
            outer = self._climb(source, node)
            kind = self.batchwise.of(source, outer)
            if _is_taken_apart(source, outer) or (kind.is_sum and _is_assigned(source, outer)):
                continue
            yield outer
        for call in source.all(cst.Call):
            value = self.batchwise.of(source, call)
            if value.kind is Kind.METRIC and value.number and not own.is_own(call):
                yield call
        for assign in source.all(cst.Assign):
            if self.batchwise.keeps_loss(source, assign) and not own.is_own(assign):
                yield assign.value
        yield from self._computed(source)

    def _computed(self, source: Source) -> Iterator[cst.BaseExpression]:
        """`accuracy = hits / n`, `return hits / n`, where both are numbers of the part."""
        own = self.facts.definitions[source]
        statements: list[cst.Assign | cst.Return] = [
            *source.all(cst.Assign),
            *source.all(cst.Return),
        ]
        for statement in statements:
            value = statement.value
            if not isinstance(value, cst.BinaryOperation) or own.is_own(statement):
                continue
            found = self.batchwise.of(source, value)
            is_lazy = isinstance(statement, cst.Assign) and found.is_sum
            if found.is_local and found.number and not is_lazy:
                yield value

    def _climb(self, source: Source, node: cst.BaseExpression) -> cst.BaseExpression:
        """The largest arithmetic around a number that combines it with others of the batch."""
        best = current = node
        for parent in source.ancestors(node):
            if not isinstance(parent, cst.BinaryOperation):
                break
            other = parent.right if parent.left is current else parent.left
            if not self.batchwise.of(source, parent).is_local:
                break
            if self.batchwise.of(source, other).is_local:
                best = parent
            current = parent
        return best

    # Where tensors and sums leave

    def _left(self, source: Source) -> Iterator[cst.BaseExpression]:
        own = self.facts.definitions[source]
        for node in self._positions(source):
            if own.is_own(node) or self._in_helper(source, node):
                continue
            if self.batchwise.of(source, node).is_local:
                yield node

    def _positions(self, source: Source) -> Iterator[cst.BaseExpression]:
        for assign in source.all(cst.AugAssign):
            adds = isinstance(assign.operator, cst.AddAssign | cst.SubtractAssign)
            if adds and not self._is_position(source, assign.target):
                yield from self._added(source, assign.target, assign.value)
        for plain in source.all(cst.Assign):
            added = own_sum(plain)
            if added is not None and not self._is_position(source, plain.targets[0].target):
                yield from self._added(source, plain.targets[0].target, added)
        for call in source.all(cst.Call):
            yield from self._passed(source, call)
        for string in source.all(cst.FormattedStringExpression):
            yield string.expression
        for operation in source.all(cst.BinaryOperation):
            if isinstance(operation.operator, cst.Modulo) and _is_text(operation.left):
                yield from _flat(operation.right)
        for comparison in source.all(cst.Comparison):
            if _is_test(source, comparison):
                parts = [comparison.left, *(item.comparator for item in comparison.comparisons)]
                yield from (p for p in parts if self.batchwise.of(source, p).is_mean)

    def _added(
        self, source: Source, target: cst.BaseExpression, value: cst.BaseExpression
    ) -> Iterator[cst.BaseExpression]:
        if not self.batchwise.is_trained(source, target):
            yield value

    def _is_position(self, source: Source, target: cst.CSTNode) -> bool:
        """Whether a count is used as a position: `buffer[start:start + n]`."""
        if not isinstance(target, cst.Name):
            return False
        slot = self.facts.slot(source, target)
        for subscript in source.all(cst.SubscriptElement):
            for name in source.inside(subscript, cst.Name):
                if name.value == target.value and self.facts.slot(source, name) == slot:
                    return True
        return False

    def _passed(self, source: Source, call: cst.Call) -> Iterator[cst.BaseExpression]:
        name = method_name(call) or dotted(call.func) or ""
        full = self.facts.callee(source, call) or ""
        if _CHECKS.match(full):
            yield from (a.value for a in call.args if self.batchwise.of(source, a.value).is_mean)
            return
        is_statement = isinstance(source.parent(call), cst.Expr)
        is_project = bool(self.facts.flow.callees.get(call)) and is_statement
        if not (
            name == "print" or (method_name(call) in _KEEPING and not full.startswith("torch"))
        ) and (not is_project or self._trains(source, call)):
            return
        owner = receiver(call)
        if owner is not None and self.batchwise.is_trained(source, owner):
            return
        for arg in call.args:
            for value in _flat(arg.value):
                kind = self.batchwise.of(source, value).kind
                is_shown = kind is not Kind.COUNT or name in _SHOWING
                if is_shown and not (is_project and kind is Kind.SUM):
                    yield value

    def _trains(self, source: Source, call: cst.Call) -> bool:
        """Whether a called function trains on what it is given."""
        return self.facts.reaches_backward(source, call)

    # What is enclosed

    def _targets(self, source: Source, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
        """The parts of a number that calls go round: as far inside as it stays the same."""
        value = self.batchwise.of(source, node)
        if value.kind is Kind.METRIC:
            yield node
        if not value.is_local:
            return
        if isinstance(node, cst.BinaryOperation):
            sides = [self.batchwise.of(source, side) for side in (node.left, node.right)]
            both_sums = all(side.is_sum for side in sides) and value.kind is Kind.RATIO
            if both_sums or not all(side.is_local for side in sides):
                for side in (node.left, node.right):
                    yield from self._targets(source, side)
                return
        if isinstance(node, cst.UnaryOperation):
            yield from self._targets(source, node.expression)
            return
        inner = self._tensor_of(source, node)
        if inner is not None and self.batchwise.of(source, inner).is_local:
            yield from self._targets(source, inner)
            return
        yield node

    def _tensor_of(self, source: Source, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """`x` in `x.detach().item()`, `float(x)`, `x.data`, `x.data[0]`."""
        match node:
            case cst.Call(func=cst.Attribute(attr=cst.Name(value=name))) if name in SAME_VALUE:
                return node.func.value  # type: ignore[attr-defined,no-any-return]
            case cst.Call(func=cst.Name(value="float" | "int" | "round")) if node.args:
                return node.args[0].value
            case cst.Attribute(attr=cst.Name(value="data")):
                return node.value
            case cst.Subscript() if _is_legacy(node):
                return node.value
        return None

    # What becomes of them

    def _reduction(self, source: Source, node: cst.BaseExpression) -> Iterator[Reduction]:
        value = self.batchwise.of(source, node)
        if not self.batchwise.is_reduced_here(source, node, value):
            return
        obstacle = self.obstacles.obstacle(source, node)
        phase, reason = self.obstacles.phase(source, node, value), obstacle
        if phase is None:
            phase, reason = "", reason or "in a loop that also evaluates"
        if value.is_mean and not obstacle:
            reason = ""
        if value.kind is Kind.METRIC:
            reason = "and the whole batch's cannot be computed from those of the parts"
        by_rank = self.facts.main_process.is_by_rank(source, node)
        yield Reduction(source, node, value, phase, reason, by_rank)

    def _in_helper(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether a node is in a call that already reduces it."""
        for item in source.ancestors(node):
            if isinstance(item, cst.Call) and self.batchwise.is_reduced_by(source, item):
                return True
            if isinstance(item, cst.SimpleStatementLine):
                return False
        return False


def _is_legacy(node: cst.Subscript) -> bool:
    """`x.data[0]`."""
    is_data = isinstance(node.value, cst.Attribute) and node.value.attr.value == "data"
    index = node.slice[0].slice if len(node.slice) == 1 else None
    return is_data and isinstance(index, cst.Index) and literal(index.value) == 0


def _is_assigned(source: Source, node: cst.CSTNode) -> bool:
    """Whether a number is put into a variable as it is, so that later uses tell what it is."""
    parent = source.parent(node)
    return isinstance(parent, cst.Assign | cst.AnnAssign) and (
        not isinstance(parent, cst.Assign) or own_sum(parent) is None
    )


def _is_taken_apart(source: Source, node: cst.CSTNode) -> bool:
    """`a, b = f(x)`: the numbers are `a` and `b`."""
    parent = source.parent(node)
    return isinstance(parent, cst.Assign) and isinstance(
        parent.targets[0].target, cst.Tuple | cst.List
    )


def _is_text(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleString | cst.ConcatenatedString | cst.FormattedString)


def _is_test(source: Source, node: cst.CSTNode) -> bool:
    for item in source.ancestors(node):
        if isinstance(item, cst.If | cst.While | cst.Assert):
            return source.contains(item.test, node)
        if isinstance(item, cst.BaseSmallStatement | cst.BaseCompoundStatement):
            return False
    return False


def _flat(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """The elements of tuples, lists and dicts that are written out."""
    if isinstance(node, cst.Tuple | cst.List | cst.Dict):
        for element in node.elements:
            yield from _flat(element.value)
    else:
        yield node
