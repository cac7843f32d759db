"""What tests of the rewriter share: rewrite a piece of code, look at what came out."""

from __future__ import annotations

import textwrap
from pathlib import Path

from migrate.api import Choice, Result, rewrite_project
from migrate.definitions import Definitions
from migrate.edit import Need
from migrate.finding import Finding
from migrate.names import Names
from migrate.project import load_project
from migrate.registry import target
from migrate.rule import Options
from migrate.source import parse_source

PATH = Path("train.py")
PREAMBLE = "import torch\nimport torch.nn as nn\nfrom torch.utils.data import DataLoader\n"
"""What `code` gets in front unless it has imports of its own."""
STEP = "def unrelated_step(criterion):\n    criterion.backward()\n"
"""What `code` gets behind it unless it trains."""


def program(code: str) -> str:
    """`code` as a program that is worth rewriting: with imports, and with a training step."""
    text = textwrap.dedent(code).strip("\n") + "\n"
    if "import torch" not in text:
        text = PREAMBLE + text
    if ".backward()" not in text:
        text += STEP
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
    project = load_project(contents, entry, contents)
    return rewrite_project(project, to, options, chosen)


def after(result: Result, name: str | None = None) -> str:
    """The new text of a file (the entry), without the imports and definitions that were added."""
    file = next(f for f in result.files if name in (None, f.path.name))
    text = file.after.decode()
    source = parse_source(file.path, file.before)
    own = Definitions(source, Names(source), target(result.target).snippets)
    edits = [edit for finding in result.findings for edit in finding.edits]
    needs = {e.name for e in edits if isinstance(e, Need) and e.source.path == file.path}
    for added in own.texts(needs):
        text = text.replace(added.text, "", 1)
    return body(text)


def body(text: str) -> str:
    """A text without what `program` puts around a fragment."""
    return text.removeprefix(PREAMBLE).replace(STEP, "").strip("\n") + "\n"


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
