"""What DataParallel gathered from the devices is taken apart again by device.

Why it matters: a wrapped model gave one loss for each device, or outputs that could be viewed as
(devices, samples). After the rewrite it gives what this process computed, and nothing is gathered.

Safety: reported only. Means over the devices' losses (`loss.mean()`) stay as they are: the mean of
one loss is itself, and gradients are averaged.

Before::

    class Net(nn.Module):
        def forward(self, x):
            return x.mean()
    model = nn.DataParallel(Net())
    for x in DataLoader(dataset, batch_size=8):
        losses = model(x)
        print(losses[0])

Finding::

    MG402 losses[0] is the first device's part of what DataParallel gathered
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.facts.batchwise import Batchwise
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import literal, method_name, receiver

_RESHAPE = frozenset({"view", "reshape", "chunk", "split"})


class GatheredLoss(Rule):
    """Finds indexing and reshaping by device."""

    code = "MG402"
    title = "gathered losses are taken apart by device"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every place that counts on one value for each device."""
        batchwise = shared_batchwise(context.facts)
        for source in context.sources:
            own = context.facts.definitions[source]
            for node in source.all(cst.Subscript):
                value = batchwise.of(source, node.value)
                index = node.slice[0].slice
                is_number = isinstance(index, cst.Index) and isinstance(literal(index.value), int)
                if value.parts and value.is_local and is_number and not own.is_own(node):
                    yield self._found(source, node)
            for source_of, call in context.facts.calls():
                if source_of is source and _by_device(context, batchwise, source, call):
                    yield self._found(source, call)

    def _found(self, source: Source, node: cst.CSTNode) -> Finding:
        code = source.one_line(node)
        is_first = isinstance(node, cst.Subscript)
        what = "the first device's part of" if is_first else "one part for each device of"
        return self.finding(
            source,
            node,
            f"{code} is {what} what DataParallel gathered",
            effect=Effect.UNKNOWN,
            advice="use the value itself: the model now gives what this process computed",
        )


def _by_device(context: Context, batchwise: Batchwise, source: Source, call: cst.Call) -> bool:
    """`outputs.view(torch.cuda.device_count(), -1)` of a wrapped model's outputs."""
    owner = receiver(call)
    if method_name(call) not in _RESHAPE or owner is None or not batchwise.of(source, owner).parts:
        return False
    counts = [c for arg in call.args for v in context.flow.made_by(source, arg.value)
              for c in [v.name] if c.endswith("device_count")]  # fmt: skip
    return bool(counts)
