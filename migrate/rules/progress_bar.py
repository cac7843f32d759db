"""A loop shows a progress bar, and every process would.

Why it matters: the bars of several processes overwrite each other.

Safety: safe. The other processes' bars are switched off by the bar's own `disable`; the loop and
what the bar counts stay.

Before::

    import torch
    from tqdm import tqdm
    for step in tqdm(range(3), desc="train"):
        pass

After::

    import torch
    from tqdm import tqdm
    for step in tqdm(range(3), desc="train", disable=not is_main_process()):
        pass
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, add_argument, enclose, replace
from migrate.facts.files import keep_to_main
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, literal

_BARS = re.compile(
    r"^tqdm(\.(auto|notebook|autonotebook|std|asyncio|rich))?\.(tqdm|trange|tqdm_notebook|tnrange)$"
    r"|^rich\.progress\.(track|Progress)$|^alive_progress\.alive_(bar|it)$"
)
_WRITES = re.compile(r"^tqdm(\.\w+)?\.tqdm\.write$")
_OTHER_BARS = re.compile(r"^(progressbar2?\.|fastprogress\.|progress\.bar\.)")


class ProgressBar(Rule):
    """Finds progress bars."""

    code = "MG602"
    title = "every process shows a progress bar"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every bar, and for every line written above one."""
        for source, call in context.facts.calls_of(r"^(tqdm|rich|alive_progress|progress|fastp)"):
            name = context.facts.callee(source, call) or ""
            if context.facts.main_process.is_by_rank(source, call):
                continue
            if _BARS.match(name):
                yield from self._bar(context, source, call)
            elif _WRITES.match(name) and not isinstance(call.func, cst.Call):
                edits = keep_to_main(context, source, call)
                yield self.finding(source, call, "leaves this line to the main process", edits)
            elif _OTHER_BARS.match(name):
                message = f"every process shows the bar that {source.code(call.func)} makes"
                advice = "make it in the main process only; elsewhere use the iterable itself"
                yield self.finding(source, call, message, advice=advice)

    def _bar(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        main, need = context.helper(source, "is_main_process")
        given = argument(call, "disable")
        stars = [arg for arg in call.args if arg.star == "**"]
        edits: list[Edit] = [need]
        if given is not None:
            if literal(given.value) is True or context.facts.main_process.asks(source, given.value):
                return
            edits += _either(source, given.value, f"not {main}()")
        elif stars:
            start = f'{{"disable": not {main}(), **'
            edits += enclose(source, stars[-1].value, start, "}")
            if f'"disable": not {main}()' in source.code(stars[-1].value):
                return
        else:
            edits.append(add_argument(source, call, f"disable=not {main}()"))
        yield self.finding(source, call, "only the main process shows the progress bar", edits)


def _either(source: Source, given: cst.BaseExpression, other: str) -> list[Edit]:
    """The edits after which a bar is disabled where it was, and where `other` holds."""
    if literal(given) in (False, None):
        return [replace(source, given, other)]
    if isinstance(given, cst.IfExp | cst.Lambda | cst.NamedExpr) and not given.lpar:
        return [*enclose(source, given, "(", f") or {other}")]
    if given.lpar:
        return [replace(source, given, f"{source.code(given)} or {other}")]
    return [*enclose(source, given, "", f" or {other}")]
