"""Rule MG303: a distributed sampler is not told the epoch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rewriting import PATH, findings, rewritten, run

DP = "model = nn.DataParallel(nn.Linear(2, 2))\n"
LOADER = "loader = DataLoader(a, 8, shuffle=True)\n"
STEP = "model(x).mean().backward()\n"
HEAD = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import "


def told(code: str) -> list[str]:
    """The lines about epochs that a program gets, each with the line below it."""
    lines = rewritten(DP + code, "MG303").splitlines()
    return [f"{line} / {after.strip()}" for line, after in pairwise(lines) if "set_epoch(" in line]


def test_before_the_loop_of_an_epoch() -> None:
    code = f"{LOADER}for epoch in range(3):\n    x = 1\n    for x in loader:\n        {STEP}"
    assert told(code) == ["    loader.sampler.set_epoch(epoch) / for x in loader:"]


@pytest.mark.parametrize(
    ("loop", "name"),
    [
        ("for ep in tqdm(range(3)):", "ep"),
        ("for self.epoch in range(3):", "self.epoch"),
        ("for e in itertools.count():", "e"),
        ("for _ in range(3):", "loader.sampler.epoch + 1"),
        ("while True:", "loader.sampler.epoch + 1"),
        ("for run in range(2):\n  for epoch in range(3):", "epoch"),
        ("for epoch in range(2):\n  for again in range(3):", "loader.sampler.epoch + 1"),
    ],
)
def test_whatever_counts_the_passes(loop: str, name: str) -> None:
    code = f"import torch\nimport torch.nn as nn\nfrom torch.utils.data import DataLoader\n{DP}"
    text = rewritten(f"{code}{LOADER}{loop}\n      for x in loader:\n        {STEP}", "MG303")
    assert f"      loader.sampler.set_epoch({name})\n      for x in loader:" in text


def test_a_while_loop_with_a_counter() -> None:
    code = f"epoch = 0\nwhile epoch < 3:\n    for x in loader:\n        {STEP}    epoch += 1\n"
    assert told(LOADER + code) == ["    loader.sampler.set_epoch(epoch) / for x in loader:"]


def test_a_function_that_receives_the_epoch() -> None:
    code = (
        f"def train(loader, epoch):\n    for i, x in enumerate(loader):\n        {STEP}"
        f"{LOADER}for epoch in range(3):\n    train(loader, epoch)\n"
    )
    assert told(code) == ["    loader.sampler.set_epoch(epoch) / for i, x in enumerate(loader):"]


def test_a_function_that_does_not_is_told_where_it_is_called() -> None:
    code = (
        f"def train(batches):\n    for x in batches:\n        {STEP}"
        f"{LOADER}for epoch in range(3):\n    loss = train(loader)\n"
    )
    assert told(code) == ["    loader.sampler.set_epoch(epoch) / loss = train(loader)"]


def test_a_method_of_a_trainer_counts_by_itself() -> None:
    code = (
        "class Trainer:\n    def __init__(self, loader):\n        self.loader = loader\n"
        f"    def epoch(self):\n        for x in self.loader:\n            {STEP}"
        f"{LOADER}trainer = Trainer(loader)\nfor epoch in range(3):\n    trainer.epoch()\n"
    )
    line = "self.loader.sampler.set_epoch(self.loader.sampler.epoch + 1)"
    assert told(code) == [f"        {line} / for x in self.loader:"]


def test_an_iterator_that_is_made_again_when_it_is_empty() -> None:
    code = (
        f"{LOADER}batches = iter(loader)\nfor step in range(100):\n    try:\n"
        "        x = next(batches)\n    except StopIteration:\n        batches = iter(loader)\n"
        f"        x = next(batches)\n    {STEP}"
    )
    line = "loader.sampler.set_epoch(loader.sampler.epoch + 1)"
    assert told(code) == [f"        {line} / batches = iter(loader)"]


def test_an_endless_generator() -> None:
    code = (
        "def endless(batches):\n    while True:\n        for x in batches:\n            yield x\n"
        f"{LOADER}stream = endless(loader)\nfor step in range(100):\n    x = next(stream)\n"
        f"    {STEP}"
    )
    line = "batches.sampler.set_epoch(batches.sampler.epoch + 1)"
    assert told(code) == [f"        {line} / for x in batches:"]


def test_a_generator_that_yields_from_the_loader() -> None:
    code = (
        "def endless(batches):\n    while True:\n        yield from batches\n"
        f"{LOADER}for x in endless(loader):\n    {STEP}"
    )
    line = "batches.sampler.set_epoch(batches.sampler.epoch + 1)"
    assert told(code) == [f"        {line} / yield from batches"]


def test_a_loader_that_is_cycled_once_repeated_its_order_before_too() -> None:
    code = (
        f"{HEAD}DataLoader\nfrom itertools import cycle\n{DP}{LOADER}"
        f"for x in cycle(loader):\n    {STEP}"
    )
    assert " loader.sampler" not in rewritten(code, "MG303")


def test_a_prefetcher_is_made_after_the_epoch_is_told() -> None:
    code = (
        "class Prefetcher:\n    def __init__(self, loader):\n        self.it = iter(loader)\n"
        "    def next(self):\n        return next(self.it)\n"
        f"{LOADER}for epoch in range(3):\n    batches = Prefetcher(loader)\n"
        f"    x = batches.next()\n    while x is not None:\n        {STEP}"
        "        x = batches.next()\n"
    )
    assert told(code) == ["    loader.sampler.set_epoch(epoch) / batches = Prefetcher(loader)"]


def test_a_single_pass_needs_nothing() -> None:
    assert told(f"{LOADER}for x in loader:\n    {STEP}") == []


def test_a_fixed_order_needs_nothing() -> None:
    code = f"for epoch in range(3):\n    for x in loader:\n        {STEP}"
    assert told("loader = DataLoader(a, 8)\n" + code) == []


def test_one_function_for_training_and_evaluation_asks_the_sampler() -> None:
    code = (
        "def run(batches, train):\n    for x in batches:\n        loss = model(x).mean()\n"
        f"        if train:\n            loss.backward()\n{LOADER}val = DataLoader(b, 8)\n"
        "while True:\n    run(loader, True)\n    run(val, False)\n"
    )
    text = rewritten(DP + code, "MG303")
    assert (
        "    if hasattr(batches.sampler, 'set_epoch'):\n        batches.sampler.set_epoch(" in text
    )


HALF = (
    f"{HEAD}DataLoader, DistributedSampler\n{DP}sampler = DistributedSampler(a)\n"
    "loader = DataLoader(a, 8, sampler=sampler)\n"
)


def test_a_half_migrated_script_is_completed() -> None:
    code = f"{HALF}for epoch in range(3):\n    for x in loader:\n        {STEP}"
    assert "    loader.sampler.set_epoch(epoch)\n    for x" in rewritten(code, "MG303")


@pytest.mark.parametrize("call", ["sampler.set_epoch(epoch)", "loader.sampler.set_epoch(epoch)"])
def test_a_script_that_tells_the_epoch_is_left_alone(call: str) -> None:
    code = f"{HALF}for epoch in range(3):\n    {call}\n    for x in loader:\n        {STEP}"
    assert findings(code, "MG303") == []


def test_a_late_call_is_reported() -> None:
    code = (
        f"{HALF}for epoch in range(3):\n    for x in loader:\n        sampler.set_epoch(epoch)\n"
        f"        {STEP}"
    )
    (found,) = findings(code, "MG303")
    assert found.message == "sampler.set_epoch(epoch) comes when the epoch's order is drawn already"


def test_a_loader_that_cannot_be_named_is_reported() -> None:
    code = (
        f"def make():\n    return DataLoader(a, 8, shuffle=True)\n{DP}for epoch in range(3):\n"
        f"    for x in make():\n        {STEP}"
    )
    (found,) = findings(code, "MG303")
    assert found.edits == ()


def test_blocks_on_one_line_and_branches_are_opened() -> None:
    code = (
        f"{LOADER}batches = None\nwhile True:\n    if batches is None:\n        pass\n"
        "    elif len(batches) == 0: batches = iter(loader)\n"
        f"    x = next(batches)\n    {STEP}"
    )
    text = rewritten(DP + code, "MG303")
    assert "    elif len(batches) == 0:\n        loader.sampler.set_epoch(" in text


def test_what_was_told_is_not_told_again() -> None:
    code = f"{LOADER}for epoch in range(3):\n    for x in loader:\n        {STEP}"
    text = run(DP + code, "MG30").files[0].after.decode()
    assert text.count("set_epoch(") == 1
    assert not run({PATH.name: text}, "MG30").files[0].changed


def test_a_cycle_that_is_made_anew_in_every_epoch_draws_a_new_order() -> None:
    code = """
    import torch
    from itertools import cycle
    from torch.utils.data import DataLoader, DistributedSampler
    def train(model, labeled, loader, epoch):
        for a, b in zip(cycle(labeled), loader):
            model(a, b).mean().backward()
    def main(model, first, second):
        labeled = DataLoader(first, sampler=DistributedSampler(first))
        loader = DataLoader(second, sampler=DistributedSampler(second))
        for epoch in range(10):
            train(model, labeled, loader, epoch)
    """
    text = rewritten(code, "MG303")
    assert "    labeled.sampler.set_epoch(epoch)\n" in text
    assert "    loader.sampler.set_epoch(epoch)\n" in text
