"""Written into scripts that train with FSDP2, `fully_shard`."""

import itertools

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def shard_model(model, blocks=()):
    """Shard `model`: blocks, given by class name, each for themselves, then the rest.

    All processes start from the main one's weights.
    """
    if torch.cuda.is_available():
        model = model.cuda()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    for module in list(model.modules()):
        if module is not model and type(module).__name__ in blocks:
            fully_shard(module)
    return fully_shard(model)


def full_state(state, prefix=""):
    """`state` with every sharded tensor whole and on the CPU. All processes must call it."""
    if isinstance(state, DTensor):
        return state.full_tensor().cpu()
    if isinstance(state, dict):
        return {
            prefix + key if isinstance(key, str) else key: full_state(value)
            for key, value in state.items()
        }
    if isinstance(state, (list, tuple)):
        return type(state)(full_state(value) for value in state)
    return state


def load_full_state(model, state_dict, strict=True):
    """Load a whole model's `state_dict`, read by every process, into the sharded `model`."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass alone, weights are still whole
    if all(name.startswith("module.") for name in state_dict):
        state_dict = {name[len("module.") :]: value for name, value in state_dict.items()}
    if any(isinstance(value, DTensor) for value in state_dict.values()):
        return model.load_state_dict(state_dict, strict)
    options = StateDictOptions(full_state_dict=True, strict=strict)
    return set_model_state_dict(model, state_dict, options=options)


def load_full_optimizer_state(optimizer, state_dict):
    """Load a whole optimizer's `state_dict` into an optimizer over sharded weights."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state = {}
    for index, entry in state_dict["state"].items():
        like = parameters[index]
        state[index] = {
            name: distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
            if isinstance(like, DTensor) and torch.is_tensor(value) and value.shape == like.shape
            else value
            for name, value in entry.items()
        }
    optimizer.load_state_dict({**state_dict, "state": state})
