"""The commands as a user meets them: answers, exit codes, JSON, and the ways out of ambiguity."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from conftest import FIXTURES, REPO
from torch import nn

from ckpt.cli import main

ZERO3 = FIXTURES / "ds009_t21-zero3_rich_w2" / "ckpt"
AMBIGUOUS = FIXTURES / "ds014_t24-zero0_rich_w2" / "ckpt"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


def answer(*words: object) -> Any:
    result = run(*words, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


class Twins(nn.Module):
    """Two layers of one shape, one of them frozen: numbers alone do not tell them apart."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.second.requires_grad_(False)


def twins_checkpoint(path: Path) -> Path:
    model = Twins()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    model.second(model.first(torch.ones(1, 3))).sum().backward()
    optimizer.step()
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 3}, path)
    return path


# --- convert ------------------------------------------------------------------------------------


def test_the_default_output_lies_beside_the_source(tmp_path: Path) -> None:
    file = tmp_path / "run.pt"
    torch.save({"weight": torch.ones(2, 2)}, file)
    assert run("convert", file, "--to", "hf").exit_code == 0
    assert run("convert", tmp_path / "run-hf", "--to", "torch").exit_code == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run-hf", "run-hf-torch.pt", "run.pt"]


def test_dry_run_says_what_is_dropped_and_writes_nothing(tmp_path: Path) -> None:
    result = run("convert", ZERO3, "--to", "hf", "-o", tmp_path / "hf", "--dry-run")
    assert result.exit_code == 0
    assert "dropped: optimizer state, param groups" in result.output
    assert "would write" in result.output
    assert list(tmp_path.iterdir()) == []


def test_quiet_prints_nothing(tmp_path: Path) -> None:
    result = run("convert", ZERO3, "--to", "hf", "-o", tmp_path / "hf", "--quiet")
    assert (result.exit_code, result.output) == (0, "")


def test_json_describes_the_conversion(tmp_path: Path) -> None:
    told = answer("convert", ZERO3, "--to", "hf", "-o", tmp_path / "hf")
    assert told["source_format"] == "zero3"
    assert told["files"] == ["model.safetensors"]
    assert told["written"] is True
    assert {note["kind"] for note in told["notes"]} >= {"dropped", "tied"}


def test_weights_only_leaves_the_optimizer_out(tmp_path: Path) -> None:
    run("convert", ZERO3, "--to", "torch", "-o", tmp_path / "w.pt", "--weights-only")
    assert list(torch.load(tmp_path / "w.pt", weights_only=True)) == ["model"]


def test_overwrite_replaces_a_checkpoint(tmp_path: Path) -> None:
    words = ("convert", ZERO3, "--to", "hf", "-o", tmp_path / "hf")
    assert [run(*words).exit_code, run(*words).exit_code] == [0, 2]
    assert run(*words, "--overwrite").exit_code == 0
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_bad_shard_size_is_a_usage_error(tmp_path: Path) -> None:
    result = run("convert", ZERO3, "--to", "hf", "--max-shard-size", "many")
    assert (result.exit_code, "5GB" in result.stderr) == (2, True)


def test_rename_changes_every_name(tmp_path: Path) -> None:
    run("convert", ZERO3, "--to", "torch", "-o", tmp_path / "out.pt", "--rename",
        r"^blocks\.(\d+)\.=layers.\1.")  # fmt: skip
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    names = [*content["model"], *content["optimizer"]["param_groups"][0]["param_names"]]
    assert "layers.0.fc.weight" in names
    assert [name for name in names if "blocks" in name] == []


def test_several_models_need_a_key(tmp_path: Path) -> None:
    weights, other = {"w": torch.ones(2, 2)}, {"w": torch.zeros(2, 2)}
    torch.save({"model": weights, "ema": {"model": other}, "epoch": 1}, tmp_path / "both.pt")
    refused = run("convert", tmp_path / "both.pt", "--to", "hf")
    assert (refused.exit_code, "--key: model, ema.model" in refused.stderr) == (2, True)
    run("convert", tmp_path / "both.pt", "--to", "torch", "-o", tmp_path / "out.pt", "--key",
        "ema.model")  # fmt: skip
    content = torch.load(tmp_path / "out.pt", weights_only=True)
    assert content["model"]["w"].sum() == 0
    assert content["model_"]["w"].sum() == 4


def test_unclear_optimizer_numbers_stop_with_the_names_and_the_ways_out(tmp_path: Path) -> None:
    result = run("convert", twins_checkpoint(tmp_path / "twins.pt"), "--to", "torch")
    assert result.exit_code == 2
    assert all(
        word in result.stderr
        for word in ("first.weight", "--param-order", "--model", "--weights-only")
    )


def test_unclear_optimizer_numbers_do_not_matter_where_only_weights_go(tmp_path: Path) -> None:
    file = twins_checkpoint(tmp_path / "twins.pt")
    result = run("convert", file, "--to", "hf", "-o", tmp_path / "hf")
    assert result.exit_code == 0
    assert "--param-order" not in result.output


def test_param_order_decides(tmp_path: Path) -> None:
    file, order = twins_checkpoint(tmp_path / "twins.pt"), tmp_path / "order.txt"
    order.write_text("# the trained one\nfirst.weight\n")
    words = ("convert", file, "--to", "torch", "-o", tmp_path / "out.pt", "--param-order", order)
    assert run(*words).exit_code == 0
    optimizer = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    assert optimizer["param_groups"][0]["param_names"] == ["first.weight"]


@pytest.mark.parametrize("text", ["first.weight\nsecond.weight\n", "nobody.weight\n"])
def test_a_wrong_param_order_is_refused(text: str, tmp_path: Path) -> None:
    file, order = twins_checkpoint(tmp_path / "twins.pt"), tmp_path / "order.txt"
    order.write_text(text)
    result = run("convert", file, "--to", "torch", "--param-order", order)
    assert (result.exit_code, "given order" in result.stderr) == (2, True)


def test_a_model_built_on_the_meta_device_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_twins.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.ModuleDict({n: torch.nn.Linear(3, 3, bias=False)\n"
        "                                 for n in ('first', 'second')})\n"
        "    model['second'].requires_grad_(False)\n"
        "    assert next(model.parameters()).is_meta\n"
        "    return model\n"
    )
    file = twins_checkpoint(tmp_path / "twins.pt")
    words = ("convert", file, "--to", "torch", "-o", tmp_path / "out.pt", "--model")
    assert run(*words, "my_twins:build").exit_code == 0
    optimizer = torch.load(tmp_path / "out.pt", weights_only=True)["optimizer"]
    assert optimizer["param_groups"][0]["param_names"] == ["first.weight"]
    failed = run(*words, "my_twins:nothing", "--overwrite")
    assert (failed.exit_code, "my_twins:nothing" in failed.stderr) == (2, True)


def test_a_progress_bar_in_bytes_on_a_terminal_only(tmp_path: Path) -> None:
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "ckpt", "convert", str(ZERO3), "--to", "hf", "-o"]
    done = subprocess.run(
        [*command, str(tmp_path / "a")], stderr=writer, stdout=subprocess.PIPE, cwd=REPO, check=True
    )
    os.close(writer)
    piped = subprocess.run(
        [*command, str(tmp_path / "b")], capture_output=True, cwd=REPO, check=True
    )
    assert b"kB" in os.read(reader, 65536)
    assert b"wrote" in done.stdout
    assert piped.stderr == b""


SLOW = """
import sys, time
import ckpt.execute as execute
from ckpt.cli import main
real = execute.copy
def slow(*args):
    print("copying", file=sys.stderr, flush=True)
    time.sleep(30)
    real(*args)
execute.copy = slow
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_conversion_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    words = ["convert", str(ZERO3), "--to", "hf", "-o", str(tmp_path / "hf")]
    child = subprocess.Popen(
        [sys.executable, "-c", SLOW, *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=REPO,
    )  # fmt: skip
    assert child.stderr is not None
    assert child.stderr.readline() == "copying\n"
    time.sleep(0.2)
    child.send_signal(number)
    _, message = child.communicate(timeout=20)
    assert (child.returncode, "Traceback" in message) == (130, False)
    assert "Interrupted" in message
    assert list(tmp_path.iterdir()) == []


# --- inspect, diff, formats ---------------------------------------------------------------------


def test_inspect_tells_what_a_checkpoint_holds() -> None:
    told = answer("inspect", ZERO3)
    assert (told["format"], told["writer"], told["world_size"]) == ("zero3", "deepspeed 0.9.5", 2)
    assert (told["params"], told["numel"]) == (15, 3315)
    assert told["tied"] == {"head.weight": "emb.weight"}
    assert told["frozen"] == ["blocks.0.fc.weight", "blocks.1.ln.bias"]
    assert [group["options"]["weight_decay"] for group in told["groups"]] == [0.1, 0.0]
    assert told["nbytes"]["optimizer"] > told["nbytes"]["master weights"]
    assert told["extras"]["epoch"] == "1"


def test_inspect_reports_what_was_taken_off_names() -> None:
    told = answer("inspect", FIXTURES / "ds009_t21-compiled_ddp_pt_w2" / "ckpt" / "checkpoint.pt")
    assert set(told["stripped"]) == {"_orig_mod.", "module."}


def test_inspect_shows_a_problem_instead_of_failing_on_it() -> None:
    told = answer("inspect", AMBIGUOUS)
    assert any("order and shapes do not tell" in problem for problem in told["problems"])
    assert run("inspect", AMBIGUOUS).exit_code == 0


def test_inspect_lists_tensors_by_glob() -> None:
    told = answer("inspect", ZERO3, "--tensors", "blocks.0.fc.*")
    assert {item["name"] for item in told} == {
        "weight/blocks.0.fc.weight", "master/blocks.0.fc.bias", "exp_avg/blocks.0.fc.bias",
        "exp_avg_sq/blocks.0.fc.bias", "step/blocks.0.fc.bias",
    }  # fmt: skip
    assert "blocks.0.fc.bias" in run("inspect", ZERO3, "--tensors", "*fc.bias").output


def test_diff_says_same_for_another_format(tmp_path: Path) -> None:
    run("convert", ZERO3, "--to", "fsdp", "-o", tmp_path / "dcp")
    result = run("diff", ZERO3, tmp_path / "dcp")
    assert (result.exit_code, result.output) == (0, "the same training state\n")
    assert answer("diff", ZERO3, tmp_path / "dcp") == {"same": True, "differences": []}


def test_diff_shows_the_first_differences(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    run("convert", ZERO3, "--to", "torch", "-o", file)
    content = torch.load(file, weights_only=True)
    content["model"]["bn.weight"][3] += 0.25
    content["optimizer"]["state"][0]["exp_avg"][2, 1] += 1
    content["optimizer"]["param_groups"][1]["lr"] = 0.125
    torch.save(content, tmp_path / "b.pt")
    result = run("diff", file, tmp_path / "b.pt")
    assert result.exit_code == 1
    assert "weight bn.weight: 1 of 13 elements differ, by up to 0.25, first at [3]" in result.output
    assert "exp_avg of emb.weight: 1 of 403 elements differ" in result.output
    assert "param group 1 lr: 0.005 against 0.125" in result.output
    assert run("diff", file, tmp_path / "b.pt", "--atol", "2").exit_code == 1
    content["optimizer"]["param_groups"][1]["lr"] = 0.005
    torch.save(content, tmp_path / "b.pt")
    assert run("diff", file, tmp_path / "b.pt", "--atol", "2").exit_code == 0


def test_diff_of_weights_only_and_of_what_is_missing(tmp_path: Path) -> None:
    run("convert", ZERO3, "--to", "hf", "-o", tmp_path / "hf")
    assert "optimizer state: only in the first" in run("diff", ZERO3, tmp_path / "hf").output
    assert run("diff", ZERO3, tmp_path / "hf", "--weights-only").exit_code == 0
    assert run("diff", ZERO3, tmp_path / "nowhere").exit_code == 2


def test_formats_lists_what_can_be_read_and_written() -> None:
    told = {item["name"]: item for item in answer("formats")}
    written = {name for name, item in told.items() if item["write"]}
    assert {"dcp", "ddp", "fsdp-full", "hf", "torch", "zero1", "zero2", "zero3"} <= written
    assert told["dcp"]["aliases"] == ["fsdp"]
    assert told["zero12"]["read"] and not told["zero12"]["write"]
    assert "fsdp" in run("formats").output


def test_python_m_ckpt_is_the_same_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "ckpt", "--version"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.startswith("ckpt, version")
