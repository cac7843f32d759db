"""Measures the whole matrix and writes docs/resume-matrix.md; `make matrix` runs it."""

import itertools
import platform
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

from resume.matrix import (
    BF16,
    TOLERANCE,
    WORLDS,
    Outcome,
    Pair,
    Source,
    measure,
    pairs,
)
from resume.nets import NETS
from resume.strategies import STRATEGIES

PAGE = REPO / "docs" / "resume-matrix.md"
HEAD = """# A job that goes on under another strategy

Written by `make matrix`, which runs what `tests/resume` runs. Each cell is a training of its own:

1. three steps under the strategy of the row, and a save with that strategy's own means;
2. `ckpt convert` to the format of the column;
3. a new process group, with other random weights and, for torch's strategies, infinite optimizer
   states, loads it with the column's own means;
4. what then stands in the live job is compared with what stood in the source's when it saved:
   weights, optimizer states, step counts and buffers bit for bit, the param groups' members and
   hyper-parameters, the scheduler's position;
5. three more steps, between two evaluations: five losses, compared with those of the source's
   run, which went on without an interruption.

The number is the largest relative difference of a loss, of at most {fp32:g} in fp32 and {bf16:g}
in bf16. The figures here: {machine}.

**What it proves.** The training state survives the way from each strategy to each other one, at
the same number of processes and at another, and the frameworks themselves load it. The losses tell
what a comparison of files cannot, such as a rate or a buffer where the framework does not look for
it; `tests/resume` loses parts on purpose and sees it in them.

**What it does not prove.** The models are small, of odd sizes so that no split comes out even; the
optimizer is AdamW; the order of samples and random numbers of dropout are not part of it; one
machine has no network between its processes. Over NCCL it runs only where every process has a GPU,
and the figures say what was there.
"""
MODELS = """
## The two models

- **transformer**: embedding tied to the head, two blocks of LayerNorm and perceptron, parameters
  of one and five elements; AdamW with weight decay on matrices only.
- **convolutional**: a frozen stem whose BatchNorm keeps the statistics it came with, as in
  fine-tuning, then trained convolutions with BatchNorm. Their moments are taken over the rows of
  all ranks, as SyncBatchNorm does on GPUs. With plain BatchNorm the loss depends on how the batch
  is split, so a job at another number of processes has other losses, whatever it resumes from.
  The evaluations read the running statistics.

FSDP1 saves sharded DCP folders under FULL_SHARD, one file of full state dicts under SHARD_GRAD_OP
and NO_SHARD (which knows no other way), and resumes from the same. In one process FSDP1 turns every
strategy into NO_SHARD. ZeRO-3 jobs at another number of processes have sub-groups of another size
as well. DDP's optimizer numbers its states, so its conversions are given `--param-order`; all
others are given nothing, and for DeepSpeed the job's `--world-size` and `--ds-config`.
No conversion needs `--allow-loss`.
"""


def tables(outcomes: Mapping[Pair, Outcome]) -> Iterator[str]:
    """One table for each model and change of the number of processes."""
    for net, (before, after) in itertools.product(NETS, WORLDS):
        targets = list(STRATEGIES)
        grid = {
            source: [Pair(Source(source, net, "fp32", before), t, after) for t in targets]
            for source in STRATEGIES
        }
        found = [outcomes[pair] for row in grid.values() for pair in row]
        yield f"\n## {net}, fp32, {before} → {after} processes\n\n{_summary(found)}\n"
        yield "| from \\ to | " + " | ".join(STRATEGIES[t].title for t in targets) + " |"
        yield "|---" * (len(targets) + 1) + "|"
        for source, row in grid.items():
            cells = " | ".join(_cell(outcomes[pair]) for pair in row)
            yield f"| {STRATEGIES[source].title} | {cells} |"


def bf16_table(outcomes: Mapping[Pair, Outcome]) -> Iterator[str]:
    """The selection in bf16."""
    found = [outcome for pair, outcome in outcomes.items() if pair.source.dtype == "bf16"]
    yield f"\n## transformer, bf16 with fp32 weights in the optimizer\n\n{_summary(found)}\n"
    yield "| from | to | 2 → 2 processes | 2 → 3 processes |\n|---|---|---|---|"
    for source, target in BF16:
        made = Source(source, "transformer", "bf16", 2)
        cells = " | ".join(_cell(outcomes[Pair(made, target, after)]) for after in (2, 3))
        yield f"| {STRATEGIES[source].title} | {STRATEGIES[target].title} | {cells} |"


def _summary(found: Iterable[Outcome]) -> str:
    found = list(found)
    passed = sum(not outcome.problems for outcome in found)
    state, losses = max(o.state for o in found), max(o.losses for o in found)
    loss = f"{losses:.1e}" if losses else "0"
    return (
        f"{passed} of {len(found)} pass. Largest difference of an element of weights, states or "
        f"buffers: {state:g}. Largest relative difference of a loss: {loss}."
    )


def _cell(outcome: Outcome) -> str:
    if outcome.problems:
        return "**fails**"
    return f"pass {outcome.losses:.0e}" if outcome.losses else "pass 0"


def machine(outcomes: Iterable[Outcome]) -> str:
    """Where the figures come from."""
    devices = sorted({outcome.device for outcome in outcomes})
    packages = " and ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    backend = {"cpu": "CPU with gloo", "cuda": "GPU with NCCL"}
    used = ", ".join(backend[device] for device in devices)
    return f"{packages}, Python {platform.python_version()}, {used}"


def main() -> None:
    """Measure, write, and say what failed."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        outcomes = measure(Path(folder), pairs())
    head = HEAD.format(**TOLERANCE, machine=machine(outcomes.values()))
    lines = [*tables(outcomes), *bf16_table(outcomes)]
    PAGE.write_text(head + MODELS + "\n".join(lines) + "\n")
    failed = [outcome for outcome in outcomes.values() if outcome.problems]
    for outcome in failed:
        print(outcome.pair.name, *outcome.problems, sep="\n  ")
    seconds = time.monotonic() - started
    print(f"{len(outcomes) - len(failed)} of {len(outcomes)} pass, {seconds:.0f} s: {PAGE}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
