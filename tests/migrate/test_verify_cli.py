"""`migrate verify` as a user meets it: real runs, files left alone, exit codes, bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent.parent
SAMPLES = REPO / "tests" / "samples"
LINEAR = """
import sys
import torch
from torch import nn

torch.manual_seed(3)
model = nn.DataParallel(nn.Linear(4, 1).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True)
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x.cuda()), y.cuda())
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "last.pt")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a script, an old checkpoint and a large file beside it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text(LINEAR)
    (folder / "last.pt").write_text("an old checkpoint")
    (folder / "data.bin").write_bytes(bytes(2 * 2**20))
    return folder


def verify(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "migrate", "verify", *words]
    environment = {"PYTHONPATH": str(REPO), "PATH": "/usr/bin:/bin", "HOME": str(cwd.parent)}
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_rewritten_copy_trains_the_same_and_the_folder_is_left_alone(project: Path) -> None:
    before = contents(project)
    done = verify(project, "train.py", "--to", "ddp", "--steps", "6", "--plot", "../loss.png")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("trains the same: 6 steps compared")
    assert "last.pt: same names, shapes and types in both" in done.stdout
    assert "to be read only: 1" in done.stdout
    assert contents(project) == before
    assert (project.parent / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_a_script_by_hand_that_differs_exits_with_1_and_the_cause(project: Path) -> None:
    text = (SAMPLES / "ddp.py").read_text().replace("8 // dist.get_world_size()", "8")
    shutil.copy(SAMPLES / "dp.py", project)
    (project / "ddp.py").write_text(text)
    words = ("dp.py", "--against", "ddp.py", "--steps", "0", "--json", "--keep", "../kept")
    done = verify(project, *words)
    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["same"], found["causes"][0]["name"]) == (False, "batch-not-divided")
    assert found["steps"][0]["samples"] == [8, [8, 8]]
    assert (project.parent / "kept" / "candidate.record" / "rank1.json").is_file()


def test_a_script_that_fails_exits_with_2_and_its_own_traceback(project: Path) -> None:
    (project / "train.py").write_text(LINEAR.replace("range(100)", "range(int(sys.argv[1]))"))
    done = verify(project, "train.py", "--to", "ddp", "--", "ten")
    assert done.returncode == 2
    assert 'train.py", line' in done.stderr
    assert "runner" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("Error: train.py: the original itself does not run in one process")
    assert "invalid literal for int() with base 10: 'ten'" in last


def test_what_differs_from_itself_is_not_compared(project: Path) -> None:
    noisy = LINEAR.replace("loss.backward()", "(loss * (1 + time.time() % 1)).backward()")
    (project / "train.py").write_text(noisy.replace("import sys", "import sys, time"))
    done = verify(project, "train.py", "--to", "ddp", "--steps", "2")
    assert done.returncode == 1
    assert "most likely cause: the original does not repeat itself" in done.stdout


def test_a_write_elsewhere_is_refused_with_the_way_to_allow_it(project: Path) -> None:
    elsewhere = project.parent / "elsewhere"
    elsewhere.mkdir()
    (project / "train.py").write_text(LINEAR.replace('"last.pt"', f'"{elsewhere}/last.pt"'))
    done = verify(project, "train.py", "--to", "ddp", "--steps", "6")
    assert done.returncode in (0, 2)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train.py",), "give either --to TARGET or --against OTHER.py"),
        (("train.py", "--to", "ddp", "--against", "b.py"), "give either --to TARGET or --against"),
        (("nothing.py", "--to", "ddp"), "nothing.py: there is no such script"),
        (("train.py", "--against", "nothing.py"), "nothing.py: there is no such script"),
        (("train.py", "--to", "tpu"), "tpu"),
        (("train.py", "--to", "ddp", "--device", "cuda", "--nproc", "64"), "64 processes need"),
        (("train.py", "--to", "ddp", "--keep", "."), "--keep needs a folder that is new or empty"),
        (("train.py", "--to", "ddp", "--plot", "no/loss.png"), "the folder of --plot is not there"),
        (("train.py", "--to", "ddp", "--tolerance", "-1"), "tolerance"),
        (("broken.py", "--to", "ddp"), "broken.py:1"),
        (("empty.py", "--to", "ddp"), "no training loop found"),
    ],
)
def test_bad_input_is_one_line_and_2(project: Path, words: tuple[str, ...], message: str) -> None:
    (project / "broken.py").write_text("def f(:\n")
    (project / "empty.py").write_text("x = 1\n")
    done = verify(project, *words)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
