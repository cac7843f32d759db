"""Where nodes stand: exactly where libcst's own provider says."""

from __future__ import annotations

import libcst as cst
import pytest
from conftest import REPO
from libcst.metadata import ByteSpanPositionProvider, MetadataWrapper

from migrate.places import Span, written

ODD = [
    "",
    "x",
    "x = 1  # comment\n",
    "\tif a : b ; c\n".strip("\t"),
    "x = (  # a\n    (1 , 2)\n)\r\n",
    "if a:\n\tb\nelif c: d\nelse:\n\te\n\n\n# end",
    "@a\n# between\n@b()\nclass C(D, metaclass=E):\n    def f(self, /, x=1, *y, z, **w): ...\n",
    'é = "ü" ; ö = f"{é!r:>{ä}}"\nprint(ö)\n',
    "async def f():\n  async with a as b, c: await (yield)\n  return [i async for i in x if i]\n",
    "try:\n  pass\nexcept* (A, B) as e: raise X from e\nfinally: pass\n",
    "match x:\n  case {'a': [1, *_], **r} if r: pass\n  case A(b=1) | None: pass\n",
    "lambda *a, b=(1): a[1:2, ..., ::3] if not -b ** ~2 else (c := \"a\" 'b')\n",
]
PROGRAMS = [path.read_text() for path in sorted((REPO / "fixtures" / "scripts").glob("*/in.py"))]


@pytest.mark.parametrize("text", [*ODD, *PROGRAMS])
def test_places_are_those_of_libcst(text: str) -> None:
    module = cst.parse_module(text)
    again, spans = written(module, text)
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    expected = wrapper.resolve(ByteSpanPositionProvider)
    assert again == text
    assert spans == {n: Span(at.start, at.start + at.length) for n, at in expected.items()}
