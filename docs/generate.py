"""Writes what the documentation says about formats and rules, from their own declarations.

`make docs` runs it. docs/formats.md and docs/rules.md are written whole; README.md only between its
markers. A test fails when one is stale.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from ckpt.format import Format, Part
from ckpt.registry import formats
from migrate.registry import rules

REPO = Path(__file__).resolve().parent.parent
README = REPO / "README.md"
PAGE = REPO / "docs" / "formats.md"
RULES_PAGE = REPO / "docs" / "rules.md"
BEGIN, END = "<!-- formats: begin (written by make docs) -->", "<!-- formats: end -->"
HEAD = """# Formats

Written by `make docs` from the modules in `ckpt/formats/`; edit those.

"""
RULES_HEAD = """# Rules of `migrate rewrite`

Written by `make docs` from the modules in `migrate/rules/`; edit those. Every example is executed
by a test. `migrate rules CODE` shows the same text.

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


def rules_page() -> str:
    rows = ["| rule | finds |", "|---|---|"]
    parts = []
    for rule in rules():
        rows.append(f"| [{rule.code}](#{rule.code.lower()}) | {rule.title} |")
        text = inspect.getdoc(inspect.getmodule(type(rule))) or ""
        parts.append(f"## {rule.code}\n\n{fenced(text)}\n")
    return RULES_HEAD + "\n".join(rows) + "\n\n" + "\n".join(parts)


def fenced(text: str) -> str:
    """`Before::` and an indented block as Markdown has them."""
    pieces = re.split(r"^(\w+)::\n\n((?:(?:    .*)?\n)*(?:    .*)?)", text, flags=re.M)
    result = pieces[0]
    for word, block, rest in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        code = "\n".join(line[4:] for line in block.strip("\n").splitlines())
        language = "" if word == "Finding" else "python"
        result += f"{word}:\n\n```{language}\n{code}\n```\n\n{rest.lstrip()}"
    return result.rstrip("\n") + "\n"


def readme(text: str) -> str:
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
    RULES_PAGE.write_text(rules_page())
    README.write_text(readme(README.read_text()))
