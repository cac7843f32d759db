"""Rule MG103: the program chooses the devices it sees."""

from __future__ import annotations

import pytest
from rewriting import findings

from migrate.finding import Applicability

OS = "import os\nimport torch\n"


def test_one_visible_device_is_work_for_a_human() -> None:
    (found,) = findings(OS + 'os.environ["CUDA_VISIBLE_DEVICES"] = "3"', "MG103")
    assert found.applicability is Applicability.MANUAL


@pytest.mark.parametrize("value", ['"0,1"', "args.gpus", '",".join(ids)'])
def test_several_visible_devices_are_only_mentioned(value: str) -> None:
    (found,) = findings(OS + f'os.environ["CUDA_VISIBLE_DEVICES"] = {value}', "MG103")
    assert found.applicability is Applicability.INFO


@pytest.mark.parametrize("value", ['""', '"-1"'])
def test_no_visible_device_is_fine(value: str) -> None:
    assert findings(OS + f'os.environ["CUDA_VISIBLE_DEVICES"] = {value}', "MG103") == []
