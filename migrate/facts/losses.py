"""How a loss of torch becomes one number: by a mean, a sum, or not at all."""

from __future__ import annotations

import re

import libcst as cst

from migrate.flow import SAME_OBJECT, Flow
from migrate.source import Source
from migrate.syntax import argument, literal, method_name
from migrate.values import External, Instance, Made

LOSS_CLASS = re.compile(r"^torch\.nn(\.modules(\.loss)?)?\.\w+Loss$")
LOSS_FUNCTION = re.compile(
    r"^torch\.nn\.functional\.(cross_entropy|nll_loss|kl_div|\w+_loss|binary_cross_entropy\w*)$"
)
_WEIGHTED = re.compile(r"(CrossEntropyLoss|NLLLoss\w*|cross_entropy|nll_loss)$")


def loss_maker(flow: Flow, source: Source, call: cst.Call) -> tuple[Source, cst.Call, str] | None:
    """The call whose arguments say how a loss is reduced: `F.mse_loss(…)`, or `nn.MSELoss(…)`."""
    if method_name(call) in SAME_OBJECT:
        return None
    for value in flow.of(source, call.func):
        if isinstance(value, External) and LOSS_FUNCTION.match(value.name):
            return source, call, value.name
        if not isinstance(value, Made | Instance) or not isinstance(value.node, cst.Call):
            continue
        names = {value.name} if isinstance(value, Made) else set()
        if isinstance(value, Instance) and not flow.method(value.cls, "forward"):
            names = flow.bases(value.cls)[1]
        name = next(filter(LOSS_CLASS.match, names), None)
        if name is not None:
            return value.source, value.node, name
    return None


def loss_reduction(flow: Flow, source: Source, call: cst.Call) -> str | None:
    """`mean`, `ratio` (a mean over a count that depends on the data), `sum`, `none`; else None."""
    made = loss_maker(flow, source, call)
    if made is None:
        return None
    _, maker, name = made
    given = argument(maker, "reduction")
    if given is not None:
        value = literal(given.value)
        if value == "mean" or value == "elementwise_mean" or value == "batchmean":
            return "ratio" if is_weighted(maker, name) else "mean"
        return str(value) if value in ("sum", "none") else None
    for old, meaning in (("reduce", "none"), ("size_average", "sum")):
        arg = argument(maker, old)
        if arg is not None and literal(arg.value) is False:
            return meaning
    return "ratio" if is_weighted(maker, name) else "mean"


def is_weighted(maker: cst.Call, name: str) -> bool:
    """Whether a mean divides by a number that depends on the labels."""
    if not _WEIGHTED.search(name):
        return False
    index = 0 if name.endswith("Loss") else 2
    for arg in (argument(maker, "weight", index), argument(maker, "ignore_index")):
        if arg is not None and literal(arg.value) not in (None, -100):
            return True
    return False
