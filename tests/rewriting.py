"""What tests of the rewriter share: rewrite a piece of code, look at what came out."""

from __future__ import annotations

import textwrap
from pathlib import Path

import libcst as cst

from migrate.api import Choice, Result, rewrite
from migrate.definitions import definitions
from migrate.finding import Finding
from migrate.registry import target
from migrate.rule import Options

PATH = Path("train.py")
PREAMBLE = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import DataLoader\n"
"""What `code` gets in front unless it has imports of its own."""


def program(code: str) -> str:
    """`code` as a program that is worth rewriting: with imports, and with a training step."""
    text = textwrap.dedent(code).strip("\n") + "\n"
    if "import torch" not in text:
        text = PREAMBLE + text
    if ".backward()" not in text:
        text += "def unrelated_step(criterion):\n    criterion.backward()\n"
    return text


def run(
    code: str | dict[str, str], only: str | tuple[str, ...] = "MG", to: str = "ddp",
    options: Options | None = None, choice: Choice | None = None,
) -> Result:  # fmt: skip
    """The result of rewriting a program, by the rules whose codes begin with `only`.

    Several files are given as a dict of names and texts, the entry first.
    """
    files = {PATH.name: program(code)} if isinstance(code, str) else code
    contents = {Path(name): textwrap.dedent(text).encode() for name, text in files.items()}
    select = (only,) if isinstance(only, str) else only
    chosen = choice or Choice(select=select)
    entry = next(iter(contents))
    return rewrite(contents, to, entry=entry, contents=contents, options=options, choice=chosen)


def after(result: Result, name: str | None = None) -> str:
    """The new text of a file (the entry), without the definitions that were added."""
    file = next(f for f in result.files if name in (None, f.path.name))
    return body(file.after.decode(), result.target)


def body(text: str, to: str) -> str:
    """A text without the definitions that the target's edits added, and without the preamble."""
    module = cst.parse_module(text)
    known = {item.text.strip() for item in definitions(target(to).snippets).values()}
    kept = []
    for node in module.body:
        bare = node.with_changes(leading_lines=[], lines_after_decorators=[]) if isinstance(
            node, cst.FunctionDef | cst.ClassDef) else node  # fmt: skip
        if module.code_for_node(bare).strip() not in known:
            kept.append(node)
    lines = module.with_changes(body=kept).code
    added = "def unrelated_step(criterion):\n    criterion.backward()\n"
    return lines.removeprefix(PREAMBLE).replace(added, "").strip("\n") + "\n"


def rewritten(
    code: str, only: str | tuple[str, ...] = "MG", to: str = "ddp", options: Options | None = None
) -> str:
    """The body that a piece of code becomes."""
    return after(run(code, only, to, options))


def findings(
    code: str | dict[str, str], only: str | tuple[str, ...] = "MG", to: str = "ddp",
    options: Options | None = None,
) -> list[Finding]:  # fmt: skip
    """The findings in a program."""
    return list(run(code, only, to, options).findings)


def expect(text: str) -> str:
    """A triple-quoted expectation in the form `rewritten` gives."""
    return textwrap.dedent(text).strip("\n") + "\n"
