"""One process alone changes the weights of a parallel model.

Why it matters: weights are handed to all processes once, when the model is made parallel. What one
process loads or draws after that the others never see: from then on the processes train different
models, and nothing says so.

Safety: not edited. Conditions are recognised by their words: rank, is_main, is_master.

Before::

    import torch
    import torch.nn as nn
    import torch.distributed as dist
    model = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
    if dist.get_rank() == 0:
        model.load_state_dict(torch.load("best.pt"))
    model(torch.ones(1, 2)).sum().backward()

Finding::

    MG817 model.load_state_dict(…) changes the weights of one process only
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import training
from migrate.syntax import method_name, receiver

_CHANGES = ("load_state_dict", "apply", "reset_parameters", "init_weights")


class LoneLoad(Rule):
    """Finds loads and initialisations of a parallel model under a rank condition."""

    code = "MG817"
    title = "one process alone changes the weights"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such call below a wrap."""
        know = training(context)
        for source, call in context.facts.calls():
            of = receiver(call)
            if method_name(call) not in _CHANGES or of is None:
                continue
            is_parallel = know.is_model(source, of) and know.is_after_wrap(source, call)
            if is_parallel and context.facts.main_process.only_main(source, call):
                yield self.finding(
                    source, call, f"{source.code(call.func)}(…) changes the weights of one process "
                    "only", effect=Effect.DIFFERENT,
                    advice="do it in every process; reading one file from all of them is fine",
                )  # fmt: skip
