"""The model is put into DataParallel.

Why it matters: DataParallel copies the model to every device in every step and gathers outputs on
one; the targets train with one process per device.

Safety: safe. The same models are wrapped in the same places; `device_ids` and `output_device` go,
because a process has one device. Where weights are sharded, an optimizer that was made before the
wrap would hold weights that are never trained, so the model is made parallel above it. Blocks that
a model repeats are sharded one by one; `--wrap-class` names them where they cannot be seen.

Before::

    model = nn.DataParallel(model, device_ids=[0, 1])

After::

    model = wrap_model(model)
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, Text, add_argument, insert_before, remove_argument, replace
from migrate.facts import Wrap
from migrate.finding import Applicability, Finding
from migrate.models import models_of_optimizer, submodule_wraps
from migrate.rule import Context, Rule
from migrate.rules._wrapping import wrap_options
from migrate.source import Source
from migrate.syntax import dotted, method_name, receiver


class DataParallelWrap(Rule):
    """Finds calls of DataParallel."""

    code = "MG201"
    title = "the model is put into DataParallel"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every wrap that is not yet the target's."""
        parts = submodule_wraps(context.facts)
        for wrap in context.facts.wraps:
            if not (wrap.distributed or wrap.functional or wrap.custom or wrap in parts):
                yield self._wrap(context, wrap)

    def _wrap(self, context: Context, wrap: Wrap) -> Finding:
        source, model = wrap.source, wrap.source.code(wrap.model or wrap.call)
        options = wrap_options(context, wrap.inner)
        early = _earlier_optimizer(context, wrap) if context.target.shards else None
        name, need = context.helper(source, context.target.wrap)
        base = _base_name(wrap.model)
        message = f"makes {model} parallel: {context.target.title}"
        if early is None or base is None:
            edits: list[Edit] = [replace(source, wrap.call.func, name), need]
            edits += [remove_argument(source, wrap.call, arg) for arg in _device_arguments(wrap)]
            edits += [add_argument(source, wrap.call, option) for option in options]
            if early is not None:
                place = source.line_of(early)
                advice = f"make the optimizer of line {place} after the model is sharded"
                return self.finding(source, wrap.call, f"the optimizer of line {place} would never "
                                    f"train the sharded {model}", edits,
                                    Applicability.MANUAL, advice=advice)  # fmt: skip
            return self.finding(source, wrap.call, message, edits)
        arguments = ", ".join([base, *options])
        edits = [*_unwrapped(wrap), insert_before(source, early, [f"{name}({arguments})"]), need]
        message += f", above the optimizer of line {source.line_of(early)}"
        return self.finding(source, wrap.call, message, edits)


def _device_arguments(wrap: Wrap) -> list[cst.Arg]:
    return [
        arg
        for arg in wrap.call.args
        if arg.value is not wrap.model and (arg.keyword is None or arg.keyword.value != "module")
    ]


def _base_name(model: cst.BaseExpression | None) -> str | None:
    """`model` for `model.cuda()`: what can be written above."""
    while isinstance(model, cst.Call) and method_name(model) in ("cuda", "to"):
        model = receiver(model)
    return dotted(model)


def _unwrapped(wrap: Wrap) -> Iterator[Text]:
    """`DataParallel(model, …)` becomes `model`."""
    source = wrap.source
    if wrap.model is None:
        return
    start, stop = source.span(wrap.call)
    inner = source.span(wrap.model)
    yield Text(source, start, inner.start, "")
    yield Text(source, inner.stop, stop, "")


def _earlier_optimizer(context: Context, wrap: Wrap) -> cst.CSTNode | None:
    """The first statement above the wrap, in its function, that makes an optimizer of its model."""
    source, facts = wrap.source, context.facts
    model_values = {*wrap.inner, *facts.flow.of(source, wrap.call)}
    makers = [
        (home, call)
        for home, call in facts.optimizers
        if models_of_optimizer(facts, home, call) & model_values
    ]
    function = source.function_of(wrap.call)
    before = [
        _statement(source, call)
        for call in source.all(cst.Call)
        if source.function_of(call) is function
        and source.span(call).start < source.span(wrap.call).start
        and _makes(context, source, call, makers)
    ]
    return before[0] if before else None


def _statement(source: Source, node: cst.CSTNode) -> cst.CSTNode:
    """The statement around a node that stands in the body of the function itself."""
    statement: cst.CSTNode = source.statement_of(node)
    return statement


def _makes(
    context: Context, source: Source, call: cst.Call, makers: list[tuple[Source, cst.Call]]
) -> bool:
    """Whether a call makes one of the optimizers, itself or in the function it calls."""
    if any(made is call for _, made in makers):
        return True
    called = {function.node for function in context.flow.callees.get(call, ())}
    return any(home.function_of(made) in called for home, made in makers)
