"""What the rules about models share: the text of a wrap."""

from __future__ import annotations

import re

import libcst as cst

from migrate.edit import Need
from migrate.facts.models import may_have_batch_norm, models_of_optimizer, repeated_blocks
from migrate.facts.program import Wrap
from migrate.rule import Context
from migrate.source import Source
from migrate.syntax import dotted, method_name, receiver
from migrate.values import Instance, Values

CONVERT = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"
CONVERTS = re.compile(r"convert_sync(_)?batchnorm|convert_syncbn_model")


def wrap_options(context: Context, values: Values) -> list[str]:
    """The arguments of the target's wrapping definition beside the model."""
    if context.target.has_wrapper:
        return ["find_unused_parameters=True"] if context.options.find_unused else []
    chosen = list(context.options.wrap_classes)
    inner = frozenset(value for value in values if isinstance(value, Instance))
    blocks = chosen or repeated_blocks(context.facts, inner)
    names = ", ".join(f'"{name}"' for name in blocks)
    return [f"blocks=[{names}]"] if blocks else []


def wrap_text(context: Context, source: Source, model: str, values: Values) -> tuple[str, Need]:
    """A call that makes `model` parallel, and what it needs."""
    name, need = context.helper(source, context.target.wrap)
    return f"{name}({', '.join([model, *wrap_options(context, values)])})", need


def base_name(model: cst.BaseExpression | None) -> str | None:
    """`model` for `model.cuda()`: what can be written above."""
    while isinstance(model, cst.Call) and method_name(model) in ("cuda", "to"):
        model = receiver(model)
    return dotted(model)


def early_optimizer(context: Context, wrap: Wrap) -> cst.CSTNode | None:
    """The first statement above the wrap, in its function, that makes an optimizer of its model.

    It would train weights that are no longer the model's, where the target shards them.
    """
    source, facts = wrap.source, context.facts
    if not context.target.shards:
        return None
    model_values = {*wrap.inner, *facts.flow.of(source, wrap.call)}
    makers = [
        (home, call)
        for home, call in facts.optimizers
        if models_of_optimizer(facts, home, call) & model_values
    ]
    above = [
        call
        for call in source.all(cst.Call)
        if source.function_of(call) is source.function_of(wrap.call)
        and source.span(call).start < source.span(wrap.call).start
    ]
    if not any(_makes(context, source, call, makers) for call in above):
        return None
    for call in above:
        if _makes(context, source, call, makers) or _takes_parameters(context, source, call, wrap):
            return source.statement_of(call)
    return None


def _takes_parameters(context: Context, source: Source, call: cst.Call, wrap: Wrap) -> bool:
    """Whether a call lists the parameters, which are others once they are sharded."""
    if method_name(call) not in ("parameters", "named_parameters"):
        return False
    values = {*wrap.inner, *context.flow.of(source, wrap.call)}
    return bool(context.flow.of(source, receiver(call)) & values)


def _makes(
    context: Context, source: Source, call: cst.Call, makers: list[tuple[Source, cst.Call]]
) -> bool:
    """Whether a call makes one of the optimizers, itself or in the function it calls."""
    if any(made is call for _, made in makers):
        return True
    called = {function.node for function in context.flow.callees.get(call, ())}
    return any(home.function_of(made) in called for home, made in makers)


def synchronises(context: Context, wrap: Wrap) -> bool:
    """Whether BatchNorm of what is wrapped is to be synchronised over the processes."""
    if context.options.batch_norm == "keep" or wrap.functional or wrap.custom is not None:
        return False
    if wrap.model is None or not may_have_batch_norm(context.facts, wrap.inner):
        return False
    inner = wrap.model if isinstance(wrap.model, cst.Call) else None
    if inner is not None and CONVERTS.search(context.facts.callee(wrap.source, inner) or ""):
        return False
    for source, call in context.facts.calls_of(CONVERTS.pattern):
        if call.args and context.flow.of(source, call.args[0].value) & wrap.inner:
            return False
    return True
