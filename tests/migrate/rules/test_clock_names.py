"""Rule MG702: a name is made from the clock or from random numbers."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

HEAD = "import random\nimport time\nimport numpy as np\nimport torch\nimport torch.nn as nn\n"


@pytest.mark.parametrize(
    "code",
    ["n = 'runs/' + {}\nopen(n, 'w')", "n = f'runs/{{{}}}'\nopen(n)", "random.seed(int({}))"],
)
def test_names_and_seeds_by_the_clock_are_the_main_process_s(code: str) -> None:
    text = HEAD + code.format("time.time()")
    assert "from_main_process(time.time())" in rewritten(text, "MG702")
    assert not run(run(text, "MG702").files[0].after.decode(), "MG702").files[0].changed


@pytest.mark.parametrize(
    "code",
    ["t = time.time()\nprint(time.time() - t)", "print('at', time.time())",
     "torch.save(1, 'x%s' % time.time())",
     "if rank == 0:\n    n = 'runs/' + time.ctime()\n    open(n)"],
)  # fmt: skip
def test_timing_printing_and_one_process_s_names_stay(code: str) -> None:
    assert findings(HEAD + code, "MG702") == []
