"""Checkpoints that become folders, to which every process writes its part: which saves and loads.

A save can be one if it is `torch.save` to a path, all processes come to it, the states in it are
not taken apart, and none of them goes to another kind of file, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.files import is_used, reaching, reads, writes
from migrate.facts.state import (
    bindings,
    files_behind,
    is_parallel,
    is_sharded_optimizer,
    is_sharded_state,
    saves,
    states_in,
)
from migrate.once import once
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import argument, dotted, has_star, method_name, receiver
from migrate.values import Made


@once
def folder_saves(context: Context) -> dict[cst.Call, Source]:
    """The saves that write folders."""
    return {call: source for call, (source, _) in _folders(context).items()}


@once
def folder_states(context: Context) -> dict[cst.Call, Source]:
    """The `state_dict()` calls that go into folders."""
    return {call: home for _, states in _folders(context).values() for call, home in states.items()}


@once
def _folders(context: Context) -> dict[cst.Call, tuple[Source, dict[cst.Call, Source]]]:
    """The saves that write folders, each with the sharded states in it."""
    if context.options.save != "sharded" or not context.target.shards:
        return {}
    to_path = {write.call for write in writes(context) if write.path is not None}
    found: dict[cst.Call, tuple[Source, dict[cst.Call, Source]]] = {}
    others: set[cst.Call] = set()
    for source, call, node in saves(context):
        states = states_in(context, [(source, node)])
        sharded = {s: home for s, home in states.items() if is_sharded_state(context, home, s)}
        if call in to_path and sharded and _can_be_folder(context, source, call, sharded):
            found[call] = source, sharded
        else:
            others |= sharded.keys()
    while mixed := [call for call, (_, states) in found.items() if others & states.keys()]:
        for call in mixed:
            others |= found.pop(call)[1].keys()
    return found


def _can_be_folder(
    context: Context, source: Source, call: cst.Call, states: dict[cst.Call, Source]
) -> bool:
    if context.facts.callee(source, call) != "torch.save" or has_star(call):
        return False
    if is_used(source, call) or any(_is_whole(context, home, s) for s, home in states.items()):
        return False
    by_rank = context.facts.main_process.is_by_rank
    return not any(by_rank(home, node) for home, node in reaching(context, source, call))


def _is_whole(context: Context, source: Source, state: cst.Call) -> bool:
    """Whether a state is gathered, or read tensor by tensor, so that it may not stay in parts."""
    return isinstance(source.parent(state), cst.Attribute) or is_gathered(context, source, state)


def is_gathered(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether a state goes through `full_state` already."""
    own = context.facts.definitions[source].name("full_state")
    around = source.around(call, cst.Call)
    return around is not None and dotted(around.func) == own


def is_folder(context: Context, source: Source, path: cst.CSTNode | None) -> bool:
    """Whether a path may be that of a checkpoint that becomes a folder."""
    return path is not None and bool(path_keys(context, source, path) & _saved_keys(context))


@once
def _saved_keys(context: Context) -> set[object]:
    found: set[object] = set()
    for call, source in folder_saves(context).items():
        path = argument(call, "f", 1)
        if path is not None:
            found |= path_keys(context, source, path.value)
    return found


@once
def folder_loads(context: Context) -> list[tuple[Source, cst.Call, cst.BaseExpression]]:
    """The `torch.load` calls that may read folders, with the paths."""
    if not folder_saves(context):
        return []
    wanted = {made.node for made in _read_for_sharded(context)}
    return [
        (source, call, path)
        for source, call, path in reads(context)
        if context.facts.callee(source, call) == "torch.load"
        and (call in wanted or is_folder(context, source, path))
    ]


def _read_for_sharded(context: Context) -> Iterator[Made]:
    """Where sharded models and their optimizers load from."""
    for source, call in context.facts.calls():
        given = argument(call, "state_dict", 0)
        if method_name(call) == "load_state_dict" and given is not None:
            of = receiver(call)
            if is_parallel(context, source, of) or is_sharded_optimizer(context, source, of):
                yield from files_behind(context, source, given.value)


def path_keys(context: Context, source: Source, path: cst.CSTNode) -> set[object]:
    """What two expressions for the same path have in common."""
    if isinstance(path, cst.IfExp):  # `path if is_main_process() else os.devnull`
        return path_keys(context, source, path.body)
    found: set[object] = set()
    if isinstance(path, cst.Name):
        found.add(context.facts.slot(source, path))
        texts = [home.code(value) for home, value in bindings(context, source, path)]
    else:
        texts = [source.code(path)]
    texts += [
        value.source.code(value.node)
        for value in context.flow.of(source, path)
        if isinstance(value, Made) and isinstance(value.node, cst.Call)
    ]
    return found | {re.sub(r"\s|,(?=\s*\))", "", text).replace('"', "'") for text in texts}
