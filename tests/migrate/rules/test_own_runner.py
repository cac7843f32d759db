"""Libraries that distribute training themselves."""

from __future__ import annotations

from rewriting import findings


def said(code: str | dict[str, str], to: str = "ddp") -> list[str]:
    return [f.message for f in findings(code, "MG901", to)]


STEP = "loss.backward()\n"


def test_libraries_are_named() -> None:
    for lines, library in (
        ("from accelerate import Accelerator\na = Accelerator()", "accelerate"),
        ("import pytorch_lightning as pl\nt = pl.Trainer(gpus=2)", "Lightning"),
        ("from lightning.pytorch import Trainer\nt = Trainer()", "Lightning"),
        ("import horovod.torch as hvd\nhvd.init()", "horovod"),
        ("from transformers import Trainer\nTrainer(m).train()", "transformers"),
        ("from mmcv.parallel import MMDataParallel\nm = MMDataParallel(m)", "OpenMMLab"),
    ):
        messages = said(f"import torch\n{lines}\n{STEP}")
        assert len(messages) == 1, lines
        assert library in messages[0]


def test_a_class_that_derives_from_a_trainer_counts() -> None:
    code = "import torch\nfrom transformers import Trainer\nclass Mine(Trainer):\n    pass\n"
    assert len(said(code + f"Mine(m).train()\n{STEP}")) == 1


def test_a_trainer_of_the_script_s_own_is_fine() -> None:
    assert said(f"import torch\nclass Trainer:\n    pass\nTrainer()\n{STEP}") == []


def test_data_parallelism_by_hand_is_reported() -> None:
    code = """
import torch
from torch.nn.parallel import replicate, scatter, parallel_apply, gather
replicas = replicate(net, ids)
out = gather(parallel_apply(replicas, scatter(x, ids)), 0)
"""
    assert len(said(code)) == 4


def test_the_encoding_library_is_reported() -> None:
    code = (
        "import torch\nfrom encoding.parallel import DataParallelModel\nm = DataParallelModel(m)\n"
    )
    assert len(said(code)) == 1
