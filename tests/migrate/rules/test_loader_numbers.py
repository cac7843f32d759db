"""Rule MG306: a number is read from a training loader that means a part now."""

from __future__ import annotations

import pytest
from rewriting import PATH, findings, rewritten, run

from migrate.rule import Options

DP = "model = nn.DataParallel(nn.Linear(2, 2))\n"
LOADER = "loader = DataLoader(a, 8, shuffle=True)\n"
LOOP = "for i, x in enumerate(loader):\n    model(x).mean().backward()\n"
HEAD = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import "


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("total / len(loader.sampler)", "total / len(loader.dataset)"),
        ("i * loader.batch_size", "i * (loader.batch_size * process_count())"),
        ("(i + 1) * loader.batch_size", "(i + 1) * (loader.batch_size * process_count())"),
        ("len(loader) * loader.batch_size", "len(loader) * (loader.batch_size * process_count())"),
        ("len(loader)", "len(loader)"),
        ("len(loader.dataset)", "len(loader.dataset)"),
    ],
)
def test_numbers_stay_those_of_all_processes(given: str, wanted: str) -> None:
    text = rewritten(f"{DP}{LOADER}{LOOP}    print({given})\n", "MG306")
    assert text.endswith(f"    print({wanted})\n")


def test_the_length_of_a_changed_sampler() -> None:
    code = (
        f"{HEAD}DataLoader, RandomSampler\n{DP}sampler = RandomSampler(a)\n"
        f"loader = DataLoader(a, 8, sampler=sampler)\n{LOOP}print(len(sampler))\n"
    )
    assert rewritten(code, "MG306").endswith("print(len(sampler.dataset))\n")


@pytest.mark.parametrize("use", ["torch.zeros(loader.batch_size, 3)", "x / loader.batch_size"])
def test_other_uses_of_the_batch_size_are_reported(use: str) -> None:
    (found,) = findings(f"{DP}{LOADER}{LOOP}    y = {use}\n", "MG306")
    assert found.message == "loader.batch_size is the batch size of one process"


def test_the_length_of_a_wrapped_sampler_is_reported() -> None:
    code = (
        f"{HEAD}DataLoader, WeightedRandomSampler\n{DP}"
        f"loader = DataLoader(a, 8, sampler=WeightedRandomSampler(w, 5))\n{LOOP}"
        "print(len(loader.sampler))\n"
    )
    (found,) = findings(code, "MG306")
    assert "len(loader.sampler.sampler)" in found.advice


def test_evaluation_loaders_and_per_rank_batches_are_left_alone() -> None:
    code = f"{DP}{LOADER}{LOOP}val = DataLoader(b, 8)\nfor x in val:\n    n += val.batch_size\n"
    assert findings(code, "MG306") == []
    code = f"{DP}{LOADER}{LOOP}    n += i * loader.batch_size\n"
    assert findings(code, "MG306", options=Options("per-rank")) == []


def test_what_was_edited_stays() -> None:
    code = f"{DP}{LOADER}{LOOP}    print(i * loader.batch_size, len(loader.sampler))\n"
    text = run(code, "MG3").files[0].after.decode()
    assert "(loader.batch_size * process_count()), len(loader.dataset))" in text
    again = run({PATH.name: text}, "MG3")
    assert not again.files[0].changed
    assert again.manual == []
