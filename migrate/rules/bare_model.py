"""A model is trained that nothing makes parallel as a whole.

Why it matters: without a wrapper, every process would train a model of its own. That is so for
scripts written for one device, for functional `data_parallel`, and where only a part of a model,
such as `model.features`, was put into DataParallel.

Safety: safe. The model is made parallel where it is complete and on its device. Attributes and
state that the script reads of it afterwards are MG211's.

Before::

    import torch
    import torch.nn as nn
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()

After::

    import torch
    import torch.nn as nn
    model = nn.Linear(2, 2).cuda()
    model = wrap_model(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.edit import Edit, insert_after
from migrate.facts.models import Bare, bare_models, may_have_batch_norm
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.rules._wrapping import CONVERT, wrap_text


class BareModel(Rule):
    """Finds trained models without a wrapper around all of them."""

    code = "MG204"
    title = "a model is trained that nothing makes parallel"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such model."""
        for bare in bare_models(context.facts):
            yield self._bare(context, bare)

    def _bare(self, context: Context, bare: Bare) -> Finding:
        values = frozenset([bare.value])
        model = bare.name
        if context.options.batch_norm == "sync" and may_have_batch_norm(context.facts, values):
            # Exactly what it was: without DataParallel, BatchNorm saw the whole batch.
            model = f"{CONVERT}({model})"
        text, need = wrap_text(context, bare.source, model, values)
        edits: list[Edit] = [
            insert_after(bare.source, bare.statement, [f"{bare.name} = {text}"]),
            need,
        ]
        message = f"makes {bare.name} parallel: {context.target.title}"
        return self.finding(bare.source, bare.statement, message, edits)
