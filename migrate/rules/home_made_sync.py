"""BatchNorm comes from a library that synchronises it over DataParallel's copies.

Why it matters: these layers exchange statistics between the threads of one process. With a process
per device they see their own part of the batch only, some fail, and converting the model to
SyncBatchNorm does not reach them.

Safety: not edited: names of parameters in files, and arguments, may differ.

Before::

    import torch
    import torch.nn as nn
    from sync_batchnorm import SynchronizedBatchNorm2d
    model = nn.DataParallel(nn.Sequential(SynchronizedBatchNorm2d(8)))

Finding::

    MG816 SynchronizedBatchNorm2d synchronises over DataParallel's copies only
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.values import Class, External

_LAYER = re.compile(
    r"(^|\.)(_?SynchronizedBatchNorm(\dd?)?|InPlaceABN(Sync)?|ABN|BatchNorm\dd?Sync|SyncBN\w*"
    r"|patch_replication_callback|DataParallelWithCallback)$"
)


class HomeMadeSync(Rule):
    """Finds layers and wrappers of sync-BatchNorm libraries."""

    code = "MG816"
    title = "a library's own synchronised BatchNorm"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every name of such a library in a file that is used."""
        seen: set[tuple[Source, str]] = set()
        for source, call in context.facts.calls():
            names = [call.func, *(arg.value for arg in call.args)]
            for node in names:
                name = self._layer(context, source, node)
                if name is not None and (source, name) not in seen:
                    seen.add((source, name))
                    yield self._report(source, node, name)

    def _layer(self, context: Context, source: Source, node: cst.BaseExpression) -> str | None:
        for value in (
            context.flow.of(source, node) if isinstance(node, cst.Name | cst.Attribute) else ()
        ):
            name = value.name if isinstance(value, External) else ""
            if isinstance(value, Class):
                name = value.node.name.value
            if name.startswith("torch."):
                continue
            if _LAYER.search(name) or name == "apex.parallel.SyncBatchNorm":
                return name.rpartition(".")[2]
        return None

    def _report(self, source: Source, node: cst.BaseExpression, name: str) -> Finding:
        is_callback = name in ("patch_replication_callback", "DataParallelWithCallback")
        advice = "use nn.BatchNorm2d (or 1d, 3d); the model is converted to SyncBatchNorm"
        if is_callback:
            advice = "take it out, and use nn.BatchNorm2d for the library's BatchNorm layers"
        return self.finding(
            source, node, f"{name} synchronises over DataParallel's copies only",
            effect=Effect.DIFFERENT, advice=advice,
        )  # fmt: skip
