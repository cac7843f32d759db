"""Edits as data: which bytes of which file change, and how many edits become one new text.

A rule never builds a new tree. It names small, separate ranges of the text it was shown, so that
the edits of all rules compose, and every line that no rule names stays as it was. What an edit
inserts may need definitions (`Need`); those are written once per file, after the imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.source import Source
from migrate.syntax import argument


@dataclass(frozen=True, eq=False, slots=True)
class Text:
    """Bytes `start` to `stop` of a file become `text`. At one place lower `order` comes first."""

    source: Source
    start: int
    stop: int
    text: str
    order: tuple[int, int] = (0, 0)


@dataclass(frozen=True, eq=False, slots=True)
class Guard:
    """A statement goes under `if condition:`. Neighbours under the same condition share one."""

    source: Source
    statement: cst.CSTNode
    condition: str


@dataclass(frozen=True, eq=False, slots=True)
class Need:
    """A definition from the target's snippets that the file has to contain."""

    source: Source
    name: str


Edit = Text | Guard | Need


class Conflict(Exception):
    """Two edits want to change the same bytes."""


def replace(source: Source, node: cst.CSTNode, text: str) -> Text:
    """The node's text becomes `text`; parentheses around it stay."""
    start, stop = source.span(node)
    return Text(source, start, stop, text)


def enclose(source: Source, node: cst.CSTNode, before: str, after: str) -> tuple[Text, Text]:
    """`before` and `after` around an expression, whose own edits still apply.

    Put a call around it (`before` ends with an opening parenthesis), so that neither precedence nor
    a line break inside can change what it means.
    """
    start, stop = source.span(node)
    return (
        Text(source, start, start, before, order=(10, -stop)),
        Text(source, stop, stop, after, order=(-10, -start)),
    )


def insert_before(source: Source, statement: cst.CSTNode, lines: Iterable[str]) -> Text:
    """Whole lines above a statement, at its indentation; above its decorators, if it has any."""
    decorators = getattr(statement, "decorators", ())
    first = decorators[0] if decorators else statement
    if isinstance(statement, cst.SimpleStatementSuite):
        return _open_suite(source, statement, lines)
    indentation = source.indentation(first)
    text = "".join(indentation + line + source.newline for line in lines)
    start = source.line_start(source.span(first).start)
    return Text(source, start, start, text)


def insert_after(source: Source, statement: cst.CSTNode, lines: Iterable[str]) -> Text:
    """Whole lines below a statement, at its indentation."""
    if isinstance(statement, cst.SimpleStatementSuite):
        raise Conflict("a block on the line of its header")
    stop = source.span(statement).stop
    end = source.line_end(max(stop - 1, 0))
    text = "".join(source.indentation(statement) + line + source.newline for line in lines)
    if end == len(source.data) and not source.data.endswith((b"\n", b"\r")):
        text = source.newline + text.removesuffix(source.newline)
    return Text(source, end, end, text, order=(-5, 0))


def delete_statement(source: Source, statement: cst.CSTNode) -> Text:
    """The statement and its line go; where it is its block's only one, `pass` stays."""
    if len(source.siblings(statement)) == 1 or isinstance(statement, cst.SimpleStatementSuite):
        return replace(source, statement, "pass")
    start, stop = source.span(statement)
    return Text(source, source.line_start(start), source.line_end(max(stop - 1, start)), "")


def set_argument(
    source: Source, call: cst.Call, name: str, text: str, index: int | None = None
) -> Text:
    """The argument `name` becomes `text`, where it stands; a new one goes last."""
    given = argument(call, name, index)
    if given is not None:
        return replace(source, given.value, text)
    return add_argument(source, call, f"{name}={text}")


def add_argument(source: Source, call: cst.Call, text: str) -> Text:
    """`text` as the last argument of a call, before a trailing comma and a closing line break."""
    if not call.args:
        stop = source.span(call).stop - 1
        return Text(source, stop, stop, text, order=(-6, 0))
    stop = _argument_stop(source, call, len(call.args) - 1)
    return Text(source, stop, stop, f", {text}", order=(-6, 0))


def _argument_stop(source: Source, call: cst.Call, index: int) -> int:
    """The end of an argument, with the parentheses around its value."""
    arg = call.args[index]
    stop = source.span(arg).stop
    for paren in getattr(arg.value, "rpar", ()):
        if paren in source.spans:
            stop = max(stop, source.span(paren).stop)
    return stop


def remove_argument(source: Source, call: cst.Call, arg: cst.Arg) -> Text:
    """An argument goes, with the comma that parted it from its neighbour."""
    args = list(call.args)
    index = next(i for i, item in enumerate(args) if item is arg)
    start, stop = source.span(arg).start, _argument_stop(source, call, index)
    if index > 0:
        start = _argument_stop(source, call, index - 1)
    elif len(args) > 1:
        stop = source.span(args[1]).start
    return Text(source, start, stop, "")


def _open_suite(source: Source, suite: cst.SimpleStatementSuite, lines: Iterable[str]) -> Text:
    """`if x: a` becomes a block, with lines above `a`."""
    compound = source.statement_of(suite)
    start = source.span(suite).start
    begin = start
    while source.data[begin - 1 : begin] in (b" ", b"\t"):
        begin -= 1
    inner = source.indentation(compound) + step(source, compound)
    body = [*lines, ""]
    return Text(source, begin, start, "".join(source.newline + inner + line for line in body))


def step(source: Source, node: cst.CSTNode) -> str:
    """One step of indentation, as used around `node`."""
    return "\t" if "\t" in source.indentation(source.statement_of(node)) else source.indent


def _guard(source: Source, run: list[cst.CSTNode], condition: str) -> Iterator[Text]:
    first, last = run[0], run[-1]
    if isinstance(first, cst.SimpleStatementSuite):
        compound = source.statement_of(first)
        yield _open_suite(source, first, [f"if {condition}:"])
        end = source.span(first).start
        yield Text(source, end, end, step(source, compound), order=(1, 0))
        return
    begin = source.line_start(source.span(first).start)
    header = f"{source.indentation(first)}if {condition}:{source.newline}"
    yield Text(source, begin, begin, header, order=(3, 0))
    strings = [
        source.span(node)
        for statement in run
        for kind in (cst.SimpleString, cst.FormattedString)
        for node in source.inside(statement, kind)
    ]
    position, stop = begin, source.span(last).stop
    while position < stop:
        end = source.line_end(position)
        in_string = any(span.start < position < span.stop for span in strings)
        line = source.data[position:end]
        if line.strip() and not in_string:
            begin = position + line[: len(line) - len(line.lstrip())].rfind(b"\f") + 1
            yield Text(source, begin, begin, step(source, first), order=(4, 0))
        position = end


def _merge_guards(guards: list[Guard]) -> Iterator[Text]:
    """Guards of neighbouring statements become one `if`."""
    wanted = {guard.statement: guard for guard in guards}
    done: set[cst.CSTNode] = set()
    for guard in sorted(wanted.values(), key=lambda g: g.source.span(g.statement).start):
        if guard.statement in done or _guarded_around(guard, wanted):
            continue
        siblings = guard.source.siblings(guard.statement)
        run = [guard.statement]
        if guard.statement in siblings:
            for item in siblings[siblings.index(guard.statement) + 1 :]:
                if item not in wanted or wanted[item].condition != guard.condition:
                    break
                run.append(item)
        done.update(run)
        yield from _guard(guard.source, run, guard.condition)


def _guarded_around(guard: Guard, wanted: dict[cst.CSTNode, Guard]) -> bool:
    return any(item in wanted for item in guard.source.ancestors(guard.statement))


def lower(edits: Iterable[Edit]) -> list[Text]:
    """The same edits as ranges of text only. Needs are not lowered here."""
    edits = list(edits)
    texts = [edit for edit in edits if isinstance(edit, Text)]
    return [*texts, *_merge_guards([edit for edit in edits if isinstance(edit, Guard)])]


def apply(source: Source, texts: Iterable[Text]) -> str:
    """The file's text after all edits.

    Raises:
        Conflict: two of them change the same bytes, or one inserts into what another replaces.
    """
    unique = {(t.start, t.stop, t.text, t.order): t for t in texts}.values()
    ordered = sorted(unique, key=lambda t: (t.start, t.stop > t.start, t.order))
    pieces, position = [], 0
    for edit in ordered:
        if edit.start < position:
            raise Conflict(f"{source.path}:{source.line_of(edit.start)}")
        pieces += [source.data[position : edit.start], edit.text.encode()]
        position = edit.stop
    pieces.append(source.data[position:])
    return b"".join(pieces).decode()
