"""Reads full weights and optimizer state out of live objects: the truth, or what was loaded."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from training.model import batch

STATE_NAMES = {
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "momentum_buffer": "momentum",
    "step": "step",
}
_WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.")


def clean(name: str) -> str:
    """The name that the parameter has in the unwrapped net."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def world_size() -> int:
    """Number of processes, 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """This process's number, 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def mean_over_ranks(loss: Tensor) -> float:
    """The loss of the global batch."""
    total = loss.detach().clone().float().reshape(1)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item() / world_size()


def step_plainly(
    module: nn.Module, optimizer: Optimizer, scheduler: Any, step: int, copies: int = 1
) -> float:
    """One training step; `copies` is how many ranks get the same rows (tensor parallel)."""
    rows = batch(step, rank() // copies, world_size() // copies)
    loss: Tensor = module(*rows)
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return mean_over_ranks(loss)


def full(value: Any) -> Tensor:
    """An own fp32 copy of the whole tensor."""
    tensor = torch.as_tensor(value).detach()
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.float().clone()


def gather(module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Weights and state under truth keys, whatever the module is wrapped in."""
    if isinstance(module, FSDP):
        return _gather_fsdp1(module, optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        tensors[clean(name)] = full(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if key in STATE_NAMES and value is not None:
                tensors[f"{STATE_NAMES[key]}/{clean(name)}"] = full(value)
    return tensors


def _summon(module: FSDP) -> dict[str, Tensor]:
    with FSDP.summon_full_params(module, writeback=False):
        return {clean(name): full(p) for name, p in module.named_parameters()}


def _gather_fsdp1(module: FSDP, optimizer: Optimizer) -> dict[str, Tensor]:
    """FSDP1 can show full parameters only: state is shown by putting it in the parameters' place.

    FSDP.optim_state_dict is not asked, since it is what the checkpoint comes from.
    """
    tensors = _summon(module)
    trained = {clean(n): p for n, p in module.named_parameters() if p.requires_grad}
    weights = {name: p.detach().clone() for name, p in trained.items()}
    steps = _steps_anywhere(trained, optimizer)
    for key in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
        if not _any_rank(any(key in state for state in optimizer.state.values())):
            continue
        _overwrite(trained, {n: optimizer.state.get(p, {}).get(key) for n, p in trained.items()})
        shown = _summon(module)
        _overwrite(trained, weights)
        tensors.update({f"{STATE_NAMES[key]}/{name}": shown[name] for name in steps or trained})
    tensors.update({f"step/{name}": torch.tensor(step) for name, step in steps.items()})
    return tensors


def _overwrite(trained: Mapping[str, Tensor], values: Mapping[str, Tensor | None]) -> None:
    for name, parameter in trained.items():
        value = values[name]
        if value is None:  # this rank has no element of it, or it never had a gradient
            parameter.detach().zero_()
        else:
            parameter.detach().copy_(value.detach().reshape(parameter.shape))


def _any_rank(flag: bool) -> bool:
    total = torch.tensor(float(flag))
    dist.all_reduce(total)
    return total.item() > 0


def _steps_anywhere(trained: Mapping[str, Tensor], optimizer: Optimizer) -> dict[str, float]:
    """A rank without elements of a parameter may lack its state: ask all ranks."""
    mine = {
        name: float(optimizer.state[p]["step"])
        for name, p in trained.items()
        if "step" in optimizer.state.get(p, {})
    }
    everyone: list[dict[str, float]] = [{} for _ in range(world_size())]
    dist.all_gather_object(everyone, mine)
    return {name: step for steps in everyone for name, step in steps.items()}


def gather_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Rank 0's buffers, and those of other ranks where they differ."""
    mine = {clean(name): b.detach().clone() for name, b in module.named_buffers()}
    everyone: list[dict[str, Tensor]] = [mine]
    if dist.is_initialized():
        everyone = [{} for _ in range(world_size())]
        dist.all_gather_object(everyone, mine)
    tensors = {f"buffer/{name}": value for name, value in everyone[0].items()}
    for number, buffers in enumerate(everyone[1:], start=1):
        for name, value in buffers.items():
            if not torch.equal(value, everyone[0][name]):
                tensors[f"buffer@rank{number}/{name}"] = value
    return tensors


def group_names(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the members of the optimizer's groups."""
    names = {id(p): clean(name) for name, p in module.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def group_meta(optimizer: Optimizer, names: Iterable[list[str]]) -> list[dict[str, Any]]:
    """Hyper-parameters of the groups with names for members."""
    metas = []
    for group, members in zip(optimizer.param_groups, names, strict=True):
        hyper = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        metas.append({"params": members, **jsonable(hyper)})
    return metas


def jsonable(value: Any) -> Any:
    """The value in terms of JSON; what JSON does not know is left to repr."""
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if isinstance(value, Tensor):
        return value.tolist()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)
