"""Where a model that is going to be trained in parallel gets weights in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.facts.models import bare_models, models_of_optimizer, submodule_wraps
from migrate.facts.program import Facts
from migrate.flow import call_arguments
from migrate.names import parameters
from migrate.once import once
from migrate.source import Source
from migrate.syntax import argument, dotted, method_name, receiver
from migrate.values import Class, External, Function, Instance, Made, Value, Values, owner_name

_HALF = frozenset({"torch.float16", "torch.half", "torch.bfloat16"})
_FULL = frozenset({"float", "double"})
_SHORT = {"half": "torch.float16", "bfloat16": "torch.bfloat16"}
_MOVES = frozenset({"cuda", "to", "half", "bfloat16", "train", "eval"})


@dataclass(frozen=True, eq=False)
class Cast:
    """A call that gives a trained model weights in half precision.

    Attributes:
        model: the expression that is cast; the call itself, if it makes the model.
        dtype: the type, as it can be written there.
        given: the argument that names the type, if one does.
        values: the models that are cast.
    """

    source: Source
    call: cst.Call
    model: cst.BaseExpression
    dtype: str
    given: cst.Arg | None
    values: Values

    @property
    def makes(self) -> bool:
        """Whether the call makes the model: `from_pretrained(…, torch_dtype=torch.float16)`."""
        return self.model is self.call

    @property
    def name(self) -> str | None:
        """The variable or attribute that is cast: `model` in `model.cuda().half()`."""
        return dotted(_unmoved(self.model))


def _unmoved(model: cst.BaseExpression | None) -> cst.BaseExpression | None:
    """`model` in `model.cuda().half()`."""
    while isinstance(model, cst.Call) and method_name(model) in _MOVES:
        model = receiver(model)
    return model


@once
def half_casts(facts: Facts) -> list[Cast]:
    """The casts of trained models, in the order of the files."""
    models = _parallel_models(facts)
    return [
        cast
        for source, call in facts.calls()
        if (cast := _cast(facts, source, call)) is not None
        and (cast.values & models or is_part(facts, cast))
        and not _is_cast_on(facts, source, call)
    ]


def _cast(facts: Facts, source: Source, call: cst.Call) -> Cast | None:
    name, model = method_name(call), receiver(call)
    if name == "from_pretrained":
        given = argument(call, "torch_dtype") or argument(call, "dtype")
        model = call
    elif name in ("to", "type"):
        typed = (arg for arg in call.args if _is_half(facts, source, arg.value))
        given = argument(call, "dtype") or next(typed, None)
    elif name in _SHORT and not call.args and model is not None:
        return Cast(source, call, model, _SHORT[name], None, facts.flow.of(source, model))
    else:
        return None
    if model is None or given is None or not _is_half(facts, source, given.value):
        return None
    values = facts.flow.of(source, model)
    return Cast(source, call, model, source.code(given.value), given, values)


def _is_half(facts: Facts, source: Source, node: cst.CSTNode) -> bool:
    """Whether an expression is, or may be, one of torch's half types."""
    return any(isinstance(v, External) and v.name in _HALF for v in facts.flow.of(source, node))


def _is_cast_on(facts: Facts, source: Source, call: cst.Call) -> bool:
    """Whether the result is cast again (`.half().float()`), or by what an earlier run wrote."""
    around = source.parent(call)
    if isinstance(around, cst.Attribute):
        return around.attr.value in _FULL
    outer = source.around(call, cst.Call)
    return outer is not None and outer in facts.uses_own(source, "compute_in")


@once
def _parallel_models(facts: Facts) -> Values:
    """The models that are trained and made parallel by the rewriting, and their wrappers."""
    parts = submodule_wraps(facts)
    groups: list[Values] = [frozenset([bare.value]) for bare in bare_models(facts)]
    for wrap in facts.wraps:
        if not (wrap.functional or wrap.distributed or wrap.custom or wrap in parts):
            groups.append(wrap.inner | facts.flow.of(wrap.source, wrap.call))
    for source, call in facts.own_wraps:
        groups.append(facts.flow.of(source, call) | facts.flow.of(source, call.args[0].value))
    groups = [group | _inside(facts, group) for group in groups]
    optimized: set[Value] = set()
    for source, call in facts.optimizers:
        optimized |= models_of_optimizer(facts, source, call)
    trained = [group for group in groups if group & optimized or not optimized]
    return frozenset(v for group in trained for v in group if isinstance(v, Instance | Made))


def _inside(facts: Facts, models: Values) -> Values:
    """The only model among what models are made of: `net` in `WithLoss(net, nn.L1Loss())`."""
    found: set[Value] = set()
    for value in models:
        if isinstance(value, Instance | Made) and isinstance(value.node, cst.Call):
            given = [facts.flow.of(value.source, arg.value) for arg in value.node.args]
            held = [v for values in given for v in values if facts.is_module(v)]
            held = [v for v in held if not (owner_name(v) or "").endswith("Loss")]
            found |= set(held) if len(held) == 1 else set()
    return frozenset(found)


def others_cast(facts: Facts, cast: Cast) -> list[str]:
    """What else is cast there, for all that can be seen: by a function that several models reach,
    or by a class whose objects are not all sharded."""
    source, function = cast.source, cast.source.function_of(cast.call)
    name = cast.name
    if function is None or name not in [p.name.value for p in parameters(function)]:
        return []
    if name == "self":
        return list(_unwrapped_instances(facts, cast))
    callee = Function(source, function, source.class_of(function))
    given = [
        (user, arg.value)
        for user, call in facts.callers.get(function, ())
        if (arg := call_arguments(call, callee, name)) is not None
    ]
    values = {facts.flow.of(user, node) for user, node in given}
    return [user.one_line(node) for user, node in given] if len(values) > 1 else []


def _unwrapped_instances(facts: Facts, cast: Cast) -> Iterator[str]:
    """The models of a class that casts itself that nothing trains in parallel."""
    cls, models = cast.source.class_of(cast.call), _parallel_models(facts)
    for source, call in facts.calls():
        made = facts.flow.of(source, call.func)
        is_ours = any(isinstance(value, Class) and value.node is cls for value in made)
        if is_ours and not facts.flow.of(source, call) & models:
            yield source.one_line(call)


def is_part(facts: Facts, cast: Cast) -> bool:
    """Whether only a part of a trained model is cast: `model.features.half()`."""
    source, node = cast.source, _unmoved(cast.model)
    if not isinstance(node, cst.Attribute) or node.attr.value == "module":
        return False
    owners, values = facts.flow.of(source, node.value), facts.flow.of(source, node)
    if not owners & _parallel_models(facts):
        return False
    return any(map(facts.is_module, values)) or not (values or dotted(node.value) == "self")


def is_trained_below(facts: Facts, cast: Cast) -> bool:
    """Whether steps run after the cast."""
    queue: list[tuple[Source, cst.CSTNode]] = [(cast.source, cast.call)]
    for source, node in queue:  # grows: what comes after a call of the function
        loops = facts.loops_around(source, node)
        if any(facts.reaches_backward(source, loop.body) for loop in loops):
            return True
        function = source.function_of(node)
        for item in (node, *source.ancestors(node)):
            if item is function:
                break
            if isinstance(item, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                siblings = source.siblings(item)
                below = siblings[siblings.index(item) + 1 :] if item in siblings else []
                if any(facts.reaches_backward(source, each) for each in below):
                    return True
        callers = facts.callers.get(function, []) if function else []
        queue += [caller for caller in callers if caller not in queue]
    return False


@once
def full_copies(facts: Facts) -> list[tuple[Source, cst.CSTNode, Values]]:
    """The lists of full-precision copies that scripts keep of half weights, and of which models."""
    found: list[tuple[Source, cst.CSTNode, Values]] = []
    for source in facts.project.sources:
        loops: list[tuple[cst.CSTNode, cst.BaseExpression]] = []
        loops += [(node, node.for_in.iter) for node in source.all(cst.ListComp)]
        loops += [(node, node.iter) for node in source.all(cst.For)]
        for node, iterable in loops:
            if facts.definitions[source].is_own(node) or not _copies(facts, source, node):
                continue
            for call in source.inside(iterable, cst.Call):
                if method_name(call) in ("parameters", "named_parameters"):
                    found.append((source, node, facts.flow.of(source, receiver(call))))
    return found


def _copies(facts: Facts, source: Source, node: cst.CSTNode) -> bool:
    """Whether an element of a list is a copy in full precision: `p.clone().float()`."""
    if isinstance(node, cst.ListComp):
        return _is_full_copy(facts, source, node.elt)
    return any(
        method_name(call) == "append"
        and call.args
        and _is_full_copy(facts, source, call.args[0].value)
        for call in source.inside(node, cst.Call)
    )


def _is_full_copy(facts: Facts, source: Source, node: cst.BaseExpression) -> bool:
    casts = [call for call in source.inside(node, cst.Call) if _is_full_cast(facts, source, call)]
    names = {method_name(call) for call in source.inside(node, cst.Call)}
    return bool(casts) and names <= {None, "Parameter", "float", "to", "type", "clone", "detach",
                                     "requires_grad_", "contiguous", "cuda"}  # fmt: skip


def _is_full_cast(facts: Facts, source: Source, call: cst.Call) -> bool:
    if method_name(call) == "float":
        return True
    names = [facts.flow.qualified(source, arg.value) or "" for arg in call.args]
    return method_name(call) in ("to", "type") and any(
        name.endswith((".float32", ".float", ".FloatTensor")) for name in names
    )
