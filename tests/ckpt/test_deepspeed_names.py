"""File names and layouts of DeepSpeed releases that cannot be installed any more.

Real files of a later release, under the earlier release's names (deepspeed v0.3.0 to v0.5.10).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from truth import Truth

import ckpt

ZERO2, ZERO3 = FIXTURES / "ds009_t21-zero2_sgd_w2", FIXTURES / "ds009_t21-zero3_rich_w2"


def weight_problems(case: Path, source: Path, out: Path) -> list[str]:
    ckpt.convert(source, "torch", out)
    return Truth.load(case).weight_problems(torch.load(out, weights_only=True)["model"])


@pytest.fixture(params=[ZERO2, ZERO3], ids=lambda p: p.name)
def case(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def test_no_underscore_before_optim_states(case: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(case / "ckpt", tmp_path / "source"))
    for file in source.rglob("*_optim_states.pt"):
        file.rename(file.with_name(file.name.replace("_optim_states", "optim_states")))
    assert weight_problems(case, source, tmp_path / "out.pt") == []


def test_a_bf16_prefix(case: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(case / "ckpt", tmp_path / "source"))
    for file in source.rglob("*_optim_states.pt"):
        file.rename(file.with_name(f"bf16_{file.name}"))
    assert weight_problems(case, source, tmp_path / "out.pt") == []


def test_parameter_shapes_beside_the_optimizer(tmp_path: Path) -> None:
    source = Path(shutil.copytree(ZERO2 / "ckpt", tmp_path / "source"))
    model_file = next(source.rglob("mp_rank_00_model_states.pt"))
    model = torch.load(model_file, weights_only=False)
    shapes = model.pop("param_shapes")
    torch.save(model, model_file)
    for file in source.rglob("*_optim_states.pt"):
        content = torch.load(file, weights_only=False)
        torch.save(content | {"param_shapes": shapes}, file)
    assert weight_problems(ZERO2, source, tmp_path / "out.pt") == []


def test_no_group_paddings(tmp_path: Path) -> None:
    """Before 0.7.0 only the lengths tell that the last rank's states are padded."""
    source = Path(shutil.copytree(ZERO2 / "ckpt", tmp_path / "source"))
    for file in source.rglob("*_optim_states.pt"):
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"].pop("group_paddings")
        torch.save(content, file)
    assert list(ckpt.diff(ckpt.open(ZERO2 / "ckpt"), ckpt.open(source))) == []


def test_ten_and_more_ranks_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    """Rank 10 comes after rank 2, also where names are sorted as text."""
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(12)]
    for name in (*names, "mp_rank_00_model_states.pt"):
        (tmp_path / name).touch()
    from ckpt.formats import _deepspeed

    save = _deepspeed.locate(tmp_path, None)
    found = _deepspeed.rank_files(save, _deepspeed.OPTIM, 12)
    assert [file.name for file in found] == names


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_01_optim_states.pt"])
def test_model_parallel_files_are_refused(name: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(ZERO2 / "ckpt", tmp_path / "source"))
    file = next(source.rglob("zero_pp_rank_0_*optim_states.pt"))
    shutil.copy(file, file.with_name(name))
    with pytest.raises(ckpt.CkptError, match="only data-parallel"):
        ckpt.open(source)
