"""Written into scripts that train with DistributedDataParallel."""

import itertools

import torch
import torch.distributed as dist


def wrap_model(model, find_unused_parameters=False):
    """`model` on this process's device, its gradients averaged over all processes."""
    device_ids = None
    if torch.cuda.is_available():
        device_ids = [torch.cuda.current_device()]
        model = model.cuda()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return torch.nn.DataParallel(model, device_ids)  # nothing to average; keeps `.module`
    return torch.nn.parallel.DistributedDataParallel(
        model, device_ids=device_ids, find_unused_parameters=find_unused_parameters
    )


def share_weights(model):
    """Every process takes the main process's weights. All of them must call it."""
    if dist.is_initialized():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            dist.broadcast(tensor.detach(), src=0)


def sync_gradients(model, now):
    """Whether `model`'s next `backward()` averages its gradients, or only adds them up.

    It takes effect with the forward pass. What was added up is averaged with the next that is.
    """
    for module in model.modules():
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            module.require_backward_grad_sync = now  # no_sync() around both passes does this
