"""A model is initialised with random numbers after it was made parallel.

Why it matters: the wrapper hands the main process's weights to all processes once, when it is
made. Weights drawn after that come from each process's own random numbers: the processes would
train different models from then on, and nothing says so.

Safety: safe. The main process's weights are handed out again after the initialisation. Where
weights are sharded, the parts would be drawn with other numbers than the whole: the initialisation
goes above the place where the model is made parallel.

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

from migrate.edit import Edit, delete_statement, insert_after, insert_before
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
        know = training(context)
        for source, call in context.facts.calls():
            of = receiver(call)
            if (
                of is None
                or not know.is_wrapper(source, of)
                or not know.is_after_wrap(source, call)
            ):
                continue
            done = _is_shared(context, source, call) or _is_wrapped_below(context, source, call, of)
            if self._draws(context, source, call) and not done:
                shards = context.target.shards
                yield (self._moved if shards else self._report)(context, source, call, of)

    def _moved(
        self, context: Context, source: Source, call: cst.Call, of: cst.BaseExpression
    ) -> Finding:
        """The initialisation of a model that is sharded, above the wrap in the same block."""
        statement, model = source.statement_of(call), source.code(of)
        above = _wrap_above(context, source, statement, model)
        if above is None:
            return self.finding(
                source, call, f"{source.code(call)} draws other weights than one process would",
                advice=f"initialise {model} before it is made parallel", effect=Effect.UNKNOWN,
            )  # fmt: skip
        message = f"{source.code(call)} comes before {model} is sharded"
        edits = [
            insert_before(source, above, source.code(statement).splitlines()),
            delete_statement(source, statement),
        ]
        return self.finding(source, call, message, edits)

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


def _wrap_above(
    context: Context, source: Source, statement: cst.CSTNode, model: str
) -> cst.CSTNode | None:
    """The statement of the same block that wraps the variable `model`, if `statement` is simple."""
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) > 1:
        return None
    siblings = source.siblings(statement)
    for wrap in context.facts.wraps:
        if wrap.source is source and source.code(wrap.model or wrap.call) == model:
            around = [item for item in siblings if source.contains(item, wrap.call)]
            if around and siblings.index(around[0]) < siblings.index(statement):
                return around[0]
    return None


def _is_wrapped_below(
    context: Context, source: Source, call: cst.Call, of: cst.BaseExpression
) -> bool:
    """Whether the variable is made parallel further down: it was another model's wrap above."""
    places = [(wrap.source, wrap.call, wrap.model) for wrap in context.facts.wraps]
    places += [(home, own, own.args[0].value) for home, own in context.facts.own_wraps]
    return any(
        home is source
        and source.span(place).start > source.span(call).stop
        and source.function_of(place) is source.function_of(call)
        and any(source.code(name) == source.code(of) for name in source.inside(model, cst.Name))
        for home, place, model in places
        if model is not None
    )


def _is_shared(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether the weights are handed out again further down in the function."""
    start = source.span(call).stop
    return any(
        source.span(other).start > start and source.function_of(other) is source.function_of(call)
        for other in context.facts.uses_own(source, "share_weights")
    )
