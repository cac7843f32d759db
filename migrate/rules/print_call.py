"""The program prints, and every process would.

Why it matters: each line would appear once per process, mixed with those of the others.

Safety: safe. The file gets a `print` of its own, which is silent in all processes but the main one.
What is printed is still evaluated by all of them, because it may take part in the training. Other
ways to write on the screen are left to the main process one by one.

Before::

    import torch
    print("starting")

After::

    import torch
    print("starting")
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.files import is_used, keep_to_main
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted

_SCREEN = (
    r"^(sys\.(stdout|stderr|__stdout__)\.write|pprint\.pprint|pprint\.pp|rich\.print|click\.echo)$"
)


class PrintCall(Rule):
    """Finds calls of print."""

    code = "MG601"
    title = "every process prints"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every file that prints, and for every other line on the screen."""
        by_rank = context.facts.main_process.is_by_rank
        for source in context.sources:
            calls = [c for s, c in context.facts.calls() if s is source and _prints(context, s, c)]
            calls = [call for call in calls if not by_rank(source, call)]
            if calls and not _is_settled(context, source):
                _, need = context.helper(source, "print")
                times = "once" if len(calls) == 1 else f"in {len(calls)} places"
                message = f"only the main process prints (this file does {times})"
                yield self.finding(source, calls[0], message, [need])
        for source, call in context.facts.calls_of(_SCREEN):
            is_done = isinstance(call.func, cst.Call) or by_rank(source, call)
            if not is_done and not is_used(source, call):
                message = f"leaves {source.code(call.func)} to the main process"
                yield self.finding(source, call, message, keep_to_main(context, source, call))


def _prints(context: Context, source: Source, call: cst.Call) -> bool:
    if context.facts.callee(source, call) == "print":
        return True
    passed = [arg.value for arg in call.args]  # `map(print, ...)`
    return any(
        dotted(n) == "print" and context.flow.qualified(source, n) == "print" for n in passed
    )


def _is_settled(context: Context, source: Source) -> bool:
    """Whether the file, or the program, has a `print` of its own."""
    if "print" in context.flow.names[source].bound:
        return True
    return any(
        re.search(r"(^|\.)(builtins?|__builtins?__)\.print$", dotted(target.target) or "")
        for item in context.sources
        for assign in item.all(cst.Assign)
        for target in assign.targets
    )
