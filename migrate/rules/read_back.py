"""A file is read that the same run wrote before.

Why it matters: only the main process writes it; another process may come to the place that reads it
before it is there, or before it is complete.

Safety: safe. All processes wait for each other in front of the outermost statement that every one
of them reaches. Two paths are the same if their texts are, or the variables that hold them.

Before::

    import torch
    def best(model, path):
        torch.save(model.state_dict(), path)
        return torch.load(path)

After::

    import torch
    def best(model, path):
        torch.save(model.state_dict(), path)
        wait_for_everyone()
        return torch.load(path)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, insert_before
from migrate.facts.files import opened, reaching, reads, writes
from migrate.facts.folders import folder_saves, path_keys
from migrate.finding import Finding
from migrate.project import main_guard
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.values import Class

Place = tuple[Source, cst.Call, cst.BaseExpression]


class ReadBack(Rule):
    """Finds reads of files that were written before."""

    code = "MG508"
    title = "a file is read that the run has written"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every read that has to wait."""
        written = list(_writes(context))
        for read in reads(context):
            source, call, path = read
            by_rank = context.facts.main_process.is_by_rank(source, call)
            if by_rank or _is_in_worker(context, source, call):
                continue
            keys = path_keys(context, source, path)
            same = [write for write in written if keys & path_keys(context, write[0], write[2])]
            events = [event for write in same for event in _events(context, read, write)]
            if events:
                yield from self._wait(context, source, call, path, events)

    def _wait(
        self, context: Context, source: Source, call: cst.Call, path: cst.BaseExpression,
        events: list[cst.CSTNode],
    ) -> Iterator[Finding]:  # fmt: skip
        statement = _outermost(source, call, events)
        name, need = context.helper(source, "wait_for_everyone")
        siblings = source.siblings(statement)
        above = siblings[: siblings.index(statement)][-1:]
        if any(re.search(rf"barrier\(|{name}\(", source.code(item)) for item in above):
            return
        message = f"waits until {source.code(path)} is written before reading it"
        edits: list[Edit] = [insert_before(source, statement, [f"{name}()"]), need]
        yield self.finding(source, call, message, edits)


def _writes(context: Context) -> Iterator[Place]:
    for write in writes(context):
        if write.path is not None and write.call not in folder_saves(context):
            yield write.source, write.call, write.path
    for source, call in context.facts.calls():
        place = opened(context, source, call)
        if place is not None and re.search(r"[wax]", place[1]):
            yield source, call, place[0]


def _events(context: Context, read: Place, write: Place) -> Iterator[cst.CSTNode]:
    """Where the function that reads has written before: the write, or calls that come to it."""
    source, call, _ = read
    scope = source.function_of(call)
    for home, node in reaching(context, write[0], write[1]):
        if home is not source or home.function_of(node) is not scope or node is call:
            continue
        loops = context.facts.loops_around(source, call)
        is_before = source.span(node).start < source.span(call).start
        if is_before or any(source.contains(loop, node) for loop in loops):
            yield node


def _outermost(source: Source, call: cst.Call, events: list[cst.CSTNode]) -> cst.CSTNode:
    """The outermost statement around a read that does not hold the write, too."""
    best: cst.CSTNode = source.statement_of(call)
    for item in source.ancestors(best):
        if isinstance(item, cst.FunctionDef | cst.ClassDef) or item is main_guard(source):
            break
        if any(source.contains(item, event) for event in events):
            break
        if isinstance(item, cst.BaseCompoundStatement):
            best = item
    while not isinstance(source.parent(best), cst.IndentedBlock | cst.Module):
        best = source.statement_of(source.parent(best) or best)
    return best


def _is_in_worker(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether a read is in a dataset, which worker processes run."""
    cls = source.class_of(call)
    if cls is None:
        return False
    names = context.flow.bases(Class(source, cls))[1]
    return any("Dataset" in name or "Sampler" in name for name in names)
