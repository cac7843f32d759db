"""Both loss curves in one picture, by matplotlib."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from migrate.errors import MigrateError
from migrate.verify.verdict import Verdict


def refuse_without_matplotlib(path: Path) -> None:
    """Raises MigrateError before anything is run for nothing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MigrateError(f"{path}: --plot needs matplotlib: pip install matplotlib")
    if not path.parent.is_dir():
        raise MigrateError(f"{path}: the folder of --plot is not there")


def draw(verdict: Verdict, path: Path) -> None:
    """Writes the picture; the ending of `path` says in which format."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = verdict.comparison.rows
    steps = [row.number for row in rows]
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot(steps, [row.loss_before for row in rows], label="before", linewidth=3, alpha=0.5)
    axes.plot(steps, [row.loss_after for row in rows], label="after", linewidth=1.2)
    if verdict.comparison.first_parting is not None:
        axes.axvline(verdict.comparison.first_parting.number, linestyle=":", color="gray")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("loss")
    axes.set_title(verdict.sentence, fontsize=10)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise MigrateError(f"{path}: the plot cannot be written: {error}") from None
    finally:
        pyplot.close(figure)
