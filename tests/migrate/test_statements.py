"""What assignments, loops, `with` items and returns put into variables."""

from __future__ import annotations

import pytest
from probing import probe

ARRIVES = """\
x = m()
probe(x)
---
x: object = m()
probe(x)
---
x = y = m()
probe(x)
---
x, y = m(), 1
probe(x)
---
(x, [y, z]) = 1, (2, m())
probe(z)
---
pair = 1, m()
x, y = pair
probe(y)
---
if (x := m()): probe(x)
---
with m() as x: probe(x)
---
x = [m()]
probe(x[0])
---
x = [1, m()]
probe(x[i])
---
x = {'a': m(), 'b': 1}
probe(x['a'])
---
x = {}
x['a'] = m()
probe(x['a'])
---
x = {k: m() for k in 'ab'}
probe(x['a'])
---
x = [m() for k in 'ab']
probe(x[1])
---
for x in [m()]: probe(x)
---
for i, x in enumerate([m()]): probe(x)
---
for x, y in zip([1], [m()]): probe(y)
---
for i, (x, y) in enumerate(zip([1], [m()])): probe(y)
---
for x, y in [(1, m())]: probe(y)
---
for k, x in {'a': m()}.items(): probe(x)
---
for x in {'a': m()}.values(): probe(x)
---
[probe(x) for x in [m()]]
---
x = []
x.append(m())
for y in x: probe(y)
---
import torch.nn as nn
x = nn.ModuleList()
x.append(m())
for i, y in enumerate(x): probe(y)
---
def f(): return m()
probe(f())
---
def f():
    return 1, m()
x, y = f()
probe(y)
---
def f():
    return {'net': m()}
probe(f()['net'])
---
def f(x=m()): probe(x)
f()
---
def f():
    for i in range(3): yield m()
for x in f(): probe(x)
---
def f():
    yield 1, m()
for x, y in f(): probe(y)
---
def f():
    global x
    x = m()
f()
probe(x)
"""


@pytest.mark.parametrize("code", ARRIVES.strip().split("\n---\n"))
def test_a_value_is_put_into_a_variable(code: str) -> None:
    assert "lib.make" in probe(f"from lib import make as m\n{code}\n")


@pytest.mark.parametrize(
    "code",
    [
        "x, y = m(), 1\nprobe(y)",
        "for x, y in zip([1], [m()]): probe(x)",
        "for i, x in enumerate([m()]): probe(i)",
        "x += m()\nprobe(x)",
        "del x\nprobe(x)",
    ],
)
def test_it_is_put_into_no_other(code: str) -> None:
    assert "lib.make" not in probe(f"from lib import make as m\n{code}\n")


def test_a_generator_stands_for_what_it_yields() -> None:
    assert probe("def f():\n    yield open(1)\nprobe(f())\n") == {"generator"}
