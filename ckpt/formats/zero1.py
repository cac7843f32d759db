"""DeepSpeed ZeRO-1, written for any number of ranks; `load_checkpoint` takes the optimizer too.

`mp_rank_00_model_states.pt` holds the whole module in the engine's precision,
`[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt` rank R's partitions of the flat fp32 weights and
states; with bf16 and fp32 gradient accumulation they are those of BF16_Optimizer. `--world-size`
says for how many ranks, `--ds-config` how the job that loads is configured, and `--like` names a
checkpoint of such a job for what the source does not tell. Weights alone can be loaded with
`load_optimizer_states=False`.

Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py, runtime/bf16_optimizer.py,
runtime/engine.py (`_load_checkpoint`, `_load_zero_checkpoint`).
"""

from __future__ import annotations

from pathlib import Path

from ckpt.format import SHARD_OPTIONS, Format, Match, WriteOptions
from ckpt.formats._zero12_out import plan_stage
from ckpt.model import Checkpoint
from ckpt.plan import WritePlan


def _matches(path: Path) -> Match:
    return Match.NO  # read as zero12, which tells the stage from inside


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """A folder with the save and `latest`."""
    return plan_stage(checkpoint, options, 1)


FORMAT = Format(
    name="zero1",
    title="DeepSpeed ZeRO-1 shards",
    matches=_matches,
    plan=plan,
    takes=frozenset(SHARD_OPTIONS),
)
