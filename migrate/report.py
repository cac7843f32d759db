"""A result as text, JSON, GitHub annotations or SARIF. Pure functions from a result to a string."""

from __future__ import annotations

import difflib
import hashlib
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

from migrate.api import FileResult, Result
from migrate.finding import Applicability, Effect, Finding
from migrate.registry import rules

FORMATS = ("text", "json", "github", "sarif")
_MARK = {Applicability.SAFE: "[*]", Applicability.POLICY: "[~]", Applicability.MANUAL: "[ ]",
         Applicability.INFO: "[i]"}  # fmt: skip
_LEGEND = "[*] safe, [~] as assumed above, [ ] for a human, [i] good to know."
_SARIF_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def diff(files: tuple[FileResult, ...]) -> bytes:
    """The changes as one unified diff, in the files' own encodings and newlines."""
    pieces: list[bytes] = []
    for file in files:
        before, after = file.before.splitlines(True), file.after.splitlines(True)
        name = str(file.path).encode()
        for line in difflib.diff_bytes(difflib.unified_diff, before, after, name, name, n=3):
            pieces.append(line if line.endswith((b"\n", b"\r")) else line + b"\n")
            if not line.endswith((b"\n", b"\r")):
                pieces.append(b"\\ No newline at end of file\n")
    return b"".join(pieces)


def launch_command(result: Result) -> str:
    """How the program is started now, on one machine."""
    return f"torchrun --standalone --nproc-per-node=N {shlex.quote(shown_path(result.entry))}"


def verdict(result: Result) -> str:
    """One sentence: what will train the same, and what not."""
    effects = {f.effect for f in result.findings if not f.suppressed}
    better = {f.code for f in result.findings if f.effect is Effect.BETTER and not f.suppressed}
    open_points = len(result.manual)
    if Effect.DIFFERENT in effects:
        start = "This will train differently until the points marked so are settled"
    elif Effect.UNKNOWN in effects or open_points:
        start = "This trains the same only if the open points hold"
    elif Effect.IF_EQUAL_PARTS in effects:
        start = "This trains the same as long as all processes' parts of a batch count equally"
    else:
        start = "This trains the same: same global batches, gradients, learning rates and files"
    if "MG203" in better:
        start += "; BatchNorm statistics are those of the whole batch now, not of one device's part"
    if better - {"MG203"}:
        start += f"; changed on purpose: {', '.join(sorted(better - {'MG203'}))}"
    left = f"{open_points} place{'s' if open_points != 1 else ''} for a human to look at"
    return f"{start}; {left}." if open_points else f"{start}."


def text(result: Result, quiet: bool = False) -> str:
    """The report for a terminal: by file, worst first."""
    lines: list[str] = []
    shown = [f for f in result.findings if not f.suppressed]
    if quiet:
        shown = [f for f in shown if f.applicability is Applicability.MANUAL]
    for path in dict.fromkeys(f.path for f in shown):
        lines += [f"{shown_path(path)}"]
        for finding in (f for f in shown if f.path == path):
            lines += _lines(finding)
        lines.append("")
    if not quiet:
        lines += [f"Not read, as nothing imports it: {line}" for line in result.unread]
        lines += _assumptions(shown)
        changed = sum(file.changed for file in result.files)
        edited = sum(bool(f.edits) for f in result.findings)
        lines.append(f"{_counted(edited, 'edit')} in {_counted(changed, 'file')}. {_LEGEND}")
        lines.append(f"Start it with: {launch_command(result)}")
    lines.append(verdict(result))
    return "\n".join(lines) + "\n"


def _lines(finding: Finding) -> Iterator[str]:
    place = f"{finding.line}:{finding.column}"
    yield f"  {place:>8} {finding.code} {_MARK[finding.applicability]} {finding.message}"
    if finding.advice:
        yield f"{'':>21}{finding.advice}"


def _assumptions(findings: list[Finding]) -> list[str]:
    said = list(dict.fromkeys(f.assumption for f in findings if f.assumption and f.edits))
    return ["Assumed:", *(f"  {item}" for item in said), ""] if said else []


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown_path(path: Path) -> str:
    """A path as short as it can be said: relative to the working folder where it lies below."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _fingerprint(finding: Finding) -> str:
    return hashlib.sha256(
        f"{finding.code}:{finding.path.name}:{finding.message}".encode()
    ).hexdigest()[:16]


def as_json(result: Result) -> str:
    """The result for programs; `changes` are in bytes of the UTF-8 text."""
    findings = [
        {
            "code": f.code,
            "path": str(f.path),
            "line": f.line,
            "column": f.column,
            "message": f.message,
            "applicability": f.applicability.value,
            "effect": f.effect.value,
            "advice": f.advice,
            "assumption": f.assumption,
            "edited": bool(f.edits),
            "suppressed": f.suppressed,
            "fingerprint": _fingerprint(f),
        }
        for f in result.findings
    ]
    document = {
        "target": result.target,
        "entry": str(result.entry),
        "launch": launch_command(result),
        "verdict": verdict(result),
        "files": [{"path": str(f.path), "changed": f.changed} for f in result.files],
        "findings": findings,
    }
    return json.dumps(document, indent=2) + "\n"


def as_github(result: Result) -> str:
    """Annotations that GitHub shows beside the lines of a pull request."""
    levels = {Applicability.MANUAL: "warning"}
    lines = []
    for f in result.findings:
        if not f.suppressed:
            level = levels.get(f.applicability, "notice")
            message = f"{f.message}. {f.advice}" if f.advice else f.message
            message = message.replace("%", "%25").replace("\n", "%0A")
            path = shown_path(f.path).replace("%", "%25").replace(":", "%3A").replace(",", "%2C")
            lines.append(
                f"::{level} file={path},line={f.line},col={f.column},title={f.code}::{message}"
            )
    return "\n".join([*lines, f"::notice::{verdict(result)}"]) + "\n"


def as_sarif(result: Result) -> str:
    """SARIF 2.1.0, for code scanning."""
    described = [
        {"id": rule.code, "name": type(rule).__name__, "shortDescription": {"text": rule.title}}
        for rule in rules()
    ]
    levels = {Applicability.MANUAL: "warning", Applicability.POLICY: "note"}
    found = [
        {
            "ruleId": f.code,
            "level": levels.get(f.applicability, "note"),
            "message": {"text": f"{f.message}. {f.advice}" if f.advice else f.message},
            "partialFingerprints": {"migrate/v1": _fingerprint(f)},
            "suppressions": [{"kind": "inSource"}] if f.suppressed else [],
            "locations": [
                {
                    "physicalLocation": {
                        "artifactLocation": {"uri": Path(shown_path(f.path)).as_posix()},
                        "region": {"startLine": f.line, "startColumn": f.column},
                    }
                }
            ],
        }
        for f in result.findings
    ]
    driver = {"name": "migrate", "rules": described}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": found}
    return (
        json.dumps({"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"
    )


def render(result: Result, output_format: str, quiet: bool = False) -> str:
    """The result in one of `FORMATS`."""
    match output_format:
        case "json":
            return as_json(result)
        case "github":
            return as_github(result)
        case "sarif":
            return as_sarif(result)
        case _:
            return text(result, quiet)
