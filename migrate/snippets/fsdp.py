"""Written into scripts that train with FSDP2, `fully_shard`."""

import itertools
import os
import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from migrate.snippets.common import (
    from_main_process,
    is_main_process,
    process_count,
    wait_for_everyone,
)


def shard_model(model, blocks=()):
    """Shard `model`: blocks, given by class name, each for themselves, then the rest.

    All processes start from the main one's weights.
    """
    if torch.cuda.is_available():
        model = model.cuda()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        dist.broadcast(tensor.detach(), src=0)
    # With half precision (see compute_in) the sharded weights stay in full precision.
    dtype = next((m.computes_in for m in model.modules() if hasattr(m, "computes_in")), None)
    policy = MixedPrecisionPolicy(dtype, dtype and torch.float32, cast_forward_inputs=False)
    for module in reversed(list(model.modules())[1:]):  # those inside others come first
        if type(module).__name__ in blocks:
            fully_shard(module, mp_policy=policy)
        elif dtype and any(x.dtype == torch.float32 for x in module.buffers(recurse=False)):
            fully_shard(module)  # BatchNorm that was cast back from half precision
    # Resharded after every forward: a forward without backward would leave stale weights.
    return fully_shard(model, mp_policy=policy, reshard_after_forward=True)


def compute_in(model, dtype):
    """`model.to(dtype)`; where several processes shard it, for computing only.

    The optimizer then trains weights in full precision.
    """
    if dtype == torch.float32:
        return model.to(dtype)
    model.computes_in = dtype
    if process_count() == 1:
        return model.to(dtype)
    for module in model.float().modules():
        for name, buffer in module.named_buffers(recurse=False):
            if torch.is_floating_point(buffer):
                setattr(module, name, buffer.to(dtype))
    return model


def sync_gradients(model, now):
    """Whether `model`'s next `backward()` averages its gradients, or only adds them up.

    Until they are averaged, every process holds whole ones, which `zero_grad()` does not reach.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(now, recurse=False)


def whole(tensor):
    """A sharded gradient or norm as one tensor. All processes must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


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


def add_prefix(state_dict, prefix="module."):
    """A model's `state_dict` with `prefix` before the names, as files had them until now."""
    return {prefix + name: value for name, value in state_dict.items()}


def take_shards(value, shards, path=()):
    """A copy of `value` without its sharded tensors; they go into `shards`, by their paths."""
    if isinstance(value, DTensor):
        shards[path] = value
        return None
    if not isinstance(value, (dict, list, tuple)):
        return value
    before = len(shards)
    items = value.items() if isinstance(value, dict) else enumerate(value)
    rest = {key: take_shards(item, shards, (*path, key)) for key, item in items}
    if len(shards) == before:
        return value
    return rest if isinstance(value, dict) else list(rest.values())


def put_back_shards(value, shards):
    """`value` from `take_shards`, with tensors in the places of those that were taken."""
    for path, tensor in shards.items():
        place = value
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = tensor
    return value


def save_sharded(obj, f, *args, **kwargs):
    """`torch.save` into a folder `f` to which every process writes its part. All must call it.

    The sharded tensors are a torch.distributed.checkpoint, the rest is in `values.pt`. What has no
    sharded tensors becomes a file. The old checkpoint stays until the new one is complete.
    """
    shards = {}
    values = take_shards(obj, shards)
    f = from_main_process(os.fspath(f))
    partial = f + ".partial"
    if is_main_process():
        remove_saved(partial)
        if shards:
            os.makedirs(partial)
            saved = {"values": values, "shards": list(shards)}
            torch.save(saved, os.path.join(partial, "values.pt"), *args, **kwargs)
        else:
            torch.save(obj, partial, *args, **kwargs)
    wait_for_everyone()
    if shards:
        whole = put_back_shards(values, shards)
        whole = whole if isinstance(whole, dict) else dict(enumerate(whole))
        planner = dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        dcp.save(whole, checkpoint_id=partial, planner=planner)
    if is_main_process():
        move_saved(partial, f)
    wait_for_everyone()


def load_sharded(f, *args, **kwargs):
    """`torch.load`, also of a folder from `save_sharded`: its tensors come whole, on the CPU."""
    if not isinstance(f, (str, os.PathLike)) or not os.path.isdir(f):
        return torch.load(f, *args, **kwargs)
    saved = torch.load(os.path.join(f, "values.pt"), *args, **kwargs)
    reader = dcp.FileSystemReader(f)
    stored = reader.read_metadata().state_dict_metadata
    names = {path: ".".join(map(str, path)) for path in saved["shards"]}
    tensors = {
        name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype)
        for name in names.values()
    }
    _load_state_dict(tensors, reader, no_dist=True)
    return put_back_shards(saved["values"], {path: tensors[name] for path, name in names.items()})


def remove_saved(path):
    """Remove a checkpoint, a file or a folder, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.remove(path)


def place_of(source, target):
    """Where `source` goes: into `target` if that is a folder, but no checkpoint itself."""
    source, target = os.fspath(source), os.fspath(target)
    if os.path.isdir(target) and not os.path.exists(os.path.join(target, "values.pt")):
        return os.path.join(target, os.path.basename(source))
    return target


def move_saved(source, target):
    """Move a checkpoint, a file or a folder; the one that was there is replaced."""
    os.stat(source)
    target = place_of(source, target)
    if os.path.lexists(target):
        remove_saved(target + ".old")
        os.rename(target, target + ".old")
    os.rename(source, target)
    remove_saved(target + ".old")


def copy_saved(source, target):
    """Copy a checkpoint, a file or a folder; the one that was there is replaced."""
    target = place_of(source, target)
    remove_saved(target + ".partial")
    if os.path.isdir(source):
        shutil.copytree(source, target + ".partial")
    else:
        shutil.copyfile(source, target + ".partial")
    move_saved(target + ".partial", target)
