"""The working copy of a user's folder: what is in it, and that the folder stays as it is."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from migrate.errors import MigrateError
from migrate.verify import workspace
from migrate.verify.workspace import Copy, Skipped, copy_project

LARGE = b"x" * (2**20 + 1)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A small project; made writable again so that it can be deleted."""
    folder = tmp_path / "project"
    for name in ("train.py", "config.yaml", "models/__init__.py", "models/net.py", "data/a/0.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    yield folder
    for path in (folder, *folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            path.chmod(0o755)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "work" / "copy"


def crowd(folder: Path, count: int, ending: str = "jpg") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number}.{ending}").touch()
    return folder


def paths(copy: Copy) -> list[str]:
    return [str(path) for path in copy.linked]


def skipped(copy: Copy) -> dict[str, str]:
    return {str(item.path): item.reason for item in copy.skipped}


def test_small_files_are_copied(root: Path, target: Path) -> None:
    copy = copy_project(root, target)
    assert (copy.root, copy.folder, copy.linked, copy.skipped) == (root, target, (), ())
    for path in root.rglob("*"):
        own = target / path.relative_to(root)
        assert not own.is_symlink()
        assert path.is_dir() or own.read_text() == path.read_text()
    assert len(list(target.rglob("*"))) == len(list(root.rglob("*")))


def test_a_change_of_the_copy_leaves_the_folder_as_it_is(root: Path, target: Path) -> None:
    copy_project(root, target)
    (target / "train.py").write_text("new")
    (target / "models" / "more.py").write_text("new")
    assert (root / "train.py").read_text() == "train.py"
    assert not (root / "models" / "more.py").exists()


def test_large_files_are_linked_and_named(root: Path, target: Path) -> None:
    (root / "data" / "big.pt").write_bytes(LARGE)
    (root / "data" / "small.pt").write_bytes(LARGE[:-1])
    copy = copy_project(root, target)
    assert paths(copy) == ["data/big.pt"]
    assert (target / "data" / "big.pt").readlink() == root / "data" / "big.pt"
    assert not (target / "data" / "small.pt").is_symlink()


def test_a_large_python_file_is_copied(root: Path, target: Path) -> None:
    (root / "tables.py").write_bytes(LARGE)
    assert copy_project(root, target).linked == ()
    assert (target / "tables.py").read_bytes() == LARGE


def test_when_much_has_been_copied_all_but_python_is_linked(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "COPIED_BYTES", 25)
    assert paths(copy_project(root, target)) == ["data/a/0.txt"]
    assert not (target / "models" / "net.py").is_symlink()


def test_a_crowded_folder_is_linked_as_a_whole(root: Path, target: Path) -> None:
    crowd(root / "data" / "a", 1000)
    crowd(root / "data" / "b", 1000)
    copy = copy_project(root, target)
    assert paths(copy) == ["data/a"]
    assert (target / "data" / "a").readlink() == root / "data" / "a"
    assert not (target / "data" / "b").is_symlink()


@pytest.mark.parametrize("name", ["0.py", "tools/0.py"])
def test_a_crowded_folder_with_python_is_not(root: Path, target: Path, name: str) -> None:
    crowd(root / "data" / "a", 1001)
    (root / "data" / "a" / name).parent.mkdir(exist_ok=True)
    (root / "data" / "a" / name).touch()
    assert copy_project(root, target).linked == ()
    assert (target / "data" / "a" / name).is_file()


def test_a_crowded_folder_of_the_script_is_copied(root: Path, target: Path) -> None:
    crowd(root, 1001)
    assert copy_project(root, target).linked == ()


def test_with_many_files_in_all_less_crowded_folders_are_linked(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "MADE_ENTRIES", 60)
    for number in range(5):
        crowd(root / "data" / f"class{number}", 11)
    crowd(root / "out", 5)
    copy = copy_project(root, target)
    assert paths(copy) == [f"data/class{number}" for number in range(5)]


def test_with_a_deep_forest_of_files_the_outermost_folder_is_linked(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "MADE_ENTRIES", 60)
    for number in range(60):
        crowd(root / "data" / f"class{number}", 1)
    (root / "out").mkdir()
    assert paths(copy_project(root, target)) == ["data"]
    assert (target / "out").is_dir()


def test_caches_histories_and_environments_stay_behind(root: Path, target: Path) -> None:
    for name in (
        "__pycache__/a.pyc", "models/__pycache__/a.pyc", ".mypy_cache/a", ".pytest_cache/a",
        "node_modules/a/a.js", ".git/HEAD", "env/pyvenv.cfg", "env/lib/a.py", "conda/conda-meta/a",
        "lib/site-packages/a.py", "wandb/run/log", ".cache/a",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    copy = copy_project(root, target)
    assert {path.name for path in target.iterdir()} == {
        "train.py", "config.yaml", "models", "data", "lib", "wandb", ".cache",
    }  # fmt: skip
    assert skipped(copy) == {
        ".git": "the history of the files",
        "conda": "a virtual environment",
        "env": "a virtual environment",
        "lib/site-packages": "installed packages",
    }


def test_the_script_may_lie_in_a_virtual_environment(root: Path, target: Path) -> None:
    (root / "pyvenv.cfg").touch()
    copy_project(root, target)
    assert (target / "train.py").read_text() == "train.py"


def test_a_link_out_of_the_folder_leads_to_its_absolute_target(root: Path, target: Path) -> None:
    outer = root.parent / "outer"
    (outer / "images").mkdir(parents=True)
    (outer / "file").touch()
    (root / "images").symlink_to("../outer/images")
    (root / "file").symlink_to(outer / "file")
    copy = copy_project(root, target)
    assert paths(copy) == ["file", "images"]
    assert (target / "images").readlink() == outer / "images"
    assert (target / "file").readlink() == outer / "file"


def test_a_link_within_the_folder_leads_to_the_copy(root: Path, target: Path) -> None:
    (root / "latest").symlink_to(root / "data" / "a")
    (root / "data" / "config").symlink_to("../config.yaml")
    (root / "again").symlink_to("latest")
    (root / "here").symlink_to(".")
    copy = copy_project(root, target)
    assert copy.linked == ()
    assert (target / "latest").resolve() == target / "data" / "a"
    assert (target / "again").resolve() == target / "data" / "a"
    assert (target / "data" / "config").resolve() == target / "config.yaml"
    assert (target / "here").resolve() == target


def test_a_link_to_what_stays_behind_leads_to_the_users(root: Path, target: Path) -> None:
    (root / ".git").mkdir()
    (root / ".git" / "hook").touch()
    (root / "hook").symlink_to(".git/hook")
    copy = copy_project(root, target)
    assert paths(copy) == ["hook"]
    assert (target / "hook").resolve() == root / ".git" / "hook"


def test_links_that_lead_nowhere_are_kept(root: Path, target: Path) -> None:
    (root / "gone").symlink_to("data/gone")
    (root / "outer").symlink_to("/no/such/place")
    (root / "circle").symlink_to("circle")
    copy_project(root, target)
    assert Path(os.path.realpath(target / "gone")) == target / "data" / "gone"
    assert (target / "outer").readlink() == Path("/no/such/place")
    assert (target / "circle").is_symlink()


def test_a_linked_python_file_becomes_a_file(root: Path, target: Path) -> None:
    (root.parent / "shared.py").write_text("shared")
    (root / "shared.py").symlink_to("../shared.py")
    assert copy_project(root, target).linked == ()
    assert not (target / "shared.py").is_symlink()
    assert (target / "shared.py").read_text() == "shared"


def test_permissions_and_times_are_kept(root: Path, target: Path) -> None:
    (root / "run.sh").touch()
    (root / "run.sh").chmod(0o750)
    os.utime(root / "run.sh", (10, 20))
    (root / "data").chmod(0o711)
    copy_project(root, target)
    assert stat.S_IMODE((target / "run.sh").stat().st_mode) == 0o750
    assert (target / "run.sh").stat().st_mtime == 20
    assert stat.S_IMODE((target / "data").stat().st_mode) == 0o711


def test_the_copy_of_what_is_read_only_is_writable(root: Path, target: Path) -> None:
    (root / "train.py").chmod(0o444)
    (root / "data").chmod(0o555)
    root.chmod(0o555)
    copy_project(root, target)
    for path in (target, target / "data", target / "train.py"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o600 == 0o600
    assert stat.S_IMODE((root / "train.py").stat().st_mode) == 0o444


def test_sockets_and_pipes_are_skipped_and_named(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(root / "pipe")
    monkeypatch.chdir(root)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        copy = copy_project(root, target)
    reason = "neither a file nor a folder"
    assert skipped(copy) == {"pipe": reason, "socket": reason}


def test_what_cannot_be_read_is_skipped_and_named(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, scan = Path.read_bytes, os.scandir

    def read_but_one(path: Path) -> bytes:
        if path.name == "config.yaml":
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    def scan_but_one(path: Path) -> object:
        if path.name == "data":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(Path, "read_bytes", read_but_one)  # the tests may run as root
    monkeypatch.setattr(os, "scandir", scan_but_one)
    copy = copy_project(root, target)
    assert copy.skipped == (
        Skipped(Path("config.yaml"), "not readable"),
        Skipped(Path("data"), "not readable"),
    )
    assert (target / "models" / "net.py").exists()


def test_the_folder_may_be_named_through_a_link_and_the_target_be_there_empty(
    root: Path, target: Path
) -> None:
    (root.parent / "alias").symlink_to(root)
    target.mkdir(parents=True)
    assert copy_project(root.parent / "alias", target).root == root
    assert (target / "train.py").exists()


@pytest.mark.parametrize("place", ["", "copy", "data/a/copy"])
def test_a_folder_that_holds_the_copy_is_refused(root: Path, place: str) -> None:
    with pytest.raises(MigrateError, match="move the script into a folder of its own") as caught:
        copy_project(root, root / place)
    assert str(caught.value).startswith(f"{root}: expected ")
    assert not (root / "copy").exists()


def test_a_folder_that_is_not_there_is_refused(root: Path, target: Path) -> None:
    with pytest.raises(MigrateError, match=r"no: expected the folder .*, found nothing; pass"):
        copy_project(root / "no", target)
    with pytest.raises(MigrateError, match=r"train.py: expected the folder .*, found a file; pass"):
        copy_project(root / "train.py", target)


def test_a_target_in_use_is_refused(root: Path, target: Path) -> None:
    target.mkdir(parents=True)
    (target / "mine").touch()
    with pytest.raises(MigrateError, match=r"expected a new or empty folder .* found other files"):
        copy_project(root, target)
    with pytest.raises(MigrateError, match=r"expected a new or empty folder .* found a file"):
        copy_project(root, target / "mine")


def test_a_full_disk_is_said(root: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(MigrateError, match="cannot be written: No space left on device; make room"):
        copy_project(root, target)


def test_a_folder_that_cannot_be_read_is_said(
    root: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> object:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(MigrateError, match=r"project: the script's folder is not readable, .*;"):
        copy_project(root, target)
