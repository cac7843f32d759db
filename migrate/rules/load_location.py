"""A file of tensors is loaded to the device it was saved from.

Why it matters: `torch.load` puts tensors where they were. Saved from `cuda:0`, they come to the
first device in every process, which fills it up.

Safety: safe where the file only goes into `load_state_dict`, which copies to the model's device, or
where the number stands in the text. Where other values are read from it, policy: they must be plain
numbers or states. What is not a model's or an optimizer's state is only mentioned.

Before::

    def resume(model, path):
        model.load_state_dict(torch.load(path))

After::

    def resume(model, path):
        model.load_state_dict(torch.load(path, map_location="cpu"))
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import Enum

import libcst as cst

from migrate.edit import remove_argument, replace, set_argument
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._process import names_own_number, short
from migrate.source import Source
from migrate.syntax import argument, has_star, method_name

_LOADERS = re.compile(r"load_state_dict|load_full_state|load_full_optimizer_state|match_prefix")
_READS = {"get", "items", "keys", "values", "pop", "update", "copy"}
_MODEL = {"cuda", "to", "eval", "train", "parameters", "state_dict", "half", "float"}


class _Use(Enum):
    STATE = "only states"
    VALUES = "states and values"
    MODEL = "a whole model"
    MOVED = "a whole model that is put on a device"
    OTHER = "anything"


class LoadLocation(Rule):
    """Finds `torch.load` that names no location, or a numbered one."""

    code = "MG105"
    title = "a file of tensors is loaded to the device it was saved from"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each load whose location is not the process's own."""
        for source, call in context.facts.calls_of(r"^torch\.load$"):
            if has_star(call):
                continue
            given = argument(call, "map_location", 1)
            if given is None or source.code(given.value) == "None":
                yield from self._without(context, source, call)
            else:
                yield from self._numbered(source, call, given.value)

    def _numbered(
        self, source: Source, call: cst.Call, location: cst.BaseExpression
    ) -> Iterator[Finding]:
        code = source.code(location)
        if names_own_number(source, location):
            return
        message = f"{short(source, location)} becomes the process's own device"
        if isinstance(location, cst.Lambda):
            for inner in source.inside(location.body, cst.Call):
                if method_name(inner) == "cuda" and len(inner.args) == 1:
                    edits = [remove_argument(source, inner, inner.args[0])]
                    yield self.finding(source, call, message, edits)
        elif re.search(r"[\"']cuda:", code) and not isinstance(location, cst.Name):
            if not isinstance(location, cst.IfExp):
                yield self.finding(source, call, message, [replace(source, location, '"cuda"')])
                return
            for branch in (location.body, location.orelse):
                if re.search(r"[\"']cuda:", source.code(branch)):
                    yield self.finding(source, call, message, [replace(source, branch, '"cuda"')])

    def _without(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        use = _use(context, source, call)
        target = short(source, call)
        if use is _Use.OTHER:
            message = f"{target} puts tensors saved from a device on that same one"
            yield self.finding(source, call, message, applicability=Applicability.INFO)
        elif use is _Use.MODEL:
            yield self.finding(
                source, call, f"{target} puts the model on the device it was saved from",
                advice='load it with map_location="cpu" and move it with .cuda()',
            )  # fmt: skip
        else:
            edit = set_argument(source, call, "map_location", '"cpu"', 1)
            values = use is _Use.VALUES
            yield self.finding(
                source, call, f"{target} loads to the CPU first", [edit],
                Applicability.POLICY if values else Applicability.SAFE,
                assumption="what else is read from the file are no tensors" if values else "",
            )  # fmt: skip


def _use(context: Context, source: Source, node: cst.CSTNode, depth: int = 0) -> _Use:
    """What is done with a loaded object."""
    parent = source.parent(node)
    if depth > 4 or parent is None:
        return _Use.OTHER
    if isinstance(parent, cst.Arg):
        call = source.parent(parent)
        called = method_name(call) or "" if isinstance(call, cst.Call) else ""
        name = source.code(call.func) if isinstance(call, cst.Call) else ""
        return _Use.STATE if _LOADERS.search(called or name) else _Use.OTHER
    if isinstance(parent, cst.Attribute) and parent.value is node:
        return _attribute(context, source, parent, depth)
    if isinstance(parent, cst.Subscript) and parent.value is node:
        inner = _use(context, source, parent, depth + 1)
        return _Use.STATE if inner is _Use.STATE else _Use.VALUES
    if isinstance(parent, cst.ComparisonTarget | cst.Comparison):
        return _Use.STATE
    if isinstance(parent, cst.Assign) and parent.value is node and len(parent.targets) == 1:
        return _variable(context, source, parent.targets[0].target, depth)
    return _Use.OTHER


def _attribute(context: Context, source: Source, node: cst.Attribute, depth: int) -> _Use:
    name = node.attr.value
    call = source.parent(node)
    if name in ("cuda", "to"):
        return _Use.MOVED
    if name in _MODEL:
        return _Use.MODEL
    if name == "get" and isinstance(call, cst.Call):
        inner = _use(context, source, call, depth + 1)
        return _Use.STATE if inner is _Use.STATE else _Use.VALUES
    return _Use.STATE if name in _READS else _Use.OTHER


def _variable(context: Context, source: Source, target: cst.CSTNode, depth: int) -> _Use:
    if not isinstance(target, cst.Name):
        return _Use.OTHER
    reads = [
        node
        for node in context.facts.reads_of(source, target)
        if not isinstance(source.parent(node), cst.AssignTarget)
        and source.span(node).start > source.span(target).start
    ]
    uses = {_use(context, source, node, depth + 1) for node in reads}
    for use in (_Use.MOVED, _Use.MODEL, _Use.OTHER, _Use.VALUES):
        if use in uses:
            return use
    return _Use.STATE if uses else _Use.OTHER
