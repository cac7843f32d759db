"""The definition that keeps a half model's weights in full precision, in two processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPO

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import torch, torch.nn as nn, torch.distributed as dist
from migrate.snippets import fsdp

store, rank, world = "file://" + sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


class Outer(Inner):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x):
        return self.inner(super().forward(x)) + self.shift


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, target):
        assert x.dtype == half and target.dtype == torch.float32  # as the script casts them
        return (self.net(x).float() - target).pow(2).mean()


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Outer(), nn.Linear(4, 1))


def cast_back(model):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.float()
    return model


def train(model, parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses = []
    for number in range(6):
        generator = torch.Generator().manual_seed(number)
        x, target = torch.randn(8, 3, generator=generator), torch.ones(8, 1)
        loss = model(x.to(half), target)  # the whole batch in every process
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


for half in (torch.bfloat16, torch.float16):
    for back in (lambda model: model, cast_back):
        plain = back(net().to(half))
        expected = train(WithLoss(plain), plain.parameters())
        model = fsdp.shard_model(WithLoss(back(fsdp.compute_in(net(), half))), ["Outer", "Inner"])
        losses = train(model, model.parameters())
        torch.testing.assert_close(losses, expected, rtol=0.02, atol=0.02 if world > 1 else 0)
        types = {p.dtype for p in model.parameters()}
        assert (types == {torch.float32}) or world == 1, types
        saved = {k[len("net."):]: v for k, v in fsdp.full_state(model.state_dict()).items()}
        buffers = dict(plain.named_buffers())
        assert {k: saved[k].dtype for k in buffers} == {k: v.dtype for k, v in buffers.items()}
        plain.load_state_dict(saved)
        fsdp.load_full_state(model, {"net." + k: v for k, v in plain.state_dict().items()})

full = fsdp.shard_model(fsdp.compute_in(net(), torch.float32), ["Outer", "Inner"])
assert full(torch.ones(2, 3)).dtype == torch.float32
dist.destroy_process_group()
"""


@pytest.mark.parametrize("world", [2, 1])
def test_half_models_train_as_before_with_weights_in_full_precision(
    world: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    runs = [
        subprocess.Popen(
            [
                sys.executable,
                str(script),
                str(REPO),
                str(tmp_path / "store"),
                str(rank),
                str(world),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * world, errors
