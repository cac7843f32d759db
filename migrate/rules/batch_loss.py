"""The loss compares the samples of a batch with each other.

Why it matters: contrastive and triplet losses, mining, and statistics over the batch see only a
part of it after the rewrite, with fewer negatives, and the average over the processes does not make
up for that. DataParallel did not have this: the loss was computed on its gathered outputs.

Safety: reported only. Features must be gathered with gradients before the loss.

Before::

    for inputs in DataLoader(dataset, batch_size=8):
        features = model(inputs)
        similarity = torch.mm(features, features.t())
        loss = similarity.logsumexp(1).mean()
        loss.backward()

Finding::

    MG404 the loss compares the samples of a batch with each other: torch.mm(features, features.t())
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.batchwise import Batchwise
from migrate.facts.batchwise import batchwise as shared_batchwise
from migrate.facts.kinds import Kind
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, literal, method_name, receiver

_PRODUCT = re.compile(r"^torch\.(mm|matmul|einsum|cdist|nn\.functional\.cosine_similarity)$")
_STATISTIC = frozenset({"std", "var", "cov", "corrcoef"})
_ADVICE = (
    "gather the features of all processes with torch.distributed.nn.functional.all_gather, "
    "which gradients pass, and compute the loss on all of them"
)


class BatchLoss(Rule):
    """Finds losses that are not a mean of what each sample contributes."""

    code = "MG404"
    title = "the loss compares the samples of a batch with each other"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every function that does so; one for every mix of samples."""
        batchwise = shared_batchwise(context.facts)
        seen: set[object] = set()
        for source, expression in batchwise.trained_expressions:
            nodes = [
                *source.inside(expression, cst.Call),
                *source.inside(expression, cst.BinaryOperation),
            ]
            for node in nodes:
                where = (source, source.function_of(node))
                if where in seen or batchwise.is_in_model(source, node):
                    continue
                if _compares(context, batchwise, source, node) and not _gathers(
                    context, source, node
                ):
                    seen.add(where)
                    yield self._compared(source, node)
        yield from self._mixes(context, batchwise)

    def _compared(self, source: Source, node: cst.CSTNode) -> Finding:
        code = source.one_line(node)
        message = f"the loss compares the samples of a batch with each other: {code}"
        return self.finding(source, node, message, effect=Effect.DIFFERENT, advice=_ADVICE)

    def _mixes(self, context: Context, batchwise: Batchwise) -> Iterator[Finding]:
        """MixUp and the like: each process mixes its own part."""
        for source, call in context.facts.calls_of(
            r"^(torch\.randperm|numpy\.random\.permutation)$"
        ):
            value = batchwise.of(source, call.args[0].value if call.args else None)
            if value.kind is Kind.COUNT and not batchwise.is_whole(value):
                yield self.finding(
                    source,
                    call,
                    f"{source.code(call)} mixes the samples of this process's part of the batch",
                    applicability=Applicability.INFO,
                    effect=Effect.UNKNOWN,
                    advice="nothing to do: pairs are drawn from the part, not from the whole batch",
                )


def _compares(context: Context, batchwise: Batchwise, source: Source, node: cst.CSTNode) -> bool:
    if isinstance(node, cst.BinaryOperation):
        is_product = isinstance(node.operator, cst.MatrixMultiply)
        return is_product and _is_square(batchwise, source, node.left, node.right)
    if not isinstance(node, cst.Call):
        return False
    full = context.facts.callee(source, node) or ""
    values = [arg.value for arg in node.args]
    made = context.flow.made_by(source, node.func)
    if any(item.name.startswith("pytorch_metric_learning.") for item in made):
        return True
    if _PRODUCT.match(full) and len(values) > 1:
        pair = values[-2:] if full.endswith("einsum") else values[:2]
        return _is_product(batchwise, source, full, node, pair)
    if method_name(node) in ("mm", "matmul") and values:
        owner = receiver(node)
        return owner is not None and not full and _is_square(batchwise, source, owner, values[0])
    if method_name(node) in ("addmm_", "addmm") and len(values) > 1:
        return _is_square(batchwise, source, values[-2], values[-1])
    return _is_statistic(batchwise, source, node, full)


def _is_product(
    batchwise: Batchwise, source: Source, full: str, call: cst.Call, pair: list[cst.BaseExpression]
) -> bool:
    data = all(batchwise.of(source, item).kind is Kind.DATA for item in pair)
    if full.endswith("einsum"):
        spelled = literal(call.args[0].value)
        return data and isinstance(spelled, str) and bool(
            re.match(r"^\s*(\w)(\w)\s*,\s*(?!\1)(\w)\2\s*->\s*\1\3\s*$", spelled)
        )  # fmt: skip
    if full.endswith("cdist"):
        return data
    if full.endswith("cosine_similarity"):
        spread = {literal(p.args[0].value) for p in pair if isinstance(p, cst.Call)
                  and method_name(p) == "unsqueeze" and p.args}  # fmt: skip
        return data and spread == {0, 1}
    return _is_square(batchwise, source, *pair)


def _is_square(
    batchwise: Batchwise, source: Source, left: cst.BaseExpression, right: cst.BaseExpression
) -> bool:
    """Samples times transposed samples."""
    both = all(batchwise.of(source, side).kind is Kind.DATA for side in (left, right))
    return both and _is_transposed(right) and not _is_transposed(left)


def _is_transposed(node: cst.BaseExpression) -> bool:
    """`x.t()`, `x.T`, `x.transpose(0, 1)`: the batch is the second dimension."""
    if isinstance(node, cst.Attribute):
        return node.attr.value in ("T", "mT")
    if not isinstance(node, cst.Call):
        return False
    dims = [literal(arg.value) for arg in node.args]
    name = method_name(node)
    if name in ("contiguous", "float", "detach"):
        inner = receiver(node)
        return inner is not None and _is_transposed(inner)
    return (name == "t" and not dims) or (
        name in ("transpose", "permute") and sorted(map(str, dims)) == ["0", "1"]
    )


def _is_statistic(batchwise: Batchwise, source: Source, call: cst.Call, full: str) -> bool:
    """`x.std(0)`, `torch.cov(x.T)`: a spread over the batch."""
    name = full.rpartition(".")[2] if full.startswith("torch.") else method_name(call)
    owner = call.args[0].value if full and call.args else receiver(call)
    if name not in _STATISTIC or owner is None or batchwise.of(source, owner).kind is not Kind.DATA:
        return False
    if name in ("cov", "corrcoef"):
        return True
    dim = argument(call, "dim", 1 if full else 0)
    return dim is not None and literal(dim.value) == 0


def _gathers(context: Context, source: Source, node: cst.CSTNode) -> bool:
    """Whether the function gathers from all processes already, or is given what was gathered."""
    function = source.function_of(node)
    places = [(source, function or source.module)]
    if function is not None:
        places += [
            (s, s.function_of(c) or s.module) for s, c in context.facts.callers.get(function, [])
        ]
    for home, place in places:
        for call in home.inside(place, cst.Call):
            full = context.facts.callee(home, call) or ""
            inner = context.flow.callees.get(call, ())
            if "all_gather" in full or any("all_gather" in f.source.code(f.node) for f in inner):
                return True
    return False
