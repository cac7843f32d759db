"""Loads universal checkpoints into live DeepSpeed engines and writes down what stands in them.

torchrun --standalone --nproc-per-node W tests/training/universal_loads.py JOBS.json

JOBS.json lists jobs: `folder` (a root with latest_universal), `out` (a safetensors file with the
keys of truth.safetensors; a JSON file comes beside it), `stage`, and as in cases.py `dtype`,
`optimizer` and `model_options`. Before loading, weights are those of another seed.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

from training.cases import Case
from training.deepspeed_runs import configuration, gather_whole
from training.leaving import run_and_leave
from training.live import group_meta, jsonable, mean_over_ranks, rank, world_size
from training.model import ModelOptions, batch, build, decay_groups
from training.wrap import make_optimizer, make_scheduler

OTHER_SEED = 4321
STEPS_DONE, MORE_STEPS = 3, 3
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def load(job: Mapping[str, Any]) -> None:
    """One engine, one folder."""
    case = Case(
        name="loaded",
        kind="deepspeed",
        worlds=(),
        options=ModelOptions.from_json(job["model_options"]),
        optimizer=job.get("optimizer", "adamw"),
        dtype=job.get("dtype", "fp32"),
        stage=job["stage"],
        config={**UNIVERSAL, **job.get("config", {})},
    )
    net = build(case.options, OTHER_SEED)
    _take_frozen(net, build(case.options))
    groups = decay_groups(net)
    base = make_optimizer(net, groups, case.optimizer)
    engine, zero, _, scheduler = deepspeed.initialize(
        model=net,
        optimizer=base,
        lr_scheduler=make_scheduler(base),
        config=configuration(case),
        dist_init_required=False,
    )
    _, client = engine.load_checkpoint(job["folder"])
    tensors = gather_whole(case, engine.module, zero, base)
    meta = {
        "param_groups": group_meta(base, [names for names, _ in groups]),
        "client": {key: client.get(key) for key in ("epoch", "note")},
        "global_steps": engine.global_steps,
        "scheduler": jsonable(scheduler.state_dict()),
        "loss_scale": float(getattr(zero, "loss_scale", 1.0)),
        "next_losses": [_step(engine, STEPS_DONE + more) for more in range(MORE_STEPS)],
    }
    if rank() == 0:
        out = Path(job["out"])
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, out)
        out.with_suffix(".json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def _take_frozen(net: nn.Module, pretrained: nn.Module) -> None:
    """Frozen weights, which DeepSpeed does not load: those that the script began with."""
    weights = dict(pretrained.named_parameters())
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if not parameter.requires_grad:
                parameter.copy_(weights[name])


def _step(engine: Any, step: int) -> float:
    loss = engine(*batch(step, rank(), world_size()))
    engine.backward(loss)
    engine.step()
    return mean_over_ranks(loss)


def main(listed: Path) -> None:
    """All jobs, one after another in one process group."""
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    for job in json.loads(listed.read_text()):
        print(job, flush=True)
        load(job)


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
