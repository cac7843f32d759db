"""The files of HF Trainer and accelerate beside a checkpoint: read, carried along, or named."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from conftest import FIXTURES
from torch.utils.data import RandomSampler

import ckpt

TRAINER = FIXTURES / "ds019_t213-hf_trainer_zero3_w2" / "checkpoint-3"
ACCELERATE = FIXTURES / "ds019_t213-accelerate_fsdp1_w2" / "ckpt"
RANDOM = ["rng_state_0.pth", "rng_state_1.pth"]


def files(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_a_trainers_folder_becomes_one_that_a_trainer_resumes_from(tmp_path: Path) -> None:
    out = ckpt.convert(TRAINER, "zero2", tmp_path / "out", world_size=2)
    assert files(out) == files(TRAINER)
    for name in ("trainer_state.json", "scheduler.pt", "config.json", *RANDOM):
        assert (out / name).read_bytes() == (TRAINER / name).read_bytes()


def test_what_goes_along_as_a_file_is_not_in_the_shards_too(tmp_path: Path) -> None:
    once = ckpt.convert(TRAINER, "zero2", tmp_path / "once", world_size=2)
    twice = ckpt.convert(once, "zero3", tmp_path / "twice", world_size=2)
    names = {*ckpt.open(TRAINER).objects, "lr_scheduler"}  # out of scheduler.pt
    assert {*ckpt.open(once).objects} == {*ckpt.open(twice).objects} == names
    assert files(twice) == files(TRAINER)


def test_random_states_of_other_ranks_stay_behind_and_that_is_said(tmp_path: Path) -> None:
    conversion = ckpt.prepare(TRAINER, "zero3", tmp_path / "out", world_size=3)
    (note,) = (n for n in conversion.notes if n.subjects == tuple(RANDOM))
    assert "the job has 3 ranks" in note.detail
    assert files(conversion.run()) == files(TRAINER) - {*RANDOM}


def test_accelerate_finds_the_shards_under_its_own_name(tmp_path: Path) -> None:
    out = ckpt.convert(ACCELERATE, "zero1", tmp_path / "out", world_size=2)
    assert (out / "latest").read_text() == "pytorch_model"
    carried = {"scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"}
    assert files(out) > carried | {"pytorch_model"}
    assert ckpt.open(out).origin.format == "zero1"


def test_a_job_without_a_trainer_has_no_such_files(tmp_path: Path) -> None:
    source = FIXTURES / "ds009_t21-zero3_rich_w2" / "ckpt"
    job = Path(shutil.copytree(source, tmp_path / "job"))
    (job / "scheduler.txt").write_text("my own")
    (job / "config.json").write_text("{}")
    out = ckpt.convert(job, "zero3", tmp_path / "out", allow_loss=True)
    assert files(out) == {"latest", "global_step3"}


def test_weights_alone_are_nothing_to_resume_from(tmp_path: Path) -> None:
    out = ckpt.convert(TRAINER, "zero3", tmp_path / "out", weights_only=True)
    assert files(out) == {"latest", "global_step0"}


@pytest.fixture
def with_sampler(tmp_path: Path) -> Path:
    """A folder with a file that is no plain data."""
    source = Path(shutil.copytree(ACCELERATE, tmp_path / "source"))
    torch.save(RandomSampler([1, 2, 3]), source / "sampler.bin")
    return source


def test_what_cannot_be_read_is_carried(with_sampler: Path, tmp_path: Path) -> None:
    out = ckpt.convert(with_sampler, "zero3", tmp_path / "out", world_size=2)
    assert (out / "sampler.bin").read_bytes() == (with_sampler / "sampler.bin").read_bytes()


def test_what_cannot_be_read_is_asked_for_where_it_is_lost(
    with_sampler: Path, tmp_path: Path
) -> None:
    with pytest.raises(ckpt.CkptError, match=r"sampler\.bin.*--allow-loss"):
        ckpt.convert(with_sampler, "torch", tmp_path / "out")
