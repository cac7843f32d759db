"""Which models are trained, which of them nothing wraps yet, and what they are made of.

Built on `facts`; only rules ask it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.facts.program import Facts, Wrap
from migrate.once import once
from migrate.source import Source
from migrate.syntax import assigned_targets, dotted, method_name, receiver
from migrate.values import Class, External, Function, Instance, Made, Value, Values

_BATCH_NORM = re.compile(r"Batch_?Norm|InPlaceABN|(^|\.)BN\d?d?$", re.I)
_WITHOUT_BATCH_NORM = re.compile(
    r"^torch\.nn\.|^transformers\.|\.(alexnet|squeezenet\w*|vgg\d+|vit_\w+|swin_\w+)$"
)
_MOVES = frozenset(
    {"cuda", "to", "apply", "float", "train", "load_state_dict", "double", "half", "bfloat16"}
)


@dataclass(frozen=True, eq=False)
class Bare:
    """A trained model without a wrapper around all of it.

    Attributes:
        name: the variable or attribute that holds it.
        statement: the last statement that makes or moves it, before it is used.
    """

    source: Source
    name: str
    statement: cst.CSTNode
    value: Value


@once
def trained_models(facts: Facts) -> Values:
    """The models whose parameters an optimizer is given."""
    found: set[Value] = set()
    for source, call in facts.optimizers:
        found |= models_of_optimizer(facts, source, call)
    return frozenset(found)


def models_of_optimizer(facts: Facts, source: Source, call: cst.Call) -> Values:
    """The models an optimizer is made for; where its parameters come from a list that is filled
    elsewhere, those whose parameters are read in the same function."""
    found: set[Value] = set(facts.models_in(source, call))
    for arg in call.args[:1]:
        found |= _behind_names(facts, source, arg.value)
    if not found:
        scope = source.function_of(call) or source.module
        found |= facts.models_in(source, scope)
    return frozenset(found)


def _behind_names(facts: Facts, source: Source, node: cst.CSTNode, depth: int = 0) -> Values:
    """Models whose parameters reach an expression through variables and the project's functions."""
    found: set[Value] = set()
    if depth > 4:
        return frozenset()
    for value in facts.flow.of(source, node):
        if isinstance(value, Made):
            found |= facts.models_in(value.source, value.node)
            for name in value.source.inside(value.node, cst.Name):
                if name is not node:
                    found |= _behind_names(facts, value.source, name, depth + 1)
    return frozenset(found)


@once
def submodule_wraps(facts: Facts) -> list[Wrap]:
    """The wraps of a part of a model: `model.features = DataParallel(model.features)`."""
    return [wrap for wrap in facts.wraps if _is_put_into_a_model(facts, wrap)]


def _is_put_into_a_model(facts: Facts, wrap: Wrap) -> bool:
    assigned = wrap.source.inside(wrap.source.statement_of(wrap.call), cst.Assign)
    targets = [target.target for assign in assigned for target in assign.targets]
    owners = [item.value for item in targets if isinstance(item, cst.Attribute)]
    values = [value for owner in owners for value in facts.flow.of(wrap.source, owner)]
    return any(facts.is_module(value) for value in values)


@once
def bare_models(facts: Facts) -> list[Bare]:
    """The trained models that nothing wraps as a whole, and where they are complete."""
    parts = {value for wrap in submodule_wraps(facts) for value in wrap.inner}
    wrapped = facts.wrapped - parts
    found: dict[tuple[Source, str], Bare] = {}
    for value in trained_models(facts):
        if value in wrapped or value in parts or _is_wrapper(value):
            continue
        place = _place(facts, value)
        if place is not None:
            found.setdefault((place.source, place.name), place)
    return [bare for bare in found.values() if not _is_rebound_to_wrapped(facts, bare)]


def _is_wrapper(value: Value) -> bool:
    return isinstance(value, Made) and value.name.endswith(("DataParallel", "fully_shard"))


def _is_rebound_to_wrapped(facts: Facts, bare: Bare) -> bool:
    """Whether the same variable also holds a wrapper: another branch makes it parallel."""
    assigned = [
        assign
        for assign in bare.source.all(cst.Assign)
        if any(bare.source.code(target.target) == bare.name for target in assign.targets)
    ]
    return any(facts.flow.of(bare.source, a.value) & facts.wrapped for a in assigned)


def _place(facts: Facts, value: Value) -> Bare | None:
    """The variable in the outermost training code that the model is first held by."""
    candidates = []
    for source in facts.project.sources:
        assigns: list[cst.Assign | cst.AnnAssign] = [*source.all(cst.Assign)]
        for assign in [*assigns, *source.all(cst.AnnAssign)]:
            targets = assigned_targets(assign)
            is_plain = dotted(targets[0]) is not None and len(targets) == 1
            if is_plain and value in facts.flow.of(source, assign.value):
                function = source.function_of(assign)
                is_outer = function is None or function in facts.training_functions
                candidates.append((not is_outer, source, assign, source.code(targets[0])))
    if not candidates:
        return None
    best = min(candidates, key=lambda item: item[0])
    _, source, assign, name = best
    statement = _completed(facts, source, source.statement_of(assign), name)
    return Bare(source, name, statement, value)


def _completed(facts: Facts, source: Source, start: cst.CSTNode, name: str) -> cst.CSTNode:
    """The last of the statements that make, move or load the model before anything else uses it."""
    statement = _outermost_branch(source, start, name)
    last = statement
    siblings = source.siblings(statement)
    for item in siblings[siblings.index(statement) + 1 :]:
        used = _mentions(source, item, name) and not _only_reads(source, item)
        if _only_prepares(source, item, name):
            last = item
        elif used or facts.reaches_backward(source, item):
            break
    return last


def _outermost_branch(source: Source, statement: cst.CSTNode, name: str) -> cst.CSTNode:
    """A statement, or the `if` around it all of whose branches bind the same name."""
    best = statement
    for item in source.ancestors(statement):
        if isinstance(item, cst.FunctionDef | cst.ClassDef | cst.For | cst.While):
            break
        if isinstance(item, cst.If) and not isinstance(source.parent(item), cst.If):
            bound = [
                assign
                for assign in source.inside(item, cst.Assign)
                if source.code(assign.targets[0].target) == name
            ]
            if len(bound) > 1 or item.orelse is not None:
                best = item
    return best


def _mentions(source: Source, node: cst.CSTNode, name: str) -> bool:
    kinds = (cst.Attribute,) if "." in name else (cst.Name,)
    return any(source.code(item) == name for kind in kinds for item in source.inside(node, kind))


def _only_prepares(source: Source, statement: cst.CSTNode, name: str) -> bool:
    """Whether a statement only moves, loads or rebinds the model, or does so in its branches."""
    if isinstance(statement, cst.If):
        blocks = [statement.body, *([statement.orelse.body] if statement.orelse else [])]
        inner = [item for block in blocks for item in getattr(block, "body", ())]
        return any(_only_prepares(source, item, name) for item in inner)
    for assign in source.inside(statement, cst.Assign):
        target = source.code(assign.targets[0].target)
        if target == name or target.startswith(f"{name}."):
            return True
    for call in source.inside(statement, cst.Call):
        base = receiver(call)
        if method_name(call) in _MOVES and base is not None and source.code(base) == name:
            return True
    return False


def _only_reads(source: Source, statement: cst.CSTNode) -> bool:
    names = {dotted(call.func) for call in source.inside(statement, cst.Call)}
    return "print" in names


# What models are made of


def parts_of(facts: Facts, value: Value) -> tuple[set[Class], set[str]]:
    """The project's classes a model may be built from, and the external names it may use."""
    classes: set[Class] = set()
    names: set[str] = set()
    queue: list[tuple[Source, cst.CSTNode]] = []
    seen: set[cst.CSTNode] = set()
    if isinstance(value, Instance):
        queue += [(c.source, c.node) for c in facts.flow.bases(value.cls)[0]]
        queue += [(value.source, value.node)] if value.node is not None else []
    elif isinstance(value, Made):
        queue.append((value.source, value.node))
        names.add(value.name)
    while queue:
        source, root = queue.pop()
        if root in seen:
            continue
        seen.add(root)
        for item in _values_in(facts, source, root):
            match item:
                case External():
                    names.add(item.name)
                case Class():
                    classes.add(item)
                    queue += [(c.source, c.node) for c in facts.flow.bases(item)[0]]
                case Function():
                    queue.append((item.source, item.node))
                case Instance() if item.node is not None:
                    classes.add(item.cls)
                    queue += [(item.source, item.node), (item.cls.source, item.cls.node)]
    return classes, names


def _values_in(facts: Facts, source: Source, root: cst.CSTNode) -> Iterator[Value]:
    for kind in (cst.Name, cst.Attribute):
        for node in source.inside(root, kind):
            yield from facts.flow.of(source, node)


def may_have_batch_norm(facts: Facts, values: Values) -> bool:
    """Whether a model may contain BatchNorm; models from elsewhere may, unless they are known."""
    for value in values:
        if not isinstance(value, Instance | Made):
            continue
        _, names = parts_of(facts, value)
        if any(_BATCH_NORM.search(name.rpartition(".")[2]) for name in names):
            return True
        made = value.name if isinstance(value, Made) else "torch.nn."
        if not _WITHOUT_BATCH_NORM.search(made) and not _is_wrapper(value):
            return True
    return False


def repeated_blocks(facts: Facts, values: Values) -> list[str]:
    """The names of the project's module classes that a model holds many of.

    Those made in a loop or a comprehension, or several times inside a ModuleList or Sequential.
    """
    found: dict[str, None] = {}
    for value in values:
        if not isinstance(value, Instance):
            continue
        classes = {value.cls, *parts_of(facts, value)[0]}
        for cls in sorted(classes, key=lambda c: (str(c.source.path), c.source.line_of(c.node))):
            for name in _made_repeatedly(facts, cls):
                found.setdefault(name)
    return list(found)


def _made_repeatedly(facts: Facts, cls: Class) -> Iterator[str]:
    source = cls.source
    counts: dict[str, int] = {}
    for call in source.inside(cls.node, cst.Call):
        for made in facts.flow.of(source, call.func):
            if not isinstance(made, Class) or not facts.is_module(Instance(made, source, None)):
                continue
            name = made.node.name.value
            if source.around(call, cst.ListComp, cst.GeneratorExp, cst.For) is not None:
                counts[name] = 2
            elif _in_container(facts, source, call):
                counts[name] = counts.get(name, 0) + 1
    yield from (name for name, count in counts.items() if count > 1)


def _in_container(facts: Facts, source: Source, call: cst.Call) -> bool:
    """Whether a module is made as an element of a ModuleList or Sequential."""
    outer = source.around(call, cst.Call)
    name = facts.callee(source, outer) if outer is not None else None
    return name in ("torch.nn.Sequential", "torch.nn.ModuleList")
