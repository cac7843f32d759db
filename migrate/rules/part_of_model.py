"""Only a part of a model is put into DataParallel.

Why it matters: gradients are averaged for what is wrapped. With a wrapper around a part, the rest
of the model would drift apart between the processes, without an error.

Safety: safe. The whole model is made parallel instead (MG204); the part keeps the names that it has
in checkpoint files.

Before::

    model = nn.Module()
    model.features = nn.DataParallel(nn.Linear(2, 2))

After::

    model = nn.Module()
    model.features = Prefixed(nn.Linear(2, 2))
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.edit import Edit, remove_argument, replace
from migrate.facts.models import submodule_wraps
from migrate.finding import Finding
from migrate.rule import Context, Rule


class PartOfModel(Rule):
    """Finds `model.part = DataParallel(...)`."""

    code = "MG205"
    title = "only a part of a model is put into DataParallel"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such wrap."""
        for wrap in submodule_wraps(context.facts):
            if wrap.distributed or wrap.functional or wrap.custom:
                continue
            source, call = wrap.source, wrap.call
            name, need = context.helper(source, "Prefixed")
            rest = [arg for arg in call.args if arg.value is not wrap.model]
            edits: list[Edit] = [replace(source, call.func, name), need]
            edits += [remove_argument(source, call, arg) for arg in rest]
            message = (
                f"{source.code(wrap.model or call)} keeps its names; the whole model is parallel"
            )
            yield self.finding(source, call, message, edits)
