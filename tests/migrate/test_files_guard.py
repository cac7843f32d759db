"""What a script that runs on a copy may write, and what becomes of the rest."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from migrate.runner.files import Files

TIMEOUT_S = 60
OUTSIDE = {
    "a file opened for writing": "open(outside / 'new', 'w')",
    "a file opened for appending": "open(outside / 'old', 'a')",
    "a file opened for reading and writing": "open(outside / 'old', 'r+b')",
    "a file that must be new": "open(outside / 'new', 'x')",
    "a path as bytes": "open(os.fsencode(outside / 'new'), 'wb')",
    "a path object": "(outside / 'new').write_text('')",
    "a lock file": "os.open(outside / 'new', os.O_CREAT | os.O_RDWR)",
    "a path with dots": "open(Path.cwd() / '..' / 'outside' / 'new', 'w')",
    "a relative path": "os.chdir(outside); open('new', 'w')",
    "a temporary file in a chosen folder": "tempfile.NamedTemporaryFile(dir=outside)",
    "a folder": "os.mkdir(outside / 'folder')",
    "folders": "os.makedirs(outside / 'a' / 'b', exist_ok=True)",
    "a removal": "os.remove(outside / 'old')",
    "a removed folder": "os.rmdir(outside / 'empty')",
    "a removal from an open folder": (
        "os.remove('old', dir_fd=os.open(outside, os.O_RDONLY | os.O_DIRECTORY))"
    ),
    "a removed tree": "shutil.rmtree(outside / 'tree', ignore_errors=True)",
    "a file moved out": "Path('mine').rename(outside / 'new')",
    "a file moved in": "(outside / 'old').rename('new')",
    "a replaced file": "os.replace('mine', outside / 'old')",
    "a file moved by shutil": "shutil.move('mine', outside / 'new')",
    "a tree moved in by shutil": "shutil.move(outside / 'tree', 'tree')",
    "a copied file": "shutil.copyfile('mine', outside / 'new')",
    "a copied tree": "shutil.copytree('folder', outside / 'new')",
    "a hard link to the outside": "os.link('mine', outside / 'new')",
    "a hard link to an outer file": "os.link(outside / 'old', 'new')",
    "a symbolic link": "os.symlink('mine', outside / 'new')",
    "a shortened file": "os.truncate(outside / 'old', 0)",
    "changed permissions": "os.chmod(outside / 'old', 0o600)",
    "a changed time": "(outside / 'old').touch()",
    "a data base": "sqlite3.connect(outside / 'new')",
    "a data base by URI": "sqlite3.connect(f'file:{outside}/new?mode=rwc', uri=True)",
    "a file through a link of the script": "os.symlink(outside, 'there'); open('there/new', 'w')",
    "a file above a linked folder": "os.symlink(outside, 'there'); open('there/../new', 'w')",
}
INSIDE = {
    "open('new', 'w')": [("write", "new")],
    "open('mine', 'a')": [("write", "mine")],
    "os.open('new', os.O_CREAT | os.O_RDWR)": [("write", "new")],
    "os.makedirs('a/b')": [("make", "a"), ("make", "a/b")],
    "os.remove('mine')": [("remove", "mine")],
    "os.rmdir('empty')": [("remove", "empty")],
    "shutil.rmtree('folder')": [("remove", "folder"), ("remove", "folder/file")],
    "os.replace('mine', 'new')": [("rename", "mine"), ("write", "new")],
    "shutil.move('mine', 'folder')": [("rename", "mine"), ("write", "folder/mine")],
    "shutil.copyfile('mine', 'new')": [("write", "new")],
    "shutil.copytree('folder', 'new')": [("make", "new"), ("write", "new/file")],
    "os.link('mine', 'new')": [("write", "new")],
    "os.symlink('mine', 'new')": [("write", "new")],
    "os.truncate('mine', 0)": [("write", "mine")],
    "os.chmod('mine', 0o600); os.utime('mine')": [],
    "sqlite3.connect('new')": [("write", "new")],
    "sqlite3.connect(':memory:')": [],
    "tempfile.TemporaryFile(dir='.'); open('mine'); os.listdir('.')": [],
    "os.mkdir('__pycache__'); open('__pycache__/a.pyc', 'wb')": [],
}
HARMLESS = [
    "open(outside / 'old').read()",
    "os.makedirs(outside, exist_ok=True)",
    "outside.mkdir(exist_ok=True)",
    "shutil.rmtree(outside / 'missing', ignore_errors=True)",
    "sqlite3.connect(f'file:{outside}/old?mode=ro', uri=True)",
    "open('/dev/null', 'w')",
    "open('/dev/stderr', 'w')",
    "open('/dev/shm/migrate-guard', 'w'); os.remove('/dev/shm/migrate-guard')",
    "open(f'/proc/self/fd/2', 'w')",
    "tempfile.NamedTemporaryFile().write(b'')",
    "open(Path(tempfile.gettempdir()) / 'new', 'w')",
    "open(user.parent / 'record' / 'rank0.json', 'w')",
    "open(0, 'r+', closefd=False)",
]


@dataclass(frozen=True)
class Heard:
    """What the guard of a child process said."""

    result: Any
    error: str
    listed: list[tuple[str, str]]
    outside: list[tuple[str, str]]
    refused: list[tuple[str, str]]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A working copy with a link to a large file; the user's folder and others stand beside it."""
    for name in ("copy/folder", "copy/empty", "user/data", "outside/tree", "outside/empty", "temp"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "record").mkdir()
    for name in (
        "copy/mine",
        "copy/folder/file",
        "user/big.pt",
        "outside/old",
        "outside/tree/file",
    ):
        (tmp_path / name).write_text("as it was")
    (tmp_path / "copy" / "big.pt").symlink_to(tmp_path / "user" / "big.pt")
    (tmp_path / "copy" / "data").symlink_to(tmp_path / "user" / "data")
    return tmp_path / "copy"


def run(copy: Path, code: str, *, temp: str = "temp", allow: tuple[str, ...] = ()) -> Heard:
    """Run the code in a process of its own: an audit hook stays for good."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(theirs, copy, code, temp, allow))
    child.start()
    theirs.close()
    try:
        assert ours.poll(TIMEOUT_S)
        heard = ours.recv()
    finally:
        child.kill()
        child.join()
    assert isinstance(heard, Heard), heard
    return heard


def _child(theirs: Connection, copy: Path, code: str, temp: str, allow: tuple[str, ...]) -> None:
    base = copy.parent
    os.chdir(copy)
    os.environ |= {"HOME": str(base / "home"), "TMPDIR": str(base / temp)}
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    files = Files(copy, [base / name for name in allow], base / "record", [base / "user"])
    files.watch()
    names = {"os": os, "shutil": shutil, "sqlite3": sqlite3, "subprocess": subprocess, "sys": sys}
    names |= {"Path": Path, "tempfile": tempfile, "result": None}
    names |= {"outside": base / "outside", "user": base / "user"}
    error = ""
    try:
        exec(code, names)
    except PermissionError as problem:
        error = str(problem)
    except BaseException:
        theirs.send(traceback.format_exc())
        return
    lists = files.listed(), files.outside(), files.refused()
    theirs.send(Heard(names["result"], error, *lists))


def contents(folder: Path) -> dict[str, str]:
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else "" for p in paths}


@pytest.mark.parametrize("code", OUTSIDE.values(), ids=OUTSIDE)
def test_outside_the_copy_is_refused(copy: Path, code: str) -> None:
    outside = copy.parent / "outside"
    before, status = contents(outside), (outside / "old").stat()
    heard = run(copy, code)
    assert "migrate verify runs the script on a copy and does not write outside it" in heard.error
    assert "--allow-write" in heard.error
    assert str(copy.parent) in heard.error
    assert heard.refused != []
    assert contents(outside) == before
    after = (outside / "old").stat()
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (
        status.st_mode,
        status.st_mtime_ns,
        status.st_nlink,
    )


@pytest.mark.parametrize(("code", "expected"), INSIDE.items(), ids=INSIDE)
def test_inside_the_copy_is_allowed_and_listed(
    copy: Path, code: str, expected: list[tuple[str, str]]
) -> None:
    heard = run(copy, code)
    assert (heard.error, heard.listed) == ("", expected)
    assert (heard.outside, heard.refused) == ([], [])


@pytest.mark.parametrize("code", HARMLESS)
def test_what_changes_nothing_of_the_user_passes_in_silence(copy: Path, code: str) -> None:
    heard = run(copy, code)
    assert (heard.error, heard.listed, heard.outside, heard.refused) == ("", [], [], [])


def test_the_message_names_the_path_and_what_to_pass(copy: Path) -> None:
    heard = run(copy, "os.makedirs(outside / 'runs' / 'a')")
    runs = copy.parent / "outside" / "runs"
    assert heard.error == (
        "[Errno 13] migrate verify runs the script on a copy and does not write outside it; pass "
        "an argument that puts output below the script's folder, or --allow-write "
        f"{runs}: '{runs}'"
    )


def test_a_refusal_that_the_script_hides_is_known(copy: Path) -> None:
    code = "try: open(outside / 'new', 'w')\nexcept OSError: result = 'went on'"
    heard = run(copy, code)
    assert (heard.error, heard.result) == ("", "went on")
    assert heard.refused == [("write", str(copy.parent / "outside" / "new"))]


def test_the_users_folder_is_refused_though_it_lies_in_the_folder_for_temporary_files(
    copy: Path,
) -> None:
    heard = run(copy, "open(outside / 'new', 'w'); open(user / 'new', 'w')", temp=".")
    assert heard.refused == [("write", str(copy.parent / "user" / "new"))]


def test_a_linked_folder_is_refused(copy: Path) -> None:
    heard = run(copy, "open('data/new', 'w')")
    assert heard.refused == [("write", str(copy.parent / "user" / "data" / "new"))]


def test_a_chosen_folder_is_allowed_and_listed_with_the_way_to_it(copy: Path) -> None:
    code = "os.makedirs(outside / 'a' / 'runs'); open(outside / 'a' / 'runs' / 'log', 'w')"
    heard = run(copy, code, allow=("outside/a/runs",))
    a = copy.parent / "outside" / "a"
    assert heard.error == ""
    expected = [("make", str(a)), ("make", str(a / "runs")), ("write", str(a / "runs" / "log"))]
    assert heard.outside == expected


def test_beside_a_chosen_folder_nothing_is_allowed(copy: Path) -> None:
    heard = run(copy, "open(outside / 'new', 'w')", allow=("outside/n", "outside/new/below"))
    assert heard.refused == [("write", str(copy.parent / "outside" / "new"))]


@pytest.mark.parametrize(
    ("setting", "place"),
    [
        ("", "home/.cache/torch/hub"),
        ("", "home/.config/matplotlib/rc"),
        ("os.environ['TORCH_HOME'] = str(outside / 'torch')", "outside/torch/hub"),
        ("os.environ['HF_HOME'] = str(outside / 'hf')", "outside/hf/hub"),
        ("os.environ['MPLCONFIGDIR'] = str(outside / 'mpl')", "outside/mpl/fonts"),
    ],
)
def test_caches_are_allowed_and_listed(copy: Path, setting: str, place: str) -> None:
    path = copy.parent / place
    heard = run(copy, f"{setting}\nos.makedirs({str(path)!r})")
    assert heard.error == ""
    assert heard.outside[-1] == ("make", str(path))


@pytest.mark.parametrize("value", ["''", "'/'", "str(Path.home())", "str(user)"])
def test_a_cache_cannot_open_the_home_or_the_project(copy: Path, value: str) -> None:
    heard = run(copy, f"os.environ['TORCH_HOME'] = {value}; open(user / 'new', 'w')")
    assert heard.refused == [("write", str(copy.parent / "user" / "new"))]
    heard = run(copy, f"os.environ['TORCH_HOME'] = {value}; open(Path.home() / 'new', 'w')")
    assert heard.refused == [("write", str(copy.parent / "home" / "new"))]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("open('big.pt', 'w').write('new')", "new"),
        ("os.write(os.open('big.pt', os.O_WRONLY | os.O_TRUNC), b'new')", "new"),
        ("open('big.pt', 'a').write('!')", "as it was!"),
        ("open('big.pt', 'r+').write('AS')", "AS it was"),
        ("os.write(os.open('big.pt', os.O_RDWR | os.O_CREAT), b'AS')", "AS it was"),
        ("os.truncate('big.pt', 2)", "as"),
        ("os.chmod('big.pt', 0o640)", "as it was"),
        ("os.replace('mine', 'big.pt')", "as it was"),
        ("shutil.copyfile('mine', 'big.pt')", "as it was"),
        ("os.link('big.pt', 'second'); open('second', 'a').write('!')", "as it was!"),
        ("os.symlink('big.pt', 'second'); open('second', 'w').write('new')", "as it was"),
    ],
)
def test_a_link_to_a_large_file_becomes_a_file_when_it_is_written(
    copy: Path, code: str, expected: str
) -> None:
    big = copy.parent / "user" / "big.pt"
    before = big.stat()
    heard = run(copy, code)
    after = big.stat()
    assert (heard.error, heard.outside, big.read_text()) == ("", [], "as it was")
    assert (after.st_mode, after.st_mtime_ns, after.st_nlink) == (
        before.st_mode,
        before.st_mtime_ns,
        before.st_nlink,
    )
    assert (copy / "big.pt").read_text() == expected
    assert {path.name for path in copy.iterdir()} <= {
        "big.pt", "data", "empty", "folder", "mine", "second",
    }  # fmt: skip


def test_a_link_that_is_read_or_removed_stays_a_link(copy: Path) -> None:
    heard = run(copy, "open('big.pt').read(); os.rename('big.pt', 'old.pt'); os.remove('old.pt')")
    assert heard.listed == [("rename", "big.pt"), ("write", "old.pt"), ("remove", "old.pt")]
    assert (copy.parent / "user" / "big.pt").read_text() == "as it was"


def test_a_link_within_the_copy_is_written_through(copy: Path) -> None:
    heard = run(copy, "os.symlink('mine', 'latest'); open('latest', 'w').write('new')")
    assert heard.listed == [("write", "latest")]
    assert ((copy / "latest").is_symlink(), (copy / "mine").read_text()) == (True, "new")


def test_a_link_into_a_chosen_folder_is_written_through(copy: Path) -> None:
    heard = run(copy, "open('big.pt', 'w').write('new')", allow=("user",))
    big = copy.parent / "user" / "big.pt"
    assert (heard.outside, big.read_text()) == ([("write", str(big))], "new")


def test_a_dangling_link_does_not_make_its_target(copy: Path) -> None:
    (copy / "gone").symlink_to(copy.parent / "user" / "gone")
    run(copy, "open('gone', 'w').write('new')")
    assert ((copy / "gone").read_text(), (copy.parent / "user" / "gone").exists()) == ("new", False)


@pytest.mark.parametrize(
    ("code", "command"),
    [
        ("os.system('true x')", "true x"),
        ("subprocess.run('true y', shell=True)", "true y"),
        ("subprocess.run(['true', 'a b'])", "true 'a b'"),
        ("os.waitpid(os.posix_spawn('/bin/true', ['true', 'z'], {}), 0)", "true z"),
    ],
)
def test_other_programs_are_named(copy: Path, code: str, command: str) -> None:
    heard = run(copy, code)
    assert (heard.listed, heard.outside) == ([], [("run", command)])


def test_processes_that_multiprocessing_starts_anew_are_named(copy: Path) -> None:
    code = (
        "import multiprocessing\n"
        "child = multiprocessing.get_context('spawn').Process(target=print)\n"
        "child.start(); child.join()"
    )
    assert [action for action, _ in run(copy, code).outside] == ["run"]


def test_a_forked_worker_is_guarded(copy: Path) -> None:
    code = (
        "child = os.fork()\n"
        "if not child:\n"
        "    try: open(outside / 'new', 'w')\n"
        "    except PermissionError: os._exit(3)\n"
        "    os._exit(0)\n"
        "result = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])"
    )
    assert run(copy, code).result == 3


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("open('a' + chr(0), 'w')", "ValueError"),
        ("open('', 'w')", "FileNotFoundError"),
        ("open('no/such', 'w')", "FileNotFoundError"),
        ("open(3.5, 'w')", "TypeError"),
        ("open('folder', 'w')", "IsADirectoryError"),
        ("os.mkdir('mine')", "FileExistsError"),
        ("os.mkdir(outside)", "FileExistsError"),
        ("os.remove(outside / 'no')", "FileNotFoundError"),
        ("os.remove('mine', dir_fd=987)", "OSError"),
        ("os.rmdir('empty'); os.rmdir('empty')", "FileNotFoundError"),
        ("sys.audit('open', object(), None, None); sys.audit('os.mkdir')", "None"),
        ("sys.audit('subprocess.Popen', 1, 2, 3, 4)", "None"),
    ],
)
def test_errors_of_the_script_are_its_own(copy: Path, code: str, error: str) -> None:
    attempt = f"try: {code}\nexcept Exception as e: result = type(e).__name__"
    heard = run(copy, attempt)
    assert (str(heard.result), heard.refused) == (error, [])


def test_compiled_writers_are_heard_whenever_their_module_is_imported(copy: Path) -> None:
    module = "def imwrite(filename, img, params=None): open(filename, 'w').write('x')"
    (copy / "cv2.py").write_text(module)
    code = (
        "sys.path.insert(0, '')\nimport cv2, builtins\n"
        "result = cv2.imwrite.__name__\n"
        "cv2.imwrite('big.pt', [])\ncv2.imwrite(img=[], filename=str(outside / 'new'))"
    )
    heard = run(copy, code)
    assert heard.result == "imwrite"
    assert heard.listed == [("write", "big.pt")]
    assert heard.refused == [("write", str(copy.parent / "outside" / "new"))]
    assert (copy.parent / "user" / "big.pt").read_text() == "as it was"


TORCH = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from migrate.runner.files import Files
files = Files(Path.cwd())
files.watch()

import torch, numpy
from torch import nn
from safetensors.torch import save_file, save_model
from safetensors.numpy import save_file as save_numpy
import torch.distributed.checkpoint as dcp

tensors, script = {'a': torch.ones(2)}, torch.jit.script(nn.Linear(1, 1))
def profile(path):
    with torch.profiler.profile() as work: torch.ones(1)
    work.export_chrome_trace(path + '.json')
writers = {
    'save': lambda path: torch.save(tensors, path),
    'named': lambda path: torch.save(f=path, obj=tensors),
    'older': lambda path: torch.save(tensors, path, _use_new_zipfile_serialization=False),
    'jit': lambda path: torch.jit.save(script, path),
    'module': lambda path: script.save(path),
    'profile': profile,
    'numpy': lambda path: numpy.save(path, numpy.ones(2)),
    'memmap': lambda path: numpy.memmap(path, mode='w+', shape=(2,)),
    'tofile': lambda path: numpy.ones(2).tofile(path),
    'safetensors': lambda path: save_file(tensors, path),
    'model': lambda path: save_model(nn.Linear(1, 1), path),
    'arrays': lambda path: save_numpy({'a': numpy.ones(2)}, path),
    'dcp': lambda path: dcp.save(tensors, checkpoint_id=path, no_dist=True),
}
for name, write in writers.items():
    write(name)
    assert any(path.startswith(name) for action, path in files.listed()), name
    try: write(os.path.join('..', 'outside', name))
    except (PermissionError, dcp.api.CheckpointException): continue
    raise AssertionError(name)
torch.save(tensors, 'big.pt')
assert len(files.refused()) == len(writers), files.refused()
"""


def test_the_writers_of_torch_and_its_kin_are_guarded(copy: Path) -> None:
    base = copy.parent
    outside = contents(base / "outside")
    child = subprocess.run(
        [sys.executable, "-c", TORCH, str(REPO)],
        cwd=copy,
        env=os.environ | {"HOME": str(base / "home"), "TMPDIR": str(base / "temp")},
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT_S,
    )
    assert child.returncode == 0, child.stderr
    assert contents(base / "outside") == outside
    assert (base / "user" / "big.pt").read_text() == "as it was"
    assert (copy / "big.pt").stat().st_size > 500
