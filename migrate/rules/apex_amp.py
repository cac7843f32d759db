"""Mixed precision by apex.

Why it matters: apex.amp patches torch and is no longer maintained; with it, neither the wrapper nor
sharding can be checked.

Safety: reported only. Native autocast and GradScaler stay as they are; a model in half precision
is MG408's.

Before::

    import torch
    from apex import amp
    model = torch.nn.Linear(2, 2)
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()

Finding::

    MG407 amp.scale_loss is apex
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source

_NATIVE = {
    "initialize": "make `scaler = torch.amp.GradScaler()` instead, and run the forward pass under "
    '`torch.autocast("cuda", dtype=torch.float16)`',
    "scale_loss": "write `scaler.scale(loss).backward()`, then `scaler.step(optimizer)` and "
    "`scaler.update()`",
    "master_params": "use the model's parameters, after `scaler.unscale_(optimizer)`",
}


class ApexAmp(Rule):
    """Finds mixed precision that is not torch's own."""

    code = "MG407"
    title = "mixed precision that is not torch's own"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call into apex."""
        for source, call in context.facts.calls_of(r"^apex\.(amp|fp16_utils)\."):
            yield self._apex(context, source, call)

    def _apex(self, context: Context, source: Source, call: cst.Call) -> Finding:
        name = (context.facts.callee(source, call) or "").rpartition(".")[2]
        return self.finding(
            source,
            call,
            f"{source.code(call.func)} is apex",
            effect=Effect.UNKNOWN,
            advice=_NATIVE.get(name, "use torch.amp: autocast for the forward pass, GradScaler"),
        )
