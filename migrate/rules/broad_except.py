"""Errors in a training step are caught and training goes on: `except RuntimeError: continue`.

Why it matters: where one process runs out of memory, or meets a bad sample, it skips its
`backward()`, and the others wait for it until a timeout. With DataParallel there was one process,
and nobody to wait.

Safety: not edited. Handlers that raise or exit, and handlers of KeyboardInterrupt or
StopIteration, are fine.

Before::

    for images, labels in loader:
        try:
            criterion(model(images), labels).backward()
        except RuntimeError:
            print("out of memory")

Finding::

    MG803 a process that catches RuntimeError here goes on without this step's backward()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source

_BROAD = re.compile(r"^(Exception|BaseException|RuntimeError|torch\.cuda\.OutOfMemoryError"
                    r"|torch\.OutOfMemoryError|MemoryError"
                    r"|ValueError|AssertionError)$")  # fmt: skip
_ENDS = re.compile(r"^(sys\.exit|exit|quit|os\._exit|os\.abort)")


class BroadExcept(Rule):
    """Finds `try` statements whose body trains and whose handlers go on."""

    code = "MG803"
    title = "errors in a training step are caught"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every handler."""
        for source in context.sources:
            for statement in source.all(cst.Try):
                if not context.facts.reaches_backward(source, statement.body):
                    continue
                for handler in statement.handlers:
                    kind = _kind(context, source, handler)
                    if kind is not None and not _ends(source, handler):
                        yield self._report(context, source, statement, handler, kind)

    def _report(
        self, context: Context, source: Source, statement: cst.Try, handler: cst.ExceptHandler,
        kind: str,
    ) -> Finding:  # fmt: skip
        loops = context.facts.loops_around(source, statement)
        inside = [loop for loop in loops if context.facts.reaches_backward(source, loop.body)]
        if inside:
            message = f"a process that catches {kind} here goes on without this step's backward()"
            advice = (
                "raise in the handler, so that all processes end and torchrun reports the error; "
                "avoid what is caught here before the step (a smaller batch, a filtered dataset)"
            )
        else:
            message = f"a process that catches {kind} here ends its training, and the others wait"
            advice = "raise at the end of the handler, so that torchrun ends the others, too"
        return self.finding(source, handler, message, effect=Effect.UNKNOWN, advice=advice)


def _kind(context: Context, source: Source, handler: cst.ExceptHandler) -> str | None:
    """What a handler catches, if that may be anything."""
    if handler.type is None:
        return "every error"
    types = handler.type.elements if isinstance(handler.type, cst.Tuple) else ()
    given = [element.value for element in types] or [handler.type]
    for item in given:
        name = context.flow.qualified(source, item) or source.code(item)
        if _BROAD.match(name):
            return source.code(handler.type)
    return None


def _ends(source: Source, handler: cst.ExceptHandler) -> bool:
    """Whether a handler ends the process, on every way through it."""
    return _block_ends(source, handler.body)


def _block_ends(source: Source, block: cst.CSTNode) -> bool:
    for statement in getattr(block, "body", ()):
        if isinstance(statement, cst.Raise):
            return True
        if isinstance(statement, cst.SimpleStatementLine) and _block_ends(source, statement):
            return True
        if (
            isinstance(statement, cst.Expr)
            and isinstance(statement.value, cst.Call)
            and _ENDS.match(source.code(statement.value.func))
        ):
            return True
        if isinstance(statement, cst.If) and statement.orelse is not None:
            other = statement.orelse
            rest = (
                _block_ends(source, cst.IndentedBlock([other]))
                if isinstance(other, cst.If)
                else _block_ends(source, other.body)
            )
            if rest and _block_ends(source, statement.body):
                return True
    return False
