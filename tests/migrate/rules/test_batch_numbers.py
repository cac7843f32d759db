"""Rule MG401: a number of the training loop is computed from a part of the batch."""

from __future__ import annotations

import pytest
from rewriting import after, findings, rewritten, run

from migrate.finding import Applicability

HEAD = """
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

model = nn.DataParallel(nn.Linear(2, 2))
criterion = nn.CrossEntropyLoss()
train_loader = DataLoader(train_set, batch_size=8)
val_loader = DataLoader(val_set, batch_size=8)
"""
LOOP = """
for step, (inputs, targets) in enumerate(train_loader):
    outputs = model(inputs)
    loss = criterion(outputs, targets)
    loss.backward()
"""


def edited(lines: str, loop: str = LOOP) -> str:
    """What the lines at the end of a training step become."""
    indented = "".join(f"    {line}\n" for line in lines.strip("\n").splitlines())
    text = rewritten(HEAD + loop + indented, "MG401")
    whole = run(HEAD + loop + indented, "MG401").files[0].after.decode()
    assert run(whole, "MG401").files[0].after.decode() == whole
    got = text.split("loss.backward()\n")[1]
    return "\n".join(line.removeprefix("    ") for line in got.splitlines())


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("running += loss.item()", "running += global_mean(loss).item()"),
        ("running = running + loss.item()", "running = running + global_mean(loss).item()"),
        ("running += loss.data[0]", "running += global_mean(loss).data[0]"),
        ("running += float(loss)", "running += float(global_mean(loss))"),
        ("running += loss.detach()", "running += global_mean(loss).detach()"),
        ("x = loss.detach().cpu().numpy()", "x = global_mean(loss).detach().cpu().numpy()"),
        ("history.append(loss.item())", "history.append(global_mean(loss).item())"),
        ("print(f'{step} {loss:.3f}')", "print(f'{step} {global_mean(loss):.3f}')"),
        ("print('%f' % loss.item())", "print('%f' % global_mean(loss).item())"),
        ("meter.update(loss.item(), inputs.size(0))",
         "meter.update(global_mean(loss).item(), inputs.size(0))"),
        ("meter.update(loss.data, inputs.size(0))",
         "meter.update(global_mean(loss).data, inputs.size(0))"),
        ("running += loss.item() * inputs.size(0)",
         "running += global_sum(loss.item() * inputs.size(0))"),
        ("correct += outputs.argmax(1).eq(targets).sum().item()",
         "correct += global_sum(outputs.argmax(1).eq(targets).sum()).item()"),
        ("correct += (outputs.max(1)[1] == targets).cpu().sum()",
         "correct += global_sum((outputs.max(1)[1] == targets).cpu().sum())"),
        ("correct += torch.sum(outputs.argmax(1) == targets.data)",
         "correct += global_sum(torch.sum(outputs.argmax(1) == targets.data))"),
        ("total += len(targets)", "total += global_sum(len(targets))"),
        ("total += targets.shape[0]", "total += global_sum(targets.shape[0])"),
        ("print(step * len(inputs))", "print(step * global_sum(len(inputs)))"),
        ("acc = (outputs.argmax(1) == targets).float().mean().item() * 100",
         "acc = global_mean((outputs.argmax(1) == targets).float().mean()).item() * 100"),
        ("assert not torch.isnan(loss)", "assert not torch.isnan(global_mean(loss))"),
        ("scheduler.step(loss)", "scheduler.step(global_mean(loss))"),
        ("best = loss", "best = global_mean(loss)"),
    ],
)  # fmt: skip
def test_numbers_become_those_of_the_whole_batch(before: str, expected: str) -> None:
    assert edited(before) == expected


@pytest.mark.parametrize(
    "line",
    [
        "n_steps += 1",
        "noise = torch.randn(inputs.size(0), 2)",
        "start = time.time() - end",
        "print(step, len(train_loader), optimizer.param_groups[0]['lr'])",
        "meter.update(time.time() - end)",
        "buffer[start:start + len(inputs)] = 1",
    ],
)
def test_what_is_no_number_of_the_batch_stays(line: str) -> None:
    assert edited(line) == line


def test_a_number_is_reduced_once_where_it_is_made() -> None:
    assert edited("value = loss.item()\nrunning += value\nprint(value)").splitlines() == [
        "value = global_mean(loss).item()", "running += value", "print(value)",
    ]  # fmt: skip


def test_a_local_count_is_reduced_where_it_is_added_not_where_it_is_divided_by() -> None:
    lines = "n = targets.size(0)\nhits = (outputs.argmax(1) == targets).sum().item()\n"
    lines += "acc = hits / n\ncorrect += hits\ntotal += n\nnoise = torch.zeros(n)"
    assert edited(lines).splitlines() == [
        "n = targets.size(0)",
        "hits = (outputs.argmax(1) == targets).sum().item()",
        "acc = global_mean(hits / n)",
        "correct += global_sum(hits)",
        "total += global_sum(n)",
        "noise = torch.zeros(n)",
    ]


def test_a_part_of_the_trained_loss_is_not_touched() -> None:
    loop = """
for inputs, targets in train_loader:
    loss = 0
    for name in ("a", "b"):
        loss += criterion(model(inputs), targets)
    loss.backward()
"""
    assert edited("running += loss.item()", loop) == "running += global_mean(loss).item()"
    assert "loss += criterion(model(inputs), targets)" in rewritten(HEAD + loop, "MG401")


def test_evaluation_is_left_alone() -> None:
    code = (
        HEAD
        + LOOP
        + """
with torch.no_grad():
    for inputs, targets in val_loader:
        outputs = model(inputs)
        val_loss += criterion(outputs, targets).item()
        total += targets.size(0)
        correct += outputs.argmax(1).eq(targets).sum().item()
"""
    )
    assert findings(code, "MG401") == []


def test_one_loop_for_both_phases_adds_up_only_in_training() -> None:
    code = (
        HEAD
        + """
loaders = {x: DataLoader(sets[x], batch_size=8) for x in ["train", "val"]}
for phase in ["train", "val"]:
    for inputs, targets in loaders[phase]:
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        if phase == "train":
            loss.backward()
        running += loss.item() * inputs.size(0)
        print(loss.item())
"""
    )
    text = rewritten(code, "MG401")
    assert 'running += global_sum(loss.item() * inputs.size(0), sharded=(phase == "train"))' in text
    assert "print(global_mean(loss).item())" in text


def test_an_accuracy_function_is_reduced_at_its_training_call_only() -> None:
    code = (
        HEAD
        + """
def accuracy(output, target):
    return (output.argmax(1) == target).float().mean().item() * 100

def train():
    for inputs, targets in train_loader:
        outputs = model(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        top1.update(accuracy(outputs, targets), len(inputs))

def validate():
    for inputs, targets in val_loader:
        top1.update(accuracy(model(inputs), targets), len(inputs))
"""
    )
    text = rewritten(code, "MG401")
    assert "top1.update(global_mean(accuracy(outputs, targets)), len(inputs))" in text
    assert "top1.update(accuracy(model(inputs), targets), len(inputs))" in text
    assert "return (output.argmax(1) == target).float().mean().item() * 100" in text


def test_a_step_in_a_method_of_another_file_is_found() -> None:
    files = {
        "train.py": "import torch\nfrom trainer import Trainer\n"
        "from torch.utils.data import DataLoader\n"
        "Trainer(torch.nn.Linear(2, 2), DataLoader(data, 8)).run()\n",
        "trainer.py": "import torch\n\nclass Trainer:\n\tdef __init__(self, model, loader):\n"
        "\t\tself.model, self.loader = model, loader\n\t\tself.criterion = torch.nn.MSELoss()\n"
        "\tdef run(self):\n\t\tfor x, y in self.loader:\n"
        "\t\t\tloss = self.criterion(self.model(x), y)\n"
        "\t\t\tloss.backward()\n\t\t\tprint(loss.item())\n",
    }
    result = run(files, "MG401")
    assert "\t\t\tprint(global_mean(loss).item())\n" in after(result, "trainer.py")


def test_a_loss_from_outside_is_assumed_to_be_a_mean() -> None:
    loop = LOOP.replace("criterion(outputs, targets)", "library.loss(outputs, targets)")
    (found,) = findings(HEAD + "import library\n" + loop + "    print(loss.item())\n", "MG401")
    assert found.applicability is Applicability.POLICY
    assert "mean over the batch" in found.assumption


def test_a_sum_loss_divided_by_the_batch_is_a_mean() -> None:
    loop = LOOP.replace(
        "criterion(outputs, targets)", "F.mse_loss(outputs, targets, reduction='sum')"
    )
    assert edited("meter.update(loss.item() / inputs.size(0), 8)", loop) == (
        "meter.update(global_mean(loss.item() / inputs.size(0)), 8)"
    )
    assert edited("running += loss.item()", loop) == "running += global_sum(loss).item()"


def test_nothing_is_reduced_where_only_one_process_comes() -> None:
    code = HEAD + LOOP + "    if rank == 0:\n        print(loss.item())\n"
    (found,) = findings(code, "MG401")
    assert found.applicability is Applicability.INFO
    assert not found.edits


def test_a_number_in_a_file_that_the_main_process_writes_is_reported() -> None:
    code = HEAD + LOOP + "    torch.save({'loss': loss.item()}, 'x.pt')\n"
    (found,) = findings(code, "MG401")
    assert found.applicability is Applicability.MANUAL
    assert "global_mean(loss)" in found.advice


def test_nothing_is_reduced_under_a_condition_on_the_data() -> None:
    code = HEAD + LOOP + "    if targets.max() > 3:\n        print(loss.item())\n"
    (found,) = findings(code, "MG401")
    assert found.applicability is Applicability.MANUAL


@pytest.mark.parametrize(
    "line",
    [
        "print(reduce_mean(loss).item())",
        "dist.all_reduce(value)\n    print(value.item())",
    ],
)
def test_numbers_that_are_reduced_by_hand_are_left_alone(line: str) -> None:
    code = (
        "import torch.distributed as dist\n"
        + HEAD
        + """
def reduce_mean(value):
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()
"""
        + LOOP
        + "    value = loss.detach().clone()\n".replace("value = ", "value = 1 * ")
        + f"    {line}\n"
    )
    assert findings(code, "MG401") == []


def test_odd_formatting_survives() -> None:
    code = (
        HEAD + LOOP.rstrip() + "; running += (\n        loss\n        .item()  # the loss\n    )\n"
    )
    assert (
        "running += (\n        global_mean(loss)\n        .item()  # the loss\n    )"
        in rewritten(code, "MG401")
    )
