"""Writes what the documentation says about formats, from the formats' own declarations.

`make docs` runs it. docs/formats.md is written whole; README.md only between its markers. A test
fails when either is stale.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from ckpt.format import Format, Part
from ckpt.registry import formats

REPO = Path(__file__).resolve().parent.parent
README = REPO / "README.md"
PAGE = REPO / "docs" / "formats.md"
BEGIN, END = "<!-- formats: begin (written by make docs) -->", "<!-- formats: end -->"
HEAD = """# Formats

Written by `make docs` from the modules in `ckpt/formats/`; edit those.

"""


def holds(item: Format) -> str:
    if item.keeps == frozenset(Part):
        return "weights, optimizer, job"
    return ", ".join(sorted(part.value for part in item.keeps))


def table() -> str:
    rows = ["| `--to` | format | read | write | holds |", "|---|---|:-:|:-:|---|"]
    for item in formats():
        names = ", ".join(f"`{name}`" for name in (item.name, *item.aliases)) if item.plan else ""
        marks = ("yes" if item.read else "", "yes" if item.plan else "")
        rows.append(f"| {names} | {item.title} | {marks[0]} | {marks[1]} | {holds(item)} |")
    return "\n".join(rows) + "\n"


def module_text(item: Format) -> str:
    home = item.plan or item.read
    module = importlib.import_module(home.__module__) if home else None
    return inspect.getdoc(module) or ""


def page() -> str:
    parts = [f"## {item.title}\n\n{module_text(item)}\n" for item in formats()]
    return HEAD + table() + "\n" + "\n".join(parts)


def readme(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(readme(README.read_text()))
