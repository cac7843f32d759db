"""The gradient of a model's output is trained on: `autograd.grad(…, create_graph=True)`.

Why it matters: the penalty's gradient does not reach every parameter (a last bias has none), so a
wrapper that waits for all of them averages nothing, and fails in the next forward. Added to the
other losses in one `backward()`, the result is exact. Weights that are sharded are gone again by
the time the second derivative needs them.

Safety: not edited.

Before::

    critic = nn.DataParallel(nn.Linear(2, 1))
    for images in loader:
        images.requires_grad_()
        scores = critic(images)
        slope = torch.autograd.grad(scores.sum(), images, create_graph=True)[0]
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        penalty.backward()

Finding::

    MG805 penalty.backward() goes through the gradient of critic alone
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, training
from migrate.source import Source
from migrate.syntax import argument, literal, receiver


class GradientPenalty(Rule):
    """Finds second derivatives of parallel models."""

    code = "MG805"
    title = "a gradient that is trained on"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every gradient, or for every backward that goes through it alone."""
        know = training(context)
        for source, call in context.facts.calls_of(r"^torch\.autograd\.grad$"):
            flag = argument(call, "create_graph", 4)
            if flag is None or literal(flag.value) in (False, None) or not call.args:
                continue
            forwards = know.behind(source, call.args[0].value)
            if not forwards:
                continue
            model = source.code(next(iter(forwards)).func)
            if context.target.shards:
                yield self._sharded(source, call, model)
            else:
                yield from self._alone(know, source, call, model)

    def _sharded(self, source: Source, call: cst.Call, model: str) -> Finding:
        return self.finding(
            source, call,
            f"the gradient of {model} is differentiated again, which fails on sharded weights",
            effect=Effect.DIFFERENT,
            advice=f"leave {model} whole on every process: wrap it in DistributedDataParallel, and "
            "add the penalty to the other losses before one backward()",
        )  # fmt: skip

    def _alone(
        self, know: Training, source: Source, call: cst.Call, model: str
    ) -> Iterator[Finding]:
        """The backward calls that go through the gradient and no other forward of the model."""
        own = set(know.behind(source, call.args[0].value))
        for home, backward in know.facts.backwards:
            of = receiver(backward)
            if of is None or not self._reaches(know, home, of, source, call):
                continue
            others = [f for f in know.behind(home, of) if f not in own]
            if not others:
                yield self.finding(
                    home, backward,
                    f"{home.code(backward)} goes through the gradient of {model} alone",
                    effect=Effect.DIFFERENT,
                    advice="add the penalty to the loss that the model's other outputs have, and "
                    "call backward() once: parameters without a second derivative are waited for",
                )  # fmt: skip

    def _reaches(
        self, know: Training, home: Source, node: cst.CSTNode, source: Source, call: cst.Call
    ) -> bool:
        """Whether a value depends on the gradient, in one function or by what it returns."""
        calls = know.calls_behind(home, node)
        if call in calls:
            return True
        function = source.function_of(call)
        if function is None or not source.inside(function, cst.Return):
            return False
        return any(
            callee.node is function
            for item in calls
            for callee in know.flow.callees.get(item, ())  # type: ignore[call-overload]
        )
