"""Rule MG302: the batch size of a training loader is the one of all devices together."""

from __future__ import annotations

import pytest
from rewriting import PATH, findings, rewritten, run

from migrate.finding import Applicability, Effect
from migrate.rule import Options

DP = "model = nn.DataParallel(nn.Linear(2, 2))\n"
LOOP = "for x in loader:\n    model(x).mean().backward()\n"
HEAD = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import "


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("DataLoader(a, 64, True)", "DataLoader(a, per_process(64), True)"),
        ("DataLoader(a, batch_size=args.b)", "DataLoader(a, batch_size=per_process(args.b))"),
        (
            "DataLoader(a, batch_size=args.b * n_gpu)",
            "DataLoader(a, batch_size=per_process(args.b * n_gpu))",
        ),
        (
            "DataLoader(a, batch_size=8 if small else 64)",
            "DataLoader(a, batch_size=per_process(8 if small else 64))",
        ),
    ],
)
def test_the_number_is_split(given: str, wanted: str) -> None:
    assert f"loader = {wanted}\n" in rewritten(f"{DP}loader = {given}\n{LOOP}", "MG302")


def test_the_assumption_is_said() -> None:
    (found,) = findings(f"{DP}loader = DataLoader(a, args.batch)\n{LOOP}", "MG302")
    assert found.applicability is Applicability.POLICY
    assert found.assumption == "the batch size args.batch is the global one, as it was before"


def test_per_rank_leaves_the_number_and_says_what_follows() -> None:
    result = run(
        f"{DP}loader = DataLoader(a, args.batch)\n{LOOP}", "MG302", options=Options("per-rank")
    )
    (found,) = result.findings
    assert not result.files[0].changed
    assert found.applicability is Applicability.INFO
    assert found.effect is Effect.DIFFERENT
    assert "learning rate" in found.advice


def test_evaluation_loaders_and_batch_samplers_keep_theirs() -> None:
    code = (
        f"{DP}loader = DataLoader(a, batch_sampler=s)\n{LOOP}for x in DataLoader(b, 8): model(x)\n"
    )
    assert findings(code, "MG302") == []


def test_a_loader_that_is_not_dealt_out_keeps_its_batch() -> None:
    code = "def make(**kw):\n    return DataLoader(a, batch_size=8, **kw)\n"
    code += f"{DP}loader = make()\n{LOOP}"
    assert findings(code, "MG302") == []


@pytest.mark.parametrize(
    ("size", "count"), [("args.batch // world_size", 0), ("per_gpu(8) // n", 0), ("args.batch", 1)]
)
def test_a_loader_with_a_distributed_sampler_is_only_talked_about(size: str, count: int) -> None:
    code = (
        f"{HEAD}DataLoader, DistributedSampler\n{DP}"
        f"loader = DataLoader(a, {size}, sampler=DistributedSampler(a))\n{LOOP}"
    )
    found = findings(code, "MG302")
    assert [f.edits for f in found] == [()] * count


def test_what_was_split_is_not_split_again() -> None:
    text = run(f"{DP}loader = DataLoader(a, 8)\n{LOOP}", "MG30").files[0].after.decode()
    assert text.count("per_process(8)") == 1
    assert not run({PATH.name: text}, "MG30").files[0].changed
