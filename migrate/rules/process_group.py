"""The program is not yet one of several processes that train together.

Why it matters: the targets train with one process per device. Each must join the others and choose
its device before it uses one, or all of them work alone, on the first device.

Safety: safe. The call comes first of all that runs, after any line that chooses the visible
devices; started without torchrun, the program is a group of one. A program that already makes a
process group keeps its own; one that makes it only under a condition is reported.

Before::

    def main():
        model = nn.Linear(2, 2).cuda()

    if __name__ == "__main__":
        main()

After::

    def main():
        model = nn.Linear(2, 2).cuda()

    if __name__ == "__main__":
        setup_distributed()
        main()
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.definitions import last_leading_import
from migrate.edit import Edit, insert_after, insert_before
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.rules._process import Uses, short, top_statement, visible_devices
from migrate.source import Source
from migrate.syntax import block_statements, dotted, is_docstring

_ENVIRONMENT = re.compile(r"environ|getenv|is_initialized|is_available|local_rank")


@dataclass(frozen=True)
class _Place:
    """Above or below a statement of the entry."""

    statement: cst.CSTNode
    below: bool = False


class _NoPlace(Exception):
    """Why no place can be proven right, and where."""

    def __init__(self, source: Source, node: cst.CSTNode, reason: str, advice: str) -> None:
        super().__init__(reason)
        self.source, self.node, self.reason, self.advice = source, node, reason, advice


class ProcessGroup(Rule):
    """Finds where the processes have to come together."""

    code = "MG101"
    title = "the program joins no process group"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding: the call of set-up, or what is wrong with the one that is there."""
        facts = context.facts
        if any(facts.uses_own(source, "setup_distributed") for source in context.sources):
            return
        if facts.process_groups:
            yield from self._existing(context)
            return
        entry = facts.entry
        try:
            place = _place(context)
        except _NoPlace as problem:
            yield self.finding(problem.source, problem.node, problem.reason, advice=problem.advice)
            return
        insert = insert_after if place.below else insert_before
        name, need = context.helper(entry, "setup_distributed")
        edits: list[Edit] = [insert(entry, place.statement, [f"{name}()"]), need]
        yield self.finding(entry, place.statement, "joins the other processes here", edits)

    def _existing(self, context: Context) -> Iterator[Finding]:
        """Findings about a group that the program makes itself, but not in every run."""
        facts = context.facts
        if not facts.own_wraps and all(wrap.distributed for wrap in facts.wraps):
            return
        spawns = facts.calls_of(r"multiprocessing(\.spawn)?\.spawn$")
        for source, call in spawns[:1]:
            yield self.finding(
                source, call, f"{source.code(call.func)} starts the processes itself",
                advice="let torchrun start them: call the function directly, with its rank from "
                'os.environ["LOCAL_RANK"]',
            )  # fmt: skip
        conditions = [_conditions(context, source, call) for source, call in facts.process_groups]
        if spawns or not all(conditions):
            return
        source, call = facts.process_groups[0]
        where, test = conditions[0][0]
        yield self.finding(
            source, call, f"the process group is made only if {short(where, test)}",
            advice="make it in every run: torchrun sets RANK, WORLD_SIZE and LOCAL_RANK",
        )  # fmt: skip


def _conditions(
    context: Context, source: Source, node: cst.CSTNode, depth: int = 0
) -> list[tuple[Source, cst.CSTNode]]:
    """The conditions under which `node` is run that torchrun does not fulfil."""
    found: list[tuple[Source, cst.CSTNode]] = []
    function = source.function_of(node)
    for item in source.ancestors(node):
        if item is function:
            break
        if not isinstance(item, cst.If) or _is_main(source, item):
            continue
        if not _from_environment(context, source, item.test):
            found.append((source, item.test))
    callers = context.facts.callers.get(function, []) if function else []
    above = [_conditions(context, s, call, depth + 1) for s, call in callers if depth < 6]
    if above and all(above):
        found += above[0]
    return found


def _is_main(source: Source, item: cst.If) -> bool:
    return "__main__" in source.code(item.test)


def _from_environment(context: Context, source: Source, test: cst.CSTNode) -> bool:
    """Whether a condition asks the environment, directly or by a variable."""
    if _ENVIRONMENT.search(source.code(test)):
        return True
    values = [v for n in source.inside(test, cst.Name) for v in context.flow.made_by(source, n)]
    for value in values:
        code = value.source.code(value.node) if isinstance(value.node, cst.Call) else ""
        if _ENVIRONMENT.search(code):
            return True
    return False


def _place(context: Context) -> _Place:
    uses = Uses(context)
    place = _Place(_first(context, uses))
    for source, node, _ in visible_devices(context.facts):
        place = _after_choice(context, uses, place, source, node)
    return place


def _first(context: Context, uses: Uses) -> cst.CSTNode:
    """The first statement of the entry that must find the group made."""
    entry, guard = context.facts.entry, context.facts.main_guard
    leading = last_leading_import(entry)
    begin = entry.span(leading).stop if leading is not None else 0
    for statement in entry.module.body:
        if statement is guard and guard is not None:
            body = [item for item in block_statements(guard.body) if not is_docstring(item)]
            return body[0]
        passive = isinstance(statement, cst.FunctionDef | cst.ClassDef) or is_docstring(statement)
        if passive or entry.span(statement).start < begin:
            continue
        if uses.group(entry, statement) or (guard is None and _prints(entry, statement)):
            return statement
    raise _NoPlace(
        entry, next(iter(entry.module.body), entry.module),
        "nothing in this file starts the training, so the processes join no group",
        "in the program that imports it, call torch.cuda.set_device and "
        "torch.distributed.init_process_group first; or rewrite that program",
    )  # fmt: skip


def _prints(source: Source, statement: cst.CSTNode) -> bool:
    return any(dotted(call.func) == "print" for call in source.inside(statement, cst.Call))


def _after_choice(
    context: Context, uses: Uses, place: _Place, source: Source, node: cst.CSTNode
) -> _Place:
    """A place that is not before the visible devices are chosen at `node`."""
    entry = context.facts.entry
    if source is not entry and source.function_of(node) is None:
        return place  # chosen when the module is imported
    chain = _calls_to(context, source, node)
    if chain is None:
        raise _late(source, node, "more than one way leads to it")
    if entry.span(chain[-1]).start < entry.span(place.statement).start:
        return place
    inner = [item for item in chain if entry.contains(entry.module, item)]
    if any(uses.device(entry, item) for item in _between(entry, place, inner)):
        raise _late(source, node, "a device may be used before")
    statement = inner[0]
    if source is not entry and uses.device(entry, statement):
        raise _late(
            source, node, f"{entry.code(statement).splitlines()[0]} goes on to use a device"
        )
    if isinstance(statement, cst.SimpleStatementSuite):
        raise _late(source, node, "it stands on the line of its block's header")
    return _Place(statement, below=True)


def _late(source: Source, node: cst.CSTNode, reason: str) -> _NoPlace:
    return _NoPlace(
        source, node, f"the visible devices are chosen here, but {reason}",
        "choose them outside the program (CUDA_VISIBLE_DEVICES=0,1 torchrun ...) and delete this "
        "line, or call setup_distributed() after it and before a device is used",
    )  # fmt: skip


def _calls_to(context: Context, source: Source, node: cst.CSTNode) -> list[cst.CSTNode] | None:
    """The statements that lead to `node`, innermost first; None if not just one way does."""
    chain = [_outer_statement(source, node)]
    for _ in range(6):
        function = source.function_of(node)
        if function is None:
            return chain if source is context.facts.entry else None
        callers = context.facts.callers.get(function, [])
        if len(callers) != 1:
            return None
        source, node = callers[0]
        chain.append(_outer_statement(source, node))
    return None


def _outer_statement(source: Source, node: cst.CSTNode) -> cst.CSTNode:
    """The statement around `node` that runs whenever its function, module or main guard does."""
    inner: cst.CSTNode = top_statement(source, node)
    while isinstance(inner, cst.If) and _is_main(source, inner):
        statements = block_statements(inner.body)
        inner = next((s for s in statements if source.contains(s, node)), inner)
        if inner in statements:
            break
    return inner


def _between(entry: Source, place: _Place, chain: list[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """What runs after `place` and before the innermost statement of `chain`."""
    start = entry.span(place.statement).start
    for statement in chain:
        for item in entry.siblings(statement):
            if item is statement:
                break
            passive = isinstance(item, cst.FunctionDef | cst.ClassDef)
            top = entry.function_of(statement) is None
            if not passive and not (top and entry.span(item).start < start):
                yield item
