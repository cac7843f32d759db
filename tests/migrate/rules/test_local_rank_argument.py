"""Rule MG108: the process's number is a command line argument."""

from __future__ import annotations

import pytest
from rewriting import rewritten, run

PARSER = "import argparse\nimport torch\np = argparse.ArgumentParser()\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"--local_rank", default=0', '"--local_rank", "--local-rank", default=local_rank_or(0)'),
        ('"--local-rank", type=int',
         '"--local-rank", "--local_rank", type=int, default=local_rank_or(None)'),
    ],
)  # fmt: skip
def test_local_rank_comes_from_the_environment(before: str, after: str) -> None:
    code = f"{PARSER}p.add_argument({before})"
    assert f"p.add_argument({after})" in rewritten(code, "MG108")
    assert not run(run(code, "MG108").files[0].after.decode(), "MG108").files[0].changed
