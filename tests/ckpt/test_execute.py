"""Carrying out a plan: what is there after success, failure, interruption and a kill."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt
from ckpt import copying, execute
from ckpt.api import Conversion, prepare
from ckpt.errors import CorruptCheckpoint, LossRefused, NoSpace, OutputExists
from ckpt.model import Record

TENSORS = 8
RECORDS_BEFORE_THE_KILL = 3
Usage = namedtuple("Usage", "total used free")


def weights(scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Tensors of falling size, so that the order in which they are copied is known."""
    return {
        f"layer{at}.weight": scale * torch.arange(1000.0 * (TENSORS - at)).reshape(-1, 10)
        for at in range(TENSORS)
    }


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file that torch saved, in a folder of its own."""
    (tmp_path / "in").mkdir()
    torch.save({"model": weights(), "step": 3}, tmp_path / "in" / "job.pt")
    return tmp_path / "in" / "job.pt"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """An empty folder to write into."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def convert(source: Path, output: Path, to: str = "torch", **options: Any) -> Path:
    return ckpt.convert(source, to, output, **options)


def same(found: dict[str, torch.Tensor], scale: float = 1.0) -> bool:
    expected = weights(scale)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], tensor) for name, tensor in expected.items()
    )


def loaded(output: Path, to: str, scratch: Path) -> dict[str, torch.Tensor]:
    """The weights in an output, read by the target's own library."""
    if to == "torch":
        return dict(torch.load(output, weights_only=True)["model"])
    if to == "hf":
        return load_file(output / "model.safetensors")
    dcp_to_torch_save(output, scratch / "all.pt")
    return dict(torch.load(scratch / "all.pt", weights_only=True)["model"])


def damage(source: Path) -> None:
    """Flip one bit in the middle of the largest tensor."""
    data = bytearray(source.read_bytes())
    data[len(data) // 8] ^= 1
    source.write_bytes(data)


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


# --- complete, and nothing else -----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", ["torch", "hf", "dcp"])
def test_an_output_is_complete_and_alone(to: str, source: Path, out: Path, tmp_path: Path) -> None:
    convert(source, out / "x", to)
    assert names(out) == ["x"]
    assert same(loaded(out / "x", to, tmp_path))


def test_the_source_stays_as_it_is(source: Path, out: Path) -> None:
    before = source.read_bytes()
    convert(source, out / "x")
    assert source.read_bytes() == before
    assert names(source.parent) == ["job.pt"]


def test_missing_folders_above_an_output_are_made(source: Path, out: Path) -> None:
    convert(source, out / "a" / "b" / "x.pt")
    assert names(out / "a" / "b") == ["x.pt"]


def test_an_output_is_not_there_while_it_is_being_written(source: Path, out: Path) -> None:
    seen: set[bool] = set()
    ckpt.prepare(source, "torch", out / "x").run(lambda _bytes: seen.add((out / "x").exists()))
    assert seen == {False}


def test_progress_adds_up_to_the_bytes_of_the_plan(source: Path, out: Path) -> None:
    conversion, told = ckpt.prepare(source, "torch", out / "x"), list[int]()
    conversion.run(told.append)
    assert sum(told) == conversion.nbytes == sum(t.nbytes for t in weights().values())


def test_preparing_writes_nothing(source: Path, out: Path) -> None:
    ckpt.prepare(source, "torch", out / "x")
    assert names(out) == []


# --- failures -----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "hf", "dcp"])
def test_a_damaged_source_leaves_nothing_behind(to: str, source: Path, out: Path) -> None:
    damage(source)
    with pytest.raises(CorruptCheckpoint, match="checksum"):
        convert(source, out / "x", to)
    assert names(out) == []


@pytest.mark.parametrize("problem", [KeyboardInterrupt(), SystemExit(1), RuntimeError("x")])
def test_an_interrupted_copy_leaves_nothing_behind(
    problem: BaseException, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy_some_and_stop(*args: Any) -> None:
        copying.copy(*args)
        raise problem

    monkeypatch.setattr(execute, "copy", copy_some_and_stop)
    with pytest.raises(type(problem)):
        convert(source, out / "x")
    assert names(out) == []


def test_an_error_in_progress_leaves_nothing_behind(source: Path, out: Path) -> None:
    def fail(_bytes: int) -> None:
        raise RuntimeError("the terminal is gone")

    with pytest.raises(RuntimeError, match="terminal"):
        ckpt.prepare(source, "torch", out / "x").run(fail)
    assert names(out) == []


def test_a_failing_commit_file_leaves_nothing_behind(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> None:
        raise OSError(errno.EIO, "broken disk")

    conversion = ckpt.prepare(source, "dcp", out / "x")
    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(OSError, match="broken disk"):
        conversion.run()
    assert names(out) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="No space left"):
        convert(source, out / "x")
    assert names(out) == []


def test_a_lost_rename_leaves_nothing_behind(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(execute, "_publish", refuse)
    with pytest.raises(OSError, match="broken disk"):
        convert(source, out / "x")
    assert names(out) == []


@pytest.fixture
def ordinary_user() -> Iterator[None]:
    """Root may write anywhere; while this lasts, the process is nobody."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    yield
    os.seteuid(before)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user can read, unlike pytest's own."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def into_a_read_only_folder(open_folder: Path) -> Conversion:
    """A conversion whose output belongs into a folder that may not be written."""
    torch.save({"model": weights()}, open_folder / "job.pt")
    (open_folder / "out").mkdir(mode=0o555)
    return ckpt.prepare(open_folder / "job.pt", "torch", open_folder / "out" / "x")


def test_a_read_only_folder_is_an_error_of_the_system(
    into_a_read_only_folder: Conversion, ordinary_user: None
) -> None:
    with pytest.raises(PermissionError):
        into_a_read_only_folder.run()
    assert names(into_a_read_only_folder.output.parent) == []


def test_an_output_below_a_file_is_an_error_of_the_system(source: Path, out: Path) -> None:
    (out / "file").write_text("mine")
    with pytest.raises(OSError, match="file"):
        convert(source, out / "file" / "x")
    assert (out / "file").read_text() == "mine"


# --- space --------------------------------------------------------------------------------------


def test_a_disk_with_just_enough_space_is_used(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(t.nbytes for t in weights().values()) + execute.SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(1 << 40, 0, needed))
    assert convert(source, out / "x").exists()


def test_a_disk_with_a_byte_too_few_is_refused_before_anything_is_written(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = sum(t.nbytes for t in weights().values()) + execute.SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: Usage(1 << 40, 0, needed - 1))
    with pytest.raises(NoSpace, match=r"/out: 0\.02 GB free, the output takes 0\.00 GB"):
        convert(source, out / "x")
    assert names(out) == []


def test_space_is_asked_for_where_the_output_goes(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: asked.append(Path(path)) or Usage(1, 0, 1 << 40)
    )
    convert(source, out / "not" / "there" / "x")
    assert asked == [out]


# --- an output that is there --------------------------------------------------------------------


@pytest.mark.parametrize("to", ["torch", "hf"])
def test_an_output_that_is_there_is_refused_and_stays(to: str, source: Path, out: Path) -> None:
    (out / "x").write_text("mine")
    with pytest.raises(OutputExists, match=r"/x: already exists.*--overwrite"):
        convert(source, out / "x", to)
    assert (out / "x").read_text() == "mine"
    assert names(out) == ["x"]


def test_a_folder_that_is_there_is_refused_and_stays(source: Path, out: Path) -> None:
    (out / "x").mkdir()
    with pytest.raises(OutputExists):
        convert(source, out / "x", "hf")
    assert names(out / "x") == []


def test_a_folder_that_is_no_checkpoint_is_not_overwritten(source: Path, out: Path) -> None:
    (out / "x").mkdir()
    (out / "x" / "thesis.tex").write_text("mine")
    with pytest.raises(OutputExists, match="not only a checkpoint"):
        convert(source, out / "x", "hf", overwrite=True)
    assert names(out / "x") == ["thesis.tex"]


def test_a_folder_that_holds_the_source_is_not_overwritten(source: Path) -> None:
    with pytest.raises(OutputExists, match="the source"):
        convert(source, source.parent, "hf", overwrite=True)
    assert names(source.parent) == ["job.pt"]


def test_the_source_itself_is_not_overwritten(source: Path) -> None:
    before = source.read_bytes()
    with pytest.raises(OutputExists, match="the source"):
        convert(source, source, overwrite=True)
    assert source.read_bytes() == before


def test_the_source_under_another_name_is_not_overwritten(source: Path, out: Path) -> None:
    (out / "link").symlink_to(source)
    with pytest.raises(OutputExists, match="the source"):
        convert(source, out / "link", overwrite=True)


def test_a_file_of_the_source_is_not_overwritten(source: Path, out: Path) -> None:
    folder = convert(source, out / "x", "dcp")
    (part,) = folder.glob("*.distcp")
    before = part.read_bytes()
    with pytest.raises(OutputExists):
        convert(folder, part, "torch", overwrite=True)
    assert part.read_bytes() == before


def test_a_failing_conversion_keeps_the_output_that_is_there(source: Path, out: Path) -> None:
    convert(source, out / "x", "hf")
    before = (out / "x" / "model.safetensors").read_bytes()
    damage(source)
    with pytest.raises(CorruptCheckpoint):
        convert(source, out / "x", "hf", overwrite=True)
    assert names(out) == ["x"]
    assert (out / "x" / "model.safetensors").read_bytes() == before


def test_a_lost_rename_keeps_the_output_that_is_there(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, out / "x", "hf")
    before = (out / "x" / "model.safetensors").read_bytes()
    rename = Path.rename

    def refuse_the_new_one(path: Path, target: Path) -> Path:
        if path.name == ".x.partial":
            raise OSError(errno.EIO, "broken disk")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new_one)
    with pytest.raises(OSError, match="broken disk"):
        convert(source, out / "x", "hf", overwrite=True)
    assert names(out) == ["x"]
    assert (out / "x" / "model.safetensors").read_bytes() == before


def test_a_refused_loss_keeps_the_output_that_is_there(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, out / "x")
    before = (out / "x").read_bytes()

    def refuse(*_args: Any) -> None:
        raise LossRefused("x")

    monkeypatch.setattr("ckpt.api.check_space", refuse)
    with pytest.raises(LossRefused):
        convert(source, out / "x", overwrite=True)
    assert (out / "x").read_bytes() == before


def test_an_empty_folder_is_overwritten(source: Path, out: Path, tmp_path: Path) -> None:
    (out / "x").mkdir()
    convert(source, out / "x", "hf", overwrite=True)
    assert same(loaded(out / "x", "hf", tmp_path))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", ["torch", "hf", "dcp"])
@pytest.mark.parametrize("after", ["torch", "hf", "dcp"])
def test_a_checkpoint_of_any_format_is_overwritten_by_any_other(
    before: str, after: str, source: Path, out: Path, tmp_path: Path
) -> None:
    convert(source, out / "x", before)
    torch.save({"model": weights(scale=2.0)}, source)
    convert(source, out / "x", after, overwrite=True)
    assert names(out) == ["x"]
    assert same(loaded(out / "x", after, tmp_path), scale=2.0)


def test_nothing_of_an_overwritten_folder_stays(source: Path, out: Path) -> None:
    convert(source, out / "x", "hf", max_shard_bytes=40_000)
    convert(source, out / "x", "hf", overwrite=True)
    assert names(out / "x") == ["model.safetensors"]


# --- a kill -------------------------------------------------------------------------------------

KILLED_PROGRAM = """
import sys, threading, time
import ckpt
from ckpt import copying, execute

execute.JOURNAL_INTERVAL_S = 0
copying.WORKERS = 1
copy_record, started = copying._Engine._copy_record, []

def slowly(*args):
    started.append(1)
    if len(started) > int(sys.argv[4]):
        time.sleep(600)
    copy_record(*args)

copying._Engine._copy_record = slowly
ckpt.convert(sys.argv[1], sys.argv[2], sys.argv[3])
"""


def journal_lines(journal: Path) -> Sequence[str]:
    return journal.read_text().splitlines() if journal.exists() else ()


def kill_in_the_middle(source: Path, to: str, output: Path) -> Path:
    """A conversion in a process of its own, killed after some records; its hidden folder."""
    partial = output.with_name(f".{output.name}.partial")
    command = [sys.executable, "-c", KILLED_PROGRAM, str(source), to, str(output)]
    child = subprocess.Popen([*command, str(RECORDS_BEFORE_THE_KILL)])
    until = time.monotonic() + 60
    while len(journal_lines(partial / ".journal")) <= RECORDS_BEFORE_THE_KILL:
        assert time.monotonic() < until
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    assert child.wait(timeout=10) == -signal.SIGKILL
    return partial


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """The records that are copied from now on."""
    seen: list[Record] = []
    copy_record = copying._Engine._copy_record

    def remember(engine: Any, source: int, record: Record, *rest: Any) -> None:
        seen.append(record)
        copy_record(engine, source, record, *rest)

    monkeypatch.setattr(copying._Engine, "_copy_record", remember)
    return seen


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("to", ["torch", "hf", "dcp"])
def test_a_killed_conversion_has_no_output_and_goes_on_when_it_is_started_again(
    to: str, source: Path, out: Path, tmp_path: Path, copied: list[Record]
) -> None:
    partial = kill_in_the_middle(source, to, out / "x")
    assert names(out) == [partial.name]
    convert(source, out / "x", to)
    assert names(out) == ["x"]
    assert len(copied) == TENSORS - RECORDS_BEFORE_THE_KILL
    assert same(loaded(out / "x", to, tmp_path))


def test_a_killed_conversion_beside_its_source_goes_on_when_it_is_started_again(
    source: Path, tmp_path: Path, copied: list[Record]
) -> None:
    output = source.parent / "job-hf"
    kill_in_the_middle(source, "hf", output)
    assert convert(source, output, "hf") == output
    assert same(loaded(output, "hf", tmp_path))
    assert len(copied) == TENSORS - RECORDS_BEFORE_THE_KILL


def test_a_killed_conversion_of_a_source_that_has_changed_begins_anew(
    source: Path, out: Path, tmp_path: Path, copied: list[Record]
) -> None:
    kill_in_the_middle(source, "hf", out / "x")
    torch.save({"model": weights(scale=2.0)}, source)
    convert(source, out / "x", "hf")
    assert names(out) == ["x"]
    assert len(copied) == TENSORS
    assert same(loaded(out / "x", "hf", tmp_path), scale=2.0)


def test_a_hidden_folder_of_another_conversion_is_cleared(source: Path, out: Path) -> None:
    (out / ".x.partial").mkdir()
    (out / ".x.partial" / ".journal").write_text("another digest\n")
    (out / ".x.partial" / "stale.safetensors").write_text("old")
    convert(source, out / "x", "hf")
    assert names(out) == ["x"]
    assert names(out / "x") == ["model.safetensors"]


def test_a_journal_whose_last_line_is_cut_goes_on(
    source: Path, out: Path, tmp_path: Path, copied: list[Record]
) -> None:
    partial = kill_in_the_middle(source, "hf", out / "x")
    journal = partial / ".journal"
    journal.write_text(journal.read_text()[:-5])
    convert(source, out / "x", "hf")
    assert len(copied) == TENSORS - RECORDS_BEFORE_THE_KILL + 1
    assert same(loaded(out / "x", "hf", tmp_path))


def test_the_journal_names_the_records_that_are_done(source: Path, out: Path) -> None:
    partial = kill_in_the_middle(source, "hf", out / "x")
    done = [json.loads(line) for line in journal_lines(partial / ".journal")[1:]]
    assert [(path, length) for path, _, length in done] == [
        (str(source), 4000 * (TENSORS - at)) for at in range(RECORDS_BEFORE_THE_KILL)
    ]


def test_an_interrupt_from_the_keyboard_leaves_nothing_behind(source: Path, out: Path) -> None:
    partial = out / ".x.partial"
    program = KILLED_PROGRAM.replace("time.sleep(600)", "time.sleep(0.5)")
    child = subprocess.Popen(
        [sys.executable, "-c", program, str(source), "hf", str(out / "x"), "3"],
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 60
    while len(journal_lines(partial / ".journal")) <= RECORDS_BEFORE_THE_KILL:
        assert time.monotonic() < until
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    _, told = child.communicate(timeout=30)
    assert "KeyboardInterrupt" in told
    assert names(out) == []


def test_a_second_conversion_to_the_same_output_is_refused(source: Path, out: Path) -> None:
    with execute._locked(out / ".x.partial"):
        with pytest.raises(OutputExists, match="another conversion"):
            convert(source, out / "x", "hf")
        assert names(out) == [".x.partial"]


def test_records_do_not_count_as_done_when_their_file_is_gone(source: Path, out: Path) -> None:
    plan = prepare(source, "hf", out / "x")
    partial = out / ".x.partial"
    partial.mkdir()
    records = [
        json.dumps([chunk.record.path, chunk.record.offset, chunk.record.length])
        for _, tensor in plan.checkpoint.tensors()
        for chunk in tensor.chunks
    ]
    (partial / ".journal").write_text("\n".join([plan.digest, *records]) + "\n")
    plan.run()
    assert list(ckpt.diff(ckpt.open(source), ckpt.open(out / "x"), weights_only=True)) == []


def test_the_space_of_a_killed_run_is_not_needed_twice(
    source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = prepare(source, "hf", out / "x").nbytes + execute.SPARE_BYTES
    usage = shutil.disk_usage(out)._replace(free=needed - 4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(NoSpace):
        prepare(source, "hf", out / "x")
    (out / ".x.partial").mkdir()
    (out / ".x.partial" / "model.safetensors").write_bytes(b"x" * 8192)
    prepare(source, "hf", out / "x")
