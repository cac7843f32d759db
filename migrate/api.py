"""From files to findings and new texts: `rewrite` is what the command line and tests call.

Nothing here prints or writes; `write` alone touches the disk, with all files or none.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import libcst as cst

from migrate.edit import Conflict, Edit, Need, Text, apply, insert_before, lower
from migrate.errors import MigrateError
from migrate.facts.models import bare_models
from migrate.facts.program import Facts
from migrate.finding import Applicability, Finding
from migrate.flow import Flow
from migrate.project import Project, load_project
from migrate.registry import rules, target
from migrate.rule import Context, Options, Rule
from migrate.source import Source
from migrate.suppressions import is_suppressed, unused


@dataclass(frozen=True)
class Choice:
    """Which findings may edit: rules by code prefix, and how sure an edit has to be."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    safe_only: bool = False
    todo: bool = False

    def takes(self, code: str) -> bool:
        """Whether a rule is among the chosen ones."""
        chosen = not self.select or code.startswith(self.select)
        return chosen and not (self.ignore and code.startswith(self.ignore))


@dataclass(frozen=True)
class FileResult:
    """One file before and after, in its own encoding."""

    path: Path
    before: bytes
    after: bytes

    @property
    def changed(self) -> bool:
        """Whether anything is different."""
        return self.before != self.after


@dataclass(frozen=True)
class Result:
    """What was done to a program.

    Attributes:
        files: every file that was read, the entry first.
        findings: applied and not applied, worst first.
        unread: files of the folder that are not Python 3, and why; nothing imports them.
    """

    target: str
    entry: Path
    files: tuple[FileResult, ...]
    findings: tuple[Finding, ...] = field(default=())
    unread: tuple[str, ...] = ()

    @property
    def manual(self) -> list[Finding]:
        """The findings that a human must look at."""
        return [f for f in self.findings if f.applicability is Applicability.MANUAL]


def rewrite(
    paths: Iterable[Path],
    to: str,
    *,
    entry: Path | None = None,
    options: Options | None = None,
    choice: Choice | None = None,
    contents: dict[Path, bytes] | None = None,
) -> Result:
    """The program in `paths`, moved to the target `to`. Nothing is written.

    `contents` stands in for files that need not exist.

    Raises:
        MigrateError: bad input; the message names file and line.
    """
    project = load_project(paths, entry, contents)
    context = _context(project, to, options or Options())
    _refuse_what_is_no_training(context)
    return _rewritten(context, choice or Choice())


def rewrite_project(
    project: Project, to: str, options: Options | None = None, choice: Choice | None = None
) -> Result:
    """The same for a project that is loaded, whether or not it is a whole training program."""
    return _rewritten(_context(project, to, options or Options()), choice or Choice())


def _rewritten(context: Context, choice: Choice) -> Result:
    project = context.project
    every = _findings(context, rules())
    findings = [_limited(f, choice, project) for f in every if choice.takes(f.code)]
    findings += unused(project.sources, every, choice.takes, context.target.name)
    findings = _without_orphans(findings)
    findings, texts = _assembled(context, findings, choice)
    files = tuple(_file(source, texts.get(source, source.text)) for source in project.sources)
    ordered = tuple(sorted(findings, key=_worst_first))
    return Result(context.target.name, project.entry.path, files, ordered, project.unread)


def _context(project: Project, to: str, options: Options) -> Context:
    chosen = target(to)
    flow = Flow(project)
    return Context(project, flow, Facts(project, flow, chosen.snippets), chosen, options)


def _refuse_what_is_no_training(context: Context) -> None:
    facts = context.facts
    if not facts.backwards:
        raise MigrateError(
            f"{context.project.entry.path}: no training loop found (nothing calls .backward()); "
            "give the file that trains, or the folder it is in"
        )
    if not (facts.wraps or facts.own_wraps or bare_models(facts)):
        raise MigrateError(
            f"{context.project.entry.path}: no model is put into DataParallel, and none is seen "
            "that an optimizer trains; give the file that makes the model as well"
        )


def _findings(context: Context, every: Iterable[Rule]) -> list[Finding]:
    found = []
    for rule in every:
        found += list(rule.check(context))
    return found


def _limited(finding: Finding, choice: Choice, project: Project) -> Finding:
    """The finding as the options and the comments in the file allow it."""
    source = next(s for s in project.sources if s.path == finding.path)
    if is_suppressed(source, finding):
        return replace(finding, edits=(), suppressed=True)
    if choice.safe_only and finding.edits and finding.applicability is Applicability.POLICY:
        return finding.without_edits("only safe edits were asked for")
    return finding


def _without_orphans(findings: list[Finding]) -> list[Finding]:
    """Edits that need another rule's edits stay only if that rule made all of its own."""
    manual = [f for f in findings if f.suppressed or f.applicability is Applicability.MANUAL]
    blocked = {f.code for f in manual} - {f.code for f in findings if f.edits}
    kept = []
    for finding in findings:
        missing = finding.requires & blocked
        if finding.edits and missing:
            finding = finding.without_edits(f"needs {', '.join(sorted(missing))}")
        kept.append(finding)
    orphaned = any(new is not old for new, old in zip(kept, findings, strict=True))
    return _without_orphans(kept) if orphaned else kept


def _assembled(
    context: Context, findings: list[Finding], choice: Choice
) -> tuple[list[Finding], dict[Source, str]]:
    """The new texts; findings whose edits collide with earlier ones become manual."""
    try:
        return findings, _texts(context, findings, choice)
    except Conflict:
        pass
    kept: list[Finding] = []
    for finding in sorted(findings, key=lambda f: f.code):
        try:
            _texts(context, [*kept, finding], choice)
        except Conflict as error:
            finding = finding.without_edits(f"its edit meets another one at {error}")
        kept.append(finding)
    kept = _without_orphans(kept)
    return kept, _texts(context, kept, choice)


def _texts(context: Context, findings: list[Finding], choice: Choice) -> dict[Source, str]:
    edits: dict[Source, list[Edit]] = {}
    for finding in findings:
        for edit in finding.edits:
            edits.setdefault(edit.source, []).append(edit)
    if choice.todo:
        for comment in _todo_comments(context, findings):
            edits.setdefault(comment.source, []).append(comment)
    texts = {}
    for source, each in edits.items():
        needs = sorted({edit.name for edit in each if isinstance(edit, Need)})
        definitions = context.facts.definitions[source].texts(needs)
        text = apply(source, [*definitions, *lower(each)])
        _check_syntax(source, text)
        texts[source] = text
    return texts


def _todo_comments(context: Context, findings: list[Finding]) -> Iterator[Text]:
    for finding in findings:
        if finding.applicability is not Applicability.MANUAL or finding.suppressed:
            continue
        source = next(s for s in context.sources if s.path == finding.path)
        comment = f"# TODO[migrate] {finding.code}: {finding.message}"
        statement = _statement_at(source, finding.line)
        if statement is not None and comment not in _comments_above(source, statement):
            yield insert_before(source, statement, [comment])


def _statement_at(source: Source, line: int) -> cst.CSTNode | None:
    kinds = (cst.SimpleStatementLine, cst.If, cst.For, cst.While, cst.With, cst.Try,
             cst.FunctionDef, cst.ClassDef)  # fmt: skip
    nodes = [node for kind in kinds for node in source.all(kind) if _line(source, node) <= line]
    return max(nodes, key=lambda node: source.span(node).start, default=None)


def _line(source: Source, statement: cst.CSTNode) -> int:
    """The first line of a statement, decorators included."""
    return source.line_of(next(iter(getattr(statement, "decorators", ())), statement))


def _comments_above(source: Source, statement: cst.CSTNode) -> set[str]:
    found: set[str] = set()
    for line in reversed(source.lines[: _line(source, statement) - 1]):
        if not line.lstrip().startswith(b"#"):
            break
        found.add(line.decode().strip())
    return found


def _check_syntax(source: Source, text: str) -> None:
    """A rewritten file that does not parse is never handed out: it is a bug, and said to be one."""
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise MigrateError(
            f"{source.path}: the rewritten text would not parse (its line {error.lineno}: "
            f"{error.msg}); this is a bug in migrate, nothing was written"
        ) from None


def _file(source: Source, text: str) -> FileResult:
    before = source.encode(source.original)
    try:
        return FileResult(source.path, before, source.encode(text))
    except UnicodeEncodeError:
        raise MigrateError(
            f"{source.path}: its encoding {source.encoding} cannot hold the rewritten text"
        ) from None


_RANK = {Applicability.MANUAL: 0, Applicability.POLICY: 1, Applicability.SAFE: 2,
         Applicability.INFO: 3}  # fmt: skip


def _worst_first(finding: Finding) -> tuple[object, ...]:
    effects = list(type(finding.effect))
    place = (str(finding.path), finding.line, finding.column, finding.code)
    return (_RANK[finding.applicability], effects.index(finding.effect), *place)


def write(result: Result, output: Path | None = None) -> list[Path]:
    """Writes the changed files, in place or below `output`; all of them or none.

    Raises:
        MigrateError: a file cannot be written; what was there before is there again.
    """
    changed = [file for file in result.files if file.changed or output is not None]
    places = [_place(result, file, output) for file in changed]
    ready: list[tuple[Path, Path]] = []
    replaced: list[tuple[Path, bytes | None]] = []
    place = result.entry
    try:
        for place, file in zip(places, changed, strict=True):
            place.parent.mkdir(parents=True, exist_ok=True)
            ready.append((_temporary(place), place))
            _write_beside(place, file.after)
        for temporary, place in ready:
            before = place.read_bytes() if place.exists() else None
            temporary.replace(place)
            replaced.append((place, before))
    except OSError as error:
        _take_back(ready, replaced)
        problem = error.strerror or str(error)
        raise MigrateError(f"{place}: cannot be written: {problem}; no file was changed") from None
    return places


def _take_back(ready: list[tuple[Path, Path]], replaced: list[tuple[Path, bytes | None]]) -> None:
    """As it was before: no new files, and the old contents."""
    for place, before in replaced:
        if before is None:
            place.unlink()
        else:
            _write_beside(place, before)
            _temporary(place).replace(place)
    for temporary, _ in ready:
        temporary.unlink(missing_ok=True)


def _place(result: Result, file: FileResult, output: Path | None) -> Path:
    if output is None:
        return file.path.resolve()
    if len(result.files) == 1 and not output.is_dir() and output.suffix:
        return output
    root = result.entry.parent.resolve()
    path = file.path.resolve()
    return output / (path.relative_to(root) if path.is_relative_to(root) else path.name)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.migrate")


def _write_beside(path: Path, content: bytes) -> None:
    """Writes what `path` is going to be, with its mode."""
    temporary = _temporary(path)
    temporary.write_bytes(content)
    if path.exists():
        temporary.chmod(path.stat().st_mode)
