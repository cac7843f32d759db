"""Rule MG109: the argument async."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten


@pytest.mark.parametrize("call", ["x.cuda(async=True)", "x.cuda(0, async = True)"])
def test_the_argument_gets_its_present_name(call: str) -> None:
    assert rewritten(f"y = {call}", "MG109") == f"y = {call.replace('async', 'non_blocking')}\n"


def test_the_line_is_reported() -> None:
    found = findings("x = 1\ny = x.cuda(async=True)", "MG109")
    assert [f.line for f in found] == [5]


def test_coroutines_are_left_alone() -> None:
    code = "async def f():\n    async with g() as h:\n        return [i async for i in h]\n"
    assert rewritten(code, "MG109") == code
