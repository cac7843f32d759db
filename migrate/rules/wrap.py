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

from migrate.edit import (
    Edit,
    Text,
    add_argument,
    delete_statement,
    insert_before,
    remove_argument,
    replace,
)
from migrate.facts.models import submodule_wraps
from migrate.facts.program import Wrap
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._wrapping import (
    CONVERT,
    base_name,
    early_optimizer,
    synchronises,
    wrap_options,
)


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
        early = early_optimizer(context, wrap)
        name, need = context.helper(source, context.target.wrap)
        base = base_name(wrap.model)
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
        model = f"{CONVERT}({base})" if synchronises(context, wrap) else base
        arguments = ", ".join([model, *options])
        edits = [*_unwrapped(wrap), insert_before(source, early, [f"{name}({arguments})"]), need]
        message += f", above the optimizer of line {source.line_of(early)}"
        return self.finding(source, wrap.call, message, edits)


def _device_arguments(wrap: Wrap) -> list[cst.Arg]:
    return [
        arg
        for arg in wrap.call.args
        if arg.value is not wrap.model and (arg.keyword is None or arg.keyword.value != "module")
    ]


def _unwrapped(wrap: Wrap) -> Iterator[Text]:
    """`DataParallel(model, …)` becomes `model`; `model = model` goes."""
    source = wrap.source
    if wrap.model is None:
        return
    statement = source.statement_of(wrap.call)
    if source.code(statement) == f"{source.code(wrap.model)} = {source.code(wrap.call)}":
        yield delete_statement(source, statement)
        return
    start, stop = source.span(wrap.call)
    inner = source.span(wrap.model)
    yield Text(source, start, inner.start, "")
    yield Text(source, inner.stop, stop, "")
