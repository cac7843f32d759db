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
    half_precision="keep the weights as they are and give fully_shard, in shard_model, "
    "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)",
    other_methods="after the model is sharded: torch.distributed.fsdp.register_fsdp_forward_method("
    "{model}, {method!r})",
)
