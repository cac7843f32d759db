"""The model is put into DataParallel.

Why it matters: DataParallel copies the model to every device in every step and gathers outputs on
one; the targets train with one process per device.

Safety: safe. The same models are wrapped in the same places; `device_ids` and `output_device` go,
because a process has one device. A model without trainable parameters is left whole.

Before::

    model = nn.DataParallel(model, device_ids=[0, 1])

After::

    model = wrap_model(model)
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, remove_argument, replace
from migrate.facts import Wrap
from migrate.finding import Finding
from migrate.rule import Context, Rule


class DataParallelWrap(Rule):
    """Finds calls of DataParallel."""

    code = "MG201"
    title = "the model is put into DataParallel"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every wrap that is not yet the target's."""
        for wrap in context.facts.wraps:
            if not (wrap.distributed or wrap.functional or wrap.custom):
                yield self._wrap(context, wrap)

    def _wrap(self, context: Context, wrap: Wrap) -> Finding:
        name, need = context.helper(wrap.source, context.target.wrap)
        edits: list[Edit] = [replace(wrap.source, wrap.call.func, name), need]
        edits += [remove_argument(wrap.source, wrap.call, arg) for arg in _device_arguments(wrap)]
        message = f"wraps {wrap.source.code(wrap.model)} for {context.target.title}"
        return self.finding(wrap.source, wrap.call, message, edits)


def _device_arguments(wrap: Wrap) -> list[cst.Arg]:
    return [
        arg
        for arg in wrap.call.args
        if arg.value is not wrap.model and (arg.keyword is None or arg.keyword.value != "module")
    ]
