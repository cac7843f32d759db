"""A model is initialised with random numbers after it was made parallel.

Why it matters: the wrapper hands the main process's weights to all processes once, when it is
made. Weights drawn after that come from each process's own random numbers: the processes would
train different models from then on, and nothing says so.

Safety: safe. The main process's weights are handed out again after the initialisation. Where
weights are sharded, every part is drawn by one process only, and there is nothing to do.

Before::

    def weights_init(m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, 0.0, 0.02)
    model = nn.DataParallel(nn.Linear(2, 2))
    model.apply(weights_init)

After::

    def weights_init(m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, 0.0, 0.02)
    model = nn.DataParallel(nn.Linear(2, 2))
    model.apply(weights_init)
    share_weights(model)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, insert_after
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import training
from migrate.source import Source
from migrate.syntax import dotted, method_name, receiver
from migrate.values import External, Function

_RANDOM = re.compile(
    r"(^|\.)(normal_?|uniform_?|trunc_normal_?|kaiming_\w+|xavier_\w+|orthogonal_?|sparse_"
    r"|reset_parameters|randn\w*|rand|bernoulli_?)$"
)


class OtherParameters(Rule):
    """Finds `model.apply(init)` and the like below the wrap."""

    code = "MG807"
    title = "a parallel model is initialised with random numbers"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every initialisation."""
        if not context.target.has_wrapper:
            return
        know = training(context)
        for source, call in context.facts.calls():
            of = receiver(call)
            if (
                of is None
                or not know.is_wrapper(source, of)
                or not know.is_after_wrap(source, call)
            ):
                continue
            if self._draws(context, source, call) and not _is_shared(context, source, call):
                yield self._report(context, source, call, of)

    def _report(
        self, context: Context, source: Source, call: cst.Call, of: cst.BaseExpression
    ) -> Finding:
        model = source.code(of)
        message = f"{source.code(call)} draws other weights in every process"
        name, need = context.helper(source, "share_weights")
        statement = source.statement_of(call)
        is_alone = isinstance(statement, cst.SimpleStatementLine) and dotted(of) is not None
        if not is_alone:
            return self.finding(
                source, call, message, effect=Effect.DIFFERENT,
                advice=f"initialise {model} before it is made parallel",
            )  # fmt: skip
        edits: list[Edit] = [insert_after(source, statement, [f"{name}({model})"]), need]
        message = f"the main process's weights are handed out after {source.code(call)}"
        return self.finding(source, call, message, edits)

    def _draws(self, context: Context, source: Source, call: cst.Call) -> bool:
        """Whether a call initialises with random numbers."""
        if method_name(call) == "apply":
            values = [v for a in call.args for v in context.flow.of(source, a.value)]
        else:
            values = [*context.flow.callees.get(call, ())]
            if not re.search(r"init|reset", method_name(call) or ""):
                return False
        for value in values:
            if isinstance(value, Function) and self._function_draws(context, value):
                return True
            if isinstance(value, External) and _RANDOM.search(value.name):
                return True
        return False

    def _function_draws(self, context: Context, function: Function) -> bool:
        return any(
            _RANDOM.search(dotted(call.func) or method_name(call) or "")
            for call in function.source.inside(function.node, cst.Call)
        )


def _is_shared(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether the weights are handed out again further down in the function."""
    start = source.span(call).stop
    return any(
        source.span(other).start > start and source.function_of(other) is source.function_of(call)
        for other in context.facts.uses_own(source, "share_weights")
    )
