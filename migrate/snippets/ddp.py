"""Written into scripts that train with DistributedDataParallel."""

import torch


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
