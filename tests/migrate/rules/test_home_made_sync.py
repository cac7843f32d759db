"""BatchNorm of sync-BatchNorm libraries."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG816", to)]


HEAD = "import torch\nimport torch.nn as nn\n"


def test_layers_of_a_library_are_reported_once() -> None:
    code = (
        HEAD
        + """
from sync_batchnorm import SynchronizedBatchNorm2d as BN
from sync_batchnorm import patch_replication_callback
model = nn.DataParallel(nn.Sequential(BN(3), BN(4)))
patch_replication_callback(model)
"""
    )
    assert len(said(code)) == 2


def test_a_class_that_is_handed_on_is_reported() -> None:
    code = HEAD + "from apex.parallel import SyncBatchNorm\nmodel = make(norm=SyncBatchNorm)\n"
    assert len(said(code)) == 1


def test_a_class_in_the_project_is_reported() -> None:
    files = {
        "train.py": HEAD
        + "from bn import SynchronizedBatchNorm2d\nm = SynchronizedBatchNorm2d(3)\n"
        "m(x).sum().backward()\n",
        "bn.py": HEAD + "class SynchronizedBatchNorm2d(nn.BatchNorm2d):\n    pass\n",
    }
    assert len(said(files)) == 1


def test_torch_s_own_layers_are_fine() -> None:
    assert said(HEAD + "m = nn.Sequential(nn.SyncBatchNorm(3), nn.BatchNorm2d(3))\n") == []
