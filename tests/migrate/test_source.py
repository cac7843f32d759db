"""One file: how it is decoded, where its nodes stand, and what is said when it cannot be read."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
import pytest

from migrate.errors import SourceError
from migrate.source import Source, parse_source

PATH = Path("a.py")


def source(text: str) -> Source:
    return parse_source(PATH, text.encode())


def call(src: Source, name: str) -> cst.Call:
    return next(item for item in src.all(cst.Call) if src.code(item.func) == name)


@pytest.mark.parametrize(
    "content",
    [
        b"x = 1\n",
        b"x = 1",
        b"",
        b"\n\n",
        b"x = 1\r\ny = 2\r\n",
        b"\xef\xbb\xbfx = '\xc3\xa9'\n",
        b"# -*- coding: latin-1 -*-\nx = '\xe9'\n",
        b"\xef\xbb\xbf# -*- coding: utf-8 -*-\nx = 1\n",
        b"x = 1\n\x0c\ny = 2\n",
        b"if x:\n\ty = 1\n",
        b"x = '\xe2\x80\xa8'\n",
    ],
)
def test_content_comes_back_byte_by_byte(content: bytes) -> None:
    src = parse_source(PATH, content)
    assert src.encode(src.text) == content


def test_offsets_count_bytes_and_columns_characters() -> None:
    src = source("s = 'żółć'; f(x)\n")
    assert src.span(call(src, "f")).start == len("s = 'żółć'; ".encode())
    assert src.column_of(call(src, "f")) == 13


def test_lines_end_at_newlines_only() -> None:
    src = source("a = 1\n\x0c\nb = '\u2028'\nf()\n")
    assert src.line_of(call(src, "f")) == 4


def test_lines_of_windows_files() -> None:
    src = source("a = 1\r\nf()\r\n")
    assert (src.line_of(call(src, "f")), src.newline) == (2, "\r\n")
    assert src.data[src.line_start(9) : src.line_end(9)] == b"f()\r\n"


def test_the_indentation_of_the_file_and_of_a_statement() -> None:
    src = source("def f():\n\tif x:\n\t\tg()\n")
    assert src.indent == "\t"
    assert src.indentation(src.statement_of(call(src, "g"))) == "\t\t"


def test_code_is_the_text_of_a_node_without_its_parentheses() -> None:
    src = source("y = ( f( a,b ) )  # c\n")
    assert src.code(call(src, "f")) == "f( a,b )"


NESTED = """\
class A:
    x = top()

    def m(self, n=default()):
        def inner():
            return deep()
        if n: one_line()
        return [inside() for _ in n]
"""


@pytest.mark.parametrize(
    ("name", "function", "cls"),
    [("top", None, "A"), ("default", None, "A"), ("deep", "inner", "A"), ("inside", "m", "A")],
)
def test_the_function_and_the_class_around_a_node(
    name: str, function: str | None, cls: str
) -> None:
    src = source(NESTED)
    found = src.function_of(call(src, name))
    around = src.class_of(call(src, name))
    assert (found.name.value if found else None) == function
    assert around is not None
    assert around.name.value == cls


def test_the_statement_of_a_one_line_block_is_the_whole_statement() -> None:
    src = source(NESTED)
    assert src.code(src.statement_of(call(src, "one_line"))) == "if n: one_line()"


def test_a_node_outside_of_every_statement_is_refused() -> None:
    src = source("x = 1\n")
    with pytest.raises(LookupError):
        src.statement_of(src.module)


def test_the_statements_beside_a_statement() -> None:
    src = source("a()\nif x:\n    b()\n    c()\n")
    inner = src.statement_of(call(src, "b"))
    assert [src.code(item) for item in src.siblings(inner)] == ["b()", "c()"]
    outer = src.statement_of(call(src, "a"))
    assert len(src.siblings(outer)) == 2


def test_nodes_in_a_node_are_in_the_order_of_the_text() -> None:
    src = source("a(b(c()))\nd()\n")
    first = src.statement_of(call(src, "a"))
    assert [src.code(item.func) for item in src.inside(first, cst.Call)] == ["a", "b", "c"]
    assert [src.code(item.func) for item in src.all(cst.Call)] == ["a", "b", "c", "d"]


def test_what_contains_what() -> None:
    src = source("a(b())\nc()\n")
    assert src.contains(call(src, "a"), call(src, "b"))
    assert src.contains(call(src, "a"), call(src, "a"))
    assert not src.contains(call(src, "a"), call(src, "c"))


def test_async_as_an_argument_is_read_as_its_present_name() -> None:
    src = source("x = 1\nx.cuda(async=True)\n")
    assert src.text == "x = 1\nx.cuda(non_blocking=True)\n"
    assert src.original == "x = 1\nx.cuda(async=True)\n"
    assert src.repaired == (2,)


def test_lines_of_async_arguments_are_counted_as_editors_count() -> None:
    assert source("s = '\u2028'\n\x0c\nx.cuda(async=True)\n").repaired == (3,)


def test_an_async_argument_on_a_line_of_its_own_is_repaired() -> None:
    assert source("x.cuda(\n    async=True)\n").repaired == (2,)


def test_async_in_a_string_or_comment_of_a_sound_file_stays() -> None:
    text = "# was x.cuda(async=True)\nprint('(async=True)')\n"
    src = source(text)
    assert (src.text, src.repaired) == (text, ())


@pytest.mark.parametrize(
    ("content", "line", "words"),
    [
        (b"x = 1\nprint 'x'\n", 2, "Python 2 source"),
        (b"\x0c\ntry:\n    f()\nexcept IOError, e:\n    pass\n", 4, "Python 2 source"),
        (b"x = 1\n!pip install x\n", 2, "magic command"),
        (b"x = 1\ny = (\n", 2, "not valid Python 3"),
        (b"x = 1\ny = '\xe9'\n", 2, "not utf-8 text"),
        (b"# coding: latin-42\nx = 1\n", 1, "encoding"),
        (b"# coding: ascii\n\nx = '\xe9'\n", 3, "text"),
    ],
)
def test_what_cannot_be_read_is_said_with_its_line(content: bytes, line: int, words: str) -> None:
    with pytest.raises(SourceError) as error:
        parse_source(PATH, content)
    assert str(error.value).startswith(f"a.py:{line}: ")
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_text_with_a_null_byte_is_refused_in_one_line() -> None:
    with pytest.raises(SourceError) as error:
        source("x = 1\n\0\n")
    assert "\n" not in str(error.value)


def test_two_types_without_parentheses_are_not_python_2() -> None:
    assert source("try:\n    f()\nexcept (IOError, error):\n    pass\n").text
    assert source("try:\n    f()\nexcept IOError, ValueError:\n    pass\n").text


def test_the_deepest_nesting_that_python_takes_is_read() -> None:
    text = "x = " + "(" * 150 + "1" + ")" * 150 + "\n"
    assert source(text).text == text
