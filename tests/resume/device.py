"""Where the processes compute: on GPUs over NCCL when every process has one, else on the CPU."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

WAIT = timedelta(seconds=90)


def chosen() -> torch.device:
    """This process's device, by the number of GPUs and the processes that torchrun started."""
    if torch.cuda.device_count() >= int(os.environ.get("WORLD_SIZE", "1")):
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join() -> torch.device:
    """The process group is set up, and DeepSpeed told; call before DeepSpeed is imported."""
    torch.set_num_threads(1)
    device = chosen()
    os.environ["DS_ACCELERATOR"] = device.type
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.backends.cudnn.allow_tf32 = False  # ten bits would not do for fp32's tolerance
        torch.backends.cudnn.deterministic = True
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=WAIT)
    else:
        dist.init_process_group("gloo", timeout=WAIT)
    return device
