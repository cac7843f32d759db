"""Rule MG104: the number of GPUs stands for the number that train."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten


@pytest.mark.parametrize(
    "line",
    ["if torch.cuda.device_count() > 1: pass", "n = torch.cuda.device_count()",
     "b = 8 * torch.cuda.device_count()", "ids = list(range(torch.cuda.device_count()))"],
)  # fmt: skip
def test_the_number_that_trains_is_the_number_of_processes(line: str) -> None:
    want = line.replace("torch.cuda.device_count()", "process_count()")
    assert rewritten(line, "MG104") == want + "\n"


@pytest.mark.parametrize(
    "line",
    ["if torch.cuda.device_count() > 0: pass", "if torch.cuda.device_count(): pass",
     "ok = torch.cuda.device_count() == 0", "ok = torch.cuda.device_count() >= args.n",
     "for i in range(torch.cuda.device_count()): print(torch.cuda.get_device_name(i))",
     "d = rank % torch.cuda.device_count()", "assert torch.cuda.device_count() > LOCAL_RANK",
     "m = nn.DataParallel(m, device_ids=range(torch.cuda.device_count()))"],
)  # fmt: skip
def test_other_counts_stay(line: str) -> None:
    assert findings(line, "MG104") == []
