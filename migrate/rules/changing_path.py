"""The forward pass uses other layers from call to call: by a random number, an argument, its input.

Why it matters: the wrapper waits for the gradient of every parameter. Layers that were left out
have none, and the next forward fails; with sharded weights a process that leaves a block out does
not join in gathering it, and training hangs.

Safety: policy. Where the wrap is seen, the wrapper looks for unused parameters in every step, which
costs a walk over the graph; `--find-unused` asks for it everywhere. Switches that are set when the
model is made, checks for None, `self.training` and arguments that are the same in every training
step are not reported.

Before::

    import random
    import torch
    import torch.nn as nn
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(2, 2)
            self.head = nn.Linear(2, 1)
        def forward(self, x):
            if random.random() < 0.8:
                x = self.block(x)
            return self.head(x)
    model = nn.DataParallel(Net())
    for images in loader:
        model(images).sum().backward()

After::

    import random
    import torch
    import torch.nn as nn
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Linear(2, 2)
            self.head = nn.Linear(2, 1)
        def forward(self, x):
            if random.random() < 0.8:
                x = self.block(x)
            return self.head(x)
    model = nn.DataParallel(Net(), find_unused_parameters=True)
    for images in loader:
        model(images).sum().backward()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import add_argument
from migrate.facts.models import parts_of, submodule_wraps
from migrate.finding import Applicability, Effect, Finding
from migrate.flow import call_arguments
from migrate.names import parameters
from migrate.rule import Context, Rule
from migrate.rules._training import Training, training, without_gradients
from migrate.source import Source
from migrate.syntax import argument, dotted, literal
from migrate.values import Class, Function, Instance

_RANDOM = re.compile(
    r"^(random|numpy\.random)\.\w+$|^torch\.(rand|randint|randn|bernoulli|randperm)$"
)
_OPTION = "find_unused_parameters"


class ChangingPath(Rule):
    """Finds branches in `forward` that leave layers out."""

    code = "MG810"
    title = "forward uses other layers from call to call"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every branch."""
        if context.target.has_wrapper and context.options.find_unused:
            return
        know = training(context)
        classes: dict[Class, bool] = {}
        for value in know.models:
            if isinstance(value, Instance):
                classes[value.cls] = True
                for part in parts_of(context.facts, value)[0]:
                    classes.setdefault(part, False)
        for cls, is_top in classes.items():
            forward = context.flow.method(cls, "forward")
            if forward is not None and forward.source.class_of(forward.node) is cls.node:
                yield from self._forward(know, cls, forward, is_top)

    def _forward(
        self, know: Training, cls: Class, forward: Function, is_top: bool
    ) -> Iterator[Finding]:
        source = forward.source
        for statement in source.inside(forward.node.body, cst.If):
            if isinstance(source.parent(statement), cst.If) or without_gradients(source, statement):
                continue
            if not self._changes(know, cls, forward, statement.test, is_top):
                continue
            used = _used_in_one(know, source, statement, forward)
            if used:
                yield from self._report(know, source, statement, sorted(used), cls)

    def _report(
        self, know: Training, source: Source, statement: cst.If, used: list[str], cls: Class
    ) -> Iterator[Finding]:
        wraps = _wraps_of(know, cls) if know.context.target.has_wrapper else []
        if wraps and all(argument(call, _OPTION) for _, call, _ in wraps):
            return
        names, test = ", ".join(used), source.one_line(statement.test)
        is_one = len(used) == 1
        message = f"{names} {'is' if is_one else 'are'} used only if {test}"
        advice = (
            "give --find-unused if a training step can leave it out"
            if know.context.target.has_wrapper
            else "decide for all processes together, so that all of them run the same layers"
        )
        if _is_random(know, source, statement.test) and not know.context.target.has_wrapper:
            advice = "draw the random number from a generator with the same seed in every process"
        if wraps and all(is_new for _, _, is_new in wraps):
            edits = [add_argument(home, call, f"{_OPTION}=True") for home, call, _ in wraps]
            yield self.finding(
                source, statement, message, edits, Applicability.POLICY, requires=["MG201"],
                assumption="training steps may leave layers out; looking for them costs some time",
            )  # fmt: skip
            return
        yield self.finding(source, statement, message, effect=Effect.UNKNOWN, advice=advice)

    def _changes(
        self, know: Training, cls: Class, forward: Function, test: cst.BaseExpression, is_top: bool
    ) -> bool:
        """Whether a condition can hold in one training step and not in another."""
        if _is_random(know, forward.source, test):
            return True
        names = [p.name.value for p in parameters(forward.node)[1:]]
        given = {n.value for n in forward.source.inside(test, cst.Name)} & set(names)
        if not given or not is_top or _is_plain_check(forward.source, test):
            return False
        return any(_varies(know, cls, forward, name) for name in given)


def _wraps_of(know: Training, cls: Class) -> list[tuple[Source, cst.Call, bool]]:
    """The calls that make models with this class parallel; whether each is DataParallel still."""
    facts = know.facts
    parts = submodule_wraps(facts)
    places = [
        (wrap.source, wrap.call, wrap.inner, not (wrap.distributed or wrap.custom))
        for wrap in facts.wraps
        if not wrap.functional and wrap not in parts
    ]
    places += [
        (source, call, facts.flow.of(source, call.args[0].value), False)
        for source, call in facts.own_wraps
    ]
    return [
        (source, call, is_new)
        for source, call, inner, is_new in places
        if any(isinstance(v, Instance) and _contains(know, v, cls) for v in inner)
    ]


def _contains(know: Training, model: Instance, cls: Class) -> bool:
    return model.cls == cls or cls in parts_of(know.facts, model)[0]


def _is_random(know: Training, source: Source, test: cst.CSTNode) -> bool:
    if any(
        _RANDOM.match(know.facts.callee(source, call) or "")
        for call in source.inside(test, cst.Call)
    ):
        return True
    for name in source.inside(test, cst.Name):
        for binding in know.reaching[source].of(name):
            value = getattr(binding.node, "value", None)
            if (
                isinstance(binding.node, cst.Assign)
                and isinstance(value, cst.Call)
                and _RANDOM.match(know.facts.callee(source, value) or "")
            ):
                return True
    return False


def _is_plain_check(source: Source, test: cst.CSTNode) -> bool:
    """A check for None, for a type or for a shape."""
    code = source.code(test)
    return bool(
        re.search(
            r"\bis (not )?None|isinstance|hasattr|\.(shape|size|dim|ndim)\b|len\(|training", code
        )
    )


def _varies(know: Training, cls: Class, forward: Function, name: str) -> bool:
    """Whether the training steps give an argument different values that can be seen."""
    params = {p.name.value: p for p in parameters(forward.node)}
    seen: set[object] = set()
    for source in know.context.sources:
        for call in know.forwards(source, source.module):
            is_own = any(
                isinstance(v, Instance) and v.cls == cls for v in know.model_of(source, call)
            )
            if (
                not is_own
                or without_gradients(source, call)
                or not know.runs_each_step(source, call)
            ):
                continue
            arg = call_arguments(call, forward, name)
            default = params[name].default
            seen.add(literal(arg.value) if arg else literal(default) if default else ...)
    return len(seen - {...}) > 1


def _used_in_one(know: Training, source: Source, statement: cst.If, forward: Function) -> set[str]:
    """The layers that one branch uses, and neither the other one nor the rest of the method."""
    branches: list[cst.CSTNode] = [statement.body]
    other: cst.If | cst.Else | None = statement.orelse
    while isinstance(other, cst.If):
        branches.append(other.body)
        other = other.orelse
    if other is not None:
        branches.append(other.body)
    used = [_layers(know, source, branch) for branch in branches]
    everywhere = set.intersection(*used) if len(used) > 1 and other is not None else set()
    start, stop = source.span(statement)
    outside = {
        name
        for name, node in _layer_calls(know, source, forward.node.body)
        if not start <= source.span(node).start < stop
    }
    if _returns_early(source, statement):
        calls = list(_layer_calls(know, source, forward.node.body))
        before = {name for name, node in calls if source.span(node).start < start}
        rest = {name for name, node in calls if source.span(node).start >= stop}
        return (used[0] ^ rest) - before
    return set().union(*used) - everywhere - outside


def _returns_early(source: Source, statement: cst.If) -> bool:
    return bool(source.inside(statement.body, cst.Return)) and statement.orelse is None


def _layers(know: Training, source: Source, node: cst.CSTNode) -> set[str]:
    return {name for name, _ in _layer_calls(know, source, node)}


def _layer_calls(
    know: Training, source: Source, node: cst.CSTNode
) -> Iterator[tuple[str, cst.CSTNode]]:
    """The calls of layers with parameters that `self` holds."""
    for call in source.inside(node, cst.Call):
        name = dotted(call.func) or ""
        if not name.startswith("self.") or name.endswith((".forward", ".eval", ".train")):
            continue
        values = know.flow.of(source, call.func)
        made = {getattr(v, "name", "") for v in values}
        if any(know.facts.is_module(v) for v in values) and not all(_EMPTY.search(n) for n in made):
            yield name, call


_EMPTY = re.compile(
    r"\.(Dropout\w*|ReLU6?|LeakyReLU|GELU|SiLU|Sigmoid|Tanh|Softmax|LogSoftmax|\w*Pool\dd|Upsample"
    r"|Identity|Flatten|\w+Loss|PixelShuffle|ELU|Softplus|Hardswish)$"
)
