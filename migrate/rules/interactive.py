"""The program waits for somebody at the keyboard, or opens a window.

Why it matters: started by torchrun, a process has no keyboard: the others wait for the one that
asks, until they give up. Every process would open the window.

Safety: windows are left to the main process, which is safe. What asks for input is not edited.

Before::

    import torch
    answer = input("continue? ")

Finding::

    MG605 asks for input, which under torchrun nobody can give
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.facts.files import is_used, keep_to_main
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source

_ASKS = r"^(input|raw_input|click\.(confirm|prompt)|getpass\.getpass)$"
_STOPS = r"^(breakpoint|i?pdb\.set_trace|IPython\.embed|code\.interact|i?pdb\.post_mortem)$"
_SHOWS = r"^(matplotlib\.pyplot\.(show|pause)|cv2\.(imshow|waitKey|destroyAllWindows|namedWindow))$"


class Interactive(Rule):
    """Finds calls that need a person or a screen."""

    code = "MG605"
    title = "the program waits for somebody"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call that the training may come to."""
        for source, call in context.facts.calls_of(_ASKS):
            if _is_reached(context, source, call):
                message = "asks for input, which under torchrun nobody can give"
                advice = "take the answer from the command line"
                yield self.finding(source, call, message, effect=Effect.UNKNOWN, advice=advice)
        for source, call in context.facts.calls_of(_STOPS):
            if _is_reached(context, source, call):
                message = "stops for the debugger, which under torchrun has no keyboard"
                yield self.finding(source, call, message, advice="remove it")
        by_rank = context.facts.main_process.is_by_rank
        for source, call in context.facts.calls_of(_SHOWS):
            is_done = isinstance(call.func, cst.Call) or by_rank(source, call)
            if not is_done and not is_used(source, call):
                message = f"leaves {source.code(call.func)} to the main process"
                yield self.finding(source, call, message, keep_to_main(context, source, call))


def _is_reached(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether the program comes to a call: at the top of the entry, or in a function it calls."""
    function = source.function_of(call)
    if function is None:
        return source is context.facts.entry
    return bool(context.facts.callers.get(function)) or function in context.facts.training_functions
