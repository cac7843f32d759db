"""DistributedDataParallel: one process per device, gradients averaged over the processes."""

from __future__ import annotations

from migrate.rule import Target

TARGET = Target(
    name="ddp",
    title="DistributedDataParallel",
    snippets=("common", "ddp"),
    wrap="wrap_model",
    has_wrapper=True,
    shards=False,
)
