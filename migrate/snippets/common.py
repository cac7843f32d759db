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


def local_rank_or(default):
    """This process's number on its machine, as torchrun tells it; `default` without torchrun."""
    return int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else default


def is_main_process():
    """True in the one process that prints and writes files, also before they have joined."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return int(os.environ.get("RANK", 0)) == 0


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


def on_main(function):
    """`function` in the main process; elsewhere what takes the same arguments and does nothing."""
    return function if is_main_process() else Silent()


def wait_for_everyone():
    """Go on when every process has come here. All of them must call it."""
    if process_count() > 1:
        dist.barrier()


def as_data_parallel(model):
    """`model` in the wrapper that it had in files until now; this one needs no process group."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        return torch.nn.DataParallel(model.module)
    return model


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


def global_sum(value, sharded=True):
    """The sum of a number or tensor over all processes. All of them must call it.

    Where the batches are not `sharded`, every process has the whole already.
    """
    if process_count() == 1 or not sharded:
        return value
    total = torch.as_tensor(value).detach().clone()
    if torch.cuda.is_available():
        total = total.cuda()
    dist.all_reduce(total)
    return total.to(value.device) if torch.is_tensor(value) else total.item()


def global_mean(value):
    """The mean of a number or tensor over all processes. All of them must call it."""
    return global_sum(value) / process_count()


def own_part(items):
    """This process's stretch of a list; where it cannot be split evenly, some are used twice."""
    size = -(-len(items) // process_count())
    even = (items * process_count())[: size * process_count()]
    return even[process_rank() * size : (process_rank() + 1) * size]


def on_any_process(condition):
    """Whether `condition` holds in at least one process. All of them must call it."""
    return global_sum(int(bool(condition))) > 0


def on_every_process(condition):
    """Whether `condition` holds in all processes. All of them must call it."""
    return global_sum(int(not condition)) == 0


class ShardedSampler(torch.utils.data.Sampler):
    """This process's part of another sampler's indices, in the order the main process draws them.

    The processes take turns, `block` indices at a time. An uneven rest is dealt out with some of it
    used twice, or left out with `drop_last`.
    """

    def __init__(self, sampler, block=1, drop_last=False):
        self.sampler, self.block, self.drop_last = sampler, block, drop_last

    def __len__(self):
        turns, rest = divmod(len(self.sampler), self.block * process_count())
        rest = rest if self.drop_last else rest + process_count() - 1
        return turns * self.block + rest // process_count()

    def __iter__(self):
        indices = iter(self.sampler)
        turn = self.block * process_count()
        size = turn * max(1024 // self.block, 1)
        while True:
            drawn = from_main_process(list(itertools.islice(indices, size)))
            for start in range(0, len(drawn), turn):
                group = drawn[start : start + turn]
                if self.drop_last:
                    group = group[: len(group) // process_count() * process_count()]
                yield from own_part(group)
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
                yield own_part(batch)
            if len(drawn) < 64:
                return


class ShardedIterable(torch.utils.data.IterableDataset):
    """Every n-th sample of a stream that is the same in all n processes, without an uneven rest."""

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

    def __getattr__(self, name):
        if name == "dataset":
            raise AttributeError(name)
        return getattr(self.dataset, name)


def sharded_arguments(dataset, batch_size=1, shuffle=False, drop_last=False, **others):
    """A DataLoader's arguments, so that it gives this process its part of every batch."""
    sampler = torch.utils.data.DistributedSampler(
        dataset, process_count(), process_rank(), shuffle=bool(shuffle), drop_last=drop_last
    )
    return dict(others, batch_size=per_process(batch_size), sampler=sampler, drop_last=drop_last)


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
        number = (torch.initial_seed() + process_rank()) % 2**32
        for seed in seed_functions:
            seed(number)


class Prefixed(torch.nn.Module):
    """A module under the name `module.`, as DataParallel called it in checkpoint files."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


def rank_seed(seed):
    """`seed`, made another one in every process but the main one."""
    return seed if is_main_process() else (seed + 1000003 * process_rank()) % 2**32


def main_process_first(function):
    """`function`, run by the main process, then by the first of every machine, then by the rest."""

    def run(*args, **kwargs):
        if process_count() == 1:
            return function(*args, **kwargs)
        turn = 0 if is_main_process() else 1 if os.environ.get("LOCAL_RANK") == "0" else 2
        for _ in range(turn):
            dist.barrier()
        result = function(*args, **kwargs)
        for _ in range(2 - turn):
            dist.barrier()
        return result

    return run
