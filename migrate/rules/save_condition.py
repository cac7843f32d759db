"""A measured number decides whether sharded weights are saved.

Why it matters: all processes have to gather the weights, or save them, together. Each has measured
the loss or the accuracy itself; if the last digits differ, one process saves, the others do not,
and all wait for ever.

Safety: safe. The main process decides for all. Conditions on counters and options, which cannot
differ, stay. Targets that do not shard need none of this.

Before::

    model = nn.DataParallel(nn.Linear(2, 2))
    def keep(accuracy, best):
        if accuracy > best:
            torch.save(model.state_dict(), "best.pt")

After::

    model = nn.DataParallel(nn.Linear(2, 2))
    def keep(accuracy, best):
        if from_main_process(accuracy > best):
            torch.save(model.state_dict(), "best.pt")
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.files import reaching
from migrate.facts.folders import folder_saves, folder_states
from migrate.facts.main_process import names_rank
from migrate.facts.state import bindings, is_sharded_state, saved_states
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted, literal

_ORDER = (cst.LessThan, cst.LessThanEqual, cst.GreaterThan, cst.GreaterThanEqual)
_COUNTING = frozenset({"range", "enumerate", "tqdm", "trange", "len", "int", "min", "max"})
_SHARED = re.compile(r"main_process|all_reduce|global_(sum|mean)")


class SaveCondition(Rule):
    """Finds conditions around gathered states."""

    code = "MG510"
    title = "a measured number decides whether weights are gathered"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every condition that the processes might answer differently."""
        seen: set[cst.CSTNode] = set()
        if not context.target.shards:
            return
        for call, home in _together(context):
            for source, node in reaching(context, home, call):
                for test in _conditions(source, node):
                    if test not in seen and _may_differ(context, source, test):
                        seen.add(test)
                        yield from self._decide(context, source, test)

    def _decide(
        self, context: Context, source: Source, test: cst.BaseExpression
    ) -> Iterator[Finding]:
        if context.facts.main_process.is_by_rank(source, test):
            return
        name, need = context.helper(source, "from_main_process")
        edits: list[Edit] = [*enclose(source, test, f"{name}(", ")"), need]
        message = f"the main process decides for all whether {source.code(test)}"
        yield self.finding(source, test, message, edits)


def _together(context: Context) -> Iterator[tuple[cst.Call, Source]]:
    """The calls that all processes have to make: they gather states, or write a folder."""
    yield from folder_saves(context).items()
    for call, home in saved_states(context).items():
        is_gathered = call not in folder_states(context)
        if is_gathered and is_sharded_state(context, home, call):
            yield call, home


def _conditions(source: Source, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
    """The conditions that decide, in its function, whether `node` is reached."""
    inner = node
    for item in source.ancestors(node):
        if isinstance(item, cst.FunctionDef):
            return
        if isinstance(item, cst.If | cst.IfExp) and inner is not item.test:
            yield item.test
        inner = item


def _may_differ(context: Context, source: Source, test: cst.BaseExpression, depth: int = 0) -> bool:
    """Whether a condition compares what processes measure."""
    if names_rank(source, test) or _SHARED.search(source.code(test)) or depth > 3:
        return False
    for comparison in source.inside(test, cst.Comparison):
        targets = comparison.comparisons
        if any(isinstance(target.operator, _ORDER) for target in targets):
            sides = [comparison.left, *(target.comparator for target in targets)]
            if not all(_is_fixed(context, source, side) for side in sides):
                return True
    names = [test] if isinstance(test, cst.Name) else source.inside(test, cst.Name)
    return any(
        source.span(value) != source.span(test) and _may_differ(context, home, value, depth + 1)
        for name in names
        for home, value in bindings(context, source, name)
    )


def _is_fixed(context: Context, source: Source, node: cst.CSTNode, depth: int = 0) -> bool:
    """Whether a number is a counter, an option or a length, which is the same everywhere."""
    if literal(node) is not ...:
        return True
    if isinstance(node, cst.BinaryOperation):
        return all(_is_fixed(context, source, side, depth) for side in (node.left, node.right))
    if isinstance(node, cst.UnaryOperation):
        return _is_fixed(context, source, node.expression, depth)
    if isinstance(node, cst.Call):
        return dotted(node.func) == "len"
    if any("parse_args" in value.name for value in context.flow.made_by(source, _base(node))):
        return True
    if not isinstance(node, cst.Name) or depth > 3:
        return False
    if _counts(context, source, node):
        return True
    values = list(bindings(context, source, node))
    fixed = [_is_fixed(context, home, value, depth + 1) for home, value in values]
    return bool(fixed) and all(fixed) and not _is_accumulated(context, source, node)


def _base(node: cst.CSTNode) -> cst.CSTNode:
    return node.value if isinstance(node, cst.Attribute) else node


def _counts(context: Context, source: Source, name: cst.Name) -> bool:
    """Whether a variable is that of a loop over numbers."""
    slot = context.facts.slot(source, name)
    for loop in source.all(cst.For):
        for target in source.inside(loop.target, cst.Name):
            if target.value == name.value and context.facts.slot(source, target) == slot:
                called = loop.iter.func if isinstance(loop.iter, cst.Call) else None
                return (dotted(called) or "").rpartition(".")[2] in _COUNTING
    return False


def _is_accumulated(context: Context, source: Source, name: cst.Name) -> bool:
    """Whether something else than a fixed number is added to a variable."""
    slot = context.facts.slot(source, name)
    return any(
        isinstance(item.target, cst.Name)
        and item.target.value == name.value
        and context.facts.slot(source, item.target) == slot
        and literal(item.value) is ...
        for item in source.all(cst.AugAssign)
    )
