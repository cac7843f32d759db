"""The definitions that save and load sharded states, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import REPO

SCRIPT = """
import copy, sys
import torch, torch.nn as nn, torch.distributed as dist
from migrate.snippets import fsdp

dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(sys.argv[2]), world_size=2)
x = torch.randn(8, 3, generator=torch.Generator().manual_seed(3))

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))

def step(model, optimizer):
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()

def check(model, optimizer, saved):
    got = fsdp.full_state([model.state_dict(), optimizer.state_dict()])
    torch.testing.assert_close(got, saved)

def sgd(p): return torch.optim.SGD(p, lr=0.1, momentum=0.9)
def adam(p): return torch.optim.Adam(p, lr=0.01)

for make in (sgd, adam):
    plain = net()
    old = make(plain.parameters())
    for _ in range(2):
        step(plain, old)
    saved = copy.deepcopy([dict(plain.state_dict()), old.state_dict()])
    model = fsdp.shard_model(net())
    optimizer = make(model.parameters())
    with torch.no_grad():
        model.eval()(x)  # leaves the weights whole
    model.train()
    fsdp.load_full_state(model, {"module." + k: v for k, v in saved[0].items()})
    fsdp.load_full_optimizer_state(optimizer, copy.deepcopy(saved[1]))
    check(model, optimizer, saved)
    assert all(k.startswith("module.") for k in fsdp.full_state(model.state_dict(), prefix="module."))
    step(plain, old)
    step(model, optimizer)
    check(model, optimizer, [dict(plain.state_dict()), old.state_dict()])
    best = copy.deepcopy(model.state_dict())
    step(model, optimizer)
    model.load_state_dict(best)
    torch.testing.assert_close(fsdp.full_state(model.state_dict()), dict(plain.state_dict()))
dist.destroy_process_group()
"""  # noqa: E501


def test_checkpoints_of_one_process_go_round(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(REPO)!r})\n{SCRIPT}")
    command = [sys.executable, str(script), str(tmp_path / "store")]
    runs = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    errors = [run.communicate(timeout=100)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
