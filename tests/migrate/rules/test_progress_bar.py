"""Rule MG602: progress bars."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

IMPORTS = "import torch, tqdm.auto\nfrom tqdm import tqdm as bar, trange\n"
IMPORTS += "from rich.progress import track\n"
OFF = "not is_main_process()"


@pytest.mark.parametrize(
    ("line", "new"),
    [
        ("bar(x)", f"bar(x, disable={OFF})"),
        ("bar(x, 'train')", f"bar(x, 'train', disable={OFF})"),
        ("trange(3)", f"trange(3, disable={OFF})"),
        ("tqdm.auto.tqdm(total=3)", f"tqdm.auto.tqdm(total=3, disable={OFF})"),
        ("track(x, description='a')", f"track(x, description='a', disable={OFF})"),
        ("bar(x, disable=False)", f"bar(x, disable={OFF})"),
        ("bar(x, disable=quiet)", f"bar(x, disable=quiet or {OFF})"),
        ("bar(x, disable=not a)", f"bar(x, disable=not a or {OFF})"),
        ("bar(x, disable=a if b else c)", f"bar(x, disable=(a if b else c) or {OFF})"),
        ("bar(x, **kw)", f'bar(x, **{{"disable": {OFF}, **kw}})'),
        ("bar(\n    x,\n    total=3,\n)", f"bar(\n    x,\n    total=3, disable={OFF},\n)"),
        ("bar.write('a')", "if is_main_process():\n    bar.write('a')"),
    ],
)  # fmt: skip
def test_only_the_main_process_shows_a_bar(line: str, new: str) -> None:
    text = rewritten(IMPORTS + line, "MG602")
    assert text.endswith("\n" + new + "\n")


@pytest.mark.parametrize(
    "line",
    ["bar(x, disable=True)", "bar(x, disable=rank != 0)", "range(3)",
     "if rank == 0:\n    x = bar(x)",
     "off = None if args.rank == 0 else True\nbar(x, disable=off)"],
)  # fmt: skip
def test_what_is_silent_already_stays(line: str) -> None:
    assert findings(IMPORTS + line, "MG602") == []


def test_a_second_run_changes_nothing() -> None:
    code = IMPORTS + "for a in bar(x, disable=q):\n    pass\nbar(x)\nbar(x, **kw)\n"
    once = run(code, "MG602").files[0].after.decode()
    assert not run(once, "MG602").files[0].changed
