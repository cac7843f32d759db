"""FSDP2, `fully_shard`: one process per device, weights, gradients and optimizer state sharded."""

from __future__ import annotations

from migrate.rule import Target

TARGET = Target(
    name="fsdp",
    title="FSDP2 (fully_shard)",
    snippets=("common", "fsdp"),
    wrap="shard_model",
    has_wrapper=False,
    shards=True,
    half_precision="compute_in",
    other_methods="after the model is sharded: torch.distributed.fsdp.register_fsdp_forward_method("
    "{model}, {method!r})",
)
