"""The model is called through the function `data_parallel`.

Why it matters: `data_parallel(model, inputs, ids)` copies the model to the devices for one forward.
A process has one device: the call is `model(inputs)`, and the model is made parallel once (MG204).

Safety: safe where inputs are given as one argument or a tuple that is written out; else manual.

Before::

    model = nn.Linear(2, 2)
    y = nn.parallel.data_parallel(model, x, [0, 1])

After::

    model = nn.Linear(2, 2)
    y = model(x)
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Text
from migrate.facts.program import Wrap
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, dotted


class FunctionalDataParallel(Rule):
    """Finds calls of `torch.nn.parallel.data_parallel`."""

    code = "MG206"
    title = "the model is called through the function data_parallel"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call."""
        for wrap in context.facts.wraps:
            if wrap.functional:
                yield self._call(wrap)

    def _call(self, wrap: Wrap) -> Finding:
        source, call = wrap.source, wrap.call
        inputs = argument(call, "inputs", 1)
        extra = argument(call, "module_kwargs", 5)
        message = f"{source.code(call)[:60]} becomes a plain call"
        is_plain = inputs is not None and dotted(inputs.value) is not None
        written_out = inputs is not None and isinstance(inputs.value, cst.Tuple)
        if wrap.model is None or inputs is None or extra or not (is_plain or written_out):
            advice = "call the model itself with its inputs, and make it parallel where it is made"
            return self.finding(source, call, message, advice=advice, effect=Effect.DIFFERENT)
        if written_out:
            return self.finding(source, call, message, _edits(source, wrap, _elements(inputs)))
        return self.finding(source, call, message, _edits(source, wrap, [inputs.value]))


def _elements(inputs: cst.Arg) -> list[cst.BaseExpression]:
    assert isinstance(inputs.value, cst.Tuple)
    return [element.value for element in inputs.value.elements]


def _edits(source: Source, wrap: Wrap, inputs: list[cst.BaseExpression]) -> list[Text]:
    """Everything of the call but the model and its inputs goes."""
    assert wrap.model is not None
    start, stop = source.span(wrap.call)
    model = source.span(wrap.model)
    first, last = source.span(inputs[0]), source.span(inputs[-1])
    return [
        Text(source, start, model.start, ""),
        Text(source, model.stop, first.start, "("),
        Text(source, last.stop, stop, ")"),
    ]
