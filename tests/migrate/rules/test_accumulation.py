"""Rule MG405: gradients are accumulated over several batches."""

from __future__ import annotations

import textwrap

import pytest
from rewriting import findings, rewritten

from migrate.finding import Applicability, Finding
from migrate.rule import Options

HEAD = """
model = nn.DataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """
for step, x in enumerate(DataLoader(data, batch_size=8)):
    loss = model(x).mean() / 4
    loss.backward()
    if (step + 1) % 4 == 0:
        optimizer.step()
        optimizer.zero_grad()
"""
CODE = HEAD + LOOP
STEP = "    if (step + 1) % 4 == 0:\n        optimizer.step()\n        optimizer.zero_grad()\n"
FORWARD = "    loss = model(x).mean() / 4\n"
BOTH = pytest.mark.parametrize("to", ["ddp", "fsdp"])


def said(code: str, to: str = "ddp", options: Options | None = None) -> Finding:
    (found,) = findings(code, "MG405", to, options)
    return found


def reason(code: str, to: str = "ddp", options: Options | None = None) -> str:
    """Why a piece of code stays as it is."""
    found = said(code, to, options)
    assert found.applicability is Applicability.INFO and not found.edits
    assert rewritten(code, "MG405", to, options).strip() == textwrap.dedent(code).strip()
    return found.advice.partition("not edited: ")[2]


def written(code: str, to: str = "ddp") -> str:
    """The inserted lines, each with the one below it."""
    assert said(code, to).applicability is Applicability.SAFE
    lines = rewritten(code, "MG405", to).splitlines()
    found = [i for i, line in enumerate(lines) if "sync_gradients(" in line]
    assert len(lines) - len(found) == len(textwrap.dedent(code).strip().splitlines())
    return "\n".join(f"{lines[i].strip()} | {lines[i + 1].strip()}" for i in found)


@BOTH
def test_only_the_last_batch_before_a_step_is_averaged(to: str) -> None:
    line = "sync_gradients(model, (step + 1) % 4 == 0) | loss = model(x).mean() / 4"
    assert written(CODE, to) == line


def test_where_weights_are_sharded_the_memory_is_said() -> None:
    assert "memory" in said(CODE, "fsdp").message
    assert "memory" not in said(CODE, "ddp").message


@BOTH
def test_once_is_enough(to: str) -> None:
    once = rewritten(CODE, "MG405", to)
    assert findings(once, "MG405", to) == []
    assert rewritten(once, "MG405", to) == once


def test_a_step_in_every_batch_is_no_accumulation() -> None:
    assert findings(CODE.replace("(step + 1) % 4 == 0", "scaled"), "MG405") == []


@pytest.mark.parametrize(
    "by_hand",
    ["with model.no_sync():\n        loss.backward()",
     "model.set_requires_gradient_sync(step % 4 == 3)\n    loss.backward()"],
)  # fmt: skip
def test_what_is_done_already_is_not_repeated(by_hand: str) -> None:
    assert findings(CODE.replace("loss.backward()", by_hand), "MG405") == []


# Conditions


@pytest.mark.parametrize(
    "test",
    ["step % k == k - 1", "not (step + 1) % 4", "(step + 1) % args.accum == 0",
     '(step + 1) % config["accum"] == 0', "step > 0 and step % 4 == 0",
     "(step + 1) % 4 == 0 or step + 1 == len(loader)"],
)  # fmt: skip
def test_every_spelling_of_the_condition_is_taken_over(test: str) -> None:
    assert written(CODE.replace("(step + 1) % 4 == 0", test)).startswith(
        f"sync_gradients(model, {test}) | loss"
    )


def test_a_condition_over_two_lines_is_written_on_one() -> None:
    code = CODE.replace("if (step + 1) % 4 == 0:", "if ((step + 1) % 4 == 0\n            or last):")
    assert written(code).startswith("sync_gradients(model, (step + 1) % 4 == 0 or last) | ")


@pytest.mark.parametrize(
    ("test", "now"),
    [("(step + 1) % 4", "((step + 1) % 4) == 0"), ("(step + 1) % 4 != 0", "(step + 1) % 4 == 0"),
     ("step % 4 != 3 and step != last", "not (step % 4 != 3 and step != last)")],
)  # fmt: skip
def test_a_continue_above_the_step_is_the_same_the_other_way_round(test: str, now: str) -> None:
    rest = "    optimizer.step()\n    optimizer.zero_grad()\n"
    code = CODE.replace(STEP, f"    if {test}:\n        continue\n{rest}")
    assert written(code).startswith(f"sync_gradients(model, {now}) | loss")


def test_a_name_for_the_condition_is_used_where_it_is_known() -> None:
    named = CODE.replace("if (step + 1) % 4 == 0:", "if now:")
    early = named.replace(FORWARD, "    now = (step + 1) % 4 == 0\n" + FORWARD)
    late = named.replace("    if now", "    now = (step + 1) % 4 == 0\n    if now")
    assert written(early).startswith("sync_gradients(model, (step + 1) % 4 == 0) | now")
    assert written(late).startswith("sync_gradients(model, (step + 1) % 4 == 0) | loss")


def test_a_counter_counts_before_the_forward_pass_or_it_stays() -> None:
    loop = "number = 0\nwhile number < 9:\n" + LOOP.split("\n", 2)[2]
    code = HEAD + loop.replace("(step + 1)", "number")
    early = code.replace(FORWARD, "    number += 1\n" + FORWARD)
    late = code.replace("    if number", "    number += 1\n    if number")
    assert written(early) == "sync_gradients(model, number % 4 == 0) | loss = model(x).mean() / 4"
    assert "number changes" in reason(late)


@pytest.mark.parametrize(
    ("test", "why"),
    [("(step + 1) % 4 == 0 and ready()", "ready() is called"),
     ("(step + 1) % counts[0] == 0", "counts[0] may change"),
     ("x.sum() % 2 == 0", "x.sum() is called"), ("step % 4 == 0 and x > 0", "x may differ")],
)  # fmt: skip
def test_a_condition_that_cannot_be_asked_earlier_stays(test: str, why: str) -> None:
    assert why in reason(CODE.replace("(step + 1) % 4 == 0", test))


def test_an_attribute_that_a_called_method_changes_is_not_known_earlier() -> None:
    code = """
    class Trainer:
        def __init__(self):
            self.count = 0
            self.model = nn.DataParallel(nn.Linear(2, 1))
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

        def note(self):
            self.count += 1

        def train(self, loader):
            for x in loader:
                self.model(x).mean().backward()
                self.note()
                if self.count % 4 == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
    """
    assert "self.count changes" in reason(code)
    constant = code.replace("self.note()", "pass")
    assert written(constant).startswith("sync_gradients(self.model, self.count % 4 == 0) | ")


# Models


def test_the_forward_pass_may_be_in_a_function() -> None:
    code = """
    def loss_of(net, x):
        if x is None:
            return net(x).sum()
        with torch.autocast("cuda"):
            return net(x).mean()
    """ + textwrap.indent(CODE.replace("model(x).mean()", "loss_of(model, x)"), "    ")
    assert written(code).startswith("sync_gradients(model, (step + 1) % 4 == 0) | loss")
    rare = code.replace("return net(x).sum()", "return x")
    assert "model may not be trained" in reason(rare)


def test_both_branches_of_mixed_precision_are_one_forward_pass() -> None:
    forward = (
        "    if amp:\n        loss = model(x).mean()\n    else:\n        loss = model(x).sum()\n"
    )
    backward = ("    if amp:\n        scaler.scale(loss).backward()\n    else:\n"
                "        loss.backward()\n")  # fmt: skip
    code = CODE.replace(FORWARD, forward).replace("    loss.backward()\n", backward)
    step = "if amp:\n            scaler.unscale_(optimizer)\n            scaler.step(optimizer)\n"
    code = code.replace("        optimizer.step()\n", f"        {step}        optimizer.step()\n")
    assert written("scaler = torch.amp.GradScaler()\n" + code).endswith(" | if amp:")


def test_two_models_are_two_lines() -> None:
    code = """
    first = nn.DataParallel(nn.Linear(2, 2))
    second = nn.DataParallel(nn.Linear(2, 2))
    params = list(first.parameters()) + list(second.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1)
    """ + textwrap.indent(LOOP.replace("model(x)", "second(first(x))"), "    ")
    every = rewritten(code, "MG405").count("sync_gradients(")
    assert said(code).applicability is Applicability.SAFE and every == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [("model(x)", "model.module(x)", "which model"),
     (FORWARD, "    if step % 2:\n        loss = model(x).mean()\n", "may not be trained"),
     (FORWARD, "    for net in [model]:\n        loss = net(x).mean()\n", "which model"),
     ("    loss.backward()", "    if loss > 0:\n        loss.backward()", "may be left out"),
     ("    loss.backward()", "    loss.backward()\n    model(x).sum().backward()", "several")],
)  # fmt: skip
def test_a_turn_that_may_do_without_a_model_stays(old: str, new: str, why: str) -> None:
    assert why in reason(CODE.replace(old, new))


# Gradients


@pytest.mark.parametrize(
    ("line", "why"),
    [("nn.utils.clip_grad_norm_(model.parameters(), 1.0)", "reads or changes gradients"),
     ("print(model.module.weight.grad)", "reads or changes gradients"),
     ("if step % 3 == 0: optimizer.step()", "takes a step as well")],
)  # fmt: skip
def test_gradients_that_are_used_at_another_time_are_averaged(line: str, why: str) -> None:
    place = "    loss.backward()\n"
    assert why in reason(CODE.replace(place, f"{place}    {line}\n"))
    assert said(CODE.replace("        optimizer.step()", f"        {line.split(': ')[-1]}\n"
                             "        optimizer.step()")).edits  # fmt: skip


def test_a_step_for_what_is_left_over_after_the_loop_stays() -> None:
    assert "takes a step as well" in reason(CODE + "optimizer.step()\n")


def test_a_second_loop_that_trains_the_model_in_every_batch_keeps_the_first_as_it_is() -> None:
    second = "for x in loader:\n    model(x).mean().backward()\n"
    assert "may train the same model" in reason(CODE + second)


def test_schedulers_are_no_steps() -> None:
    assert said(CODE + "scheduler.step()\n").edits


@pytest.mark.parametrize(("end", "is_right"), [("", False), (" or step + 1 == len(loader)", True)])
def test_sharded_gradients_must_not_be_left_over_where_others_are_cleared(
    end: str, is_right: bool
) -> None:
    loop = LOOP.replace("DataLoader(data, batch_size=8)", "loader").replace("== 0:", f"== 0{end}:")
    epochs = "for epoch in range(3):\n    optimizer.zero_grad()" + textwrap.indent(loop, "    ")
    assert said(HEAD + epochs, "ddp").edits
    assert bool(said(HEAD + epochs, "fsdp").edits) is is_right
    broken = epochs.replace(
        "        if (", "        if x is None:\n            break\n        if ("
    )
    assert "zero_grad() of line" in reason(HEAD + broken, "fsdp")


def test_apex_unscales_gradients_after_every_backward() -> None:
    scaled = "    with amp.scale_loss(loss, optimizer) as scaled:\n        scaled.backward()"
    assert "apex" in reason(CODE.replace("    loss.backward()", scaled))


def test_buffers_that_are_shared_with_gradients_stay_the_same() -> None:
    code = CODE.replace("nn.Linear(2, 1)", "nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))")
    assert said(code).edits
    assert "BatchNorm" in reason(code, options=Options(batch_norm="keep"))
    assert said(code, "fsdp", Options(batch_norm="keep")).edits


@pytest.mark.parametrize("write", ["self.seen = self.seen + 1", "self.seen += 1",
                                   "self.seen[0] = 1", "self.seen.data.add_(1)"])  # fmt: skip
def test_buffers_that_the_model_writes_are_shared_in_every_batch(write: str) -> None:
    net = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.fc = nn.Linear(2, 1)

    def forward(self, x):
        {write}
        return self.fc(x) + self.seen[0]
"""
    code = net + CODE.replace("nn.Linear(2, 1)", "Net()")
    assert "the buffer seen" in reason(code)
    assert said(code.replace(write, "pass")).edits


def test_tabs_stay_tabs() -> None:
    code = CODE.replace("    ", "\t")
    assert "\n\tsync_gradients(model, (step + 1) % 4 == 0)\n\tloss" in rewritten(code, "MG405")
