"""Edits of one text: where they go, how they compose, when they collide."""

from __future__ import annotations

from pathlib import Path

import libcst as cst
import pytest

from migrate.edit import (
    Conflict,
    Edit,
    Guard,
    add_argument,
    apply,
    delete_statement,
    enclose,
    insert_after,
    insert_before,
    lower,
    remove_argument,
    replace,
    set_argument,
)
from migrate.source import Source, parse_source


def source(text: str) -> Source:
    return parse_source(Path("a.py"), text.encode())


def call(src: Source, name: str) -> cst.Call:
    return next(c for c in src.all(cst.Call) if src.code(c.func) == name)


def statement(src: Source, text: str) -> cst.CSTNode:
    nodes = [*src.all(cst.SimpleStatementLine), *src.all(cst.With), *src.all(cst.FunctionDef)]
    return next(node for node in nodes if src.code(node).startswith(text))


def done(src: Source, *edits: Edit) -> str:
    return apply(src, lower(edits))


def test_a_replaced_node_keeps_its_parentheses_and_comments() -> None:
    src = source("x = (f(1))  # note\n")
    assert done(src, replace(src, call(src, "f"), "g()")) == "x = (g())  # note\n"


def test_enclosures_of_nested_expressions_nest() -> None:
    src = source("y = a(b(c))\n")
    outer, inner = call(src, "a"), call(src, "b")
    edits = [*enclose(src, inner, "in(", ")"), *enclose(src, outer, "out(", ")")]
    assert done(src, *edits) == "y = out(a(in(b(c))))\n"


def test_enclosures_that_begin_or_end_together_nest() -> None:
    src = source("y = a.b().c()\n")
    inner, outer = call(src, "a.b"), call(src, "a.b().c")
    edits = [*enclose(src, inner, "in(", ")"), *enclose(src, outer, "out(", ")")]
    assert done(src, *edits) == "y = out(in(a.b()).c())\n"


def test_a_new_argument_goes_before_a_trailing_comma() -> None:
    src = source("f(\n    a,\n    b,\n)\n")
    assert done(src, add_argument(src, call(src, "f"), "c=1")) == "f(\n    a,\n    b, c=1,\n)\n"


def test_a_new_argument_follows_an_enclosed_one() -> None:
    src = source("f(a)\n")
    f = call(src, "f")
    edits = [*enclose(src, f.args[0].value, "g(", ")"), add_argument(src, f, "c=1")]
    assert done(src, *edits) == "f(g(a), c=1)\n"


def test_a_first_argument_needs_no_comma() -> None:
    src = source("f()\n")
    assert done(src, add_argument(src, call(src, "f"), "c=1")) == "f(c=1)\n"


@pytest.mark.parametrize(
    ("text", "index", "expected"),
    [
        ("f(a, b=2)\n", 1, "f(a)\n"),
        ("f(a, b=2)\n", 0, "f(b=2)\n"),
        ("f(a)\n", 0, "f()\n"),
        ("f((a), (b), c)\n", 1, "f((a), c)\n"),
        ("f(a,\n  b,  # why\n  c)\n", 2, "f(a,\n  b)\n"),
    ],
)
def test_a_removed_argument_takes_its_comma_along(text: str, index: int, expected: str) -> None:
    src = source(text)
    f = call(src, "f")
    assert done(src, remove_argument(src, f, f.args[index])) == expected


def test_two_neighbouring_arguments_can_be_removed() -> None:
    src = source("f(a, b=1, c=2)\n")
    f = call(src, "f")
    edits = [remove_argument(src, f, f.args[1]), remove_argument(src, f, f.args[2])]
    assert done(src, *edits) == "f(a)\n"


def test_an_argument_is_set_where_it_stands() -> None:
    src = source("f(a, 64, shuffle=True)\n")
    f = call(src, "f")
    edits = [set_argument(src, f, "batch_size", "8", 1), set_argument(src, f, "shuffle", "False")]
    assert done(src, *edits) == "f(a, 8, shuffle=False)\n"


def test_lines_go_above_and_below_at_the_same_indentation() -> None:
    src = source("if a:\n\tb()  # b\n\tc()\n")
    b, c = statement(src, "b()"), statement(src, "c()")
    edits = [insert_before(src, c, ["before_c()"]), insert_after(src, b, ["after_b()"])]
    assert done(src, *edits) == "if a:\n\tb()  # b\n\tafter_b()\n\tbefore_c()\n\tc()\n"


def test_lines_go_above_the_decorators() -> None:
    src = source("@d\ndef f(): pass\n")
    assert done(src, insert_before(src, statement(src, "def f"), ["x"])) == "x\n@d\ndef f(): pass\n"


def test_a_line_below_the_last_one_without_newline() -> None:
    src = source("a()")
    assert done(src, insert_after(src, statement(src, "a()"), ["b()"])) == "a()\nb()"


def test_a_one_line_block_opens_for_a_line_above() -> None:
    src = source("if a: b()\n")
    suite = src.all(cst.SimpleStatementSuite)[0]
    assert done(src, insert_before(src, suite, ["x()"])) == "if a:\n    x()\n    b()\n"


def test_the_only_statement_of_a_block_leaves_pass() -> None:
    src = source("if a:\n    b()\nc()\nd()\n")
    edits = [
        delete_statement(src, statement(src, "b()")),
        delete_statement(src, statement(src, "c()")),
    ]
    assert done(src, *edits) == "if a:\n    pass\nd()\n"


def test_neighbouring_guards_share_one_if() -> None:
    src = source("def f():\n    a()\n    b(1,\n      2)\n    c()\n")
    edits = [Guard(src, statement(src, text), "main") for text in ("a()", "b(1")]
    assert done(src, *edits) == (
        "def f():\n    if main:\n        a()\n        b(1,\n          2)\n    c()\n"
    )


def test_a_guard_leaves_the_inside_of_strings_alone() -> None:
    src = source('a("""x\n  y\n""", 1)\n')
    assert done(src, Guard(src, statement(src, "a("), "m")) == ('if m:\n    a("""x\n  y\n""", 1)\n')


def test_a_guard_of_a_one_line_block() -> None:
    src = source("if a: b()\n")
    suite = src.all(cst.SimpleStatementSuite)[0]
    assert done(src, Guard(src, suite, "m")) == "if a:\n    if m:\n        b()\n"


def test_a_guard_inside_a_guarded_block_is_not_needed() -> None:
    src = source("with a:\n    b()\n")
    edits = [Guard(src, statement(src, text), "m") for text in ("b()", "with a")]
    assert done(src, *edits) == "if m:\n    with a:\n        b()\n"


def test_edits_inside_a_guarded_statement_survive() -> None:
    src = source("a(b)\nc()\n")
    edits = [Guard(src, statement(src, "a("), "m"), replace(src, call(src, "a").func, "z")]
    assert done(src, *edits) == "if m:\n    z(b)\nc()\n"


def test_windows_newlines_are_kept() -> None:
    src = source("a()\r\nb()\r\n")
    edits = [
        Guard(src, statement(src, "b()"), "m"),
        insert_after(src, statement(src, "a()"), ["x"]),
    ]
    assert done(src, *edits) == "a()\r\nx\r\nif m:\r\n    b()\r\n"


def test_two_edits_of_the_same_bytes_collide() -> None:
    src = source("f(a)\n")
    f = call(src, "f")
    with pytest.raises(Conflict):
        done(src, replace(src, f, "g"), replace(src, f.args[0], "h"))


def test_the_same_edit_twice_is_one() -> None:
    src = source("f(a)\n")
    f = call(src, "f")
    assert done(src, replace(src, f.func, "g"), replace(src, f.func, "g")) == "g(a)\n"


def test_text_that_is_not_ascii_keeps_its_offsets() -> None:
    src = source("s = 'äöü€'; f(a)\n")
    assert done(src, replace(src, call(src, "f").func, "g")) == "s = 'äöü€'; g(a)\n"
