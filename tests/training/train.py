"""Trains the cases and writes each one's checkpoint with the truth beside it.

torchrun --standalone --nproc-per-node W tests/training/train.py OUTDIR CASE [CASE ...]
python tests/training/train.py list
"""

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from training.cases import CASES, Case
from training.leaving import run_and_leave
from training.live import gather, gather_buffers, jsonable, rank, world_size
from training.model import (
    GLOBAL_BATCH,
    batch,
    build,
    decay_groups,
    nonpersistent_buffers,
    tied_names,
)
from training.torch_runs import Session, open_torch
from training.wrap import make_optimizer, make_scheduler

STEPS = 3
CLIENT = {"epoch": 1, "note": "client"}
TOLERANCE = {"losses": 1e-4, "weights": 1e-4}


def open_case(case: Case) -> Session:
    """The run of the case; DeepSpeed is imported only where it is used."""
    if case.kind == "deepspeed":
        from training.deepspeed_runs import open_deepspeed

        return open_deepspeed(case)
    return open_torch(case)


def reference(case: Case) -> tuple[dict[str, Tensor], list[float]]:
    """The same training in one plain process: state after STEPS, losses of twice as many steps.

    The rows go through in the ranks' portions, for BatchNorm makes the loss depend on the split.
    """
    net = build(case.options)
    optimizer = make_optimizer(net, decay_groups(net), case.optimizer)
    scheduler = make_scheduler(optimizer)
    world = case.data_parallel(world_size())
    tensors: dict[str, Tensor] = {}
    losses = []
    for step in range(2 * STEPS):
        if step == STEPS:
            tensors = gather(net, optimizer)
        parts = [net(*batch(step, part, world)) / world for part in range(world)]
        loss = torch.stack(parts).sum()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return tensors, losses


def compare(case: Case, tensors: dict[str, Tensor], losses: list[float]) -> dict[str, Any]:
    """Differences to the plain run; an fp32 run that strays from it has no truth to tell."""
    expected, expected_losses = reference(case)
    missing = sorted(set(expected) - set(tensors))
    worst: dict[str, float] = {}
    for key, value in expected.items():
        kind = key.rpartition("/")[0] or "weights"
        if key in tensors:
            difference = float((tensors[key] - value).abs().max())
            worst[kind] = max(worst.get(kind, 0.0), difference)
    off = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    if case.dtype == "fp32":
        good = off <= TOLERANCE["losses"] and worst["weights"] <= TOLERANCE["weights"]
        if missing or not good:
            raise RuntimeError(f"{case.name} strays from plain torch: {worst} {off} {missing}")
    return {"ref_max_abs_diff": worst, "ref_loss_diff": off, "ref_losses": expected_losses}


def describe(case: Case, session: Session) -> dict[str, Any]:
    """What truth.json says about the run at the time of saving."""
    net = build(case.options)
    buffers = [name for name, _ in net.named_buffers()]
    return {
        "case": case.name,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "deepspeed": None,
        "world_size": world_size(),
        "data_parallel_size": case.data_parallel(world_size()),
        "dtype": case.dtype,
        "model_options": case.options.to_json(),
        "global_batch": GLOBAL_BATCH,
        "tied": tied_names(net),
        "frozen": list(case.options.frozen),
        "buffers": buffers,
        "nonpersistent_buffers": nonpersistent_buffers(net, list(net.state_dict())),
        "step": STEPS,
        "client_state": CLIENT,
        "param_groups": session.param_groups(),
        "scheduler": {
            "type": type(session.scheduler).__name__,
            "state": jsonable(session.scheduler.state_dict()),
        },
        **session.meta(),
    }


def run_case(case: Case, folder: Path) -> None:
    """Train, save, note the truth, and train on for the losses that a resumed run should see."""
    checkpoint = folder / "ckpt"
    checkpoint.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    session = open_case(case)
    losses = [session.train_step(step) for step in range(STEPS)]
    tensors = session.gather() | gather_buffers(session.module)
    meta = describe(case, session)
    session.save(checkpoint, CLIENT)
    dist.barrier()
    next_losses = [session.train_step(step) for step in range(STEPS, 2 * STEPS)]
    if rank() == 0:
        meta |= {"losses": losses, "next_losses": next_losses}
        meta |= compare(case, tensors, losses + next_losses)
        whole = {key: value.cpu().contiguous() for key, value in tensors.items()}
        save_file(whole, folder / "truth.safetensors")
        (folder / "truth.json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def train_all(out: Path, names: list[str]) -> None:
    """All cases, one after another in one process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        if world_size() not in CASES[name].worlds:
            raise ValueError(f"case {name} is meant for {CASES[name].worlds} processes")
        start = time.monotonic()
        run_case(CASES[name], out / name)
        torch.compiler.reset()
        if rank() == 0:
            print(f"OK {name} {time.monotonic() - start:.1f}s", flush=True)
    dist.barrier()


def main(arguments: list[str]) -> None:
    """Run the named cases, or print the table."""
    if arguments == ["list"]:
        for case in CASES.values():
            print(case.name, *case.worlds)
        return
    run_and_leave(lambda: train_all(Path(arguments[0]), arguments[1:]))


if __name__ == "__main__":
    main(sys.argv[1:])
