"""The weights and optimizer states that a program saves and loads: where they come from.

A dict that is saved is followed back to the `state_dict()` calls in it, through variables,
arguments, copies and other dicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.models import bare_models, models_of_optimizer
from migrate.facts.program import DATA_PARALLEL
from migrate.flow import Flow
from migrate.names import Slot
from migrate.once import once
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import argument, method_name, receiver
from migrate.values import Made, Value, Values

_SAVING = re.compile(
    r"^(torch\.save|(.*\.)?c?[Pp]ickle\.dump|joblib\.dump|safetensors\.torch\.save_file)$"
)
_LOADING = re.compile(
    r"^(torch\.load|safetensors(\.\w+)*\.load_file|torch\.hub\.load_state_dict_from_url)$"
)


_COPY = re.compile(r"^copy\.(deep)?copy$")


def models_at(context: Context, source: Source, node: cst.CSTNode | None) -> Values:
    """The values of an expression; for a copy, those of what was copied, too."""
    found: set[Value] = set(context.flow.of(source, node))
    for value in list(found):
        if isinstance(value, Made) and _COPY.match(value.name) and isinstance(value.node, cst.Call):
            for arg in value.node.args[:1]:
                found |= context.flow.of(value.source, arg.value)
    return frozenset(found)


def is_wrapper(context: Context, source: Source, node: cst.CSTNode | None) -> bool:
    """Whether an expression may be a model inside DataParallel, wrapper included."""
    return any(
        isinstance(value, Made) and DATA_PARALLEL.match(value.name)
        for value in models_at(context, source, node)
    )


@once
def bare_values(context: Context) -> Values:
    """The trained models that the script itself does not make parallel."""
    return frozenset(bare.value for bare in bare_models(context.facts))


def is_parallel(context: Context, source: Source, node: cst.CSTNode | None) -> bool:
    """Whether an expression may be a model that is made parallel, now or by the rewriting."""
    values = models_at(context, source, node)
    return bool(values & (context.facts.wrapped | bare_values(context)))


def is_sharded_optimizer(context: Context, source: Source, node: cst.CSTNode | None) -> bool:
    """Whether an expression may be an optimizer of weights that are wrapped, or not seen."""
    made = {value.node for value in context.flow.made_by(source, node)}
    parallel = context.facts.wrapped | bare_values(context)
    models = [
        models_of_optimizer(context.facts, home, call)
        for home, call in context.facts.optimizers
        if call in made
    ]
    return any(not each or each & parallel for each in models)


def is_sharded_state(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether a call is a `state_dict()` whose tensors the target shards."""
    if not context.target.shards or method_name(call) != "state_dict":
        return False
    of = receiver(call)
    return is_parallel(context, source, of) or is_sharded_optimizer(context, source, of)


def saves(context: Context) -> Iterator[tuple[Source, cst.Call, cst.BaseExpression]]:
    """The calls that save objects, with what they save."""
    for source, call in context.facts.calls():
        if _SAVING.match(context.facts.callee(source, call) or ""):
            arg = argument(call, "obj", 0)
            if arg is not None:
                yield source, call, arg.value


@once
def saved_states(context: Context) -> dict[cst.Call, Source]:
    """The `state_dict()` calls whose results are saved."""
    nodes = [(source, node) for source, _, node in saves(context)]
    return states_in(context, nodes)


def states_in(
    context: Context, nodes: list[tuple[Source, cst.BaseExpression]]
) -> dict[cst.Call, Source]:
    """The `state_dict()` calls whose results expressions hold."""
    found: dict[cst.Call, Source] = {}
    seen: set[Value] = set()
    slots = slots_of(context)
    queue = [value for source, node in nodes for value in _values(context.flow, source, node)]
    while queue:
        value = queue.pop()
        if value in seen or not isinstance(value, Made):
            continue
        seen.add(value)
        found.update((call, value.source) for call in _state_calls(value.source, value.node))
        for slot in slots.get(value.node, ()):
            queue += context.flow.slots.get(slot, ())
        if isinstance(value.node, cst.Call) and method_name(value.node) != "state_dict":
            for arg in value.node.args:
                queue += _values(context.flow, value.source, arg.value)
    own = context.facts.definitions
    return {call: source for call, source in found.items() if not own[source].is_own(call)}


def _values(flow: Flow, source: Source, node: cst.CSTNode) -> list[Value]:
    """What an expression can be; for one that is written out, the expression itself."""
    return list(flow.of(source, node)) or [Made(source, node, "")]


def _state_calls(source: Source, node: cst.CSTNode) -> list[cst.Call]:
    if isinstance(node, cst.FunctionDef):
        return []
    return [call for call in source.inside(node, cst.Call) if method_name(call) == "state_dict"]


@once
def slots_of(context: Context) -> dict[object, list[Slot]]:
    """For every object that holds others, the places in it."""
    found: dict[object, list[Slot]] = {}
    for slot in context.flow.slots:
        found.setdefault(slot.owner, []).append(slot)
    return found


def comes_from_file(context: Context, source: Source, node: cst.CSTNode | None) -> bool:
    """Whether an expression is what a file held, or a part of it."""
    return next(files_behind(context, source, node), None) is not None


def files_behind(
    context: Context, source: Source, node: cst.CSTNode | None, depth: int = 0
) -> Iterator[Made]:
    """The reading of files that an expression, or what it is a part of, can come from."""
    if node is None or depth > 8:
        return
    for value in context.flow.made_by(source, node):
        if _LOADING.match(value.name):
            yield value
    for home, part in _origins(context, source, node):
        yield from files_behind(context, home, part, depth + 1)


def _origins(
    context: Context, source: Source, node: cst.CSTNode
) -> Iterator[tuple[Source, cst.CSTNode | None]]:
    """What an expression is a part of, or has its value from."""
    if isinstance(node, cst.Subscript):
        yield source, node.value
    elif isinstance(node, cst.Call) and method_name(node) in ("get", "pop", "state_dict"):
        yield source, receiver(node)
    elif isinstance(node, cst.IfExp):
        yield source, node.body
        yield source, node.orelse
    elif isinstance(node, cst.Name):
        yield from bindings(context, source, node)


def bindings(
    context: Context, source: Source, name: cst.Name
) -> Iterator[tuple[Source, cst.BaseExpression]]:
    """The expressions that are assigned to a variable, or passed to a parameter."""
    slot = context.facts.slot(source, name)
    for assign in source.all(cst.Assign):
        for target in assign.targets:
            to = target.target
            is_named = isinstance(to, cst.Name) and to.value == name.value
            if is_named and context.facts.slot(source, to) == slot:  # type: ignore[arg-type]
                yield source, assign.value
    if isinstance(slot.owner, cst.FunctionDef):
        names = [p.name.value for p in slot.owner.params.params]
        for home, call in context.facts.callers.get(slot.owner, ()):
            shift = 1 if names[:1] == ["self"] else 0
            if name.value in names[shift:]:
                arg = argument(call, name.value, names.index(name.value) - shift)
                if arg is not None:
                    yield home, arg.value


def is_whole_in_memory(context: Context, source: Source, node: cst.BaseExpression) -> bool:
    """Whether an expression may be a state that is saved, too, and so is gathered where it is read.

    Also one whose origin cannot be seen, which then is not that of a sharded model.
    """
    values = context.flow.of(source, node)
    if not values:
        return True
    calls = {c for v in values if isinstance(v, Made) for c in _state_calls(v.source, v.node)}
    return not calls or bool(calls & saved_states(context).keys())
