"""Written into scripts for every target that runs one process per device."""

import atexit
import builtins
import itertools
import logging
import os

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


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


def same_everywhere(value):
    """Whether all processes give the same text or number. All of them must call it."""
    every = [None] * process_count()
    dist.all_gather_object(every, value)
    return all(item == every[0] for item in every)


def batch_of(args, kwargs):
    """The number of samples in a model's arguments, their form, and sums to tell batches apart.

    The number is 0 where the arguments cannot be split along their first dimension.
    """
    leaves, spec = tree_flatten((args, kwargs))
    rows = [leaf for leaf in leaves if torch.is_tensor(leaf) and leaf.dim() > 0]
    rest = [leaf for leaf in leaves if not torch.is_tensor(leaf)]
    plain = (type(None), bool, int, float, str)
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, plain)]
    size = len(rows[0]) if rows else 0
    if len(given) != len(rest) or any(
        len(row) != size or row.layout != torch.strided or row.is_complex() for row in rows
    ):
        return 0, "", ""
    modes = [value for value in given if isinstance(value, (bool, str))]
    form = repr((spec, [(row.dim(), row.dtype) for row in rows], modes))
    sums = [row.unsqueeze(-1).flatten(1).sum(1, dtype=torch.float64).tolist() for row in rows]
    return size, form, repr((given, sums))


def gather_rows(rows, size):
    """All processes' rows of a tensor that has `size` rows, in order. All of them must call it."""
    sizes = [len(part) for part in torch.arange(size).tensor_split(process_count())]
    own = rows[: sizes[process_rank()]]
    own = torch.cat([own, own.new_zeros((sizes[0] - len(own), *own.shape[1:]))])
    own = own.cuda() if torch.cuda.is_available() else own
    data = own.contiguous().flatten().view(torch.uint8)  # every type can be sent as bytes
    every = [torch.empty_like(data) for _ in sizes]
    dist.all_gather(every, data)
    parts = [part.view(own.dtype).view(own.shape) for part in every]
    return torch.cat([parts[rank][:n] for rank, n in enumerate(sizes)]).to(rows.device)


def agree(result, other):
    """Whether two results of a model are the same but for rounding."""
    (first, spec), (second, other_spec) = tree_flatten(result), tree_flatten(other)
    if spec != other_spec:
        return False
    for index, one in enumerate(first):
        two = second[index]
        if not torch.is_tensor(one) or not torch.is_tensor(two):
            if one is not two:
                return False
        elif (one.shape, one.dtype, one.device) != (two.shape, two.dtype, two.device):
            return False
        else:
            one, two = (torch.nan_to_num(x.double(), 0.0, 0.0, 0.0) for x in (one, two))
            gaps = (one - two).abs().unsqueeze(-1).flatten(1).sum(1)
            if gaps.max() > 0.02 * two.abs().sum() / len(two):
                return False
    return True


def result_of_parts(model, args, kwargs, size):
    """What `model` gives for a batch, of which every process computes its part; whether it fits.

    It fits where all processes have tensors with one row for each sample.
    """

    def part(value):
        if not torch.is_tensor(value) or value.dim() == 0:
            return value
        own = value.tensor_split(process_count())[process_rank()]
        return own if len(own) else value[:1]  # computed to keep step, and thrown away

    own_args, own_kwargs = tree_map(part, (args, kwargs))
    leaves, spec = tree_flatten(model(*own_args, **own_kwargs))
    count = max(len(range(process_rank(), size, process_count())), 1)
    fits = all(
        len(leaf) == count and not leaf.is_complex()
        if torch.is_tensor(leaf) and leaf.dim() > 0
        else leaf is None
        for leaf in leaves
    )
    form = [leaf if leaf is None else (leaf.shape[1:], leaf.dtype) for leaf in leaves if fits]
    if not same_everywhere(repr((fits, spec, form))) or not fits:
        return None, False
    whole = [leaf if leaf is None else gather_rows(leaf, size) for leaf in leaves]
    return tree_unflatten(whole, spec), True


def on_parts(model):
    """`model`, evaluated by every process on its part of the batch; each gets the whole result.

    All processes must call it, with the same batch. The first batch is computed whole as well. If
    that gives something else, or the result has not one row for each sample, it stays whole, as it
    does while gradients are recorded.
    """

    def run(*args, **kwargs):
        if process_count() == 1 or model.training or torch.is_grad_enabled():
            return model(*args, **kwargs)
        size, form, sums = batch_of(args, kwargs)
        known = model.__dict__.setdefault("in_parts", {})
        is_open = size > 1 and known.get(form, True)
        if not same_everywhere((is_open, size, form, sums)) or not is_open:
            return model(*args, **kwargs)
        result, fits = result_of_parts(model, args, kwargs, size)
        if fits and form in known:
            return result
        whole = model(*args, **kwargs)
        known[form] = fits and on_every_process(agree(result, whole))
        return whole

    return run


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
