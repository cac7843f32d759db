"""The definitions about processes, run in two of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SNIPPETS = Path(__file__).parents[2] / "migrate" / "snippets" / "common.py"
PROGRAM = """
import random, sys, time
sys.path.insert(0, {folder!r})
from common import *
import builtins
setup_distributed()
rank = process_rank()
torch.manual_seed(7)
first = torch.rand(1).item()
seed_ranks(torch.manual_seed, random.seed)
second = torch.rand(1).item()
started = main_process_first(time.time)()
if rank == 0:
    time.sleep(0.2)
main_process_first(lambda: time.sleep(0.3 if rank == 0 else 0))()
ended = time.time()
values = [None] * process_count()
dist.all_gather_object(values, (first, second, started, rank_seed(5), local_rank_or(-1)))
if rank == 0:
    firsts, seconds, starts, seeds, locals_ = zip(*values)
    assert len(set(firsts)) == 1 and len(set(seconds)) == process_count()
    assert list(starts) == sorted(starts)
    assert seeds[0] == 5 and len(set(seeds)) == process_count()
    assert list(locals_) == ([0, 1] if process_count() == 2 else [-1]), locals_
    torch.manual_seed(7)
    assert (torch.rand(1).item(), torch.rand(1).item()) == (first, second)
    builtins.print("fine")
"""


def run(path: Path, *launcher: str) -> str:
    command = [sys.executable, *launcher, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_two_processes_and_one_part_where_they_should(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(SNIPPETS.parent)))
    assert run(program) == "fine"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    assert run(program, *launcher) == "fine"
