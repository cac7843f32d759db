"""DataParallel is used only if some number, list or switch of GPUs says so.

Why it matters: under torchrun the number of processes decides. A condition on a GPU list that is
false would leave every process with a model of its own, trained on its part of the data, unsaid.

Safety: safe. With several processes the model is made parallel whatever the condition says; with
one process the condition means what it meant. Names are used here to recognise such conditions
(gpu, cuda, device, parallel); conditions on the number of GPUs itself are MG104's.

Before::

    model = nn.Linear(2, 2)
    if len(args.gpu_ids) > 1:
        model = nn.DataParallel(model)

After::

    model = nn.Linear(2, 2)
    if process_count() > 1 or (len(args.gpu_ids) > 1):
        model = nn.DataParallel(model)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.program import Wrap
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._counting import becomes_process_count
from migrate.source import Source

_GPU = re.compile(r"gpu|cuda|device|parallel|multi|distribut", re.I)


class GpuCondition(Rule):
    """Finds `if` and conditional expressions that decide whether a model is wrapped."""

    code = "MG202"
    title = "DataParallel depends on a GPU list or switch"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every condition."""
        seen: set[cst.CSTNode] = set()
        for wrap in context.facts.wraps:
            if wrap.distributed or wrap.functional:
                continue
            for test in _tests(wrap):
                code = wrap.source.code(test)
                done = "process_count()" in code or counts_processes(context, wrap.source, test)
                if test not in seen and not done and _GPU.search(code):
                    seen.add(test)
                    yield self._condition(context, wrap, test)

    def _condition(self, context: Context, wrap: Wrap, test: cst.BaseExpression) -> Finding:
        source = wrap.source
        name, need = context.helper(source, "process_count")
        edits: list[Edit] = [*enclose(source, test, f"{name}() > 1 or (", ")"), need]
        message = f"several processes make the model parallel whatever {source.code(test)} is"
        return self.finding(source, test, message, edits, Applicability.SAFE)


def counts_processes(context: Context, source: Source, test: cst.BaseExpression) -> bool:
    """Whether a condition is on a number of GPUs that becomes the number of processes."""
    nodes: list[cst.CSTNode] = [*source.inside(test, cst.Name), *source.inside(test, cst.Call)]
    nodes += source.inside(test, cst.Attribute)
    made = {value for node in nodes for value in context.flow.made_by(source, node)}
    counts = [value for value in made if value.name == "torch.cuda.device_count"]
    return bool(counts) and all(
        isinstance(value.node, cst.Call)
        and becomes_process_count(context, value.source, value.node)
        for value in counts
    )


def _tests(wrap: Wrap) -> Iterator[cst.BaseExpression]:
    """The conditions under which, being true, the wrap is reached in its function."""
    source, inner = wrap.source, wrap.call
    child: cst.CSTNode = inner
    for item in source.ancestors(inner):
        if isinstance(item, cst.FunctionDef):
            return
        if isinstance(item, cst.If | cst.IfExp) and child is item.body:
            yield item.test
        child = item
