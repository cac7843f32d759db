"""All processes draw the same random numbers, because the program seeds them.

Why it matters: with one seed, every process would drop the same units and crop its images alike.
The models must begin alike, but after that each process needs its own numbers.

Safety: policy. The call stands straight before the training, after everything that is built alike,
and the main process goes on with the original numbers. Nothing that must be the same everywhere,
such as a random split, may be drawn in the training itself. A generator that decides which way the
training goes (`if random.random() < p`) stays the same in all processes.

Before::

    def main(loader, criterion):
        torch.manual_seed(0)
        model = nn.DataParallel(nn.Linear(2, 2))
        for x, y in loader:
            criterion(model(x), y).backward()

After::

    def main(loader, criterion):
        torch.manual_seed(0)
        model = nn.DataParallel(nn.Linear(2, 2))
        seed_ranks(torch.manual_seed)
        for x, y in loader:
            criterion(model(x), y).backward()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import insert_before
from migrate.facts.models import bare_models
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._process import SEEDS, names_own_number
from migrate.source import Source
from migrate.syntax import block_statements

_DRAWS = {
    "random.seed": re.compile(r"^random\.(?!seed|Random)\w+$"),
    "numpy.random.seed": re.compile(r"^numpy\.random\.(?!seed|RandomState|default_rng)\w+$"),
    "torch.manual_seed": re.compile(r"^torch\.(rand|randn|randint|randperm|bernoulli|normal)$"),
}
_ORDER = ("torch.manual_seed", "numpy.random.seed", "random.seed")


class Seeds(Rule):
    """Finds programs that seed their random numbers."""

    code = "MG701"
    title = "all processes draw the same random numbers"

    def check(self, context: Context) -> Iterator[Finding]:
        """The place where the processes part, and seeding inside the training."""
        facts = context.facts
        seeds = facts.calls_of(SEEDS.pattern)
        if not seeds or any(names_own_number(source, call) for source, call in seeds):
            return
        for source, call in seeds:
            if any(facts.reaches_backward(source, loop.body)
                   for loop in facts.loops_around(source, call)):  # fmt: skip
                yield self.finding(
                    source, call, f"{source.code(call)} seeds all processes alike in the training",
                    effect=Effect.DIFFERENT, advice="add the process's number to the seed",
                )  # fmt: skip
        if any(facts.uses_own(source, "seed_ranks") for source in context.sources):
            return
        names = _functions(context, seeds)
        places = _places(context)
        for source, statement in places if names else ():
            yield self._part(context, source, statement, names)

    def _part(
        self, context: Context, source: Source, statement: cst.CSTNode, names: list[str]
    ) -> Finding:
        spelled = [_spelling(context, source, statement, name) for name in names]
        missing = [name for name, text in zip(names, spelled, strict=True) if text is None]
        lines = [f"import {name.partition('.')[0]}" for name in missing]
        arguments = ", ".join(text or name for name, text in zip(names, spelled, strict=True))
        helper, need = context.helper(source, "seed_ranks")
        lines.append(f"{helper}({arguments})")
        return self.finding(
            source, statement, "from here on every process draws its own random numbers",
            [insert_before(source, statement, lines), need], Applicability.POLICY,
            assumption="nothing that must be the same in all processes is drawn in the training",
        )  # fmt: skip


def _functions(context: Context, seeds: list[tuple[Source, cst.Call]]) -> list[str]:
    """The seeding functions to call again; not those whose numbers steer the training."""
    called = {context.facts.callee(source, call) or "" for source, call in seeds}
    found = {name if name in _ORDER else "torch.manual_seed" for name in called}
    if any(name.endswith(("set_seed", "seed_everything")) for name in called):
        found |= {"numpy.random.seed", "random.seed"}
    return [name for name in _ORDER if name in found and not _decides(context, _DRAWS[name])]


def _decides(context: Context, draws: re.Pattern[str]) -> bool:
    """Whether a condition in the training asks a random generator."""
    facts = context.facts
    for source, call in facts.calls_of(draws.pattern):
        if source.function_of(call) not in facts.training_functions and not any(
            facts.reaches_backward(source, loop) for loop in facts.loops_around(source, call)
        ):
            continue
        for item in source.ancestors(call):
            if isinstance(item, cst.If | cst.While) and source.contains(item.test, call):
                return True
            if isinstance(item, cst.BaseSmallStatement):
                break
    return False


def _places(context: Context) -> list[tuple[Source, cst.CSTNode]]:
    """The statements before which the processes part: where the training of a wrap begins."""
    facts = context.facts
    wraps = [(wrap.source, wrap.call) for wrap in facts.wraps if not wrap.functional]
    found: dict[cst.CSTNode, Source] = {}
    bare = [(model.source, model.statement) for model in bare_models(facts)]
    for source, call in [*wraps, *bare, *facts.own_wraps]:
        place = _training_after(context, source, call)
        if place is not None:
            found[place[1]] = place[0]
    return [(source, statement) for statement, source in found.items()]


def _training_after(
    context: Context, source: Source, node: cst.CSTNode
) -> tuple[Source, cst.CSTNode] | None:
    """The first statement after `node`, or after a call that leads to it, that trains."""
    for _ in range(6):
        function = source.function_of(node)
        for statement in _later(source, node, function):
            passive = isinstance(statement, cst.FunctionDef | cst.ClassDef)
            if not passive and context.facts.reaches_backward(source, statement):
                return source, statement
        callers = context.facts.callers.get(function, []) if function else []
        if len(callers) != 1:
            return None
        source, node = callers[0]
    return None


def _later(
    source: Source, node: cst.CSTNode, function: cst.FunctionDef | None
) -> Iterator[cst.CSTNode]:
    """The statements below `node` in its block, then in the blocks around it, in its function."""
    inner = node
    for item in source.ancestors(node):
        if isinstance(item, cst.IndentedBlock | cst.Module):
            statements = block_statements(item)
            yield from statements[statements.index(inner) + 1 :]
        if item is function:
            return
        inner = item


def _spelling(context: Context, source: Source, statement: cst.CSTNode, name: str) -> str | None:
    """How the file calls a function at a statement; None if it has not imported it."""
    names = context.flow.names[source]
    for bound, item in names.imports.items():
        full = ".".join(filter(None, (item.module, item.name)))
        visible = bound in names.module_names or names.is_visible(statement, bound)
        if not item.level and visible and (name == full or name.startswith(full + ".")):
            return bound + name[len(full) :]
    return None
