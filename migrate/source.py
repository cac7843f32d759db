"""One source file: its text, its syntax tree, and where every node stands in the text.

Offsets are bytes of the UTF-8 text, whatever the encoding of the file. Node vocabulary that needs
no file is in `syntax`; what names mean is in `names`.

Places come from `places`, parents are collected here: libcst's ParentNodeProvider and ScopeProvider
cost 1.1 s for 1,300 lines.
"""

from __future__ import annotations

import bisect
import codecs
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import libcst as cst

from migrate.errors import SourceError
from migrate.places import Span, Spans, written
from migrate.syntax import child_nodes

_NEWLINE = re.compile(r"\r\n|\r|\n")
_ASYNC_ARGUMENT = re.compile(r"([(,]\s*)async(\s*=(?!=))")
Node = TypeVar("Node", bound=cst.CSTNode)
Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
Function = cst.FunctionDef


@dataclass(frozen=True, eq=False)
class Source:
    """A parsed file. `path` is only a name here: nothing is read from or written to it.

    Attributes:
        original: the text as it was, where `text` had to be repaired to be Python 3.
        repaired: the lines, from 1, that were.
    """

    path: Path
    text: str
    encoding: str
    bom: bytes
    module: cst.Module
    spans: Spans
    parents: dict[cst.CSTNode, cst.CSTNode]
    original: str
    repaired: tuple[int, ...] = ()

    @cached_property
    def data(self) -> bytes:
        """The text in UTF-8: what offsets count."""
        return self.text.encode()

    @cached_property
    def lines(self) -> list[bytes]:
        """The physical lines, each with its newline."""
        return self.data.splitlines(keepends=True)

    @cached_property
    def _line_starts(self) -> list[int]:
        starts, position = [], 0
        for line in self.lines:
            starts.append(position)
            position += len(line)
        return starts

    @property
    def newline(self) -> str:
        """The newline the file uses."""
        return self.module.default_newline

    @property
    def indent(self) -> str:
        """One step of the file's indentation."""
        return self.module.default_indent.rpartition("\f")[2]

    def encode(self, text: str) -> bytes:
        """`text` as the bytes of a file with this file's encoding and byte order mark."""
        return self.bom + text.encode(self.encoding)

    def span(self, node: cst.CSTNode) -> Span:
        """Where `node` stands, without parentheses around it, comments and white space."""
        return self.spans[node]

    def code(self, node: cst.CSTNode) -> str:
        """The text of `node`, as it stands in the file."""
        start, stop = self.spans[node]
        return self.data[start:stop].decode()

    def one_line(self, node: cst.CSTNode) -> str:
        """The text of `node` on one line, for messages."""
        return " ".join(self.code(node).split())

    def line_of(self, where: cst.CSTNode | int) -> int:
        """The line, from 1, on which a node or an offset stands."""
        offset = where if isinstance(where, int) else self.spans[where].start
        return bisect.bisect_right(self._line_starts, offset)

    def column_of(self, where: cst.CSTNode | int) -> int:
        """The column, from 1 and in characters, at which a node or an offset stands."""
        offset = where if isinstance(where, int) else self.spans[where].start
        start = self.line_start(offset)
        return len(self.data[start:offset].decode()) + 1

    def line_start(self, offset: int) -> int:
        """The offset of the first byte of the line that `offset` is in."""
        return self._line_starts[bisect.bisect_right(self._line_starts, offset) - 1]

    def line_end(self, offset: int) -> int:
        """The offset after the newline of the line that `offset` is in."""
        index = bisect.bisect_right(self._line_starts, offset) - 1
        return self._line_starts[index] + len(self.lines[index])

    def indentation(self, statement: cst.CSTNode) -> str:
        """The white space before a statement that begins its line, after any form feed."""
        start = self.spans[statement].start
        before = self.data[self.line_start(start) : start].decode()
        return before[: len(before) - len(before.lstrip())].rpartition("\f")[2]

    def parent(self, node: cst.CSTNode) -> cst.CSTNode | None:
        """The node around `node`; None for the module."""
        return self.parents.get(node)

    def ancestors(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """The nodes around `node`, the nearest first, without itself."""
        current = self.parents.get(node)
        while current is not None:
            yield current
            current = self.parents.get(current)

    def around(self, node: cst.CSTNode, *kinds: type[Node]) -> Node | None:
        """The nearest node of one of `kinds` around `node`."""
        return next((item for item in self.ancestors(node) if isinstance(item, kinds)), None)

    def function_of(self, node: cst.CSTNode) -> Function | None:
        """The function whose body `node` is in; None at the top level of module or class."""
        return self._functions.get(node)

    @cached_property
    def _functions(self) -> dict[cst.CSTNode, Function | None]:
        found: dict[cst.CSTNode, Function | None] = {self.module: None}
        for node, parent in self.parents.items():  # a node comes after the one around it
            is_body = isinstance(parent, cst.FunctionDef) and node is parent.body
            found[node] = parent if is_body else found[parent]  # type: ignore[assignment]
        return found

    def class_of(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """The class whose body holds `node`, directly or in a method."""
        return self.around(node, cst.ClassDef)

    def statement_of(self, node: cst.CSTNode) -> Statement:
        """The nearest statement that contains `node`, or is it."""
        for item in (node, *self.ancestors(node)):
            if isinstance(item, cst.SimpleStatementLine | cst.BaseCompoundStatement):
                return item
            if isinstance(item, cst.SimpleStatementSuite):
                compound = self.parents[item]
                while not isinstance(compound, cst.BaseCompoundStatement):
                    compound = self.parents[compound]
                return compound
        raise LookupError("a node outside every statement")

    def siblings(self, statement: cst.CSTNode) -> list[cst.CSTNode]:
        """The statements of the block that `statement` is in, itself included."""
        body = getattr(self.parents[statement], "body", ())
        return list(body) if isinstance(body, tuple | list) else [statement]

    @cached_property
    def _by_type(self) -> dict[type[cst.CSTNode], tuple[list[cst.CSTNode], list[int], list[int]]]:
        """The nodes of each type in the order of the text, with their starts and stops."""
        found: dict[type[cst.CSTNode], list[tuple[Span, cst.CSTNode]]] = {}
        for node in (self.module, *self.parents):
            span = self.spans.get(node, Span(0, 0))
            found.setdefault(type(node), []).append((span, node))
        ordered = {}
        for kind, places in found.items():
            places.sort(key=lambda place: place[0].start)
            spans = [span for span, _ in places]
            nodes = [node for _, node in places]
            ordered[kind] = nodes, [at.start for at in spans], [at.stop for at in spans]
        return ordered

    def all(self, kind: type[Node]) -> list[Node]:
        """Every node of a type, in the order of the text."""
        return self._by_type[kind][0] if kind in self._by_type else []  # type: ignore[return-value]

    def inside(self, root: cst.CSTNode, kind: type[Node]) -> list[Node]:
        """Every node of a type in `root`, itself included, in the order of the text."""
        if kind not in self._by_type:
            return []
        nodes, starts, stops = self._by_type[kind]
        start, stop = self.spans[root]
        begin = bisect.bisect_left(starts, start)
        end = bisect.bisect_left(starts, stop, begin)
        return [nodes[i] for i in range(begin, end) if stops[i] <= stop]  # type: ignore[misc]

    def contains(self, outer: cst.CSTNode, inner: cst.CSTNode) -> bool:
        """Whether `inner` is `outer` or stands in it."""
        return inner is outer or any(item is outer for item in self.ancestors(inner))

    def is_variable(self, name: cst.Name) -> bool:
        """Whether a name is one by itself, not that of an attribute or of an argument."""
        around = self.parents.get(name)
        if isinstance(around, cst.Attribute):
            return around.value is name
        return not (isinstance(around, cst.Arg) and around.keyword is name)

    def find(self, kind: type[Node], test: Callable[[Node], bool]) -> list[Node]:
        """The nodes of a type for which `test` holds."""
        return [node for node in self.all(kind) if test(node)]


def parse_source(path: Path, content: bytes) -> Source:
    """The source in `content`; `path` is for messages.

    Raises:
        SourceError: not text in the declared encoding, or not Python 3.
    """
    original, encoding, bom = _decode(path, content)
    text, repaired = original, tuple[int, ...]()
    try:
        module = _parse(path, text)
    except cst.ParserSyntaxError as error:
        text, repaired = _without_async_arguments(original)
        if not repaired:
            raise _syntax_problem(path, text, error.raw_line) from None
        module = _parse_repaired(path, text)
    again, spans = written(module, text)
    if again != text:
        raise SourceError(path, None, "does not survive parsing unchanged; nothing was rewritten")
    source = Source(path, text, encoding, bom, module, spans, _parents(module), original, repaired)
    for handler in source.all(cst.ExceptHandler):
        if _is_python_2(handler):
            raise _syntax_problem(path, text, source.line_of(handler))
    return source


def _parse(path: Path, text: str) -> cst.Module:
    try:
        return cst.parse_module(text)
    except (RecursionError, ValueError) as error:
        raise SourceError(path, None, f"cannot be parsed: {error}") from None


def _parse_repaired(path: Path, text: str) -> cst.Module:
    try:
        return _parse(path, text)
    except cst.ParserSyntaxError as error:
        raise _syntax_problem(path, text, error.raw_line) from None


def _is_python_2(handler: cst.ExceptHandler) -> bool:
    """`except Problem, error:`, which Python 3.14 reads as two types."""
    types = handler.type
    if not isinstance(types, cst.Tuple) or types.lpar or len(types.elements) != 2:
        return False
    second = types.elements[1].value
    return isinstance(second, cst.Name) and second.value.islower()


def _without_async_arguments(text: str) -> tuple[str, tuple[int, ...]]:
    """`x.cuda(async=True)`, from before Python 3.7, with its name since torch 0.4."""
    ends = [found.end() for found in _ASYNC_ARGUMENT.finditer(text)]
    lines = tuple(len(_NEWLINE.findall(text[:end])) + 1 for end in ends)
    return _ASYNC_ARGUMENT.sub(r"\1non_blocking\2", text), tuple(dict.fromkeys(lines))


def _decode(path: Path, content: bytes) -> tuple[str, str, bytes]:
    bom = codecs.BOM_UTF8 if content.startswith(codecs.BOM_UTF8) else b""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        encoding = "utf-8" if encoding == "utf-8-sig" else encoding
        return content[len(bom) :].decode(encoding), encoding, bom
    except UnicodeDecodeError as error:
        raise _not_text(path, content, error) from None
    except (SyntaxError, LookupError) as error:
        try:
            content.decode()
        except UnicodeDecodeError as cause:
            raise _not_text(path, content, cause) from None
        raise SourceError(path, 1, f"encoding not known: {error}") from None


def _not_text(path: Path, content: bytes, error: UnicodeDecodeError) -> SourceError:
    line = content[: error.start].count(b"\n") + 1
    problem = f"not {error.encoding} text (byte {error.start}); declare its encoding"
    return SourceError(path, line, problem)


def _syntax_problem(path: Path, text: str, line: int) -> SourceError:
    """What keeps a file from being Python 3, by the first line that gives a reason."""
    lines = [item.strip() for item in _NEWLINE.split(text)]
    for number, shown in enumerate(lines, 1):
        if re.match(r"(print|exec)\s+[^=(\s]|except [\w.]+, ?\w+:|raise \w+, ", shown):
            problem = f"Python 2 source ({shown[:60]!r}); port it first, for example with 2to3"
            return SourceError(path, number, problem)
        if shown.startswith(("%", "!")) and number <= line:
            problem = f"a notebook's magic command ({shown[:60]!r}); save it as a plain script"
            return SourceError(path, number, problem)
    shown = lines[line - 1] if 0 < line <= len(lines) else ""
    return SourceError(path, line, f"not valid Python 3: {shown[:80]!r}")


def _parents(module: cst.Module) -> dict[cst.CSTNode, cst.CSTNode]:
    parents: dict[cst.CSTNode, cst.CSTNode] = {}
    stack: list[cst.CSTNode] = [module]
    while stack:
        node = stack.pop()
        for child in child_nodes(node):
            parents[child] = node
            stack.append(child)
    return parents
