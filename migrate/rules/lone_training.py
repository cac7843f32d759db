"""A script that starts a process per device still wraps its model in DataParallel, one device each.

Why it matters: DataParallel with the process's own device does not talk to the other processes.
Each of them trains a model of its own, and the file of the last one to save is kept.

Safety: not edited by this rule: MG201 replaces the wrap, as any other. It says why that changes
what comes out.

Before::

    import os
    import torch
    import torch.nn as nn
    import torch.distributed as dist
    local_rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    model = nn.DataParallel(nn.Linear(2, 2), device_ids=[local_rank])

Finding::

    MG902 until now every process trained a model of its own: nn.DataParallel with one device
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.syntax import argument, literal


class LoneTraining(Rule):
    """Finds DataParallel with the process's own device beside a process group."""

    code = "MG902"
    title = "DataParallel in a script with a process per device"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every wrap."""
        if not context.facts.process_groups:
            return
        for wrap in context.facts.wraps:
            devices = argument(wrap.call, "device_ids", 1)
            if wrap.distributed or devices is None:
                continue
            value = devices.value
            is_one = isinstance(value, cst.List | cst.Tuple) and len(value.elements) == 1
            if is_one and literal(value.elements[0].value) is ...:  # type: ignore[attr-defined]
                func = wrap.source.code(wrap.call.func)
                yield self.finding(
                    wrap.source, wrap.call,
                    f"until now every process trained a model of its own: {func} with one device",
                    applicability=Applicability.INFO, effect=Effect.BETTER,
                )  # fmt: skip
