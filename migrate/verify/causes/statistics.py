"""BatchNorm normalises with the statistics of a part of the batch."""

from __future__ import annotations

from collections.abc import Iterator

from migrate.verify.cause import Cause, Place
from migrate.verify.comparison import Comparison


def find(c: Comparison) -> Iterator[Cause]:
    """Layers that trained unsynchronised, or whose running statistics differ."""
    kinds = c.ranks[0].batch_norms if c.ranks else {}
    plain = {kind: count for kind, count in kinds.items() if kind != "SyncBatchNorm"}
    if plain and c.world_size > 1:
        yield _as_replicas(plain) if _original_has_replicas(c) else _unsynchronised(plain)
    last = c.first_parting.number if c.first_parting else len(c.rows)
    for row in c.rows[:last]:  # after that, other weights make other statistics
        mine, theirs = row.before.batch_norm, row.after[0].batch_norm
        if mine is not None and theirs is not None and not c.close(mine, theirs):
            yield _buffers(row.number, mine, theirs)
            return


def _original_has_replicas(c: Comparison) -> bool:
    wrapped = any("DataParallel" in rank.wraps for rank in c.original.ranks.values())
    return wrapped and c.data_parallel != "whole"


def _names(plain: dict[str, int]) -> str:
    return ", ".join(sorted(plain))


def _as_replicas(plain: dict[str, int]) -> Cause:
    return Cause(
        Place.STATISTICS,
        "batch-norm-by-process",
        "BatchNorm is not synchronised: each process normalises with its own part of the batch, "
        "as DataParallel's replicas did",
        _names(plain),
        is_note=True,
    )


def _unsynchronised(plain: dict[str, int]) -> Cause:
    return Cause(
        Place.STATISTICS,
        "batch-norm-not-synchronised",
        "BatchNorm is not synchronised: each process normalises with its own part of the batch",
        f"{_names(plain)} trained in every process; the original normalised whole batches",
        "nn.SyncBatchNorm.convert_sync_batchnorm(model) before the wrap",
    )


def _buffers(step: int, mine: float, theirs: float) -> Cause:
    return Cause(
        Place.STATISTICS,
        "batch-norm-buffers",
        "the running statistics of BatchNorm differ",
        f"after step {step}: {mine:.6g} in the original, {theirs:.6g} here (sum of magnitudes)",
        "synchronise BatchNorm, and load buffers on every process",
    )
