"""Comments that keep rules away: `# migrate: ignore[MG301]` on a line, `# migrate: skip-file`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from migrate.finding import Applicability, Finding
from migrate.source import Source

UNUSED = "MG000"
"""The code of the remark that a suppression has nothing to suppress."""
_IGNORE = re.compile(rb"#\s*migrate:\s*ignore(?:\[([\w\s,]+)\])?")
_SKIP = re.compile(rb"^\s*#\s*migrate:\s*skip-file", re.M)
_EVERY = ""


def is_suppressed(source: Source, finding: Finding) -> bool:
    """Whether a comment keeps a finding's rule away from its line, or from the file."""
    line = source.lines[finding.line - 1] if finding.line <= len(source.lines) else b""
    codes = _codes(line)
    return finding.code in codes or _EVERY in codes or bool(_SKIP.search(source.data))


def unused(
    sources: Iterable[Source], findings: Iterable[Finding], takes: Callable[[str], bool], to: str
) -> Iterator[Finding]:
    """A remark for every code on a line where nothing of that code was found.

    `findings` are those of all rules, `takes` tells which of them were asked for.
    """
    found = {(f.path, f.line, code) for f in findings for code in (f.code, _EVERY)}
    for source in sources:
        if _SKIP.search(source.data) or not takes(UNUSED):
            continue
        for number, line in enumerate(source.lines, 1):
            for code in _codes(line):
                if takes(code or UNUSED) and (source.path, number, code) not in found:
                    column = len(_IGNORE.split(line, 1)[0].decode()) + 1
                    what = f"{code} does not occur" if code else "nothing occurs"
                    message = f"this suppression is not used: {what} here with --to {to}"
                    yield Finding(UNUSED, message, source.path, number, column, Applicability.INFO)


def _codes(line: bytes) -> list[str]:
    """The codes that a line's comment names; one of all rules is the empty text."""
    comment = _IGNORE.search(line)
    if comment is None:
        return []
    names = comment.group(1)
    return [_EVERY] if names is None else re.findall(r"\w+", names.decode())
