"""Errors that people make, planted in right programs: each is found, and named.

The programs themselves are found to train the same in `test_training.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from scripts import Case, cases
from verifying import folder, original, start, start_several, verdict

CASES = {case.name: case for case in cases()}


@dataclass(frozen=True, eq=False)
class Sabotage:
    """Texts to replace in a rewritten program, and what is to be found then.

    `both` is replaced in the original too, `before` in the original alone.
    """

    name: str
    cause: str
    case: str
    edits: dict[str, str]
    both: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    target: str = "ddp"
    mode: str = "whole"


def sharded_evaluation(samples: int) -> dict[str, str]:
    return {
        f"PatternImages({samples}, seed=2), batch_size=args.batch_size,":
        "held_out, batch_size=per_process(args.batch_size), "
        "sampler=data.DistributedSampler(held_out, shuffle=False),",
        "def main():\n": f"def main():\n    held_out = PatternImages({samples}, seed=2)\n",
    }  # fmt: skip


SABOTAGES = [
    Sabotage(
        "the sampler is never told the epoch", "no-set-epoch", "vision_resume",
        {"    loader.sampler.set_epoch(epoch)\n": ""},
    ),
    Sabotage(
        "the batch size is not divided", "batch-not-divided", "vision_resume",
        {"batch_size=per_process(args.batch_size)": "batch_size=args.batch_size"},
    ),
    Sabotage(
        "the training loader has no sampler", "samples-not-shared", "vision_resume",
        {"batch_size=per_process(args.batch_size), "
         "sampler=data.DistributedSampler(train_dataset, shuffle=True)":
         "batch_size=args.batch_size, shuffle=True",
         "    loader.sampler.set_epoch(epoch)\n": ""},
    ),
    Sabotage(
        "every process shuffles with its own seed", "sampler-seeds", "vision_resume",
        {"DistributedSampler(train_dataset, shuffle=True)":
         "DistributedSampler(train_dataset, shuffle=True, seed=process_rank())"},
    ),
    Sabotage(
        "a summed loss is not scaled", "loss-reduction", "submodule_sum_loss",
        {"(loss * process_count()).backward()": "loss.backward()"},
    ),
    Sabotage(
        "a mean loss is scaled", "loss-reduction", "single_gpu",
        {"loss.backward()": "(loss * process_count()).backward()"},
    ),
    Sabotage(
        "each process computes the validation metric on its part", "evaluation-not-reduced",
        "vision_resume", sharded_evaluation(64),
    ),
    Sabotage(
        "a sampler on the evaluation loader counts samples twice", "evaluation-samples",
        "vision_resume",
        {**sharded_evaluation(63), "    return top1.avg": "    return global_mean(top1.avg)"},
        both={"PatternImages(64, seed=2)": "PatternImages(63, seed=2)"},
    ),
    Sabotage(
        "batch norm is not synchronised", "batch-norm-not-synchronised", "top_level_script",
        {"torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)": "net"},
        before={"torch.nn.DataParallel(net)": "net"},
    ),
    Sabotage(
        "every process saves", "written-twice", "vision_resume",
        {"    if is_main_process():\n        torch.save(": "    if True:\n        torch.save("},
    ),
    Sabotage(
        "nobody saves", "files-missing", "vision_resume",
        {"    if is_main_process():\n        torch.save(":
         "    if process_rank() == process_count():\n        torch.save(",
         "        if is_main_process():\n            shutil":
         "        if process_rank() == process_count():\n            shutil"},
    ),
    Sabotage(
        "the optimizer is made before the model is sharded", "stale-optimizer",
        "language_model_warmup",
        {'    shard_model(model, blocks=["TransformerBlock"])\n': "",
         "    scheduler = get_cosine":
         '    shard_model(model, blocks=["TransformerBlock"])\n    scheduler = get_cosine'},
        target="fsdp",
    ),
    Sabotage(
        "a late change of weights is not shared", "change-not-shared", "vision_resume",
        {"if i == 3:": "if i == 3 and is_main_process():"},
        both={"        optimizer.zero_grad()\n":
              "        if i == 3:\n            model.module.fc.bias.data.zero_()\n"
              "        optimizer.zero_grad()\n"},
    ),
    Sabotage(
        "weights are loaded by one process after the wrap", "ranks-start-apart", "vision_resume",
        {"    cudnn.benchmark = True\n":
         "    cudnn.benchmark = True\n"
         "    if is_main_process():\n        model.module.fc.reset_parameters()\n"},
    ),
    Sabotage(
        "the model is made with another seed", "other-start", "vision_resume",
        {"torch.manual_seed(args.seed)\n": "torch.manual_seed(args.seed + 1)\n"},
    ),
    Sabotage(
        "the schedule is computed from the undivided length", "schedule",
        "language_model_warmup",
        {"t_total = len(train": "t_total = process_count() * len(train"},
        mode="dealt",
    ),
    Sabotage(
        "the learning rate is scaled by the number of processes", "rate-scaled", "vision_resume",
        {"torch.optim.SGD(model.parameters(), args.lr,":
         "torch.optim.SGD(model.parameters(), args.lr * process_count(),"},
    ),
    Sabotage(
        "the wrapped model is called past its wrapper", "gradients-not-averaged",
        "vision_resume",
        {"model(images)\n        loss = criterion(output, target)\n\n":
         "model.module(images)\n        loss = criterion(output, target)\n\n"},
    ),
    Sabotage(
        "a collective call stands under a condition on the rank", "processes-apart",
        "vision_resume",
        {"        losses.update(global_mean(loss).item(), images.size(0))\n        top1":
         "        if is_main_process():\n"
         "            losses.update(global_mean(loss).item(), images.size(0))\n        top1"},
    ),
]  # fmt: skip


def changed(text: str, edits: dict[str, str]) -> str:
    for old, new in edits.items():
        assert text.count(old) == 1, (text.count(old), old)
        text = text.replace(old, new)
    return text


def script(name: str, text: str) -> Path:
    path = folder() / name
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "planted", SABOTAGES, ids=lambda planted: re.sub(r"\W+", "-", planted.name)
)
def test_a_planted_error_is_named(planted: Sabotage) -> None:
    case: Case = CASES[planted.case]
    right = case.completed(planted.target, folder()).read_text()
    wrong = script("wrong.py", changed(changed(right, planted.both), planted.edits))
    edits = {**planted.both, **planted.before}
    if edits:
        before = script("before.py", changed(case.entry.read_text(), edits))
        one = start(before, case.arguments(), data_parallel=planted.mode)
    else:
        one = original(case, planted.mode)
    other = start_several(wrong, case.arguments(planted.target), data_parallel=planted.mode)
    found = verdict(one, other, planted.mode)
    assert one.is_good, one.stderr[-2000:]
    assert found.causes, found.sentence
    assert found.causes[0].name == planted.cause, (found.causes, other.stderr[-2000:])
