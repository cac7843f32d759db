"""The definitions that deal data out, run in one, two and three processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SNIPPETS = Path(__file__).parents[2] / "migrate" / "snippets" / "common.py"
PROGRAM = """
import random, sys
sys.path.insert(0, {folder!r})
from common import *
import builtins
from torch.utils.data import DataLoader, DistributedSampler
setup_distributed()
rank, count = process_rank(), process_count()


def gathered(values):
    every = [None] * count
    dist.all_gather_object(every, list(values))
    return every


class Shuffled(torch.utils.data.Sampler):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __iter__(self):
        return iter(random.sample(range(self.n), self.n))


random.seed(rank)  # other draws in every process: the main one's count
for n in (0, 1, 2, 7, 12, 3000):
    for block in (1, 2, 4):
        for drop_last in (False, True):
            sampler = ShardedSampler(Shuffled(n), block, drop_last)
            every = gathered(sampler)
            assert len({{len(part) for part in every}}) == 1, (n, block, every)
            assert len(every[0]) == len(sampler), (n, block, drop_last)
            drawn = sum(every, [])
            if drop_last:
                assert len(set(drawn)) == len(drawn) == n // count * count
            else:
                assert set(drawn) == set(range(n))

batches = [[0, 1, 2, 3, 4, 5], [6, 7], [8]]
every = gathered(ShardedBatchSampler(batches))
assert [len(part) for part in every] == [3] * count
for index, batch in enumerate(batches):
    parts = [part[index] for part in every]
    assert len({{len(part) for part in parts}}) == 1 and set(sum(parts, [])) == set(batch)
assert sum((part[0] for part in every), []) == batches[0]  # neighbours stay neighbours


class Stream(torch.utils.data.IterableDataset):
    name = "stream"

    def __iter__(self):
        return iter(range(13))

    def __len__(self):
        return 13


stream = ShardedIterable(Stream())
every = gathered(stream)
assert [len(part) for part in every] == [13 // count] * count == [len(stream)] * count
assert sorted(sum(every, [])) == list(range(13 // count * count))
assert stream.name == "stream"
import pickle
assert list(pickle.loads(pickle.dumps(stream))) == list(stream)

data = list(range(30))
for drop_last in (False, True):
    whole = DataLoader(data, batch_size=12, shuffle=True, drop_last=drop_last)
    given = dict(batch_size=12, shuffle=True, drop_last=drop_last, num_workers=0)
    part = DataLoader(data, **sharded_arguments(data, **given))
    assert len(part) == len(whole)
    every = gathered([batch.tolist() for batch in part])
    assert len({{tuple(map(len, batches)) for batches in every}}) == 1
    for n in range(50):
        for size in (count, 6):
            sampler = DistributedSampler(range(n), shuffle=False, drop_last=drop_last) if n else []
            size = size * count // count
            rest = dict(batch_size=per_process(size * count), drop_last=drop_last)
            if n >= count:
                few = DataLoader(range(n), sampler=sampler, **rest)
                assert len(few) == len(DataLoader(range(n), size * count, drop_last=drop_last))

assert per_process(None) is None and per_process(6 * count) == 6
try:
    per_process(6 * count + 1)
    assert count == 1
except ValueError as error:
    assert "cannot be split over %d processes evenly" % count in str(error)
if rank == 0:
    builtins.print("fine")
"""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_sample_once_and_as_many_for_each(count: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(SNIPPETS.parent)))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [sys.executable, *(launcher if count > 1 else []), str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "fine"
