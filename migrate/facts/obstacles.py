"""Why a call that all processes make cannot stand at a place, and when the loop there trains."""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.facts.batchwise import Batchwise
from migrate.facts.files import is_write, may_write
from migrate.facts.kinds import Batch, Kind
from migrate.facts.program import Facts
from migrate.source import Source
from migrate.syntax import assigned_targets
from migrate.values import Function


class Obstacles:
    """Looks at the way to a place: conditions, handlers, guards, files that are written."""

    def __init__(self, facts: Facts, batchwise: Batchwise) -> None:
        self.facts = facts
        self.batchwise = batchwise

    def obstacle(self, source: Source, node: cst.CSTNode) -> str:
        """Why not every process need come to `node`; empty if all do."""
        if self.facts.main_process.is_by_rank(source, node):
            return "and only one process comes here"
        if self._is_written(source, node):
            return "and only the main process writes it"
        inner = node
        for item in source.ancestors(node):
            if isinstance(item, cst.FunctionDef | cst.Module):
                break
            if isinstance(item, cst.Lambda | cst.ExceptHandler):
                return "and not every process need come here"
            test = _condition(item, inner)
            if test is not None and self._depends_on_data(source, test):
                return f"and whether a process comes here depends on its data: {source.code(test)}"
            inner = item
        return ""

    def _depends_on_data(self, source: Source, test: cst.CSTNode) -> bool:
        for name in source.inside(test, cst.Name):
            value = self.batchwise.of(source, name)
            parent = source.parent(name)
            if isinstance(parent, cst.Attribute) and parent.attr is name:
                continue
            counted = self._is_counted(source, name)
            if value.kind in (Kind.DATA, Kind.SUM) and not counted:
                return True
            if value.kind is Kind.UNKNOWN and value.origins:
                return True
        return False

    def _is_counted(self, source: Source, name: cst.Name) -> bool:
        """`len(x)`, `x.size(0)`, `x.shape[0]`, `x is None`: no data is looked at."""
        for item in source.ancestors(name):
            value = self.batchwise.of(source, item)
            if value.kind is Kind.COUNT:
                return True
            if isinstance(item, cst.Comparison):
                return isinstance(item.comparisons[0].operator, cst.Is | cst.IsNot | cst.In)
            if isinstance(item, cst.If | cst.While | cst.IfExp):
                return False
        return False

    def _is_written(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether the statement writes a file, which only the main process does."""
        for item in source.ancestors(node):
            if isinstance(item, cst.Call):
                functions = self.facts.flow.callees.get(item, ())
                if may_write(self.facts, source, item) or any(map(self._opens, functions)):
                    return True
            if isinstance(item, cst.With) and item.body is not node:
                calls = [i.item for i in item.items if isinstance(i.item, cst.Call)]
                if any(is_write(self.facts, source, call) for call in calls):
                    return True
            if isinstance(item, cst.FunctionDef):
                return False
        return False

    def _opens(self, function: Function) -> bool:
        """Whether a function of the program writes files."""
        calls = function.source.inside(function.node, cst.Call)
        return any(is_write(self.facts, function.source, call) for call in calls)

    def phase(self, source: Source, node: cst.CSTNode, value: Batch) -> str | None:
        """The condition under which the batch's loop trains; None if it cannot be written here."""
        for origin in value.origins:
            home = next((s for s in self.facts.project.sources if origin in s.spans), source)
            loop = origin if isinstance(origin, cst.For) else None
            test = training_condition(self.facts, home, loop) if loop else ""
            if test:
                same = home is source and home.function_of(origin) is source.function_of(node)
                return test if same else None
        return ""


def training_condition(facts: Facts, source: Source, loop: cst.For) -> str:
    """`phase == "train"`, where a loop goes backward only under it; empty if it always does."""
    calls = [c for s, c in facts.backwards if s is source and source.contains(loop.body, c)]
    found: set[str] = set()
    for call in calls:
        tests = [
            (item, inner)
            for item, inner in _path(source, call, loop)
            if isinstance(item, cst.If) and inner is not item.test
        ]
        outer = [(i, n) for i, n in tests if _is_invariant(source, i.test, loop)]
        if not outer:
            return ""
        item, inner = outer[-1]
        text = source.one_line(item.test)
        found.add(f"({text})" if inner is item.body else f"not ({text})")
    return found.pop() if len(found) == 1 else ""


def _path(
    source: Source, node: cst.CSTNode, stop: cst.CSTNode
) -> Iterator[tuple[cst.CSTNode, cst.CSTNode]]:
    inner = node
    for item in source.ancestors(node):
        if item is stop:
            return
        yield item, inner
        inner = item


def _is_invariant(source: Source, test: cst.CSTNode, loop: cst.For) -> bool:
    """Whether a condition is made of variables that the loop does not set."""
    names = source.inside(test, cst.Name)
    targets = {n.value for n in source.inside(loop.target, cst.Name)}
    nodes = [
        node
        for kind in (cst.Assign, cst.AugAssign, cst.For)
        for node in source.inside(loop.body, kind)
    ]
    for target in (target for node in nodes for target in assigned_targets(node)):
        targets |= {n.value for n in source.inside(target, cst.Name)}
    calls = source.inside(test, cst.Call)
    return bool(names) and not calls and not any(name.value in targets for name in names)


def _condition(item: cst.CSTNode, inner: cst.CSTNode) -> cst.CSTNode | None:
    """What decides whether `inner`, a part of `item`, runs, or how often."""
    match item:
        case cst.If() | cst.While() | cst.IfExp() if inner is not item.test:
            return item.test
        case cst.For() if inner is item.body and isinstance(item.iter, cst.Name | cst.Attribute):
            return None
        case cst.BooleanOperation() if inner is item.right:
            return item.left
    return None
