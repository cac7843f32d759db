"""Resumes from a checkpoint by the framework's own means and writes down what it got.

torchrun --standalone --nproc-per-node W tests/training/resume.py KIND CKPT OUT.safetensors
    [--model-options JSON] [--plain] [--flat] [--optimizer sgd] [--next-steps N]

OUT.safetensors has the keys of truth.safetensors; OUT.json the parameter groups and next losses.
Optimizer state is infinite before loading, so that nothing can pass that was not loaded.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
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
from training.model import ModelOptions, build, decay_groups
from training.wrap import make_optimizer, make_scheduler, wrap

OTHER_SEED = 4321
STEPS_DONE = 3


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("fsdp2", "fsdp1", "ddp"))
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model-options", default="{}", help="JSON, as in truth.json")
    parser.add_argument("--plain", action="store_true", help="load into the unwrapped model")
    parser.add_argument("--flat", action="store_true", help="flatten_optimizer_state_dict")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--next-steps", type=int, default=0, help="train on and note the losses")
    return parser.parse_args(arguments)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_blank_state(optimizer: Optimizer) -> None:
    """State to load into, all infinite. It takes a step, and that at rate 0 to spare the weights.

    get_state_dict would take such a step too, but would leave plausible zeros behind.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    before = [_local(p.detach()).clone() for p in parameters]
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, old in zip(parameters, before, strict=True):
        assert torch.equal(_local(parameter.detach()), old), "the blank step changed a weight"
        for value in optimizer.state[parameter].values():
            if isinstance(value, Tensor):
                value.fill_(math.inf)  # not NaN: FSDP1 wants equal steps on all ranks


def load_fsdp2(wrapped: nn.Module, optimizer: Optimizer, folder: Path, flat: bool) -> None:
    """dcp.load between get_state_dict and set_state_dict, as torch's tutorial has it."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = get_state_dict(wrapped, optimizer, options=options)
    content: dict[str, Any] = {"model": model, "optimizer": state}
    dcp_load(content, checkpoint_id=folder)
    set_state_dict(
        wrapped,
        optimizer,
        model_state_dict=content["model"],
        optim_state_dict=content["optimizer"],
        options=options,
    )


def load_fsdp1(wrapped: nn.Module, optimizer: Optimizer, folder: Path) -> None:
    """dcp.load into sharded state dicts, and FSDP's own way back for the optimizer.

    Left to itself torch 2.13 drops a tensor of which this rank has no rows, takes that for a sign
    of a checkpoint older than 2.4, and asks for the single key `optimizer.param_groups`.
    """
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    with FSDP.state_dict_type(wrapped, StateDictType.SHARDED_STATE_DICT):
        content: dict[str, Any] = {
            "model": wrapped.state_dict(),
            "optimizer": FSDP.optim_state_dict(wrapped, optimizer),
        }
        dcp_load(content, checkpoint_id=folder, planner=planner)
        wrapped.load_state_dict(content["model"])
        state = FSDP.optim_state_dict_to_load(wrapped, optimizer, content["optimizer"])
    optimizer.load_state_dict(state)


def load_ddp(wrapped: nn.Module, optimizer: Optimizer, file: Path) -> None:
    """torch.load without trust, and strict loading."""
    content = torch.load(file, weights_only=True, map_location="cpu")
    wrapped.load_state_dict(content["model"], strict=True)
    optimizer.load_state_dict(content["optimizer"])


def resume(options: argparse.Namespace) -> None:
    """Build with other weights, load, write down."""
    net = build(ModelOptions.from_json(json.loads(options.model_options)), OTHER_SEED)
    groups = decay_groups(net)
    wrapped = wrap(net, "plain" if options.plain else options.kind)
    optimizer = make_optimizer(wrapped, groups, options.optimizer)
    # a trainer with a scheduler has it before loading: then initial_lr is asked for, too
    scheduler = make_scheduler(optimizer) if options.next_steps else None
    make_blank_state(optimizer)
    if options.kind == "fsdp2":
        load_fsdp2(wrapped, optimizer, options.checkpoint, options.flat)
    elif options.kind == "fsdp1":
        load_fsdp1(wrapped, optimizer, options.checkpoint)
    else:
        load_ddp(wrapped, optimizer, options.checkpoint)
    tensors = gather(wrapped, optimizer) | gather_buffers(wrapped)
    meta: dict[str, Any] = {"param_groups": group_meta(optimizer, group_names(wrapped, optimizer))}
    if scheduler is not None:
        scheduler.last_epoch = STEPS_DONE
        steps = range(STEPS_DONE, STEPS_DONE + options.next_steps)
        losses = [step_plainly(wrapped, optimizer, scheduler, step) for step in steps]
        meta["next_losses"] = losses
    if rank() == 0:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        save_file({k: v.cpu().contiguous() for k, v in tensors.items()}, options.out)
        options.out.with_suffix(".json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def main(arguments: list[str]) -> None:
    """Resume in a process group."""
    options = parse(arguments)
    torch.set_num_threads(1)

    def action() -> None:
        dist.init_process_group("gloo")
        resume(options)

    run_and_leave(action)


if __name__ == "__main__":
    main(sys.argv[1:])
