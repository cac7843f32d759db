"""Trains under FSDP2 and FSDP1 and saves each run in every way that its users save.

torchrun --standalone --nproc-per-node W tests/training/fsdp_saves.py OUT

Leaves `OUT/<run>-<way>/` with ckpt, truth.safetensors and truth.json. The truth is gathered inside
the run before anything is saved. accelerate's own functions write its folders; they are given what
they ask of an Accelerator, for its own set-up wants a GPU.
"""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.optim import Optimizer

from training.cases import Case
from training.leaving import run_and_leave
from training.live import (
    gather,
    gather_buffers,
    group_meta,
    group_names,
    rank,
    step_plainly,
    world_size,
)
from training.model import RICH, Block, build, decay_groups
from training.torch_runs import Session
from training.train import CLIENT, STEPS, describe
from training.wrap import make_optimizer, make_scheduler

Save = Callable[[Path, nn.Module, Optimizer, dict[str, Any]], None]


def shard(net: nn.Module, *, dim1: bool = False, hybrid: bool = False) -> nn.Module:
    """The net under FSDP2; `dim1` cuts even weights along dimension 1, `hybrid` has replicas."""
    shape = (2, world_size() // 2) if hybrid else (world_size(),)
    names = ("replicate", "shard") if hybrid else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if dim1 and parameter.ndim > 1 and parameter.shape[1] % 3 == 0 else None

    blocks: Any = net.blocks
    for module in (*blocks, net):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement)
    return net


def wrap1(net: nn.Module, *, mesh: bool = False, hybrid: bool = False) -> nn.Module:
    """The net under FSDP1; with a mesh it saves DTensors, else ShardedTensors."""
    more: dict[str, Any] = {}
    if mesh:
        more["device_mesh"] = init_device_mesh("cpu", (world_size(),))
    if hybrid:
        more["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        more["process_group"] = hybrid_groups()
    cpu, policy = torch.device("cpu"), ModuleWrapPolicy({Block})
    return FSDP(net, auto_wrap_policy=policy, use_orig_params=True, device_id=cpu, **more)


def hybrid_groups() -> tuple[Any, Any]:
    """Two halves that shard, and the pairs that hold the same."""
    half = world_size() // 2
    shards = [dist.new_group(list(range(i * half, (i + 1) * half))) for i in range(2)]
    copies = [dist.new_group([i, i + half]) for i in range(half)]
    return shards[rank() // half], copies[rank() % half]


def states(module: nn.Module, optimizer: Optimizer) -> tuple[Any, Any]:
    """Sharded state dicts of model and optimizer, the latter by FQN."""
    if isinstance(module, FSDP):
        with FSDP.state_dict_type(module, StateDictType.SHARDED_STATE_DICT):
            return module.state_dict(), FSDP.optim_state_dict(module, optimizer)
    return get_state_dict(module, optimizer)


def by_name(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """One file a rank, optimizer states by FQN."""
    model, state = states(module, optimizer)
    torch.save({"model": model, "optimizer": state, **rest}, folder / f"rank{rank()}.pt")


def by_number(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """One file a rank, of what the objects themselves give."""
    content = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), **rest}
    torch.save(content, folder / f"step3_rank_{rank()}.pt")


def verl(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """verl's three files a rank. Source: verl FSDPCheckpointManager.save_checkpoint."""
    extra = {"lr_scheduler": rest["scheduler"], "rng": {"cpu": torch.get_rng_state() + rank()}}
    model = states(module, optimizer)[0]
    contents = {"model": model, "optim": optimizer.state_dict(), "extra_state": extra}
    for name, content in contents.items():
        file = folder / f"{name}_world_size_{world_size()}_rank_{rank()}.pt"
        torch.save(content, file)


def full(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """Rank 0's full state dicts. No offload: on the CPU it mixes up the states in torch 2.13."""
    if isinstance(module, FSDP):
        with FSDP.state_dict_type(
            module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(rank0_only=True),
            FullOptimStateDictConfig(rank0_only=True, offload_to_cpu=False),
        ):
            model, state = module.state_dict(), FSDP.optim_state_dict(module, optimizer)
    else:
        options = StateDictOptions(full_state_dict=True)
        model, state = get_state_dict(module, optimizer, options=options)
    if rank() == 0:
        torch.save({"model": model, "optimizer": state, **rest}, folder / "checkpoint.pt")


def local(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """FSDP1's LOCAL_STATE_DICT."""
    with FSDP.state_dict_type(module, StateDictType.LOCAL_STATE_DICT):
        model = module.state_dict()
    content = {"model": model, "optimizer": optimizer.state_dict(), **rest}
    torch.save(content, folder / f"rank{rank()}.pt")


def accelerate(kind: str, use_dcp: bool = True) -> Save:
    """accelerate's `save_state` folder, by accelerate's functions for FSDP and for the rest."""

    def save(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
        from accelerate import PartialState
        from accelerate.checkpointing import save_accelerator_state
        from accelerate.utils import (
            FullyShardedDataParallelPlugin,
            save_fsdp_model,
            save_fsdp_optimizer,
        )

        PartialState(cpu=True)  # for its logger
        version = 1 if isinstance(module, FSDP) else 2
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type=kind)
        asked = SimpleNamespace(process_index=rank(), num_processes=world_size())
        save_fsdp_model(plugin, asked, module, str(folder), use_dcp=use_dcp)
        save_fsdp_optimizer(plugin, asked, optimizer, module, str(folder), use_dcp=use_dcp)
        scheduler = SimpleNamespace(state_dict=lambda: rest["scheduler"])
        save_accelerator_state(str(folder), [], [], [scheduler], [], rank(), step=3)

    return save


RANKS = {"by_name": by_name, "verl": verl}
SHARDED, FULL = accelerate("SHARDED_STATE_DICT"), accelerate("FULL_STATE_DICT")
TWO = {
    "by_number": by_number, "full": full, "accelerate": SHARDED, "accelerate_full": FULL,
    "accelerate_ranks": accelerate("SHARDED_STATE_DICT", use_dcp=False),
} | RANKS  # fmt: skip
ONE = {"full": full, "local": local, "accelerate": SHARDED} | RANKS
RUNS: dict[str, tuple[Callable[[nn.Module], nn.Module], dict[str, Save], tuple[int, ...]]] = {
    "fsdp2": (shard, TWO, (2, 3)),
    "fsdp2_dim1": (lambda net: shard(net, dim1=True), {"by_number": by_number}, (2, 3)),
    "fsdp2_hybrid": (lambda net: shard(net, hybrid=True), {"by_number": by_number}, (4,)),
    "fsdp1": (wrap1, ONE, (2, 3)),
    "fsdp1_mesh": (lambda net: wrap1(net, mesh=True), RANKS, (2, 3)),
    "fsdp1_hybrid": (lambda net: wrap1(net, hybrid=True), {"by_name": by_name}, (4,)),
}


def run(name: str, out: Path) -> None:
    """Train, note the truth, save in every way."""
    wrap, ways, _ = RUNS[name]
    net = build(RICH)
    groups = decay_groups(net)
    module = wrap(net)
    optimizer = make_optimizer(module, groups)
    scheduler = make_scheduler(optimizer)
    for step in range(STEPS):
        step_plainly(module, optimizer, scheduler, step)
    tensors = gather(module, optimizer) | gather_buffers(module)
    session = Session(
        module=module,
        scheduler=scheduler,
        train_step=lambda step: step_plainly(module, optimizer, scheduler, step),
        gather=lambda: tensors,
        param_groups=lambda: group_meta(optimizer, group_names(module, optimizer)),
        save=lambda folder, client: None,
        meta=lambda: {"optimizer": type(optimizer).__name__},
    )
    meta = describe(Case(name, name, (world_size(),), options=RICH), session)
    rest = {**CLIENT, "scheduler": scheduler.state_dict()}
    whole = {key: value.cpu().contiguous() for key, value in tensors.items()}
    for way, save in ways.items():
        folder = out / f"{name}-{way}"
        (folder / "ckpt").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save(folder / "ckpt", module, optimizer, rest)
    steps = range(STEPS, 2 * STEPS)
    meta["next_losses"] = [session.train_step(step) for step in steps]
    for way in ways if rank() == 0 else ():
        save_file(whole, out / f"{name}-{way}" / "truth.safetensors")
        (out / f"{name}-{way}" / "truth.json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def main(out: Path) -> None:
    """Every run that is meant for this number of processes."""
    torch.set_num_threads(1)
    random.seed(0)
    dist.init_process_group("gloo")
    for name, (_, _, worlds) in RUNS.items():
        if world_size() in worlds:
            run(name, out)
    dist.barrier()


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
