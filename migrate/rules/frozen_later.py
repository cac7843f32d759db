"""Parameters are frozen or un-frozen after the model was made parallel.

Why it matters: the wrapper averages the gradients of the parameters that were trainable when it
was made. One that is un-frozen later is trained by every process for itself, unsaid; one that is
frozen later is waited for, and the next forward fails. A whole model that is switched off and on
between steps, as the discriminator of a GAN, is fine.

Safety: not edited. In code that runs before the wrap there is nothing to report.

Before::

    model = nn.DataParallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))
    for parameter in model.module[0].parameters():
        parameter.requires_grad = False

Finding::

    MG808 parameter.requires_grad is changed after model was made parallel
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, base_of, parameters_of, training
from migrate.source import Source
from migrate.syntax import argument, literal, method_name, receiver
from migrate.values import Instance


class FrozenLater(Rule):
    """Finds assignments to `requires_grad` below the wrap."""

    code = "MG808"
    title = "parameters are frozen or un-frozen after the wrap"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every place."""
        if not context.target.has_wrapper:
            return
        know = training(context)
        for source in context.sources:
            for node, parameter, value in _changes(source):
                model = _model(know, source, parameter)
                if model is None or not know.is_after_wrap(source, node):
                    continue
                is_looked_for = context.options.find_unused and literal(value) is False
                if not is_looked_for and not _is_switched(know, source, node, value):
                    yield self._report(source, node, parameter, model)

    def _report(
        self, source: Source, node: cst.CSTNode, parameter: cst.BaseExpression, model: str
    ) -> Finding:
        text = source.code(parameter)
        what = text if isinstance(node, cst.Call) else f"{text}.requires_grad"
        return self.finding(
            source, node, f"{what} is changed after {model} was made parallel",
            effect=Effect.DIFFERENT,
            advice="freeze above the line that makes the model parallel; to change it during "
            "training, make the model parallel again from the bare model each time",
        )  # fmt: skip


def _changes(
    source: Source,
) -> Iterator[tuple[cst.CSTNode, cst.BaseExpression, cst.BaseExpression | None]]:
    """The places that set `requires_grad`: the place, of what, to what."""
    for assign in source.all(cst.Assign):
        for target in assign.targets:
            node = target.target
            if isinstance(node, cst.Attribute) and node.attr.value == "requires_grad":
                yield assign, node.value, assign.value
    for call in source.all(cst.Call):
        of = receiver(call)
        if method_name(call) == "requires_grad_" and of is not None:
            given = argument(call, "requires_grad", 0)
            yield call, of, given.value if given else None


def _model(know: Training, source: Source, node: cst.BaseExpression) -> str | None:
    """The parallel model whose parameters an expression stands for."""
    holder = _loop_over(know, source, node) or node
    current: cst.BaseExpression | None = holder
    while isinstance(current, cst.Attribute | cst.Subscript):
        if know.is_model(source, current):
            break
        current = current.value
    if current is None:
        return None
    if not know.is_model(source, current):
        return _own_class(know, source, current)
    return base_of(current) or source.code(current)


def _own_class(know: Training, source: Source, node: cst.BaseExpression) -> str | None:
    """The name of the class around `self`, if that is a parallel model's."""
    cls = source.class_of(node)
    if cls is None or source.code(node) != "self":
        return None
    is_model = any(isinstance(v, Instance) and v.cls.node is cls for v in know.models)
    return cls.name.value if is_model else None


def _loop_over(
    know: Training, source: Source, node: cst.BaseExpression
) -> cst.BaseExpression | None:
    """`model` in `for p in model.parameters()`, for the variable of the loop."""
    root = node
    while isinstance(root, cst.Attribute):
        root = root.value
    if not isinstance(root, cst.Name):
        return None
    for binding in know.reaching[source].of(root):
        if isinstance(binding.node, cst.For):
            return parameters_of(binding.node.iter)
    return None


def _is_switched(
    know: Training, source: Source, node: cst.CSTNode,
    value: cst.BaseExpression | None,
) -> bool:  # fmt: skip
    """Whether all of a model's parameters are switched, in a step: off for another model's sake.

    Also where the value does not change anything: True, right below the wrap.
    """
    loop = source.around(node, cst.For)
    every = (
        loop is not None
        and _is_whole(know, source, loop.iter)
        and not _conditions(source, node, loop)
    )
    if isinstance(node, cst.Call):
        of = receiver(node)
        every = every or (of is not None and know.is_model(source, of))
    return every and (know.runs_each_step(source, node) or literal(value) is True)


def _is_whole(know: Training, source: Source, iterable: cst.BaseExpression) -> bool:
    of = parameters_of(iterable)
    return of is not None and know.is_model(source, of)


def _conditions(source: Source, node: cst.CSTNode, loop: cst.For) -> bool:
    return any(
        isinstance(item, cst.If) and source.contains(loop, item) for item in source.ancestors(node)
    )
