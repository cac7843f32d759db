"""Several `backward()` go through one forward, or through forwards made before the first.

Why it matters: the wrapper averages gradients once for every forward that was prepared last. In
`out1 = model(a); out2 = model(b); loss1.backward(); loss2.backward()`, and in two `backward()` on
one output, the gradients of the second are never averaged, and nothing says so: the processes
drift apart. One `backward()` of the sum is exact, and so are forward, backward, forward, backward.

Safety: not edited. Adding the losses up changes where gradients can be looked at between the two.

Before::

    model = nn.DataParallel(nn.Linear(2, 1))
    for images, others in loader:
        first = model(images).mean()
        second = model(others).mean()
        first.backward()
        second.backward()

Finding::

    MG804 second.backward() is not averaged: model ran for it before first.backward()
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, are_exclusive, training
from migrate.source import Source
from migrate.syntax import receiver
from migrate.values import Values


@dataclass(frozen=True, eq=False)
class Backward:
    """A `backward()` and the forwards it goes through."""

    source: Source
    call: cst.Call
    forwards: dict[cst.Call, Values]


class TwoBackwards(Rule):
    """Finds `backward()` calls whose gradients a wrapper does not average."""

    code = "MG804"
    title = "several backward() through forwards that were made before the first"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every later `backward()`."""
        if not context.target.has_wrapper:
            return
        know = training(context)
        done: list[Backward] = []
        for source, call in sorted(
            context.facts.backwards, key=lambda item: item[0].span(item[1]).start
        ):
            of = receiver(call)
            if of is None:
                continue
            item = Backward(source, call, know.behind(source, of))
            finding = self._repeated(item) or self._late(know, item, done)
            if finding is not None:
                yield finding
            done.append(item)

    def _late(self, know: Training, item: Backward, done: list[Backward]) -> Finding | None:
        """A second backward through what was run before the first."""
        source = item.source
        for earlier in done:
            if earlier.source is not source or not _follow(know, earlier, item):
                continue
            for forward, models in item.forwards.items():
                if source.span(forward).start > source.span(earlier.call).start:
                    continue
                same = [f for f, m in earlier.forwards.items() if m & models]
                if not same or any(are_exclusive(source, forward, other) for other in same):
                    continue
                if _runs_between(know, earlier, item, models):
                    continue
                return self._report(source, item.call, earlier.call, forward)
        return None

    def _report(
        self, source: Source, call: cst.Call, earlier: cst.Call, forward: cst.Call
    ) -> Finding:
        model, first = source.code(forward.func), source.code(earlier)
        second = source.code(call)
        what = first if first != second else f"line {source.line_of(earlier)}"
        return self.finding(
            source, call,
            f"{second} is not averaged: {model} ran for it before {what}",
            effect=Effect.DIFFERENT,
            advice=f"add the two losses up and call backward() once, or run {model} again between "
            "the two backward() calls; outputs that only another model needs: .detach() them",
        )  # fmt: skip

    def _repeated(self, item: Backward) -> Finding | None:
        """A backward in a loop through one forward outside of it."""
        source = item.source
        for loop in source.ancestors(item.call):
            if isinstance(loop, cst.FunctionDef):
                return None
            if not isinstance(loop, cst.For | cst.While):
                continue
            inside = [f for f in item.forwards if source.contains(loop, f)]
            if inside or not item.forwards:
                return None
            forward = next(iter(item.forwards))
            return self.finding(
                source, item.call,
                f"{source.code(item.call)} goes through {source.code(forward.func)} of line "
                f"{source.line_of(forward)} again and again: only the first gradients are averaged",
                effect=Effect.DIFFERENT,
                advice="add the losses up in the loop and call backward() once after it",
            )  # fmt: skip
        return None


def _follow(know: Training, first: Backward, second: Backward) -> bool:
    """Whether one call runs after the other in the same turn of the same loop."""
    source = first.source
    if source.function_of(first.call) is not source.function_of(second.call):
        return False
    if are_exclusive(source, first.call, second.call):
        return False
    loops = [know.facts.loops_around(source, item.call)[:1] for item in (first, second)]
    return loops[0] == loops[1]


def _runs_between(know: Training, first: Backward, second: Backward, models: Values) -> bool:
    """Whether the second backward also goes through a forward made after the first one."""
    source = first.source
    start = source.span(first.call).stop
    return any(m & models and source.span(f).start > start for f, m in second.forwards.items())
