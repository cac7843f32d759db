"""Which files belong to a program, and which of them is started."""

from __future__ import annotations

from pathlib import Path

import pytest

from migrate.errors import MigrateError
from migrate.project import Project, load_project

TRAINS = "loss.backward()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a program in a package, and what must not be taken for part of it."""
    files = {
        "train.py": "import torch, pkg.nets as nets\nfrom utils import log\n" + TRAINS,
        "utils.py": "from pkg import extra\n",
        "unused.py": "x = 1\n",
        "pkg/__init__.py": "from .nets import Net\n",
        "pkg/nets.py": "from . import layers\nfrom .. import outside\n",
        "pkg/layers.py": "import utils\n",
        "pkg/extra.py": "from .deep.inner import x\n",
        "pkg/deep/__init__.py": "",
        "pkg/deep/inner.py": "from ..layers import y\nfrom ... import utils\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def names(project: Project) -> list[str]:
    """The files of a project, from the folder of the entry."""
    root = project.entry.path.parent
    return sorted(str(source.path.relative_to(root)) for source in project.sources)


def test_imports_are_followed_through_packages_and_cycles(folder: Path) -> None:
    assert names(load_project([folder / "train.py"])) == [
        "pkg/__init__.py",
        "pkg/deep/__init__.py",
        "pkg/deep/inner.py",
        "pkg/extra.py",
        "pkg/layers.py",
        "pkg/nets.py",
        "train.py",
        "utils.py",
    ]


def test_the_entry_comes_first(folder: Path) -> None:
    project = load_project([folder], folder / "train.py")
    assert project.sources[0] is project.entry
    assert project.entry.path.name == "train.py"


@pytest.mark.parametrize(
    "statement",
    ["import helper", "import helper as h", "from helper import *", "from helper import a as b",
     "from . import helper", "from .helper import a", "def f():\n    import helper",
     "try:\n    import helper\nexcept ImportError:\n    pass"],
)  # fmt: skip
def test_every_spelling_of_an_import_is_followed(tmp_path: Path, statement: str) -> None:
    (tmp_path / "train.py").write_text(f"{statement}\n")
    (tmp_path / "helper.py").write_text("a = 1\n")
    assert names(load_project([tmp_path / "train.py"])) == ["helper.py", "train.py"]


def test_a_module_is_known_by_its_name_from_every_root(folder: Path) -> None:
    project = load_project([folder / "train.py"])
    assert project.module("pkg") is not None
    assert project.module("pkg.deep.inner") is not None
    assert project.module("torch") is None


@pytest.mark.parametrize(
    ("file", "module", "level", "expected"),
    [
        ("pkg/nets.py", "layers", 1, "pkg.layers"),
        ("pkg/nets.py", "", 1, "pkg"),
        ("pkg/__init__.py", "nets", 1, "pkg.nets"),
        ("pkg/deep/inner.py", "layers", 2, "pkg.layers"),
        ("pkg/deep/__init__.py", "layers", 2, "pkg.layers"),
        ("train.py", "utils", 1, "utils"),
        ("train.py", "torch.nn", 0, "torch.nn"),
    ],
)
def test_relative_imports_are_resolved(
    folder: Path, file: str, module: str, level: int, expected: str
) -> None:
    project = load_project([folder / "train.py"])
    source = next(s for s in project.sources if s.path == folder / file)
    assert project.imported(source, module, level) == expected


def test_the_folder_above_the_package_of_an_entry_is_a_root(folder: Path) -> None:
    (folder / "pkg" / "run.py").write_text("from pkg.layers import y\nimport utils\n")
    project = load_project([folder / "pkg" / "run.py"])
    assert {s.path.name for s in project.sources} >= {"run.py", "layers.py", "utils.py"}


def test_a_relative_path_finds_its_modules(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    project = load_project([Path("train.py")])
    assert project.module("pkg.layers") is not None
    monkeypatch.chdir(folder / "pkg")
    assert load_project([Path("nets.py")]).module("layers") is not None


def test_a_package_is_followed_to_each_package_around_a_module(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/__init__.py", "a/b/__init__.py", "a/b/c.py"):
        (tmp_path / name).write_text("")
    (tmp_path / "train.py").write_text("import a.b.c\n")
    assert len(load_project([tmp_path / "train.py"]).sources) == 4


def test_a_helper_that_cannot_be_parsed_is_left_out(folder: Path) -> None:
    (folder / "utils.py").write_text("print 'x'\n")
    assert "utils.py" not in names(load_project([folder / "train.py"]))


def test_a_file_that_was_given_has_to_be_sound(folder: Path) -> None:
    (folder / "utils.py").write_text("print 'x'\n")
    with pytest.raises(MigrateError, match=r"utils\.py:1: Python 2"):
        load_project([folder / "train.py", folder / "utils.py"])


def test_several_files_are_taken_as_they_are(folder: Path) -> None:
    project = load_project([folder / "train.py", folder / "unused.py"])
    assert names(project) == ["train.py", "unused.py"]


def test_a_file_given_twice_is_one(folder: Path) -> None:
    project = load_project([folder / "train.py", folder / "pkg" / ".." / "train.py"])
    assert sum(s.path.name == "train.py" for s in project.sources) == 1


def test_a_folder_is_taken_whole_without_caches_and_environments(folder: Path) -> None:
    for name in ("venv", "__pycache__", ".git"):
        (folder / name).mkdir()
        (folder / name / "x.py").write_text("x = (\n")
    assert len(load_project([folder]).sources) == 9


def test_a_folder_below_a_skipped_name_is_taken(tmp_path: Path) -> None:
    (tmp_path / "build" / "mine").mkdir(parents=True)
    (tmp_path / "build" / "mine" / "train.py").write_text(TRAINS)
    assert names(load_project([tmp_path / "build" / "mine"])) == ["train.py"]


@pytest.mark.parametrize(
    ("files", "entry"),
    [
        ({"a.py": "x = 1\n", "b.py": TRAINS}, "b.py"),
        ({"a.py": TRAINS, "b.py": TRAINS + "if __name__ == '__main__':\n    f()\n"}, "b.py"),
        ({"a.py": TRAINS, "train_net.py": TRAINS}, "train_net.py"),
        ({"main.py": "from lib import fit\ntrain(1)\n", "lib.py": TRAINS}, "main.py"),
        ({"a.py": TRAINS, "b.py": TRAINS + "m = nn.DataParallel(m)\n"}, "b.py"),
    ],
)
def test_the_entry_is_the_file_that_looks_like_it(
    tmp_path: Path, files: dict[str, str], entry: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert load_project([tmp_path]).entry.path.name == entry


def test_a_choice_that_cannot_be_made_is_asked_for(tmp_path: Path) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(TRAINS)
    with pytest.raises(MigrateError, match=r"a\.py, .*b\.py; say it with --entry FILE"):
        load_project([tmp_path])
    assert load_project([tmp_path], tmp_path / "b.py").entry.path.name == "b.py"


def test_an_entry_that_is_not_there_is_refused(folder: Path) -> None:
    with pytest.raises(MigrateError, match="--entry is not among the files"):
        load_project([folder], folder / "other.py")


@pytest.mark.parametrize(
    ("name", "words"),
    [("none.py", "no such file or folder"), ("empty", "no Python files"), ("a.ipynb", "notebook")],
)
def test_what_cannot_be_taken_is_refused(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.ipynb").write_text("{}")
    with pytest.raises(MigrateError, match=words):
        load_project([tmp_path / name])


def test_contents_stand_in_for_files_and_are_not_followed(folder: Path) -> None:
    given = {folder / "train.py": b"import utils\n"}
    project = load_project([folder / "train.py"], contents=given)
    assert names(project) == ["train.py"]
    assert project.entry.text == "import utils\n"


def test_text_from_nowhere_is_a_program() -> None:
    path = Path("stdin.py")
    assert load_project([path], contents={path: b"x = 1\n"}).entry.text == "x = 1\n"


def test_a_file_of_a_folder_that_nothing_imports_may_be_anything(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nx.backward()\n")
    (tmp_path / "old.py").write_text("print 'x'\n")
    project = load_project([tmp_path])
    assert [source.path.name for source in project.sources] == ["train.py"]
    assert "old.py:1: Python 2 source" in project.unread[0]


def test_a_file_of_a_folder_that_is_imported_has_to_be_python(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import old\nx.backward()\n")
    (tmp_path / "old.py").write_text("print 'x'\n")
    with pytest.raises(MigrateError, match=r"old.py:1: Python 2 source"):
        load_project([tmp_path])
