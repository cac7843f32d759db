"""BatchNorm layers are looked for by their class after they became SyncBatchNorm.

Why it matters: SyncBatchNorm is not a BatchNorm2d. `isinstance(m, nn.BatchNorm2d)` is false for
every layer from then on, so that frozen statistics are not frozen, and weight decay reaches them.

Safety: safe. The class is added to those that are asked for. Checks that run before the model is
made parallel, or that ask for the common base class, are left alone.

Before::

    model = nn.DataParallel(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()

After::

    model = nn.DataParallel(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    for m in model.modules():
        if isinstance(m, (nn.BatchNorm2d, nn.SyncBatchNorm)):
            m.eval()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, Text, replace
from migrate.facts.models import may_have_batch_norm
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, training
from migrate.source import Source
from migrate.syntax import dotted

_CLASS = re.compile(r"^torch\.nn\.(modules\.(batchnorm\.)?)?BatchNorm[123]d$")
_BASE = re.compile(r"(^|\.)(_BatchNorm|_NormBase|SyncBatchNorm)$")


class BatchNormCheck(Rule):
    """Finds `isinstance(m, nn.BatchNorm2d)` below the wrap."""

    code = "MG814"
    title = "BatchNorm is looked for by its class"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every check."""
        if context.options.batch_norm == "keep":
            return
        know = training(context)
        values = frozenset(v for wrap in context.facts.wraps for v in wrap.inner) | know.models
        if not may_have_batch_norm(context.facts, values):
            return
        for source, call in context.facts.calls_of(r"^(isinstance|issubclass)$"):
            if len(call.args) == 2:
                yield from self._asked(context, know, source, call, call.args[1].value)
        for source in context.sources:
            for comparison in source.all(cst.Comparison):
                if source.code(comparison.left).startswith("type("):
                    yield from self._compared(context, know, source, comparison)

    def _asked(
        self, context: Context, know: Training, source: Source, node: cst.CSTNode,
        kinds: cst.BaseExpression,
    ) -> Iterator[Finding]:  # fmt: skip
        elements = kinds.elements if isinstance(kinds, cst.Tuple) else ()
        given = [element.value for element in elements] or [kinds]
        names = [context.flow.qualified(source, item) or source.code(item) for item in given]
        if not any(_CLASS.match(n) for n in names) or any(_BASE.search(n) for n in names):
            return
        if self._is_asked_too(source, node) or not know.is_after_wrap(source, node):
            return
        first = next(g for g, n in zip(given, names, strict=True) if _CLASS.match(n))
        added = _sync_name(context, source, first)
        if elements:
            stop = source.span(given[-1]).stop
            edits: list[Edit] = [Text(source, stop, stop, f", {added}")]
        else:
            edits = [replace(source, kinds, f"({source.code(kinds)}, {added})")]
        yield self._found(context, source, node, edits)

    def _compared(
        self, context: Context, know: Training, source: Source, node: cst.Comparison
    ) -> Iterator[Finding]:
        """`type(m) == nn.BatchNorm2d`."""
        target = node.comparisons[0]
        kinds = target.comparator
        if isinstance(kinds, cst.Tuple | cst.List):
            if isinstance(target.operator, cst.In):
                as_tuple = cst.Tuple(kinds.elements) if isinstance(kinds, cst.List) else kinds
                yield from self._asked(context, know, source, node, as_tuple)
            return
        name = context.flow.qualified(source, kinds) or ""
        if not _CLASS.match(name) or not know.is_after_wrap(source, node):
            return
        if isinstance(target.operator, cst.Equal | cst.Is) and not self._is_asked_too(source, node):
            start, stop = source.span(target.operator)
            both = f"({source.code(kinds)}, {_sync_name(context, source, kinds)})"
            edits: list[Edit] = [Text(source, start, stop, "in"), replace(source, kinds, both)]
            yield self._found(context, source, node, edits)

    def _found(
        self, context: Context, source: Source, node: cst.CSTNode, edits: list[Edit]
    ) -> Finding:
        is_bound = "torch" in context.flow.names[source].module_names
        if not is_bound and any("torch.nn.Sync" in getattr(e, "text", "") for e in edits):
            _, need = context.helper(source, context.target.wrap)
            edits = [*edits, need]
        message = f"{source.code(node)} asks for SyncBatchNorm, too: the layers become that"
        return self.finding(source, node, message, edits)

    @staticmethod
    def _is_asked_too(source: Source, node: cst.CSTNode) -> bool:
        """Whether the same condition asks for SyncBatchNorm already."""
        statement = source.around(node, cst.If, cst.IfExp, cst.SimpleStatementLine)
        return statement is not None and "SyncBatchNorm" in source.code(
            getattr(statement, "test", statement)
        )


def _sync_name(context: Context, source: Source, kind: cst.BaseExpression) -> str:
    """How SyncBatchNorm is written here."""
    code = dotted(kind) or ""
    prefix = code.rpartition(".")[0]
    if prefix and isinstance(kind, cst.Attribute):
        base = context.flow.qualified(source, kind.value)
        if base == "torch.nn":
            return f"{prefix}.SyncBatchNorm"
    return "torch.nn.SyncBatchNorm"
