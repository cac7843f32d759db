"""What the model or the script remembers of past batches is updated from a part of the batch.

Why it matters: queues of keys, memory banks, prototypes and centres are filled from the outputs of
every batch. After the rewrite each process fills its own with its part, so they differ, and hold
less than before.

Safety: reported only. What is stored must be gathered from all processes first. A buffer that a
wrapped model updates in `forward` is sent out from the main process by the wrapper, as DataParallel
kept that of its first device; where weights are sharded nobody does that.

Before::

    bank = torch.zeros(100, 2)
    for inputs, index in DataLoader(dataset, batch_size=8):
        features = model(inputs)
        bank[index] = features.detach()
        features.mean().backward()

Finding::

    MG409 bank remembers this process's part of the batch only
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.facts.batchwise import Batchwise
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.facts.kinds import Kind
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import dotted, method_name, receiver, string_value

_IN_PLACE = frozenset(
    ["copy_", "mul_", "add_", "sub_", "div_", "lerp_", "fill_", "index_copy_", "scatter_", "put_"]
)


class MemoryBank(Rule):
    """Finds memories of past batches."""

    code = "MG409"
    title = "a memory of past batches is updated from a part of the batch"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every memory."""
        batchwise = shared_batchwise(context.facts)
        yield from self._written(batchwise, context)
        if context.target.shards:
            yield from self._buffers(batchwise, context)

    def _written(self, batchwise: Batchwise, context: Context) -> Iterator[Finding]:
        """`bank[index] = features`, in a loop over batches that are dealt out."""
        seen: set[str] = set()
        for source in context.sources:
            for assign in source.all(cst.Assign):
                target = assign.targets[0].target
                name = dotted(target.value) if isinstance(target, cst.Subscript) else None
                value = batchwise.of(source, assign.value)
                dealt = [batchwise.dealt_out(origin) for origin in value.origins]
                if name is None or name in seen or value.kind is not Kind.DATA or not any(dealt):
                    continue
                if _outlives(batchwise, source, target, value.origins):  # type: ignore[arg-type]
                    seen.add(name)
                    yield self._found(source, assign, name)

    def _found(self, source: Source, node: cst.CSTNode, name: str) -> Finding:
        return self.finding(
            source,
            node,
            f"{name} remembers this process's part of the batch only",
            effect=Effect.DIFFERENT,
            advice="gather what is stored, and where, from all processes with "
            "torch.distributed.all_gather before it is stored",
        )

    def _buffers(self, batchwise: Batchwise, context: Context) -> Iterator[Finding]:
        """Buffers that methods of a sharded model write."""
        for source in context.sources:
            for call in source.all(cst.Call):
                name = string_value(call.args[0].value) if call.args else None
                cls = source.class_of(call)
                if method_name(call) != "register_buffer" or name is None or cls is None:
                    continue
                if batchwise.is_in_model(source, call):
                    for node in _writes(source, cls, f"self.{name}")[:1]:
                        yield self._found(source, node, f"self.{name}")


def _outlives(
    batchwise: Batchwise, source: Source, target: cst.Subscript, origins: frozenset[cst.CSTNode]
) -> bool:
    """Whether what is written into was made before the loop over the batches."""
    name = target.value
    if not isinstance(name, cst.Name):
        return (dotted(name) or "").startswith("self.")
    bindings = batchwise.reaching[source].of(name)
    home = source.function_of(target)
    if not any(o in source.spans and source.function_of(o) is home for o in origins):
        return False
    loops = [origin for origin in origins if isinstance(origin, cst.For) and origin in source.spans]
    inside = any(source.contains(loop, b.node) for loop in loops for b in bindings)
    is_batch = any(batchwise.of(source, name).origins for _ in (1,))
    return bool(bindings) and not inside and not is_batch


def _writes(source: Source, cls: cst.ClassDef, text: str) -> list[cst.CSTNode]:
    """Where methods other than the constructor write an attribute."""
    found: list[cst.CSTNode] = []
    for assign in source.inside(cls, cst.Assign):
        target = assign.targets[0].target
        inner = target.value if isinstance(target, cst.Subscript) else target
        if dotted(inner) == text:
            found.append(assign)
    for call in source.inside(cls, cst.Call):
        if method_name(call) in _IN_PLACE and dotted(receiver(call)) == text:
            found.append(call)
    return [
        node
        for node in found
        if _method(source, node) not in ("__init__", "reset_parameters", None)
    ]


def _method(source: Source, node: cst.CSTNode) -> str | None:
    function = source.function_of(node)
    return function.name.value if function else None
