"""Trains under FSDP2 and FSDP1 and saves each run in every way that its users save.

torchrun --standalone --nproc-per-node W tests/training/fsdp_saves.py OUT

Leaves `OUT/<run>-<way>/` with ckpt, truth.safetensors and truth.json. The truth is gathered inside
the run before anything is saved. accelerate's own functions write its folders; they are given what
they ask of an Accelerator, for its own set-up wants a GPU.
"""

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
    clean,
    gather,
    gather_buffers,
    group_meta,
    group_names,
    rank,
    step_plainly,
    world_size,
)
from training.live import full as full_copy
from training.model import RICH, WEIGHT_DECAY, Block, ModelOptions, build, decay_groups
from training.torch_runs import Session
from training.train import CLIENT, STEPS, describe
from training.wrap import BETAS, LEARNING_RATE, make_optimizer, make_scheduler

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


def wrap1(
    net: nn.Module, *, mesh: bool = False, hybrid: bool = False, flat: bool = False
) -> nn.Module:
    """The net under FSDP1; with a mesh it saves DTensors, else ShardedTensors."""
    more: dict[str, Any] = {}
    if hybrid:
        more["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    if mesh:
        shape = (2, world_size() // 2) if hybrid else (world_size(),)
        names = ("replicate", "shard") if hybrid else ("shard",)
        more["device_mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    elif hybrid:
        more["process_group"] = hybrid_groups()
    cpu, policy = torch.device("cpu"), ModuleWrapPolicy({Block})
    return FSDP(net, auto_wrap_policy=policy, use_orig_params=not flat, device_id=cpu, **more)


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


def raw(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """One file a rank: sharded weights, and the optimizer as it is."""
    content = {"model": states(module, optimizer)[0], "optimizer": optimizer.state_dict(), **rest}
    torch.save(content, folder / f"rank{rank()}.pt")


def named(folder: Path, module: nn.Module, optimizer: Optimizer, rest: dict[str, Any]) -> None:
    """The same of an optimizer that was made of named parameters."""
    names = {id(p): name for name, p in module.named_parameters()}
    other = torch.optim.AdamW(
        [
            {**group, "params": [(names[id(p)], p) for p in group["params"]]}
            for group in optimizer.param_groups
        ]
    )
    other.load_state_dict(optimizer.state_dict())
    raw(folder, module, other, rest)


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


@dataclass(frozen=True)
class Run:
    """How the net is wrapped, the ways it is saved in, and the numbers of processes."""

    wrap: Callable[[nn.Module], nn.Module]
    ways: Mapping[str, Save]
    worlds: tuple[int, ...] = (2, 3)
    options: ModelOptions = RICH


RANKS = {"by_name": by_name, "verl": verl}
SHARDED, FULL = accelerate("SHARDED_STATE_DICT"), accelerate("FULL_STATE_DICT")
TWO = {
    "by_number": by_number, "full": full, "accelerate": SHARDED, "accelerate_full": FULL,
    "accelerate_ranks": accelerate("SHARDED_STATE_DICT", use_dcp=False),
} | RANKS  # fmt: skip
ONE = {"full": full, "local": local, "accelerate": SHARDED, "raw": raw, "named": named} | RANKS
FLAT = {"raw": raw, "named": named, "verl": verl}
TRAINED = replace(RICH, frozen=())  # a flat parameter is trained or it is not
HALF = replace(TRAINED, frozen=tuple(f"blocks.1.{name}" for name, _ in Block().named_parameters()))
RUNS = {
    "fsdp2": Run(shard, TWO),
    "fsdp2_dim1": Run(lambda net: shard(net, dim1=True), {"by_number": by_number}),
    "fsdp2_hybrid": Run(lambda net: shard(net, hybrid=True), {"by_number": by_number}, (4,)),
    "fsdp1": Run(wrap1, ONE),
    "fsdp1_mesh": Run(lambda net: wrap1(net, mesh=True), RANKS),
    "fsdp1_hybrid": Run(
        lambda net: wrap1(net, hybrid=True),
        {"by_name": by_name, "raw": raw},  # torch 2.13 cannot save LOCAL_STATE_DICT here
        (4,),
    ),
    "fsdp1_flat": Run(lambda net: wrap1(net, flat=True), FLAT | {"local": local}, options=TRAINED),
    "fsdp1_flat_frozen": Run(lambda net: wrap1(net, flat=True), FLAT, (2,), HALF),
    "fsdp1_flat_hybrid": Run(
        lambda net: wrap1(net, flat=True, mesh=True, hybrid=True),
        FLAT,
        (4,),
        TRAINED,
    ),
}


def flat_optimizer(module: nn.Module) -> Optimizer:
    """AdamW of the flat parameters, as a script makes it that knows of none."""
    trained = [p for p in module.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)


def gather_units(module: FSDP, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Weights and states of flat parameters: what unsharding shows of states put in their place."""
    flats = {clean(n).removesuffix("_flat_param"): p for n, p in module.named_parameters()}
    tensors = summon(module)
    names, kept = list(tensors), {unit: p.detach().clone() for unit, p in flats.items()}
    owners = {n: max((u for u in flats if n.startswith(u)), key=len) for n in names}
    trained = {unit for unit, p in flats.items() if p in optimizer.state}
    for key in ("exp_avg", "exp_avg_sq"):
        for unit in trained:
            flats[unit].detach().copy_(optimizer.state[flats[unit]][key])
        shown = summon(module)
        tensors |= {f"{key}/{n}": shown[n] for n in names if owners[n] in trained}
        for unit, p in flats.items():
            p.detach().copy_(kept[unit])
    for name in (n for n in names if owners[n] in trained):
        tensors[f"step/{name}"] = full_copy(optimizer.state[flats[owners[name]]]["step"])
    return tensors


def summon(module: FSDP) -> dict[str, torch.Tensor]:
    """The whole weights by name."""
    with FSDP.summon_full_params(module, writeback=False):
        return {clean(name): full_copy(p) for name, p in module.named_parameters()}


def run(name: str, out: Path) -> None:
    """Train, note the truth, save in every way."""
    todo = RUNS[name]
    net = build(todo.options)
    groups = decay_groups(net)
    module = todo.wrap(net)
    is_flat = name.startswith("fsdp1_flat")
    optimizer = flat_optimizer(module) if is_flat else make_optimizer(module, groups)
    scheduler = make_scheduler(optimizer)
    for step in range(STEPS):
        step_plainly(module, optimizer, scheduler, step)
    tensors = gather_units(module, optimizer) if is_flat else gather(module, optimizer)
    tensors |= gather_buffers(module)
    members = [[n for n, _ in build(todo.options).named_parameters() if f"step/{n}" in tensors]]
    session = Session(
        module=module,
        scheduler=scheduler,
        train_step=lambda step: step_plainly(module, optimizer, scheduler, step),
        gather=lambda: tensors,
        param_groups=lambda: group_meta(
            optimizer, members if is_flat else group_names(module, optimizer)
        ),
        save=lambda folder, client: None,
        meta=lambda: {"optimizer": type(optimizer).__name__},
    )
    meta = describe(Case(name, name, (world_size(),), options=todo.options), session)
    rest = {**CLIENT, "scheduler": scheduler.state_dict()}
    whole = {key: value.cpu().contiguous() for key, value in tensors.items()}
    for way, save in todo.ways.items():
        folder = out / f"{name}-{way}"
        (folder / "ckpt").mkdir(parents=True, exist_ok=True)
        dist.barrier()
        save(folder / "ckpt", module, optimizer, rest)
    steps = range(STEPS, 2 * STEPS)
    meta["next_losses"] = [session.train_step(step) for step in steps]
    for way in todo.ways if rank() == 0 else ():
        save_file(whole, out / f"{name}-{way}" / "truth.safetensors")
        (out / f"{name}-{way}" / "truth.json").write_text(json.dumps(meta, indent=1))
    dist.barrier()


def main(out: Path) -> None:
    """Every run that is meant for this number of processes."""
    torch.set_num_threads(1)
    random.seed(0)
    dist.init_process_group("gloo")
    for name, todo in RUNS.items():
        if world_size() in todo.worlds:
            run(name, out)
    dist.barrier()


if __name__ == "__main__":
    run_and_leave(lambda: main(Path(sys.argv[1])))
