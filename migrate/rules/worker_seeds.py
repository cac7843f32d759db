"""Loader workers are seeded by their number alone.

Why it matters: worker 0 of every process would draw the same augmentation as worker 0 of the
others.

Safety: safe. The main process's workers keep their seeds, those of the others get other ones. A
seed made from `torch.initial_seed()` differs already.

Before::

    import torch
    import numpy as np
    from torch.utils.data import DataLoader

    def init(worker_id):
        np.random.seed(1 + worker_id)

    loader = DataLoader([1], num_workers=2, worker_init_fn=init)

After::

    import torch
    import numpy as np
    from torch.utils.data import DataLoader

    def init(worker_id):
        np.random.seed(rank_seed(1 + worker_id))

    loader = DataLoader([1], num_workers=2, worker_init_fn=init)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.rules._process import SEEDS, names_own_number
from migrate.source import Source
from migrate.syntax import argument
from migrate.values import Function

_DIFFERS = re.compile(r"initial_seed|get_worker_info|rank_seed|get_state")


class WorkerSeeds(Rule):
    """Finds `worker_init_fn`s that seed."""

    code = "MG703"
    title = "loader workers are seeded by their number alone"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each seeding call in such a function."""
        done: set[cst.CSTNode] = set()
        for loader in context.facts.loaders:
            given = argument(loader.call, "worker_init_fn", 9)
            for source, function in _functions(context, loader.source, given):
                if function in done or _DIFFERS.search(source.code(function)):
                    continue
                done.add(function)
                if not names_own_number(source, function):
                    yield from self._seeds(context, source, function)

    def _seeds(self, context: Context, source: Source, function: cst.CSTNode) -> Iterator[Finding]:
        for call in source.inside(function, cst.Call):
            if SEEDS.search(context.facts.callee(source, call) or "") and len(call.args) == 1:
                name, need = context.helper(source, "rank_seed")
                message = f"{source.code(call)} seeds the workers of all processes alike"
                edits: list[Edit] = [*enclose(source, call.args[0].value, f"{name}(", ")"), need]
                yield self.finding(source, call, message, edits)


def _functions(
    context: Context, source: Source, given: cst.Arg | None
) -> Iterator[tuple[Source, cst.CSTNode]]:
    if given is None:
        return
    if isinstance(given.value, cst.Lambda):
        yield source, given.value
    for value in context.flow.of(source, given.value):
        if isinstance(value, Function):
            yield value.source, value.node
