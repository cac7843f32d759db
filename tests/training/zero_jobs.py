"""Trains the sources of test_zero_targets.py, and loads what became of them into live engines.

torchrun --standalone --nproc-per-node W tests/training/zero_jobs.py train OUTDIR
torchrun --standalone --nproc-per-node W tests/training/zero_jobs.py load JOBS.json

JOBS.json lists jobs: `folder`, `out` (a safetensors file with the keys of truth.safetensors; a JSON
file comes beside it), `config` (DeepSpeed's), `model_options`, `optimizer`, and `saved`, where the
engine saves what it has loaded. With `flags`, arguments of load_checkpoint, weights alone are asked
for. Before loading, weights are those of another seed.
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
from deepspeed.accelerator import get_accelerator
from safetensors.torch import save_file

from training.cases import Case
from training.deepspeed_runs import gather_weights, gather_whole, open_deepspeed
from training.leaving import run_and_leave
from training.live import gather_buffers, group_meta, jsonable, mean_over_ranks, rank, world_size
from training.model import FROZEN, RICH, ModelOptions, batch, build, decay_groups
from training.train import CLIENT, STEPS, run_case
from training.wrap import make_optimizer, make_scheduler

OTHER_SEED = 4321
SPLITTABLE = ModelOptions(tie=True, tiny=True, frozen=FROZEN)
"""Without BatchNorm, whose loss depends on how many ranks share a batch."""

SMALL_SUB_GROUPS = {"zero_optimization": {"sub_group_size": 500}}
DEALT_OUT = {"zero_optimization": {"round_robin_gradients": True}}
ALIGNED = {"zero_optimization": {"parameter_alignment": True}}
ALIGNED_AND_DEALT = {
    "zero_optimization": {"parameter_alignment": True, "round_robin_gradients": True}
}
ACCUMULATES_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}


def _deepspeed(name: str, stage: int, options: ModelOptions = RICH, **more: Any) -> Case:
    return Case(name, "deepspeed", (), "deepspeed", stage=stage, options=options, **more)


SOURCES = (
    Case("ddp", "ddp", (), options=SPLITTABLE, named=True),
    Case("fsdp2", "fsdp2", (), "dcp", options=SPLITTABLE),
    _deepspeed("zero1", 1, SPLITTABLE),
    _deepspeed("zero3", 3, SPLITTABLE, config=SMALL_SUB_GROUPS),
    _deepspeed("zero2_rich", 2),
    _deepspeed("zero2_bf16", 2, dtype="bf16"),
    _deepspeed("zero1_acc32", 1, dtype="bf16", config=ACCUMULATES_FP32),
    _deepspeed("zero3_bf16", 3, dtype="bf16", config=SMALL_SUB_GROUPS),
    _deepspeed("zero2_fp16", 2, dtype="fp16"),
    _deepspeed("zero1_sgd", 1, optimizer="sgd"),
    _deepspeed("zero1_aligned", 1, dtype="bf16", config=ALIGNED),
)
WITHOUT_TRUTH = (
    _deepspeed("zero2_dealt", 2, config=DEALT_OUT),
    _deepspeed("zero2_aligned_dealt", 2, config=ALIGNED_AND_DEALT),
)
"""DeepSpeed 0.19.8 cannot be asked for whole tensors under round_robin_gradients; it only saves."""


def train(out: Path) -> None:
    """All sources, each with its truth where there is one."""
    for case in SOURCES:
        print(case.name, flush=True)
        run_case(case, out / case.name)
    for case in WITHOUT_TRUTH:
        print(case.name, flush=True)
        session = open_deepspeed(case)
        for step in range(STEPS):
            session.train_step(step)
        session.save(out / case.name / "ckpt", CLIENT)


def load(job: Mapping[str, Any]) -> None:
    """One engine, one folder."""
    config = job["config"]
    dtype = next((name for name in ("bf16", "fp16") if name in config), "fp32")
    stage = config["zero_optimization"]["stage"]
    options = ModelOptions.from_json(job["model_options"])
    case = Case("loaded", "deepspeed", (), options=options, dtype=dtype, stage=stage)
    net = build(options, OTHER_SEED)
    groups = decay_groups(net)
    base = make_optimizer(net, groups)
    if dtype == "fp16":  # most CPUs deny it, yet torch can do it
        get_accelerator().is_fp16_supported = lambda: True
    engine, zero, _, scheduler = deepspeed.initialize(
        model=net,
        optimizer=base,
        lr_scheduler=make_scheduler(base),
        config=config,
        dist_init_required=False,
    )
    path, client = engine.load_checkpoint(job["folder"], **job.get("flags", {}))
    assert path is not None, "load_checkpoint found no checkpoint"
    if "saved" in job:
        kept = {key: client[key] for key in CLIENT}
        engine.save_checkpoint(job["saved"], client_state=kept)
    if "flags" in job:
        tensors = gather_weights(engine.module, stage)
    else:
        tensors = gather_whole(case, engine.module, zero, base)
    tensors |= gather_buffers(engine.module)
    meta = {
        "param_groups": group_meta(base, [names for names, _ in groups]),
        "client": {key: client.get(key) for key in CLIENT},
        "global_steps": engine.global_steps,
        "scheduler": jsonable(scheduler.state_dict()),
        "loss_scale": float(getattr(zero, "loss_scale", 1.0)),
        "next_losses": [_step(engine, STEPS + more) for more in range(STEPS)],
    }
    if rank() == 0:
        out = Path(job["out"])
        save_file({key: value.cpu().contiguous() for key, value in tensors.items()}, out)
        out.with_suffix(".json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def _step(engine: Any, step: int) -> float:
    loss = engine(*batch(step, rank(), world_size()))
    engine.backward(loss)
    engine.step()
    return mean_over_ranks(loss)


def main(what: str, where: Path) -> None:
    """Everything in one process group."""
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    dist.init_process_group("gloo")
    if what == "train":
        train(where)
    else:
        for job in json.loads(where.read_text()):
            print(job["folder"], flush=True)
            load(job)
    dist.barrier()


if __name__ == "__main__":
    run_and_leave(lambda: main(sys.argv[1], Path(sys.argv[2])))
