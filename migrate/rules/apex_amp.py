"""Mixed precision by apex, or by a model in half precision that is going to be sharded.

Why it matters: apex.amp patches torch and is no longer maintained; with it, neither the wrapper nor
sharding can be checked. Weights in half precision lose their full-precision copy when sharded.

Safety: reported only. Native autocast and GradScaler stay as they are.

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
from migrate.syntax import method_name, receiver

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
        """One finding for every call into apex, and for every sharded model made half."""
        for source, call in context.facts.calls_of(r"^apex\.(amp|fp16_utils)\."):
            yield self._apex(context, source, call)
        if context.target.shards:
            yield from self._half(context)

    def _apex(self, context: Context, source: Source, call: cst.Call) -> Finding:
        name = (context.facts.callee(source, call) or "").rpartition(".")[2]
        return self.finding(
            source,
            call,
            f"{source.code(call.func)} is apex",
            effect=Effect.UNKNOWN,
            advice=_NATIVE.get(name, "use torch.amp: autocast for the forward pass, GradScaler"),
        )

    def _half(self, context: Context) -> Iterator[Finding]:
        for source, call in context.facts.calls():
            if method_name(call) not in ("half", "bfloat16") or call.args:
                continue
            values = context.flow.of(source, receiver(call))
            if values & context.facts.wrapped and any(map(context.facts.is_module, values)):
                yield self.finding(
                    source,
                    call,
                    f"{source.code(call)} leaves no full-precision weights to shard",
                    effect=Effect.UNKNOWN,
                    advice=context.target.half_precision,
                )
