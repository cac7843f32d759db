"""The files that belong to one program: the entry, and what it imports that is not installed.

Reads files; decides nothing about their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import libcst as cst

from migrate.errors import MigrateError, SourceError
from migrate.source import Source, parse_source
from migrate.syntax import dotted

_SKIPPED_FOLDERS = {".git", ".venv", "venv", "node_modules", "__pycache__", "build", "dist"}


@dataclass(eq=False)
class Project:
    """Parsed sources by module name, and which of them is run.

    Attributes:
        sources: the files, the entry first.
        entry: the file that is started; it gets the process group.
        roots: folders that imports are looked up in.
        unread: why files of the folder are no part of it, one line each.
    """

    sources: list[Source]
    entry: Source
    roots: tuple[Path, ...] = ()
    modules: dict[str, Source] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for source in self.sources:
            for root in self.roots or (source.path.parent,):
                name = _module_name(source.path, root)
                if name is not None:
                    self.modules.setdefault(name, source)

    def module(self, name: str) -> Source | None:
        """The project's file for an import; None for what is installed."""
        return self.modules.get(name)

    def imported(self, source: Source, module: str, level: int) -> str:
        """The absolute name of a module that `source` imports, relative imports resolved."""
        if level == 0:
            return module
        names = [name for name, item in self.modules.items() if item is source]
        package = max(names, key=len, default="").split(".")
        is_package = source.path.name == "__init__.py"
        base = package[: len(package) - level + is_package]
        return ".".join([*base, *([module] if module else [])])


def load_project(
    paths: Iterable[Path], entry: Path | None = None, contents: dict[Path, bytes] | None = None
) -> Project:
    """The program in `paths`: files as they are, folders with all their Python files.

    Given one file, the modules it imports are followed as far as they lie beside it or below. Of a
    folder, files that are not Python 3 are left out, unless the program imports them.

    Raises:
        MigrateError: a path is missing or unreadable, or no entry can be told.
    """
    paths, given = list(paths), dict(contents or {})
    files = [file for path in paths for file in _files(path, given)]
    if not files:
        raise MigrateError("no Python files in " + ", ".join(str(path) for path in paths))
    parsed: dict[Path, Source] = {}
    unread: dict[Path, SourceError] = {}
    for file in files:
        try:
            parsed[_key(file)] = parse_source(file, _content(file, given))
        except SourceError as error:
            if file in paths or (entry is not None and _key(file) == _key(entry)):
                raise
            unread[_key(file)] = error
    if not parsed:
        raise next(iter(unread.values()))
    start = _entry(list(parsed.values()), entry)
    roots = _roots(start, [path for path in paths if path.is_dir()])
    if len(files) == 1 and start.path not in given:
        _follow(start, roots, parsed)
    for source in parsed.values() if unread else ():
        for name, level in imported_modules(source):
            for file in _module_files(source, roots, name, level):
                if _key(file) in unread:
                    raise unread[_key(file)]
    ordered = [start, *(item for item in parsed.values() if item is not start)]
    return Project(ordered, start, roots, unread=tuple(str(error) for error in unread.values()))


def _files(path: Path, given: dict[Path, bytes]) -> Iterator[Path]:
    if path in given or path.is_file():
        if path.suffix == ".ipynb":
            raise MigrateError(f"{path}: a notebook; save it as a plain script first")
        yield path
    elif path.is_dir():
        for file in sorted(path.rglob("*.py")):
            if not _SKIPPED_FOLDERS & set(file.relative_to(path).parts):
                yield file
    else:
        raise MigrateError(f"{path}: no such file or folder")


def _content(path: Path, given: dict[Path, bytes]) -> bytes:
    if path in given:
        return given[path]
    try:
        return path.read_bytes()
    except OSError as error:
        raise MigrateError(f"{path}: cannot be read: {error.strerror}") from None


def _key(path: Path) -> Path:
    return path.resolve()


def _entry(sources: list[Source], entry: Path | None) -> Source:
    if entry is not None:
        for source in sources:
            if _key(source.path) == _key(entry):
                return source
        raise MigrateError(f"{entry}: --entry is not among the files to rewrite")
    if len(sources) == 1:
        return sources[0]
    scores = [(_entry_score(source), source) for source in sources]
    best = max(score for score, _ in scores)
    winners = [source for score, source in scores if score == best]
    if len(winners) > 1:
        names = ", ".join(str(source.path) for source in winners[:5])
        raise MigrateError(f"which of these is started? {names}; say it with --entry FILE")
    return winners[0]


def _entry_score(source: Source) -> tuple[bool, bool, bool, bool]:
    """What makes a file look like the one that is run to train."""
    names = [dotted(call.func) or "" for call in source.all(cst.Call)]
    trains = any(name.endswith("backward") or "train" in name.lower() for name in names)
    wraps = any("DataParallel" in name for name in names)
    guarded = main_guard(source) is not None
    return trains, guarded, "train" in source.path.stem or source.path.stem == "main", wraps


def main_guard(source: Source) -> cst.If | None:
    """The `if __name__ == "__main__":` of a file."""
    for statement in source.module.body:
        if isinstance(statement, cst.If) and "__main__" in source.code(statement.test):
            return statement
    return None


def _roots(entry: Source, folders: Iterable[Path]) -> tuple[Path, ...]:
    """Where imports are looked up: the entry's folder, the one above its package, those given."""
    here = entry.path.parent
    top = here.resolve()
    while (top / "__init__.py").is_file() and top != top.parent:
        top = top.parent
    above = [] if top == here.resolve() else [top]
    return tuple(dict.fromkeys([here, *above, *folders]))


def _module_name(path: Path, root: Path) -> str | None:
    try:
        parts = list(_key(path).relative_to(_key(root)).with_suffix("").parts)
    except ValueError:
        return None
    if parts and parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def _follow(start: Source, roots: tuple[Path, ...], parsed: dict[Path, Source]) -> None:
    """Adds the files that `start` imports, and what these import, to `parsed`.

    A helper that cannot be parsed is left out: only files that are rewritten must be sound.
    """
    queue = [start]
    while queue:
        source = queue.pop(0)
        for name, level in imported_modules(source):
            for file in _module_files(source, roots, name, level):
                if _key(file) in parsed:
                    continue
                try:
                    found = parse_source(file, file.read_bytes())
                except (MigrateError, OSError):
                    continue
                parsed[_key(file)] = found
                queue.append(found)


def imported_modules(source: Source) -> Iterator[tuple[str, int]]:
    """The modules that import statements name, with the number of leading dots.

    `from a import b` gives `a` and `a.b`, for `b` may be a module.
    """
    for statement in source.all(cst.Import):
        for alias in statement.names:
            yield dotted(alias.name) or "", 0
    for item in source.all(cst.ImportFrom):
        module, level = dotted(item.module) or "", len(item.relative)
        yield module, level
        if not isinstance(item.names, cst.ImportStar):
            for alias in item.names:
                yield ".".join(filter(None, (module, dotted(alias.name)))), level


def _module_files(source: Source, roots: tuple[Path, ...], name: str, level: int) -> Iterator[Path]:
    """The file of a module, and those of the packages that it lies in."""
    folders = list(roots)
    if level:
        parents = source.path.resolve().parents
        if level <= len(source.path.parents):
            parents = source.path.parents
        folders = [parents[level - 1]] if level <= len(parents) else []
    words = name.split(".") if name else []
    for folder in folders:
        packages = [folder.joinpath(*words[:count]) for count in range(1, len(words))]
        found = [base / "__init__.py" for base in packages]
        last = folder.joinpath(*words)
        module = last.with_suffix(".py") if words else last / "__init__.py"
        found.append(module if module.is_file() else last / "__init__.py")
        if found[-1].is_file():
            yield from (file for file in found if file.is_file())
            return
