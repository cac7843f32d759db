"""Why a call of all processes cannot stand where a number is read: at `use(loss)`."""

from __future__ import annotations

import textwrap
from pathlib import Path

import libcst as cst
import pytest

from migrate.facts.batchwise import batchwise
from migrate.facts.obstacles import Obstacles, training_condition
from migrate.facts.program import Facts
from migrate.flow import Flow
from migrate.project import load_project
from migrate.syntax import dotted

HEAD = """
import json, os, torch, imageio
from torch.utils.data import DataLoader
from tqdm import tqdm
def dump(x):
    json.dump(x, open("log", "w"))
loader = DataLoader(data, 8)
for epoch in range(9):
    for phase in ("train", "val"):
        for x, y in loader:
            loss = criterion(model(x), y)
"""


def facts(body: str) -> Facts:
    text = HEAD + textwrap.indent(body, " " * 12)
    path = Path("train.py")
    project = load_project([path], path, {path: text.encode()})
    return Facts(project, Flow(project), ("common", "ddp"))


def obstacle(body: str) -> str:
    """What stands in the way of the first `use(…)`."""
    found = facts(body)
    source = found.entry
    call = next(c for c in source.all(cst.Call) if dotted(c.func) == "use")
    return Obstacles(found, batchwise(found)).obstacle(source, call)


@pytest.mark.parametrize(
    "body",
    [
        "loss.backward()\nuse(loss)\n",
        "loss.backward()\nif epoch > 3: use(loss)\n",
        "loss.backward()\nif len(x) > 3: use(loss)\n",
        "loss.backward()\ntqdm.write(use(loss))\n",
        "loss.backward()\nmodel.save_text(use(loss))\n",
    ],
)
def test_where_all_processes_come_there_is_none(body: str) -> None:
    assert obstacle(body) == ""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("loss.backward()\nif rank == 0: use(loss)\n", "only one process comes"),
        ("loss.backward()\nif x.sum() > 0: use(loss)\n", "depends on its data"),
        ("try: loss.backward()\nexcept OSError: use(loss)\n", "not every process"),
        ("loss.backward()\nf = lambda: use(loss)\n", "not every process"),
        ("loss.backward()\ntorch.save(use(loss), 'a')\n", "only the main process writes"),
        ("loss.backward()\nimageio.imwrite(use(loss), x)\n", "only the main process writes"),
        ("loss.backward()\nos.makedirs(str(use(loss)))\n", "only the main process writes"),
        ("loss.backward()\nlog.write(use(loss))\n", "only the main process writes"),
        ("loss.backward()\ndump(use(loss))\n", "only the main process writes"),
        ("loss.backward()\nwith open('a') as f: use(loss)\n", "only the main process writes"),
    ],
)
def test_where_not_all_come_it_is_said_why(body: str, words: str) -> None:
    assert words in obstacle(body)


@pytest.mark.parametrize(
    ("body", "condition"),
    [
        ("loss.backward()\n", ""),
        ("if phase == 'train': loss.backward()\n", "(phase == 'train')"),
        ("if phase == 'val': pass\nelse: loss.backward()\n", "not (phase == 'val')"),
        ("if loss > 0: loss.backward()\n", ""),
    ],
)
def test_the_condition_under_which_a_loop_trains(body: str, condition: str) -> None:
    found = facts(body)
    source = found.entry
    assert training_condition(found, source, source.all(cst.For)[-1]) == condition
