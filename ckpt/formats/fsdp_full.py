"""One torch.save file with FSDP's full state dicts: the model whole, the optimizer by FQN.

Written: `model`, `optimizer` as `{"state": {fqn: {...}}, "param_groups": [{..., "params":
[fqn, ...]}]}`, and the rest of the job under its own names. It loads at any world size. FSDP1, on
every rank (a rank at a time, or with `mmap=True`, where memory is short):

    content = torch.load(FILE, weights_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        model.load_state_dict(content["model"])
        state = FSDP.optim_state_dict_to_load(model, optimizer, content["optimizer"])
    optimizer.load_state_dict(state)

That works with `use_orig_params=False` too where one param group has all parameters; several do not
fit flat parameters, and torch refuses them ("a different number of parameter groups").

FSDP2, of which only rank 0 needs the file (the others give empty dicts):

    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, content["model"], options=options)
    set_optimizer_state_dict(model, optimizer, content["optimizer"], options=options)

Read by the `torch` format, which calls such a file `fsdp-full`.

Source: torch 2.13.0 torch/distributed/fsdp/fully_sharded_data_parallel.py (`optim_state_dict`,
`full_optim_state_dict`), torch/distributed/checkpoint/state_dict.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ckpt.format import Format, Match, WriteOptions
from ckpt.formats._torch_dict import plan_torch_dict
from ckpt.model import Checkpoint
from ckpt.optimizers import for_torch
from ckpt.plan import WritePlan


def _matches(path: Path) -> Match:
    return Match.NO


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """One `.pt` file whose optimizer states are keyed by name."""
    checkpoint, told = for_torch(checkpoint)
    planned = plan_torch_dict(checkpoint, options, prefix="", by_name=True)
    return replace(planned, notes=(*planned.notes, *told))


FORMAT = Format(
    name="fsdp-full",
    title="torch.save file with FSDP's full state dicts (FSDP1, FSDP2 from rank 0)",
    matches=_matches,
    plan=plan,
    output_suffix=".pt",
)
