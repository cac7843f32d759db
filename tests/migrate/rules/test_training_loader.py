"""Rule MG301: a DataLoader whose batches are trained on gives every process all samples."""

from __future__ import annotations

import pytest
from rewriting import PATH, after, expect, findings, rewritten, run

from migrate.rule import Options

DP = "model = nn.DataParallel(nn.Linear(2, 2))\n"
LOOP = "for x in loader:\n    model(x).mean().backward()\n"
IMPORT = "from torch.utils.data import DataLoader, DistributedSampler\n"
HEAD = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import "


def loader(arguments: str) -> str:
    """The DataLoader call that a training loader with these arguments becomes."""
    text = rewritten(f"{DP}train_set = load()\nloader = DataLoader({arguments})\n{LOOP}", "MG301")
    line = next(line for line in text.splitlines() if line.startswith("loader = "))
    return line.removeprefix("loader = DataLoader(").removesuffix(")")


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        ("train_set, 8", "train_set, 8, sampler=DistributedSampler(train_set, shuffle=False)"),
        ("train_set, 8, True", "train_set, 8, sampler=DistributedSampler(train_set, shuffle=True)"),
        (
            "train_set, shuffle=True, batch_size=8",
            "train_set, sampler=DistributedSampler(train_set, shuffle=True), batch_size=8",
        ),
        (
            "train_set, 8, shuffle=not args.fixed, drop_last=True",
            "train_set, 8, sampler=DistributedSampler(train_set, shuffle=not args.fixed, "
            "drop_last=True), drop_last=True",
        ),
        (
            "train_set, 8, shuffle=(args.n > 1), drop_last=False",
            "train_set, 8, sampler=DistributedSampler(train_set, shuffle=args.n > 1), "
            "drop_last=False",
        ),
        (
            "dataset=train_set, batch_size=8, shuffle=False, sampler=None",
            "dataset=train_set, batch_size=8, "
            "sampler=DistributedSampler(train_set, shuffle=False)",
        ),
        (
            "sets['train'], 8, num_workers=2, pin_memory=True",
            "sets['train'], 8, num_workers=2, pin_memory=True, "
            "sampler=DistributedSampler(sets['train'], shuffle=False)",
        ),
    ],
)  # fmt: skip
def test_shuffle_becomes_a_sampler(before: str, wanted: str) -> None:
    assert loader(before) == wanted


def test_a_dataset_that_is_made_in_the_call_gets_a_name() -> None:
    code = f"{DP}train_loader = DataLoader(Data(1), 8, shuffle=True)\n" + LOOP.replace(
        "in loader", "in train_loader"
    )
    assert (
        "train_dataset = Data(1)\n"
        "train_loader = DataLoader(train_dataset, 8, "
        "sampler=DistributedSampler(train_dataset, shuffle=True))\n"
    ) in rewritten(code, "MG301")


@pytest.mark.parametrize(
    ("imported", "call", "spelled"),
    [
        ("import torch.utils.data as data", "data.DataLoader", "data.DistributedSampler"),
        ("from torch.utils import data", "data.DataLoader", "data.DistributedSampler"),
        ("import os", "torch.utils.data.DataLoader", "torch.utils.data.DistributedSampler"),
        (
            "from torch.utils.data.distributed import DistributedSampler as DS",
            "torch.utils.data.DataLoader",
            "DS",
        ),
        ("from torch.utils.data import *", "DataLoader", "DistributedSampler"),
    ],
)
def test_the_sampler_is_spelled_as_the_loader(imported: str, call: str, spelled: str) -> None:
    code = (
        f"import torch\nimport torch.nn as nn\n{imported}\n"
        f"{DP}train_set = load()\nloader = {call}(train_set, 8, shuffle=True)\n{LOOP}"
    )
    assert f"sampler={spelled}(train_set, shuffle=True)" in rewritten(code, "MG301")


def test_an_import_over_several_lines_is_extended() -> None:
    code = (
        "import torch\nimport torch.nn as nn\nfrom torch.utils.data import (\n    DataLoader,\n"
        f"    Dataset,\n)\n{DP}train_set = load()\nloader = DataLoader(train_set, 8)\n{LOOP}"
    )
    assert "    DataLoader, DistributedSampler,\n    Dataset,\n" in rewritten(code, "MG301")


@pytest.mark.parametrize(
    ("sampler", "wanted"),
    [
        ("RandomSampler(train_set)", "DistributedSampler(train_set)"),
        ("SequentialSampler(train_set)", "DistributedSampler(train_set, shuffle=False)"),
    ],
)
def test_samplers_of_torch_become_distributed_ones(sampler: str, wanted: str) -> None:
    code = (
        f"{HEAD}DataLoader, RandomSampler, SequentialSampler\n"
        f"{DP}train_set = load()\nsampler = {sampler}\n"
        f"loader = DataLoader(train_set, sampler=sampler, batch_size=8)\n{LOOP}"
    )
    assert f"sampler = {wanted}\nloader = DataLoader(train_set, sampler=sampler" in rewritten(
        code, "MG301"
    )


@pytest.mark.parametrize(
    "sampler",
    ["WeightedRandomSampler(w, 10)", "SubsetRandomSampler(indices)",
     "RandomSampler(train_set, replacement=True)"],
)  # fmt: skip
def test_other_samplers_are_wrapped(sampler: str) -> None:
    name = sampler.partition("(")[0]
    code = (
        f"{HEAD}DataLoader, {name}\n{DP}sampler = {sampler}\n"
        f"loader = DataLoader(train_set, sampler=sampler, batch_size=8, drop_last=True)\n{LOOP}"
    )
    assert "sampler=ShardedSampler(sampler, drop_last=True)" in rewritten(code, "MG301")


def test_a_sampler_class_of_the_script_keeps_its_neighbours_together() -> None:
    code = (
        "class Pairs(torch.utils.data.Sampler):\n    def __iter__(self):\n        yield 1\n"
        f"{DP}loader = DataLoader(train_set, sampler=Pairs(), batch_size=args.batch)\n{LOOP}"
    )
    wanted = "sampler=ShardedSampler(Pairs(), block=per_process(args.batch)), batch_size="
    assert wanted in rewritten(code, "MG301")


def test_a_sampler_that_may_be_none_leaves_shuffling_to_a_distributed_one() -> None:
    code = (
        f"{HEAD}DataLoader, WeightedRandomSampler\n{DP}"
        "sampler = WeightedRandomSampler(w, 10) if args.balanced else None\n"
        "loader = DataLoader(data, 8, shuffle=(sampler is None), sampler=sampler)\n"
        "for epoch in range(3):\n    for x in loader:\n        model(x).mean().backward()\n"
    )
    text = rewritten(code, ("MG301", "MG303"))
    assert (
        "loader = DataLoader(data, 8, sampler=ShardedSampler(sampler) if sampler is not None "
        "else DistributedSampler(data, shuffle=True))\n"
    ) in text
    assert "    if hasattr(loader.sampler, 'set_epoch'):\n        loader.sampler.set" in text


def test_batch_samplers_are_wrapped() -> None:
    code = f"{DP}loader = DataLoader(train_set, batch_sampler=make(), num_workers=2)\n{LOOP}"
    assert "batch_sampler=ShardedBatchSampler(make()), num" in rewritten(code, "MG301")


def test_streams_are_wrapped() -> None:
    code = (
        "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n"
        f"        yield 1\n{DP}stream = Stream()\nloader = DataLoader(stream, batch_size=8)\n{LOOP}"
    )
    assert "DataLoader(ShardedIterable(stream), batch_size=8)" in rewritten(code, "MG301")


def test_keyword_dicts_without_the_batch_are_harmless() -> None:
    code = (
        f"{DP}kwargs = {{'num_workers': 1, 'pin_memory': True}} if cuda else {{}}\n"
        f"loader = DataLoader(train_set, batch_size=8, shuffle=True, **kwargs)\n{LOOP}"
    )
    assert "sampler=DistributedSampler(train_set, shuffle=True), **kwargs)" in rewritten(
        code, "MG301"
    )


def test_keyword_dicts_with_the_batch_are_converted_where_they_are_used() -> None:
    code = (
        f"{DP}train_kwargs = {{'batch_size': args.batch}}\nif cuda:\n"
        "    cuda_kwargs = {'num_workers': 1, 'shuffle': True}\n"
        "    train_kwargs.update(cuda_kwargs)\n"
        f"loader = DataLoader(train_set, **train_kwargs)\n{LOOP}"
    )
    text = rewritten(code, "MG3")
    assert "DataLoader(train_set, **sharded_arguments(train_set, **train_kwargs))" in text
    assert "batch_size': args.batch}" in text


def test_hidden_arguments_are_reported() -> None:
    code = (
        "def make(data, **options):\n    return DataLoader(data, **options)\n"
        f"{DP}loader = make(train_set)\n{LOOP}"
    )
    (found,) = findings(code, "MG301")
    assert "**options hides its arguments" in found.message
    assert found.edits == ()


PHASES = (
    "loaders = {x: DataLoader(sets[x], batch_size=8, shuffle=%s) for x in ['train', 'val']}\n"
    "for epoch in range(3):\n    for phase in ['train', 'val']:\n"
    "        for x in loaders[phase]:\n            loss = model(x).mean()\n"
    "            if phase == 'train':\n                loss.backward()\n"
)


@pytest.mark.parametrize(
    ("shuffle", "wanted"),
    [
        ("(x == 'train')",
         "sampler=DistributedSampler(sets[x], shuffle=True) if x == 'train' else None)"),
        ("True", "shuffle=x != 'train', "
                 "sampler=DistributedSampler(sets[x], shuffle=True) if x == 'train' else None)"),
    ],
)  # fmt: skip
def test_in_a_dict_of_loaders_only_the_training_one_is_dealt_out(shuffle: str, wanted: str) -> None:
    text = rewritten(DP + PHASES % shuffle, "MG3")
    assert wanted in text
    assert "batch_size=per_process(8) if x == 'train' else 8, " in text
    assert "        if hasattr(loaders[phase].sampler, 'set_epoch'):\n" in text


def test_a_dict_that_is_written_out_is_told_apart_by_its_keys() -> None:
    code = DP + PHASES % "True"
    code = code.replace(
        "loaders = {x: DataLoader(sets[x], batch_size=8, shuffle=True) for x in ['train', 'val']}",
        "loaders = {'train': DataLoader(a, 8, shuffle=True), 'val': DataLoader(b, 8)}",
    )
    text = rewritten(code, "MG301")
    assert (
        "{'train': DataLoader(a, 8, sampler=DistributedSampler(a, shuffle=True)), "
        "'val': DataLoader(b, 8)}"
    ) in text


HELPER = (
    "def make(data, train):\n    return DataLoader(data, batch_size=8, shuffle=train)\n"
    f"{DP}loader = make(a, True)\nval_loader = make(b, False)\n{LOOP}"
    "for x in val_loader:\n    print(model(x))\n"
)


def test_a_helper_for_both_kinds_of_loaders_is_told_which_by_its_parameter() -> None:
    text = rewritten(HELPER, "MG3")
    wanted = "sampler=DistributedSampler(data, shuffle=True) if train else None)"
    assert wanted in text
    assert "batch_size=per_process(8) if train else 8" in text


def test_a_helper_that_cannot_be_told_apart_is_reported() -> None:
    code = HELPER.replace("make(a, True)", "make(a, first)").replace("(b, False)", "(b, second)")
    (found,) = [f for f in findings(code, "MG301") if not f.edits]
    assert "make makes loaders for training and evaluation" in found.message


def test_one_function_for_training_and_evaluation_trains_on_the_first_only() -> None:
    code = (
        f"{DP}def run(loader, train):\n    for x in loader:\n        loss = model(x).mean()\n"
        "        if train:\n            loss.backward()\n"
        "a = DataLoader(a_set, 8)\nb = DataLoader(b_set, 8)\nrun(a, True)\nrun(b, train=False)\n"
    )
    text = rewritten(code, "MG301")
    assert "a = DataLoader(a_set, 8, sampler=" in text
    assert "b = DataLoader(b_set, 8)\n" in text


def test_evaluation_loaders_stay_whole() -> None:
    code = f"{DP}loader = DataLoader(a, 8)\n{LOOP}val = DataLoader(b, 8)\n"
    code += "for x in val:\n    model(x)\n"
    assert "val = DataLoader(b, 8)\n" in rewritten(code, "MG301")


def test_evaluating_on_the_training_loader_is_reported() -> None:
    code = f"{DP}loader = DataLoader(a, 8)\n{LOOP}for x in loader:\n    right += model(x).sum()\n"
    (found,) = [f for f in findings(code, "MG301") if not f.edits]
    assert found.message == "evaluates on loader, of which a process sees its part"
    assert found.line == 8


@pytest.mark.parametrize(
    "sampler",
    ["DistributedSampler(a)",
     "RandomSampler(a) if args.local_rank == -1 else DistributedSampler(a)"],
)  # fmt: skip
def test_loaders_that_are_dealt_out_by_hand_are_left_alone(sampler: str) -> None:
    code = (
        f"{HEAD}DataLoader, DistributedSampler, RandomSampler\n{DP}sampler = {sampler}\n"
        f"loader = DataLoader(a, 8, sampler=sampler)\n{LOOP}"
    )
    assert findings(code, "MG301") == []


def test_batches_of_one_sample_are_reported() -> None:
    code = f"{DP}loader = DataLoader(a, shuffle=True)\n{LOOP}"
    (found,) = findings(code, "MG301")
    assert "a batch of one sample cannot be split" in found.message
    options = Options(batch="per-rank")
    assert "DistributedSampler(a" in rewritten(code, "MG301", options=options)


def test_a_file_that_others_import_works_without_a_process_group() -> None:
    files = {
        "train.py": "import torch\nfrom data import make\n"
        + DP.replace("nn.", "torch.nn.")
        + f"loader = make()\n{LOOP}",
        "data.py": "from torch.utils.data import DataLoader\n\n\ndef make():\n"
        "    return DataLoader(DATA, 8, shuffle=True)\n",
    }
    text = after(run(files, "MG301"), "data.py")
    assert (
        "DistributedSampler(DATA, num_replicas=process_count(), rank=process_rank(), shuf" in text
    )


@pytest.mark.parametrize("code", [
    f"{DP}loader = DataLoader(\n    a,\n    batch_size=8,\n    shuffle=True,  # order\n)\n{LOOP}",
    f"{DP}loader = DataLoader(a, 8, shuffle=True,)\n{LOOP}",
    f"{DP}a = load(); loader = DataLoader(a, 8)\n{LOOP}",
    f"{DP}if big: loader = DataLoader(make(1), 8, shuffle=True)\n{LOOP}",
    f"{DP}class Trainer:\n\tdef __init__(self):\n\t\tself.loader = DataLoader(self.data, 8)\n"
    "\tdef fit(self):\n\t\tfor x in self.loader:\n\t\t\tmodel(x).mean().backward()\n"
    "Trainer().fit()\n",
    DP + PHASES % "True", HELPER,
])  # fmt: skip
@pytest.mark.parametrize("to", ["ddp", "fsdp"])
def test_what_was_rewritten_stays(code: str, to: str) -> None:
    once = run(code, "MG3", to)
    text = once.files[0].after.decode()
    assert "DistributedSampler(" in text
    twice = run({PATH.name: text}, "MG3", to)
    assert twice.files[0].after.decode() == text
    assert [f.message for f in twice.manual] == [f.message for f in once.manual]


def test_odd_formatting_survives() -> None:
    code = f"{DP}loader = DataLoader(\n    a,\n    batch_size=8,\n    shuffle=True,  # order\n)\n"
    code += LOOP
    assert rewritten(code, "MG301") == expect(
        "import torch\nimport torch.nn as nn\n"
        + IMPORT
        + code.replace("shuffle=True,", "sampler=DistributedSampler(a, shuffle=True),")
    )
