"""The model runs past its wrapper in a training step: `model.module(x)`, `model.module.encode(x)`.

Why it matters: only a forward of the wrapper itself gets its gradients averaged. What runs past it
trains every process on its own part of the data, and nothing says so. Where weights are sharded,
only `forward` gathers them.

Safety: not edited. In evaluation, and where the wrapper's forward also runs in the same step, it
is harmless and not reported.

Before::

    model = nn.DataParallel(nn.Linear(2, 1))
    for images in loader:
        model.module(images).sum().backward()

Finding::

    MG806 model.module(…) runs past the wrapper: its gradients are not averaged
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, base_of, training, without_gradients
from migrate.source import Source
from migrate.syntax import method_name, receiver
from migrate.values import Function, Instance, Method, Values


class PastWrapper(Rule):
    """Finds forwards that no wrapper sees."""

    code = "MG806"
    title = "the model runs past its wrapper"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call."""
        know = training(context)
        for source, call in context.facts.calls():
            model = _model(context, know, source, call)
            if model is None or not _trains(know, source, call):
                continue
            if context.target.has_wrapper and _wrapper_runs_too(know, source, call, model):
                continue
            yield self._report(context, source, call)

    def _report(self, context: Context, source: Source, call: cst.Call) -> Finding:
        name = source.code(call.func)
        method = method_name(call) or ""
        if context.target.has_wrapper:
            method = "" if method in ("module", "forward") else method
            base = source.code(call.func).partition(".module")[0]
            message = f"{name}(…) runs past the wrapper: its gradients are not averaged"
            advice = f"call {base}(…) instead"
            if method:
                base = base_of(receiver(call)) or base
                advice = (
                    f"call {base}(…) itself, and let its forward() do what {method}() does when an "
                    "argument asks for it"
                )
        else:
            message = f"{name}(…) runs without gathering the weights: only forward() does that"
            advice = context.target.other_methods.format(
                model=base_of(receiver(call)) or "model", method=method
            )
        return self.finding(source, call, message, effect=Effect.DIFFERENT, advice=advice)


def _model(context: Context, know: Training, source: Source, call: cst.Call) -> Values | None:
    """The model that a call runs past its wrapper; None if it does not."""
    func = call.func
    if not isinstance(func, cst.Attribute):
        return None
    name = func.attr.value
    if name == "module":
        of = func.value
        is_past = context.target.has_wrapper and know.is_wrapper(source, of)
        return know.flow.of(source, of) & know.models if is_past else None
    if name == "forward":
        inner = func.value
        is_module = isinstance(inner, cst.Attribute) and inner.attr.value == "module"
        if not is_module or not context.target.has_wrapper:
            return None
        assert isinstance(inner, cst.Attribute)
        return (know.flow.of(source, inner.value) & know.models) or None
    return _other_method(know, source, func)


def _other_method(know: Training, source: Source, func: cst.Attribute) -> Values | None:
    """The model, if a method other than forward runs layers of it."""
    owner = know.flow.of(source, func.value) & know.models
    if not owner or _is_self(source, func.value):
        return None
    for value in know.flow.of(source, func):
        if (
            isinstance(value, Method)
            and value.instance in know.models
            and _runs_layers(know, value.function, value.instance)
        ):
            return owner
    return None


def _is_self(source: Source, node: cst.CSTNode) -> bool:
    return isinstance(node, cst.Name) and node.value == "self"


def _runs_layers(know: Training, function: Function, instance: Instance, depth: int = 0) -> bool:
    """Whether a method calls modules that its object holds, or the object itself."""
    source = function.source
    if depth > 3 or without_gradients(source, function.node.body):
        return False
    for call in source.inside(function.node.body, cst.Call):
        root = call.func
        while isinstance(root, cst.Attribute | cst.Subscript):
            root = root.value
        if not _is_self(source, root) or without_gradients(source, call):
            continue
        if isinstance(call.func, cst.Name):
            return True
        if (
            any(know.facts.is_module(v) for v in know.flow.of(source, call.func))
            and method_name(call) not in _QUIET_METHODS
        ):
            return True
        for callee in know.flow.callees.get(call, ()):
            if callee.node is not function.node and _runs_layers(know, callee, instance, depth + 1):
                return True
    return False


_QUIET_METHODS = frozenset(
    [
        "parameters",
        "named_parameters",
        "state_dict",
        "load_state_dict",
        "modules",
        "named_modules",
        "children",
        "train",
        "eval",
        "to",
        "cuda",
        "cpu",
        "half",
        "float",
        "double",
        "type",
        "requires_grad_",
        "apply",
        "zero_grad",
    ]
)


def _trains(know: Training, source: Source, call: cst.Call) -> bool:
    """Whether a call's result is trained on: in a training loop, with gradients."""
    if without_gradients(source, call) or know.facts.main_process.only_main(source, call):
        return False
    loops = know.facts.loops_around(source, call)
    function = source.function_of(call)
    if loops and not know.facts.reaches_backward(source, loops[0].body):
        return any(call in know.calls_behind(home, of) for home, of in _losses(know, source, call))
    if not loops and function not in know.facts.training_functions:
        return False
    losses = _losses(know, source, call)
    return not losses or any(call in know.calls_behind(home, of) for home, of in losses)


def _losses(
    know: Training, source: Source, call: cst.Call
) -> list[tuple[Source, cst.BaseExpression]]:
    """What `backward()` is called on in the function of a call."""
    function = source.function_of(call)
    return [
        (home, of)
        for home, backward in know.facts.backwards
        if home is source and source.function_of(backward) is function
        for of in (receiver(backward),)
        if of is not None
    ]


def _wrapper_runs_too(know: Training, source: Source, call: cst.Call, model: Values) -> bool:
    """Whether the wrapper's own forward runs in the same step."""
    loops = know.facts.loops_around(source, call)
    root: cst.CSTNode = loops[0].body if loops else source.function_of(call) or source.module
    for other in know.forwards(source, root):
        func = other.func
        is_past = ".module" in source.code(func)
        if (
            not is_past
            and know.model_of(source, other) & model
            and not without_gradients(source, other)
        ):
            return True
    return False
