"""A name is made from the clock or from random numbers.

Why it matters: each process reads the clock a moment later, so they would disagree about the folder
of the run, and look for checkpoints where nobody wrote any.

Safety: policy. The main process's value goes to all, which is right where all processes come by.
Values that only measure time, are printed, or are used where only one process writes stay.
Attributes are followed by their name (the one place where a name decides).

Before::

    import os
    import time

    import torch

    folder = os.path.join("runs", time.strftime("%H%M%S"))
    os.makedirs(folder)

After::

    import os
    import time

    import torch

    folder = os.path.join("runs", from_main_process(time.strftime("%H%M%S")))
    os.makedirs(folder)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import enclose
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._process import CLOCKS, SEEDS, is_output, short
from migrate.source import Source
from migrate.syntax import argument, method_name, string_value

_SINKS = re.compile(
    r"^(os\.(mkdir|makedirs|path\.\w+)|open|pathlib\.Path|wandb\.init|torch\.save|shutil\.\w+"
    r"|logging\.(FileHandler|basicConfig))$|SummaryWriter$|FileHandler$"
)
_TEXT = re.compile(r"^(str|int|os\.path\.join|pathlib\.Path|abs|round)$")
_KEEPS = {
    "format",
    "replace",
    "strftime",
    "isoformat",
    "join",
    "strip",
    "split",
    "lower",
    "timestamp",
}
_TEXTUAL = (
    cst.FormattedStringExpression, cst.FormattedString, cst.Attribute, cst.Subscript, cst.Element,
    cst.Tuple, cst.ConcatenatedString, cst.Arg, cst.IfExp, cst.BooleanOperation,
)  # fmt: skip


class ClockNames(Rule):
    """Finds names that differ between processes."""

    code = "MG702"
    title = "a name is made from the clock or from random numbers"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each such value that flows into a path, a run's name or a seed."""
        calls = context.facts.calls_of(CLOCKS.pattern)
        clocks = {call for _, call in calls}
        for source, call in calls:
            if any(item in clocks for item in source.ancestors(call)):
                continue
            if not _by_all(context, source, call) or not _is_name(context, source, call, 0):
                continue
            name, need = context.helper(source, "from_main_process")
            node = _chain(source, call)
            yield self.finding(
                source, call, f"{short(source, node)} is taken from the main process",
                [*enclose(source, node, f"{name}(", ")"), need], Applicability.POLICY,
                assumption="every process comes to this line",
            )  # fmt: skip


def _chain(source: Source, call: cst.CSTNode) -> cst.CSTNode:
    """`now().strftime(...)` for `now()`."""
    node = call
    while True:
        attribute = source.parent(node)
        outer = source.parent(attribute) if isinstance(attribute, cst.Attribute) else None
        if not isinstance(outer, cst.Call) or outer.func is not attribute:
            return node
        if method_name(outer) not in _KEEPS:
            return node
        node = outer


def _by_all(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether all processes certainly come to a place, in the migrated program too."""
    facts = context.facts
    for item in source.ancestors(call):
        if isinstance(item, cst.Call):
            name = facts.callee(source, item) or ""
            if source.code(item.func).rstrip("_") == "from_main_process":
                return False
            sink = _SINKS.search(name) and not name.startswith(("os.path", "pathlib"))
            if sink or is_output(item):
                return False
        if isinstance(item, cst.If) and facts.loops_around(source, item):
            return False
        if isinstance(item, cst.FunctionDef | cst.Lambda):
            break
    if facts.main_process.is_by_rank(source, call):
        return False
    function = source.function_of(call)
    known = function is None or function in facts.training_functions
    if known or (function and function.name.value == "__init__"):
        return True
    return function is not None and bool(source.inside(function, cst.Return))


def _is_name(context: Context, source: Source, node: cst.CSTNode, depth: int) -> bool:
    """Whether a value flows into a path, the name of a run, or a seed."""
    if depth > 6:
        return False
    parent = source.parent(node)
    while parent is not None:
        verdict = _verdict(context, source, parent, node, depth)
        if verdict is not None:
            return verdict
        node, parent = parent, source.parent(parent)
    return False


def _verdict(
    context: Context, source: Source, parent: cst.CSTNode, node: cst.CSTNode, depth: int
) -> bool | None:
    """Whether a value becomes a name in the node around it; None if what is around that decides."""
    if isinstance(parent, cst.Call):
        return _in_call(context, source, parent, node, depth)
    if isinstance(parent, cst.BinaryOperation):
        builds = isinstance(parent.operator, cst.Add | cst.Modulo | cst.Divide)
        return None if builds else False
    if isinstance(parent, cst.Assign):
        return any(_target(context, source, t.target, depth) for t in parent.targets)
    if isinstance(parent, cst.Return):
        function = source.function_of(parent)
        callers = context.facts.callers.get(function, []) if function else []
        return any(_is_name(context, s, call, depth + 1) for s, call in callers)
    return None if isinstance(parent, _TEXTUAL) else False


def _in_call(
    context: Context, source: Source, call: cst.Call, node: cst.CSTNode, depth: int
) -> bool | None:
    """What a call does with its argument; None if its result is what counts."""
    name = context.facts.callee(source, call) or ""
    if call.func is node:
        return None if method_name(call) in _KEEPS else False
    if is_output(call):
        return False
    if method_name(call) == "add_argument":
        return _argparse(context, call, depth)
    if method_name(call) in ("mkdir", "save", "add_argument_group"):
        return True
    if _SINKS.search(name) or SEEDS.search(name):
        return True
    if _TEXT.search(name) or method_name(call) in _KEEPS or CLOCKS.search(name):
        return None
    for function in context.flow.callees.get(call, ()):
        arg = next((a for a in call.args if a is node or source.contains(a, node)), None)
        for parameter in function.node.params.params:
            given = arg is not None and argument(call, parameter.name.value) is arg
            if not given and not _position(call, arg, function.node, parameter):
                continue
            if _reads(context, function.source, parameter.name, depth):
                return True
    return False


def _position(
    call: cst.Call, arg: cst.Arg | None, function: cst.FunctionDef, parameter: cst.Param
) -> bool:
    """Whether a positional argument becomes a parameter."""
    if arg is None or arg.keyword is not None:
        return False
    names = [p for p in function.params.params if p.name.value != "self"]
    index = next(i for i, item in enumerate(call.args) if item is arg)
    return index < len(names) and names[index] is parameter


def _argparse(context: Context, call: cst.Call, depth: int) -> bool:
    names = [string_value(arg.value) or "" for arg in call.args if arg.keyword is None]
    given = argument(call, "dest")
    text = (
        string_value(given.value) if given else next((n for n in names if n.startswith("--")), "")
    )
    return _attribute(context, (text or "").lstrip("-").replace("-", "_"), depth)


def _attribute(context: Context, name: str, depth: int) -> bool:
    return any(
        _is_name(context, source, node, depth + 1)
        for source in context.sources
        for node in source.all(cst.Attribute)
        if node.attr.value == name and not isinstance(source.parent(node), cst.AssignTarget)
    )


def _target(context: Context, source: Source, target: cst.CSTNode, depth: int) -> bool:
    if isinstance(target, cst.Attribute):
        return _attribute(context, target.attr.value, depth)
    return isinstance(target, cst.Name) and _reads(context, source, target, depth)


def _reads(context: Context, source: Source, name: cst.Name, depth: int) -> bool:
    return any(
        _is_name(context, source, node, depth + 1)
        for node in context.facts.reads_of(source, name)
        if not isinstance(source.parent(node), cst.AssignTarget)
    )
