"""Trains and resumes the jobs of a list, one after another in one process group.

torchrun --standalone --nproc-per-node W tests/resume/worker.py JOBS.json

A job is `{"strategy", "net", "dtype", "out"}`, and to resume, `"checkpoint"` and `"scheduler_key"`;
`"forget"` names what is then spoilt on purpose: optimizer, buffers or scheduler.
`out` is a folder: truth.safetensors has what stands in the live job, at the save or after loading,
truth.json the losses from there on. A job to train also leaves its save in `out/ckpt`. A job that
fails on all ranks leaves `error` in its truth.json, and the others go on.
"""

import gc
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from training.leaving import run_and_leave
from training.live import mean_over_ranks, rank

from resume.device import join
from resume.strategies import STRATEGIES

LINEAR = torch.nn.functional.linear
"""torch's own: DeepSpeed's stage 3 puts another in its place, for the whole process."""

SEED, OTHER_SEED, STEPS, MORE_STEPS = 1234, 4321, 3, 3


def open_job(job: Mapping[str, Any], seed: int, device: torch.device) -> Any:
    """A live job; DeepSpeed is imported only where it is used."""
    strategy = STRATEGIES[job["strategy"]]
    if strategy.kind == "deepspeed":
        from resume.deepspeed_jobs import DeepSpeedJob

        return DeepSpeedJob(strategy, job["net"], job["dtype"], seed, device)
    from resume.torch_jobs import TorchJob

    return TorchJob(strategy, job["net"], job["dtype"], seed, device)


def evaluate(live: Any) -> float:
    """Loss of the first batch with BatchNorm's running statistics."""
    live.module.eval()
    with torch.no_grad():
        loss = live.loss(0)
    live.module.train()
    return mean_over_ranks(loss)


def go_on(live: Any) -> list[float]:
    """The losses from step STEPS on: evaluated, of each step, evaluated."""
    before = evaluate(live)
    steps = [live.train_step(STEPS + more) for more in range(MORE_STEPS)]
    return [before, *steps, evaluate(live)]


def forget(live: Any, what: str) -> None:
    """Lose a part of what was loaded into a DDP job."""
    if what == "optimizer":
        for state in live.optimizer.state.values():
            state["exp_avg"].zero_()
    elif what == "buffers":
        for name, buffer in live.module.named_buffers():
            buffer.fill_("var" in name)
    else:
        live.scheduler.last_epoch = 0


def run(job: Mapping[str, Any], out: Path, device: torch.device) -> dict[str, Any]:
    """Train and save, or load; then note what there is, and train on."""
    resumes = "checkpoint" in job
    live = open_job(job, OTHER_SEED if resumes else SEED, device)
    if resumes:
        live.load(Path(job["checkpoint"]), job["scheduler_key"])
        if "forget" in job:
            forget(live, job["forget"])
    else:
        for step in range(STEPS):
            live.train_step(step)
    tensors, meta = live.gather(), live.describe()
    if not resumes:
        live.save(out / "ckpt")
    dist.barrier()
    if rank() == 0:
        whole = {key: value.cpu().contiguous() for key, value in tensors.items()}
        save_file(whole, out / "truth.safetensors")
    return {**meta, "losses": go_on(live), "device": device.type}


def main(jobs: Path) -> None:
    """All jobs; what one leaves behind is gone before the next."""
    device = join()
    for job in json.loads(jobs.read_text()):
        out = Path(job["out"])
        (out / "ckpt").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        torch.nn.functional.linear = LINEAR
        try:
            meta = run(job, out, device)
        except Exception:
            meta = {"error": traceback.format_exc()}
            print(job, meta["error"], flush=True)
        if rank() == 0:
            (out / "truth.json").write_text(json.dumps({**job, **meta}, indent=1))
        gc.collect()
    dist.barrier()


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
