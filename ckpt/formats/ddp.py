"""A torch.save file whose weights carry DDP's `module.` prefix, for scripts that load the wrapper.

Read by the `torch` format, which takes the prefix off. Source: torch 2.13.0
torch/nn/parallel/distributed.py.
"""

from __future__ import annotations

from pathlib import Path

from ckpt.format import Format, Match, WriteOptions
from ckpt.formats._torch_dict import plan_torch_dict
from ckpt.model import Checkpoint
from ckpt.plan import WritePlan

PREFIX = "module."


def _matches(path: Path) -> Match:
    return Match.NO


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """One `.pt` file whose weights' names begin with `module.`."""
    return plan_torch_dict(checkpoint, options, PREFIX)


FORMAT = Format(
    name="ddp",
    title="torch.save file with `module.` names",
    matches=_matches,
    plan=plan,
    output_suffix=".pt",
)
