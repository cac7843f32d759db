"""The definitions that edits need, taken from `snippets/` as text, and where they go in a file."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import libcst as cst

from migrate.edit import Text
from migrate.names import Names, bindings
from migrate.source import Source
from migrate.syntax import block_statements, dotted, is_docstring

SNIPPETS = Path(__file__).parent / "snippets"
_HEADER = re.compile(rb"(?:#[^\r\n]*(?:\r\n|\r|\n|$))+(?=[\r\n]|$)")
_CODING = re.compile(rb"(?:#(?:!|[^\r\n]*coding[:=])[^\r\n]*(?:\r\n|\r|\n)){1,2}")
_HARMLESS = re.compile(
    r"(sys|warnings|os\.path|os\.environ|site|resource|matplotlib|mpl|plt|cv2|mp|\w*Path)\b"
    r"|(print|str|len|__import__|os\.getcwd|os\.getenv|logging\.getLogger)$|\w+Error$"
    r"|.*\.(set_printoptions|set_start_method|set_sharing_strategy|filterwarnings|simplefilter)$"
)
"""Calls that often stand between imports, and that nothing has to be done about."""


@dataclass(frozen=True)
class Definition:
    """One function or class of a snippet file.

    Attributes:
        text: its source, ending with a newline.
        imports: for each imported name it uses, the statement that binds it.
        uses: the other definitions it calls.
    """

    name: str
    text: str
    imports: dict[str, str]
    uses: tuple[str, ...]


@cache
def definitions(files: tuple[str, ...]) -> dict[str, Definition]:
    """The definitions of some snippet files, by name, in the order of the files."""
    found: dict[str, Definition] = {}
    imports: dict[str, str] = {}
    parts: list[tuple[str, str]] = []
    for file in files:
        content = (SNIPPETS / f"{file}.py").read_text()
        lines = content.splitlines(keepends=True)
        for node in ast.parse(content).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                imports.update(_import_statements(node))
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                first = min([node.lineno, *(item.lineno for item in node.decorator_list)])
                parts.append((node.name, "".join(lines[first - 1 : node.end_lineno])))
    names = {name for name, _ in parts}
    for name, text in parts:
        # A chain's first name: `dist` in `dist.get_rank()`, not the `print` of `builtins.print`.
        used = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", re.sub(r'"""[\s\S]*?"""|#.*', "", text)))
        others = tuple(other for other in names if other in used and other != name)
        needed = {bound: line for bound, line in imports.items() if bound in used - names}
        found[name] = Definition(name, text, needed, others)
    return found


def _import_statements(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, str]]:
    """The names that an import binds, each with the statement that binds it alone."""
    for alias in node.names:
        text = ast.unparse(alias)
        if isinstance(node, ast.ImportFrom):
            yield alias.asname or alias.name, f"from {node.module} import {text}"
        else:
            yield alias.asname or alias.name.partition(".")[0], f"import {text}"


class Definitions:
    """What one file already has of the definitions, and under which names it gets the others."""

    def __init__(self, source: Source, names: Names, files: tuple[str, ...]) -> None:
        self.source = source
        self.names = names
        self.available = definitions(files)
        self.own = frozenset(self._own())
        self.own_names = frozenset(node.name.value for node in self.own)

    def _own(self) -> Iterator[cst.FunctionDef | cst.ClassDef]:
        """Definitions of this file that an earlier run wrote, by their text."""
        for node in self.source.module.body:
            if isinstance(node, cst.FunctionDef | cst.ClassDef):
                name = node.name.value.rstrip("_")
                known = self.available.get(name)
                if known and _shape(known.text) == _shape(self.source.code(node)):
                    yield node

    def is_own(self, node: cst.CSTNode) -> bool:
        """Whether a node stands in a definition that an earlier run wrote."""
        if not self.own:
            return False
        return any(item in self.own for item in (node, *self.source.ancestors(node)))

    def name(self, wanted: str) -> str:
        """The name under which this file has, or gets, a definition."""
        for name in self.own_names:
            if name.rstrip("_") == wanted:
                return name
        taken = self.names.bound - self.own_names
        while wanted in taken:
            wanted += "_"
        return wanted

    def texts(self, wanted: Iterable[str]) -> list[Text]:
        """The edits that add the definitions `wanted`, and all they use, after the imports."""
        present = {name.rstrip("_") for name in self.own_names}
        needed = self._closure(wanted) - present
        if not needed:
            return []
        ordered = [item for name, item in self.available.items() if name in needed]
        imports = {bound: line for item in ordered for bound, line in item.imports.items()}
        renames = {name: self.name(name) for name in self.available}
        lines: list[str] = []
        for bound, line in sorted(imports.items(), key=lambda item: item[1]):
            renames[bound], missing = self._import(bound, line)
            lines += [missing + "\n"] if missing else []
        for item in ordered:
            lines.append("\n\n" + _renamed(item.text, renames))
        return [self._place("".join(lines))]

    def _closure(self, wanted: Iterable[str]) -> set[str]:
        found: set[str] = set()
        queue = list(wanted)
        while queue:
            name = queue.pop()
            if name not in found:
                found.add(name)
                queue += self.available[name].uses
        return found

    def _import(self, bound: str, line: str) -> tuple[str, str | None]:
        """The name under which the file has what an import binds, and the import to add for it."""
        name = bound
        while name in self.names.module_names:
            if self._bound_by(name, line):
                return name, None if name in self._early else _aliased(line, name)
            name += "_"
        return name, _aliased(line, name)

    @cached_property
    def _early(self) -> set[str]:
        """The names that are imported before the place for definitions, whatever happens."""
        body: list[cst.CSTNode] = list(self.source.module.body)
        anchor = last_leading_import(self.source)
        certain: list[cst.CSTNode] = []
        for statement in body[: body.index(anchor) + 1] if anchor in body else []:
            inside = block_statements(statement.body) if isinstance(statement, cst.Try) else None
            certain += inside or [statement]
        return {
            name
            for line in certain
            if isinstance(line, cst.SimpleStatementLine)
            for small in line.body
            if isinstance(small, cst.Import | cst.ImportFrom)
            for name, _ in bindings(small)
        }

    def _bound_by(self, bound: str, line: str) -> bool:
        """Whether the module's `bound` is what the import statement `line` would bind."""
        given = self.names.imports.get(bound)
        if given is None:
            return False
        words = line.split()
        module = words[1] if words[0] == "import" else f"{words[1]}.{words[3]}"
        full = ".".join(filter(None, (given.module, given.name)))
        return full == module or (words[0] == "import" and full == module.partition(".")[0])

    def _place(self, text: str) -> Text:
        source = self.source
        anchor = last_leading_import(source)
        newline = source.newline
        text = text.replace("\n", newline)
        if anchor is None:
            at = _after_header(source.data)
            is_cut = at > 0 and not source.data[:at].endswith((b"\n", b"\r"))
            text = (newline if is_cut else "") + text.lstrip() + newline * 2
            return Text(source, at, at, text, order=(-9, 0))
        end = source.line_end(max(source.span(anchor).stop - 1, 0))
        if not source.data[:end].endswith((b"\n", b"\r")):
            text = newline + text
        if source.data[end:].lstrip(b" \t")[:1] not in (b"", b"\n", b"\r"):
            text += newline
        return Text(source, end, end, text, order=(-9, 0))


def _aliased(line: str, name: str) -> str:
    """An import statement that binds `name`."""
    plain = line.partition(" as ")[0]
    return plain if plain.split()[-1] == name else f"{plain} as {name}"


def _after_header(data: bytes) -> int:
    """Where the comments end that a file begins with, if they are not those of its first line."""
    found = _HEADER.match(data) or _CODING.match(data)
    return found.end() if found else 0


@cache
def _shape(text: str) -> str | None:
    """What a definition is, however it is laid out, and whatever underscores its names end with."""
    try:
        tree = ast.dump(ast.parse(text))
    except SyntaxError:
        return None
    return re.sub(r"\\[nrt]|\s|(?<=\w)_+(?=\W)", "", tree)


def _renamed(text: str, renames: dict[str, str]) -> str:
    for name, new in renames.items():
        if name != new:
            text = re.sub(rf"(?<![\w.]){re.escape(name)}(?=\W)", new, text)
    return text


def last_leading_import(source: Source) -> cst.CSTNode | None:
    """The statement after which definitions go: the last import before anything is defined or run.

    Without imports, the docstring.
    """
    last: cst.CSTNode | None = None
    for statement in source.module.body:
        if isinstance(statement, cst.FunctionDef | cst.ClassDef | cst.For | cst.While | cst.With):
            break
        if isinstance(statement, cst.If) and "__main__" in source.code(statement.test):
            break
        imports = source.inside(statement, cst.Import) + source.inside(statement, cst.ImportFrom)
        if not (imports and isinstance(statement, cst.Try)) and _runs(source, statement):
            break
        if imports or (last is None and is_docstring(statement)):
            last = statement
    return last


def _runs(source: Source, statement: cst.CSTNode) -> bool:
    """Whether a statement does more than what people do between imports."""
    test = source.span(statement.test) if isinstance(statement, cst.If) else None
    calls = [call for call in source.inside(statement, cst.Call)
             if test is None or source.span(call).start >= test.stop]  # fmt: skip
    return not all(_HARMLESS.match(dotted(call.func) or "") for call in calls)
