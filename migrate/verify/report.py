"""A verdict as text and as JSON. Nothing here prints."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from migrate.verify.cause import Cause
from migrate.verify.comparison import Row
from migrate.verify.verdict import Verdict

if TYPE_CHECKING:
    from rich.table import Table

SHOWN = 20
"""Rows of the table; of longer runs the first ones, those round the parting and the last ones."""


def as_json(verdict: Verdict) -> str:
    """Everything, for programs."""
    c = verdict.comparison
    content = {
        "same": verdict.is_same,
        "verdict": verdict.sentence,
        "tolerance": c.tolerance,
        "first_difference": c.first_parting and c.first_parting.number,
        "causes": [_cause(cause) for cause in verdict.causes],
        "notes": [_cause(cause) for cause in verdict.notes],
        "steps": [_step(row) for row in c.rows],
        "weights": c.final and {"largest_difference": c.final.difference, "where": c.final.where},
        "files": [asdict(file) for file in (c.final.files if c.final else ())],
        "conditions": list(verdict.conditions),
    }
    return json.dumps(_finite(content), indent=2) + "\n"


def table(verdict: Verdict) -> Table:
    """The steps, for a terminal."""
    from rich.table import Table

    c = verdict.comparison
    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("step", "loss before", "loss after", "difference", "gradient", "rate", "samples"):
        made.add_column(name, justify="right")
    parting = c.first_parting.number if c.first_parting else 0
    previous = 0
    for row in _shown(c.rows, parting):
        if row.number != previous + 1:
            made.add_row("…")
        previous = row.number
        made.add_row(*_cells(row), style="bold red" if row.number == parting else "")
    return made


def lines(verdict: Verdict) -> list[str]:
    """What is said below the table: causes, notes, conditions, and the verdict at the end."""
    c = verdict.comparison
    found = []
    for number, cause in enumerate(verdict.causes):
        heading = "most likely cause" if number == 0 else "also"
        found += [f"{heading}: {cause.title}", f"  {cause.evidence}"]
        found += [f"  to do: {cause.advice}"] if cause.advice else []
    found += [f"note: {note.title} ({note.evidence})" for note in verdict.notes]
    if c.final is not None:
        where = f" ({c.final.where})" if c.final.where else ""
        found.append(f"weights at the end: largest difference {c.final.difference:.2g}{where}")
        found += [_file_line(file.path, file.unread, file.problem) for file in c.final.files]
    found += [f"run with: {condition}" for condition in verdict.conditions]
    return [*found, f"tolerance {c.tolerance:g}, relative", verdict.sentence]


def _file_line(path: str, unread: str, problem: str) -> str:
    if unread:
        return f"{path}: not compared, it {unread}"
    return f"{path}: {problem}" if problem else f"{path}: same names, shapes and types in both"


def _shown(rows: tuple[Row, ...], parting: int) -> list[Row]:
    if len(rows) <= SHOWN:
        return list(rows)
    near = {*range(1, 6), *range(parting - 3, parting + 6), *range(len(rows) - 4, len(rows) + 1)}
    return [row for row in rows if row.number in near]


def _cells(row: Row) -> list[str]:
    after = {step.lr for step in row.after}
    rate = _rates(row.before.lr) if after == {row.before.lr} else (
        f"{_rates(row.before.lr)} | {' '.join(_rates(lr) for lr in sorted(after))}"
    )  # fmt: skip
    samples = "+".join(str(step.samples) for step in row.after)
    return [
        str(row.number),
        f"{row.loss_before:.6g}",
        f"{row.loss_after:.6g}",
        f"{row.loss_after - row.loss_before:.1e}",
        f"{row.norm_before:.4g} | {row.norm_after:.4g}",
        rate,
        f"{row.before.samples} | {samples}",
    ]


def _rates(rates: tuple[float, ...]) -> str:
    return ",".join(f"{rate:.4g}" for rate in dict.fromkeys(rates))


def _cause(cause: Cause) -> dict[str, Any]:
    names = ("name", "title", "evidence", "advice")
    return {name: getattr(cause, name) for name in names}


def _step(row: Row) -> dict[str, Any]:
    return {
        "step": row.number,
        "optimizer": row.before.optimizer,
        "at": row.before.at,
        "loss": [row.loss_before, row.loss_after],
        "gradient_norm": [row.norm_before, row.norm_after],
        "weights_norm": [row.weights_before, row.weights_after],
        "lr": [list(row.before.lr), [list(step.lr) for step in row.after]],
        "samples": [row.before.samples, [step.samples for step in row.after]],
    }


def _finite(content: Any) -> Any:
    """JSON has neither NaN nor infinity: they become their names."""
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return content
