"""Loads full state dicts of FSDP into live FSDP1 and FSDP2 jobs and notes what they then have.

torchrun --standalone --nproc-per-node W tests/training/fsdp_loads.py JOBS.json

JOBS.json lists `{"kind": "fsdp1" | "fsdp2", "file": ..., "out": ...}`. `out` gets the keys of
truth.safetensors, its .json the parameter groups and the losses of the next steps. Weights are
others and optimizer states infinite before loading, so that nothing passes that was not loaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.optim import Optimizer

from training.leaving import run_and_leave
from training.live import (
    gather,
    gather_buffers,
    group_meta,
    group_names,
    rank,
    step_plainly,
)
from training.model import RICH, build, decay_groups
from training.resume import OTHER_SEED, STEPS_DONE, make_blank_state
from training.wrap import make_optimizer, make_scheduler, wrap

NEXT_STEPS = 3


def load_fsdp1(module: nn.Module, optimizer: Optimizer, file: Path) -> None:
    """As the `fsdp-full` format says it: FSDP's own way, on every rank."""
    content = torch.load(file, weights_only=True)
    with FSDP.state_dict_type(module, StateDictType.FULL_STATE_DICT):
        module.load_state_dict(content["model"])
        state = FSDP.optim_state_dict_to_load(module, optimizer, content["optimizer"])
    optimizer.load_state_dict(state)


def load_fsdp2(module: nn.Module, optimizer: Optimizer, file: Path) -> None:
    """As the `fsdp-full` format says it: from rank 0."""
    content: dict[str, Any] = {"model": {}, "optimizer": {}}
    if rank() == 0:
        content = torch.load(file, weights_only=True)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(module, content["model"], options=options)
    set_optimizer_state_dict(module, optimizer, content["optimizer"], options=options)


def load(kind: str, file: Path, out: Path) -> None:
    """Build with other weights, load, write down, train on."""
    net = build(RICH, OTHER_SEED)
    groups = decay_groups(net)
    module = wrap(net, kind)
    optimizer = make_optimizer(module, groups)
    scheduler = make_scheduler(optimizer)
    make_blank_state(optimizer)
    (load_fsdp1 if kind == "fsdp1" else load_fsdp2)(module, optimizer, file)
    tensors = gather(module, optimizer) | gather_buffers(module)
    meta: dict[str, Any] = {"param_groups": group_meta(optimizer, group_names(module, optimizer))}
    scheduler.last_epoch = STEPS_DONE
    steps = range(STEPS_DONE, STEPS_DONE + NEXT_STEPS)
    meta["next_losses"] = [step_plainly(module, optimizer, scheduler, step) for step in steps]
    if rank() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, out)
        out.with_suffix(".json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def main(jobs: Path) -> None:
    """All jobs, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in json.loads(jobs.read_text()):
        load(job["kind"], Path(job["file"]), Path(job["out"]))
    dist.barrier()


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
