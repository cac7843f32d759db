"""`--save sharded`: folders that two processes write, read in two and in one; and real scripts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO
from scripts import Case, cases, contents
from verifying import start, start_several

from ckpt.api import open_checkpoint
from migrate.api import rewrite
from migrate.rule import Options
from migrate.snippets.fsdp import load_sharded

SCRIPT = """
import os, sys
from collections import Counter
sys.path.insert(0, REPO)
import torch, torch.nn as nn, torch.distributed as dist
from migrate.snippets import fsdp

folder, rank, world, action = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = "file://" + os.path.join(folder, "store-" + action)
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)

def make(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model = fsdp.shard_model(net)
    if kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 3], gamma=0.5)
    return model, optimizer, scheduler

def train(model, optimizer, scheduler, steps):
    for number in steps:
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(number))
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()  # the whole batch in every process: the mean is the same
        optimizer.step()
        scheduler.step()

for kind in ("sgd", "adamw"):
    path = os.path.join(folder, kind + ".pt")
    best = os.path.join(folder, kind + "-best.pt")
    model, optimizer, scheduler = made = make(kind)
    if action == "save":
        fsdp.save_sharded({"epoch": 0, "state_dict": model.state_dict()}, path)
        train(*made, range(2))
        state = {
            "epoch": 2, "best": 0.5 + rank, "state_dict": fsdp.add_prefix(model.state_dict()),
            "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(),
            "pair": (1, [2, {}]), "counts": Counter("ab"), "rng": torch.full((2 + rank,), rank),
        }
        fsdp.save_sharded(state, path)
        fsdp.save_sharded([model.state_dict(), optimizer.state_dict()], path + ".list")
        fsdp.save_sharded({"nothing": rank}, path + ".file")
        if rank == 0:
            fsdp.copy_saved(path, best)
            fsdp.copy_saved(path, best)
        train(*made, range(2, 4))
        result = fsdp.full_state({"m": model.state_dict(), "o": optimizer.state_dict()})
        if rank == 0:
            torch.save(result, os.path.join(folder, kind + "-end.pt"))
    else:
        saved = fsdp.load_sharded(best, map_location="cpu", weights_only=False)
        assert list(saved) == ["epoch", "best", "state_dict", "optimizer", "scheduler", "pair",
                               "counts", "rng"]
        assert (saved["epoch"], saved["best"], saved["pair"]) == (2, 0.5, (1, [2, {}]))
        assert saved["counts"] == Counter("ab") and saved["rng"].tolist() == [0, 0]
        assert fsdp.load_sharded(path + ".file") == {"nothing": 0}
        weights, other = fsdp.load_sharded(path + ".list", weights_only=False)
        assert set(other["state"]) == set(range(6)), other["state"].keys()
        fsdp.load_full_state(model, saved["state_dict"])
        fsdp.load_full_optimizer_state(optimizer, saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        train(*made, range(2, 4))
        got = fsdp.full_state({"m": model.state_dict(), "o": optimizer.state_dict()})
        end = torch.load(os.path.join(folder, kind + "-end.pt"), weights_only=False)
        torch.testing.assert_close(got, end)
dist.destroy_process_group()
"""


def run_processes(folder: Path, world: int, action: str) -> None:
    script = folder / "script.py"
    script.write_text(SCRIPT.replace("REPO", repr(str(REPO))))
    runs = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(rank), str(world), action],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * world, errors


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes have saved after two steps, and the end of their training."""
    folder = tmp_path_factory.mktemp("sharded")
    run_processes(folder, 2, "save")
    return folder


@pytest.mark.parametrize("world", [2, 1])
def test_training_goes_on_as_if_it_had_not_stopped(saved: Path, world: int) -> None:
    run_processes(saved, world, f"load{world}")


def test_every_process_writes_and_nothing_is_left_over(saved: Path) -> None:
    names = {path.name for path in (saved / "adamw.pt").iterdir()}
    assert {".metadata", "values.pt", "__0_0.distcp", "__1_0.distcp"} <= names
    assert [p.name for p in saved.iterdir() if p.name.endswith((".partial", ".old"))] == []
    assert (saved / "adamw.pt.file").is_file()


def test_ckpt_reads_the_folder(saved: Path) -> None:
    checkpoint = open_checkpoint(saved / "adamw.pt")
    assert set(checkpoint.params) >= {"0.weight", "2.bias"}


REAL = [case for case in cases() if case.name in ("step_driven_while", "trainer_class")]


@pytest.mark.parametrize("case", REAL, ids=lambda case: case.name)
def test_a_real_script_goes_on_from_its_folder_and_from_an_old_file(
    case: Case, tmp_path: Path
) -> None:
    result = rewrite([case.entry], "fsdp", options=Options(save="sharded"))
    source, before, now, later = (tmp_path / name for name in ("src", "before", "now", "later"))
    for folder in (source, before, now):
        folder.mkdir()
    for name, content in contents(case, result).items():
        (source / name).write_bytes(content)
    script, args, more = source / case.entry.name, case.facts["args"], case.facts["resume_args"]
    assert start(case.entry, args, before).returncode == 0
    run = start_several(script, args, now)
    assert run.returncode == 0, run.stderr
    assert not run.written_by_several()
    shutil.copytree(before, later)
    assert start(case.entry, more, before).returncode == 0
    saved = case.facts["checkpoint"]
    for folder in (now, later):
        run = start_several(script, more, folder)
        assert run.returncode == 0, run.stderr
        assert (folder / saved).is_dir()
        old = torch.load(before / saved, weights_only=False)
        new = load_sharded(folder / saved, weights_only=False)
        assert list(new) == list(old)
        key = case.facts["weights"]
        torch.testing.assert_close(new[key], dict(old[key]), atol=1e-5, rtol=1e-4)
    last = [*more[:1], str(int(more[1]) + 2), *more[2:]]
    assert start(script, last, now, sees=1).returncode == 0
