"""Damaged, incomplete and foreign input: one line that names the file, exit 2, nothing written."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import FIXTURES

from ckpt.api import open_checkpoint
from ckpt.cli import main

ZERO3 = FIXTURES / "ds009_t21-zero3_rich_w2" / "ckpt"
ZERO2 = FIXTURES / "ds009_t21-zero2_rich_w2" / "ckpt"
DCP = FIXTURES / "ds014_t24-ddp_gsd_dcp_w2" / "ckpt"
FSDP2 = FIXTURES / "ds014_t24-fsdp2_gsdflat_rich_dcp_w3" / "ckpt"
TAG = "global_step3"
Z3_MODEL = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"


def ckpt(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def copied(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "source"))


def truncate(path: Path, by: int) -> None:
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size - by)


def flip_byte(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def refused(source: Path, tmp_path: Path, *words: str, options: Sequence[object] = ()) -> str:
    """Convert into every target, expecting one line with these words; the last line."""
    message = ""
    for target in ("hf", "torch", "dcp"):
        before = sorted(tmp_path.iterdir())
        result = ckpt("convert", source, "--to", target, "-o", tmp_path / "out", *options)
        message = result.stderr.strip()
        assert result.exit_code == 2, result.output
        assert message.count("\n") == 0
        assert message.startswith("Error: ")
        assert "Traceback" not in result.output
        assert [word for word in words if word not in message] == []
        assert sorted(tmp_path.iterdir()) == before
    return message


# --- nothing there, or something else -----------------------------------------------------------


def test_no_such_path(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", tmp_path, "nowhere", "no such file or folder")


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", tmp_path, "empty", "the folder is empty")


def test_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    refused(tmp_path / "notes.txt", tmp_path, "notes.txt", "not a checkpoint", "ckpt formats")


def test_a_folder_of_other_things_names_what_is_inside(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.py").write_text("")
    refused(tmp_path / "folder", tmp_path, "train.py")


def test_a_folder_that_holds_checkpoints_names_them(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    shutil.copytree(ZERO3, tmp_path / "jobs" / "run")
    shutil.copytree(DCP, tmp_path / "jobs" / "step-3")
    refused(tmp_path / "jobs", tmp_path, "run", "step-3", "give one of them")


def test_an_unknown_target_lists_the_known_ones() -> None:
    result = ckpt("convert", ZERO3, "--to", "onnx")
    assert (result.exit_code, "hf" in result.stderr) == (2, True)


# --- incomplete ---------------------------------------------------------------------------------


def test_a_missing_rank_of_zero3(tmp_path: Path) -> None:
    source = copied(ZERO3, tmp_path)
    (source / TAG / OPTIM.format(1)).unlink()
    refused(source, tmp_path, TAG, "found 1 of 2", "optim_states", "[1]", "every rank")


def test_a_missing_model_file_of_zero3(tmp_path: Path) -> None:
    source = copied(ZERO3, tmp_path)
    (source / TAG / Z3_MODEL.format(0)).unlink()
    refused(source, tmp_path, TAG, "found 1 of 2", "model_states", "[0]")


def test_a_missing_rank_of_zero2(tmp_path: Path) -> None:
    source = copied(ZERO2, tmp_path)
    (source / TAG / OPTIM.format(0)).unlink()
    refused(source, tmp_path, TAG, "found 1 of 2", "[0]")


def test_all_optimizer_files_of_zero2_missing(tmp_path: Path) -> None:
    source = copied(ZERO2, tmp_path)
    for rank in (0, 1):
        (source / TAG / OPTIM.format(rank)).unlink()
    refused(source, tmp_path, TAG, "ZeRO stage 2", "optim_states")


def test_the_module_of_zero2_missing(tmp_path: Path) -> None:
    source = copied(ZERO2, tmp_path)
    (source / TAG / "mp_rank_00_model_states.pt").unlink()
    refused(source, tmp_path, TAG, "mp_rank_00_model_states.pt", "missing")


def test_no_latest_lists_the_tags(tmp_path: Path) -> None:
    source = copied(ZERO3, tmp_path)
    (source / "latest").unlink()
    refused(source, tmp_path, "latest", "--tag", TAG)
    assert ckpt("inspect", source, "--tag", TAG).exit_code == 0
    assert ckpt("inspect", source / TAG).exit_code == 0


def test_latest_names_a_tag_that_is_not_there(tmp_path: Path) -> None:
    source = copied(ZERO3, tmp_path)
    (source / "latest").write_text("global_step9")
    refused(source, tmp_path, "global_step9", "--tag", TAG)


def test_a_wrong_tag_lists_the_tags(tmp_path: Path) -> None:
    refused(ZERO3, tmp_path, "step7", TAG, options=["--tag", "step7"])


def test_a_dcp_folder_without_metadata(tmp_path: Path) -> None:
    source = copied(DCP, tmp_path)
    (source / ".metadata").unlink()
    refused(source, tmp_path, ".metadata", "did not finish")


def test_a_dcp_folder_without_a_ranks_file(tmp_path: Path) -> None:
    source = copied(FSDP2, tmp_path)
    (source / "__1_0.distcp").unlink()
    refused(source, tmp_path, "__1_0.distcp", "missing")


def test_a_safetensors_shard_missing(tmp_path: Path) -> None:
    assert ckpt("convert", ZERO3, "--to", "hf", "-o", tmp_path / "hf",
                "--max-shard-size", "4KB").exit_code == 0  # fmt: skip
    next((tmp_path / "hf").glob("model-00002-*")).unlink()
    refused(tmp_path / "hf", tmp_path, "model-00002-of-", "missing")


# --- truncated, damaged, mixed ------------------------------------------------------------------

ZERO3_OPTIM = f"{TAG}/{OPTIM.format(1)}"
DAMAGES: dict[str, tuple[Path, str, Callable[[Path], None]]] = {
    "zero3 optimizer cut": (ZERO3, ZERO3_OPTIM, lambda p: truncate(p, 100)),
    "zero3 optimizer half": (ZERO3, ZERO3_OPTIM, lambda p: truncate(p, p.stat().st_size // 2)),
    "zero3 optimizer empty": (ZERO3, ZERO3_OPTIM, lambda p: p.write_bytes(b"")),
    "zero3 optimizer garbage": (ZERO3, ZERO3_OPTIM, lambda p: p.write_bytes(b"\0" * 5000)),
    "zero2 module cut": (ZERO2, f"{TAG}/mp_rank_00_model_states.pt", lambda p: truncate(p, 1000)),
    "dcp data cut": (FSDP2, "__0_0.distcp", lambda p: truncate(p, 100)),
    "dcp metadata cut": (FSDP2, ".metadata", lambda p: truncate(p, 100)),
    "dcp metadata empty": (FSDP2, ".metadata", lambda p: p.write_bytes(b"")),
    "dcp metadata garbage": (FSDP2, ".metadata", lambda p: p.write_bytes(b"\x80\x04garbage")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    original, name, spoil = DAMAGES[damage]
    source = copied(original, tmp_path)
    spoil(source / name)
    message = refused(source, tmp_path, "source")
    assert Path(name).name in message or TAG in message


@pytest.mark.parametrize("original", [ZERO3, ZERO2, FSDP2, DCP], ids=lambda p: p.parent.name)
def test_a_byte_of_a_weight_changed(original: Path, tmp_path: Path) -> None:
    """Inside the weight itself, where the archive's own structure stays valid."""
    source = copied(original, tmp_path)
    place = open_checkpoint(source).params["blocks.0.proj.weight"].weight.chunks[0]
    flip_byte(Path(place.record.path), place.record.offset + 4 * place.start + 2)
    refused(source, tmp_path, Path(place.record.path).name, "checksum", "Copy it again")


def test_ranks_of_two_saves_mixed(tmp_path: Path) -> None:
    source = copied(FIXTURES / "ds009_t21-zero2_sgd_w2" / "ckpt", tmp_path)
    other = FIXTURES / "ds009_t21-zero2_rich_w2" / "ckpt"
    shutil.copy(other / TAG / OPTIM.format(1), source / TAG / OPTIM.format(1))
    refused(source, tmp_path, TAG, "two different saves are mixed")


def test_ranks_of_two_saves_mixed_where_no_counter_tells(tmp_path: Path) -> None:
    """SGD counts no steps; the module's weights are the only witness."""
    source = copied(FIXTURES / "ds009_t21-zero2_sgd_w2" / "ckpt", tmp_path)
    file = source / TAG / OPTIM.format(1)
    content = torch.load(file, weights_only=False)
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.add_(1e-3)
    torch.save(content, file)
    refused(source, tmp_path, "not the module's weights", "two saves")


def test_more_ranks_than_the_world_size(tmp_path: Path) -> None:
    source = copied(FIXTURES / "ds009_t21-zero2_rich_w2" / "ckpt", tmp_path)
    other = FIXTURES / "ds009_t21-zero2_fp32_w3" / "ckpt"
    shutil.copy(other / TAG / OPTIM.format(2), source / TAG / OPTIM.format(2))
    refused(source, tmp_path, TAG, "two different saves are mixed")


def test_dcp_files_of_two_saves_mixed(tmp_path: Path) -> None:
    source = copied(FSDP2, tmp_path)
    shutil.copy(DCP / "__0_0.distcp", source / "__0_0.distcp")
    refused(source, tmp_path, "source")


# --- pickles ------------------------------------------------------------------------------------


class Hostile:
    """Would create a file when loaded by an unpickler that executes what it reads."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return os.mkdir, (str(self.marker),)


def test_an_unexpected_global_in_a_torch_file(tmp_path: Path) -> None:
    marker, file = tmp_path / "executed", tmp_path / "model.pt"
    torch.save({"model": {"weight": torch.ones(2)}, "extra": Hostile(marker)}, file)
    refused(file, tmp_path, "model.pt", "mkdir", "nothing was executed")
    assert not marker.exists()


def test_an_unexpected_global_in_dcp_metadata(tmp_path: Path) -> None:
    source, marker = copied(DCP, tmp_path), tmp_path / "executed"
    (source / ".metadata").write_bytes(pickle.dumps(Hostile(marker)))
    refused(source, tmp_path, ".metadata", "mkdir")
    assert not marker.exists()


def test_an_unknown_zero_stage(tmp_path: Path) -> None:
    source = copied(ZERO3, tmp_path)
    for rank in (0, 1):
        file = source / TAG / OPTIM.format(rank)
        content = torch.load(file, weights_only=False)
        content["optimizer_state_dict"]["zero_stage"] = 7
        torch.save(content, file)
    refused(source, tmp_path, OPTIM.format(0), "unknown ZeRO stage 7")


# --- outputs ------------------------------------------------------------------------------------


def test_an_output_that_exists(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    refused(ZERO3, tmp_path, "out", "already exists", "--overwrite")


def test_a_disk_that_is_too_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    refused(ZERO3, tmp_path, "free", "the output takes")


def test_a_source_without_weights(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "losses": [1.0, 2.0]}, tmp_path / "job.pt")
    refused(tmp_path / "job.pt", tmp_path, "job.pt", "no model state dict")


def test_a_config_of_another_model(tmp_path: Path) -> None:
    config = FIXTURES / "ds019_t213-hf_trainer_zero3_w2" / "checkpoint-3"
    result = ckpt("convert", ZERO3, "--to", "hf", "-o", tmp_path / "out", "--hf-config", config)
    assert (result.exit_code, (tmp_path / "out").exists()) == (2, False)
    assert "does not fit" in result.stderr


def test_a_loss_the_target_could_hold_needs_consent(tmp_path: Path) -> None:
    """A tied weight of a checkpoint older than DeepSpeed's record of ties: name, no weights."""
    source = copied(ZERO3, tmp_path)
    for rank in (0, 1):
        file = source / TAG / Z3_MODEL.format(rank)
        content = torch.load(file, weights_only=False)
        content["shared_params"] = {}
        torch.save(content, file)
    refused(source, tmp_path, "head.weight", "--allow-loss")
    allowed = ckpt("convert", source, "--to", "hf", "-o", tmp_path / "hf", "--allow-loss")
    assert (allowed.exit_code, "head.weight" in allowed.output) == (0, True)
