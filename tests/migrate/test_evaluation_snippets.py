"""Evaluation in parts: what it gives is what the whole batch gives.

The definitions run in one, two and three processes, and a rewritten program in two.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from scripts import TARGETS, cases, contents
from verifying import start, start_several

from migrate.api import rewrite
from migrate.rule import Options

SNIPPETS = Path(__file__).parents[2] / "migrate" / "snippets" / "common.py"
CASE = next(case for case in cases() if case.name == "vision_resume")
LAYERS = "        x = self.stages(x)\n"
SHOW = "        if not self.training:\n            print('rows', len(x))\n"
PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from common import *
import builtins
from collections import OrderedDict, namedtuple
setup_distributed()
rank, count = process_rank(), process_count()
torch.manual_seed(0)
Pair = namedtuple("Pair", "logits hidden")


class Model(torch.nn.Module):
    def __init__(self, result):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.rows, self.result = [], result

    def forward(self, x, *args, **kwargs):
        self.rows.append(len(x))
        return self.result(self.linear(x), x, *args, **kwargs)


def same(one, two):
    one, spec = tree_flatten(one)
    two, other = tree_flatten(two)
    assert spec == other
    for a, b in zip(one, two):
        if torch.is_tensor(a):
            assert a.dtype == b.dtype and a.device == b.device
            a, b = (t if t.is_complex() else t.double() for t in (a, b))
            assert torch.allclose(a, b, atol=1e-6), (a, b)
        else:
            assert a == b


def rows(result, batches, *args, **kwargs):
    # the sizes that the model sees, after results were compared with those of the whole
    model = Model(result).eval()
    seen = []
    with torch.no_grad():
        for x in batches:
            del model.rows[:]
            made = on_parts(model)(x, *args, **kwargs)
            seen.append(list(model.rows))
            same(made, model(x, *args, **kwargs))
    counts = [None] * count
    dist.all_gather_object(counts, [len(batch) for batch in seen])
    assert all(item == counts[0] for item in counts), counts  # as many forwards in every process
    return seen


def own(n):
    return max(len(torch.arange(n).tensor_split(count)[rank]), 1)


batches = [torch.randn(n, 3) for n in (12, 12, 7, count, 2, 1, 5)]
PARTS = [[own(12), 12], *([own(len(x))] if len(x) > 1 else [1] for x in batches[1:])]
WHOLE = [[len(x)] for x in batches]
if count == 1:
    PARTS = WHOLE
results = dict(
    tensor=lambda y, x: y,
    argmax=lambda y, x: y.argmax(1),
    boolean=lambda y, x: y > 0,
    half=lambda y, x: y.half(),
    bfloat=lambda y, x: y.bfloat16(),
    small=lambda y, x: y.short(),
    tuples=lambda y, x: (y, None, [x, y[:, 0]]),
    named=lambda y, x: Pair(y, x),
    dicts=lambda y, x: OrderedDict(out=y, aux=dict(x=x)),
    strided=lambda y, x: y.t().contiguous().t(),
    infinite=lambda y, x: y.masked_fill(y < 0, -float("inf")),
)
for name, result in results.items():
    assert rows(result, batches) == PARTS, name

# One number, other objects, rows that depend on each other, rows of another size: whole.
FOUND = [[own(12), 12], *WHOLE[1:]] if count > 1 else WHOLE
whole = dict(
    complexes=lambda y, x: torch.complex(y, y),
    scalar=lambda y, x: y.mean(),
    text=lambda y, x: [str(len(row)) for row in y],
    both=lambda y, x: (y, y.sum()),
    batchwise=lambda y, x: y - y.mean(0),
    running=lambda y, x: y.cumsum(0),
    swapped=lambda y, x: y.t(),
)
for name, result in whole.items():
    assert rows(result, batches) == FOUND, name
four = [torch.randn(4 * count, 3) for _ in range(2)]  # as many rows as a part has, by chance
assert len(rows(lambda y, x: y.t(), four)[1]) == 1
ragged = [torch.arange(36.0).reshape(12, 3), batches[1]]
rows(lambda y, x: y[:, : int(x.max()) % 4 + 1], ragged)

# Arguments.
def pick(y, x, *args, **kwargs):
    return y


extra = torch.randn(12, 2)
twelve = [batches[0], batches[1]]
parts = [[own(12), 12], [own(12)]] if count > 1 else WHOLE[:2]
made = rows(lambda y, x, z, flag, k=0: y + z[:, :1] * k, twelve, extra, True, k=2)
assert made == parts, made
made = rows(lambda y, x, d, t: y + d["z"][:, :1] * t, twelve, {{"z": extra}}, torch.tensor(2.0))
assert made == parts, made
for odd in (["a"] * 12, [1, 2], torch.randn(5), dict(z="a"), object()):
    assert rows(pick, twelve, odd) == WHOLE[:2], odd
    assert rows(pick, twelve, odd=odd) == WHOLE[:2], odd

# Batches that are not the same everywhere, and gradients.
model = Model(pick).eval()
with torch.no_grad():
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(rank))
    same(on_parts(model)(x), model(x))
    x = torch.randn(12 + rank, 3)
    same(on_parts(model)(x), model(x))
model = Model(pick).eval()
y = on_parts(model)(batches[0])
y.sum().backward()
assert model.linear.weight.grad is not None and model.rows == [12]
with torch.inference_mode():
    same(on_parts(model)(batches[0]), model(batches[0]))
    same(on_parts(model)(batches[0]), model(batches[0]))
model.train()
del model.rows[:]
with torch.no_grad():
    on_parts(model)(batches[0])
assert model.rows == [12]
if rank == 0:
    builtins.print("fine")
"""


@pytest.mark.parametrize("count", [1, 2, 3])
def test_parts_give_what_the_whole_gives(count: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(SNIPPETS.parent)))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    command = [sys.executable, *launcher, str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[:3000]
    assert done.stdout.strip() == "fine"


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the program prints about its evaluation."""
    run = start(CASE.entry, CASE.arguments(), tmp_path_factory.mktemp("original"))
    return evaluation(run.stdout)


def evaluation(stdout: str) -> list[str]:
    return [line for line in stdout.splitlines() if line.startswith(("=> validation", "test"))]


@pytest.mark.parametrize("target", TARGETS)
def test_a_program_prints_the_same_numbers(target: str, printed: list[str], tmp_path: Path) -> None:
    result = rewrite([CASE.entry], target, options=Options(evaluation="sharded"))
    (content,) = contents(CASE, result).values()
    text = content.decode().replace(LAYERS, f"{LAYERS}{SHOW}", 1)
    script = tmp_path / "train.py"
    script.write_text(text)
    run = start_several(script, CASE.arguments(target), tmp_path)
    assert run.returncode == 0, run.stderr[-3000:]
    assert evaluation(run.stdout) == printed
    rows = [line for line in run.stdout.splitlines() if line.startswith("rows")]
    assert rows == ["rows 8", "rows 16", *["rows 8"] * 7]  # 16 only once, to compare
