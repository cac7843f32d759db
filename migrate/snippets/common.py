"""Written into scripts for every target that runs one process per device."""

import atexit
import builtins
import itertools
import logging
import os

import torch
import torch.distributed as dist


def setup_distributed():
    """Join the processes that torchrun started; started without it, be a group of one."""
    if dist.is_initialized():
        return
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
        backend = "nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    atexit.register(dist.destroy_process_group)
    if dist.get_rank() != 0:
        logging.disable(logging.WARNING)


def process_rank():
    """This process's number, 0 where there are no others."""
    return dist.get_rank() if dist.is_initialized() else 0


def process_count():
    """The number of processes that train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main_process():
    """True in the one process that prints and writes files."""
    return process_rank() == 0


def print(*args, **kwargs):
    """The builtin, in the main process only."""
    if is_main_process():
        builtins.print(*args, **kwargs)


class Silent:
    """Takes every call and does nothing: the other processes' writer."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


def from_main_process(value):
    """The main process's `value`, in every process. All of them must call it."""
    if process_count() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def per_process(batch_size):
    """This process's part of a batch size that is meant for all processes together."""
    if batch_size is None:
        return None
    if batch_size % process_count():
        raise ValueError(
            "batch size %d cannot be split over %d processes evenly" % (batch_size, process_count())
        )
    return batch_size // process_count()


def global_sum(value):
    """The sum of a number or tensor over all processes. All of them must call it."""
    if process_count() == 1:
        return value
    total = torch.as_tensor(value).detach().clone()
    if torch.cuda.is_available():
        total = total.cuda()
    dist.all_reduce(total)
    return total.to(value.device) if torch.is_tensor(value) else total.item()


def global_mean(value):
    """The mean of a number or tensor over all processes. All of them must call it."""
    return global_sum(value) / process_count()


class ShardedSampler(torch.utils.data.Sampler):
    """This process's part of another sampler's indices, in the order the main process draws them.

    Where they cannot be dealt out evenly, some are used twice, so that all processes get as many.
    """

    def __init__(self, sampler):
        self.sampler = sampler

    def __len__(self):
        return -(-len(self.sampler) // process_count())

    def __iter__(self):
        indices = iter(self.sampler)
        size = 1024 * process_count()
        while True:
            drawn = from_main_process(list(itertools.islice(indices, size)))
            even = drawn + drawn[: -len(drawn) % process_count()]
            yield from even[process_rank() :: process_count()]
            if len(drawn) < size:
                return


class ShardedBatchSampler(torch.utils.data.Sampler):
    """This process's part of every batch of another batch sampler, as the main process draws it."""

    def __init__(self, batch_sampler):
        self.batch_sampler = batch_sampler

    def __len__(self):
        return len(self.batch_sampler)

    def __iter__(self):
        batches = iter(self.batch_sampler)
        while True:
            drawn = from_main_process([list(batch) for batch in itertools.islice(batches, 64)])
            for batch in drawn:
                even = batch + batch[: -len(batch) % process_count()]
                yield even[process_rank() :: process_count()]
            if len(drawn) < 64:
                return


class ShardedIterable(torch.utils.data.IterableDataset):
    """This process's samples of a stream that is the same everywhere, dealt out in turn."""

    def __init__(self, dataset):
        self.dataset = dataset
        self.rank, self.count = process_rank(), process_count()

    def __iter__(self):
        samples = iter(self.dataset)
        while True:
            group = list(itertools.islice(samples, self.count))
            if len(group) < self.count:
                return
            yield group[self.rank]

    def __len__(self):
        return len(self.dataset) // self.count


def match_prefix(state_dict, model):
    """`state_dict` with or without `module.` before its names, as `model` has them."""
    wrapped = any(name.startswith("module.") for name in model.state_dict())
    stored = all(name.startswith("module.") for name in state_dict)
    if wrapped and not stored:
        return {"module." + name: value for name, value in state_dict.items()}
    if stored and not wrapped:
        return {name[len("module.") :]: value for name, value in state_dict.items()}
    return state_dict


def seed_ranks(*seed_functions):
    """Every process draws its own random numbers from here; the main one goes on as before."""
    if not is_main_process():
        for seed in seed_functions:
            seed((torch.initial_seed() + process_rank()) % 2**32)
