"""The model is taken out of its wrapper: `model.module`.

Why it matters: the script asks for its own wrapper, by `isinstance` or by the number of GPUs,
before it writes `.module`. Where the wrapper is another one, or there is none, the answer is wrong.

Safety: safe. The question becomes whether there is a wrapper. Where the target has none, `.module`
goes where nothing asks.

Before::

    model = nn.DataParallel(nn.Linear(2, 2))
    if isinstance(model, nn.DataParallel):
        model = model.module
    weights = model.module.state_dict() if torch.cuda.device_count() > 1 else model.state_dict()

After::

    model = nn.DataParallel(nn.Linear(2, 2))
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    weights = model.module.state_dict() if hasattr(model, "module") else model.state_dict()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Text, replace
from migrate.facts.program import DATA_PARALLEL
from migrate.facts.state import is_wrapper
from migrate.facts.wrappers import chooses, module_attributes
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted

_ASKS = re.compile(r"hasattr|isinstance|__class__|type\(")


class Unwrap(Rule):
    """Finds `.module`, and the questions before it."""

    code = "MG507"
    title = "the model is taken out of its wrapper"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every question, and for every `.module` that has to go."""
        asked: list[tuple[Source, cst.CSTNode]] = []
        for source in context.sources:
            choices: list[cst.IfExp | cst.If] = [*source.all(cst.IfExp), *source.all(cst.If)]
            for choice in choices:
                if chooses(context, source, choice):
                    asked.append((source, choice.body))
                    if not _ASKS.search(source.code(choice.test)):
                        yield self._ask(context, source, choice)
        if context.target.has_wrapper:
            for source, call in context.facts.calls_of(r"^isinstance$"):
                yield from self._isinstance(context, source, call)
        else:
            for source in context.sources:
                done = [node for home, node in asked if home is source]
                yield from self._without(context, source, done)

    def _ask(self, context: Context, source: Source, choice: cst.IfExp | cst.If) -> Finding:
        attribute = module_attributes(context, source, choice.body)[0]
        model = source.code(attribute.value)
        test = source.code(choice.test)
        message = f"takes {model} out of its wrapper if it has one, not if {test}"
        edits = [replace(source, choice.test, f'hasattr({model}, "module")')]
        return self.finding(source, choice.test, message, edits)

    def _isinstance(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        if len(call.args) != 2 or not is_wrapper(context, source, call.args[0].value):
            return
        kinds = call.args[1].value
        elements = kinds.elements if isinstance(kinds, cst.Tuple) else ()
        given = [element.value for element in elements] or [kinds]
        names = [context.flow.qualified(source, node) or "" for node in given]
        spelled = [dotted(node) or "" for node in given]
        if any("DistributedDataParallel" in name for name in (*names, *spelled)):
            return
        old = [n for n, name in zip(given, names, strict=True) if DATA_PARALLEL.match(name)]
        if not old:
            return
        new = _distributed(context, source, dotted(old[0]) or "")
        message = f"{source.code(call)} asks for the new wrapper, too"
        if new is None:
            advice = "add torch.nn.parallel.DistributedDataParallel to the classes asked for"
            yield self.finding(source, call, message, advice=advice)
            return
        text = ", ".join([source.code(node) for node in given] + [new])
        inner = kinds.lpar if isinstance(kinds, cst.Tuple) else ()
        edits = [replace(source, kinds, text if inner else f"({text})")]
        yield self.finding(source, call, message, edits)

    def _without(
        self, context: Context, source: Source, asked: list[cst.CSTNode]
    ) -> Iterator[Finding]:
        for attribute in module_attributes(context, source, source.module):
            if any(source.contains(node, attribute) for node in asked):
                continue
            if _is_asked_for(source, attribute):
                continue
            model = source.code(attribute.value)
            parent = source.parent(attribute)
            message = f"{model} has no wrapper: {model}.module is {model}"
            if isinstance(parent, cst.AssignTarget):
                advice = f"assign to {model} itself, before it is made parallel"
                yield self.finding(source, attribute, message, advice=advice)
                continue
            start = source.span(attribute.value).stop
            for paren in getattr(attribute.value, "rpar", ()):
                start = max(start, source.span(paren).stop)
            edit = Text(source, start, source.span(attribute).stop, "")
            yield self.finding(source, attribute, message, [edit])


def _is_asked_for(source: Source, attribute: cst.Attribute) -> bool:
    """Whether a condition around `.module` asks whether there is one."""
    inner: cst.CSTNode = attribute
    for item in source.ancestors(attribute):
        if isinstance(item, cst.FunctionDef):
            return False
        if isinstance(item, cst.If | cst.IfExp) and inner is item.body:
            test = source.code(item.test)
            if _ASKS.search(test) and ("module" in test or "Parallel" in test):
                return True
        inner = item
    return False


def _distributed(context: Context, source: Source, name: str) -> str | None:
    """The new wrapper's class, spelled as the old one's."""
    prefix, _, last = name.rpartition(".")
    if last == "DataParallel" and prefix:
        module = prefix if prefix.endswith("parallel") else f"{prefix}.parallel"
        return f"{module}.DistributedDataParallel"
    names = context.flow.names[source].module_names
    return "torch.nn.parallel.DistributedDataParallel" if "torch" in names else None
