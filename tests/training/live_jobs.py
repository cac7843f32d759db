"""Trains, converts and loads what a list says, one after another in one process group.

torchrun --standalone --nproc-per-node W tests/training/live_jobs.py JOBS.json

A job names what it does in `do`. `train`: a deepspeed run of `case`, the arguments of Case, which
leaves `out/ckpt` and its truth. `convert`: ckpt.convert with the `arguments`. `sort`: the names in
the safetensors file `out` by the alphabet, as other libraries write them. `load`: as
zero_jobs.py has it. `dropout`: a run under `strategy` whose ranks draw from random number
generators of their own, begun anew with a save to `out/ckpt`, or resumed from `source`; every
rank's losses go to `out/losses.json`. A job that fails on all ranks leaves a traceback in
`<out>.error.txt`, and the others go on.
"""

import gc
import json
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[up]) for up in (1, 2)]

import deepspeed
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.optim import Optimizer

import ckpt
from training.cases import Case
from training.deepspeed_runs import configuration
from training.fsdp_loads import load_fsdp1
from training.leaving import run_and_leave
from training.live import rank, world_size
from training.model import WEIGHT_DECAY, Block, ModelOptions, Net, batch, build
from training.train import run_case
from training.wrap import BETAS, LEARNING_RATE, make_optimizer, make_scheduler, wrap
from training.zero_jobs import load

LINEAR = torch.nn.functional.linear
"""torch's own: DeepSpeed's stage 3 puts another in its place, for the whole process."""

SEED, OTHER_SEED, STEPS, MORE_STEPS = 1234, 4321, 3, 3
DROPOUT = 0.2


def train(job: Mapping[str, Any]) -> None:
    """A run with its truth."""
    options = ModelOptions.from_json(job["case"]["options"])
    case = Case(**{**job["case"], "kind": "deepspeed", "worlds": (), "options": options})
    run_case(case, Path(job["out"]))


def convert(job: Mapping[str, Any]) -> None:
    """A conversion, by the first rank."""
    if rank() == 0:
        ckpt.convert(**job["arguments"])


def sort(job: Mapping[str, Any]) -> None:
    """The file again, written by safetensors itself."""
    if rank() == 0:
        file, before = Path(job["out"]), ckpt.open(job["out"]).order
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
        save_file(load_file(file), file, metadata)
        assert ckpt.open(file).order != before


# --- dropout ------------------------------------------------------------------------------------


def net_with_dropout(seed: int) -> Net:
    """The net, whose blocks' outputs are thinned out at random."""
    net = build(ModelOptions(), seed)
    for block in net.blocks:
        block.register_forward_hook(lambda _module, _given, y: nn.functional.dropout(y, DROPOUT))
    return net


def one_group(net: nn.Module) -> list[tuple[list[str], float]]:
    """All parameters with one decay, as a flat parameter of FSDP1 wants them."""
    return [([name for name, _ in net.named_parameters()], WEIGHT_DECAY)]


class UnderDeepSpeed:
    """An engine, whose client state has the rank's random number state."""

    def __init__(self, stage: int, seed: int) -> None:
        net = net_with_dropout(seed)
        base = make_optimizer(net, one_group(net))
        config = configuration(Case("dropout", "deepspeed", (), stage=stage))
        self.engine, *_ = deepspeed.initialize(
            model=net,
            optimizer=base,
            lr_scheduler=make_scheduler(base),
            config=config,
            dist_init_required=False,
        )

    def step(self, rows: tuple[Tensor, Tensor]) -> float:
        """The rank's own loss."""
        loss = self.engine(*rows)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss)

    def save(self, folder: Path) -> None:
        """With the state of torch's generator, which every rank has in its file in stage 3."""
        self.engine.save_checkpoint(str(folder), client_state={"rng": torch.get_rng_state()})

    def load(self, folder: str) -> Tensor:
        """Returns the rank's state: its own, or that under its number."""
        path, client = self.engine.load_checkpoint(folder)
        assert path is not None, "load_checkpoint found no checkpoint"
        found: Tensor = client["by_rank"]["rng"][rank()] if "by_rank" in client else client["rng"]
        return found


class UnderFSDP2:
    """A sharded net that resumes from a DCP folder."""

    def __init__(self, seed: int) -> None:
        net = net_with_dropout(seed)
        groups = one_group(net)
        self.module = self.wrapped(net)
        self.optimizer = self.optimize(groups)
        self.scheduler = make_scheduler(self.optimizer)

    def wrapped(self, net: Net) -> nn.Module:
        """The net as it trains."""
        return wrap(net, "fsdp2")

    def optimize(self, groups: list[tuple[list[str], float]]) -> Optimizer:
        """The optimizer of the wrapped net."""
        return make_optimizer(self.module, groups)

    def step(self, rows: tuple[Tensor, Tensor]) -> float:
        """The rank's own loss."""
        loss = self.module(*rows)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        return float(loss)

    def load(self, source: str) -> Tensor:
        """Returns the rank's random number state."""
        model, state = get_state_dict(self.module, self.optimizer)
        states = [torch.zeros_like(torch.get_rng_state()) for _ in range(world_size())]
        content: dict[str, Any] = {"model": model, "optimizer": state, "by_rank": {"rng": states}}
        dcp_load(content, checkpoint_id=source)
        set_state_dict(
            self.module, self.optimizer, model_state_dict=model, optim_state_dict=state
        )  # fmt: skip
        self.scheduler.last_epoch = STEPS
        return states[rank()]


class UnderFlatFSDP1(UnderFSDP2):
    """FSDP1 with use_orig_params=False: its optimizer sees one flat parameter a block."""

    def wrapped(self, net: Net) -> nn.Module:
        """Each block a unit, and the rest."""
        cpu, policy = torch.device("cpu"), ModuleWrapPolicy({Block})
        return FSDP(net, auto_wrap_policy=policy, use_orig_params=False, device_id=cpu)

    def optimize(self, groups: list[tuple[list[str], float]]) -> Optimizer:
        """One group, for no other can be made."""
        return torch.optim.AdamW(
            self.module.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY
        )

    def load(self, source: str) -> Tensor:
        """As the `fsdp-full` format says it."""
        content = torch.load(source, weights_only=True)
        load_fsdp1(self.module, self.optimizer, Path(source))
        self.scheduler.last_epoch = STEPS
        found: Tensor = content["by_rank"]["rng"][rank()]
        return found


def open_run(strategy: str, seed: int) -> Any:
    """A run under the strategy."""
    if strategy.startswith("zero"):
        return UnderDeepSpeed(int(strategy[-1]), seed)
    return UnderFSDP2(seed) if strategy == "fsdp2" else UnderFlatFSDP1(seed)


def run_with_dropout(job: Mapping[str, Any]) -> None:
    """Six steps with a save after three, or the last three."""
    resumes, out = "source" in job, Path(job["out"])
    seed = OTHER_SEED if resumes else SEED
    live = open_run(job["strategy"], seed)
    torch.manual_seed(seed + rank())
    if resumes:
        torch.set_rng_state(live.load(job["source"]))
    losses = []
    for step in range(STEPS if resumes else 0, STEPS + MORE_STEPS):
        if step == STEPS and not resumes:
            live.save(out / "ckpt")
        losses.append(live.step(batch(step, rank(), world_size())))
    everyone: list[list[float]] = [[] for _ in range(world_size())]
    dist.all_gather_object(everyone, losses)
    if rank() == 0:
        (out / "losses.json").write_text(json.dumps(everyone))


DOES: Mapping[str, Callable[[Mapping[str, Any]], None]] = {
    "train": train,
    "convert": convert,
    "sort": sort,
    "load": load,
    "dropout": run_with_dropout,
}


def main(listed: Path) -> None:
    """All jobs; what one leaves behind is gone before the next."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for job in json.loads(listed.read_text()):
        print(job, flush=True)
        torch.nn.functional.linear = LINEAR
        try:
            DOES[job["do"]](job)
        except Exception:
            traceback.print_exc()
            Path(f"{job['out']}.error.txt").write_text(traceback.format_exc())
        gc.collect()
        dist.barrier()


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
