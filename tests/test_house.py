"""Does every line live in the right room? The rules of CONTRIBUTING.md that can be executed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPO

from ckpt import registry

PACKAGES = ("ckpt", "migrate")
FILES = sorted(path for package in PACKAGES for path in (REPO / package).rglob("*.py"))
SNIPPETS = REPO / "migrate" / "snippets"
"""Texts for other people's scripts: they import torch and read the environment there."""
RUNNER = REPO / "migrate" / "runner"
"""What goes with other people's scripts in processes of their own."""
OWN = [path for path in FILES if not any(path.is_relative_to(p) for p in (SNIPPETS, RUNNER))]
RULES = sorted((REPO / "migrate" / "rules").glob("*.py"))
FORMATS = sorted((REPO / "ckpt" / "formats").glob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_NESTING = 500, 40, 4
TOP_LEVEL = {
    ".ci", ".editorconfig", ".gitignore", ".pre-commit-config.yaml", "CHANGELOG.md",
    "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "benchmarks", "ckpt", "constraints.txt",
    "docs", "fixtures", "migrate", "pyproject.toml", "tests",
}  # fmt: skip
PURE = (
    "chunks",
    "dtypes",
    "errors",
    "model",
    "moves",
    "note",
    "optimizer_dict",
    "param_order",
    "plan",
)
TORCH_ROOMS = ("assemble", "copying", "meta_model", "storage/dcp_files", "storage/torch_file")
FILE_NAMES = {
    ".distcp": "storage/dcp_files",
    ".metadata": "storage/dcp_files",
    "model.safetensors": "formats/_safetensors_folder",
    "_optim_states": "formats/_deepspeed",
    "_model_states": "formats/_deepspeed",
    "latest": "formats/_deepspeed",
}
"""Names of files on disk, and the one room that knows each (messages may repeat them)."""


def room(path: Path) -> str:
    return path.relative_to(REPO / "ckpt").with_suffix("").as_posix()


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(node: ast.AST) -> Iterator[str]:
    for item in ast.walk(node):
        if isinstance(item, ast.Import):
            yield from (alias.name for alias in item.names)
        elif isinstance(item, ast.ImportFrom):
            yield str(item.module)
            yield from (f"{item.module}.{alias.name}" for alias in item.names)


def top_imports(path: Path) -> set[str]:
    """What a module imports when it is imported, without what only type checkers see."""
    body = [n for n in tree(path).body if isinstance(n, ast.Import | ast.ImportFrom)]
    return {name.partition(".")[0] for node in body for name in imports(node)}


def ckpt_files() -> list[Path]:
    return [path for path in FILES if path.is_relative_to(REPO / "ckpt")]


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    yield from (node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef))


def body_lines(function: ast.FunctionDef) -> int:
    docstring = ast.get_docstring(function, clean=False)
    lines = (function.end_lineno or 0) - function.lineno + 1
    return lines - (docstring.count("\n") + 1 if docstring else 0)


def nesting(node: ast.AST, depth: int = 0) -> int:
    blocks = ast.If | ast.For | ast.While | ast.With | ast.Try
    inner = [
        nesting(child, depth + isinstance(child, blocks)) for child in ast.iter_child_nodes(node)
    ]
    return max([depth, *inner])


def test_the_top_level_is_the_agreed_one() -> None:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert {name.partition("/")[0] for name in listed} <= TOP_LEVEL


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPO)))
def test_files_and_functions_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES
    long = [f.name for f in functions(path) if body_lines(f) > MAX_FUNCTION_LINES]
    deep = [f.name for f in functions(path) if nesting(f) > MAX_NESTING]
    assert (long, deep) == ([], [])


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(REPO)))
def test_modules_and_public_functions_have_docstrings(path: Path) -> None:
    module = tree(path)
    public = [
        node
        for node in module.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    assert ast.get_docstring(module)
    assert [node.name for node in public if not ast.get_docstring(node)] == []


def test_the_two_packages_do_not_know_each_other() -> None:
    for path in OWN:
        names = {name.partition(".")[0] for name in imports(tree(path))}
        other = {"ckpt": {"migrate", "libcst"}, "migrate": {"ckpt", "torch"}}
        assert names & other[path.relative_to(REPO).parts[0]] == set(), path


def test_the_runner_is_started_and_never_imported() -> None:
    for path in FILES:
        inside = path.is_relative_to(RUNNER)
        names = {name for name in imports(tree(path)) if name.startswith("migrate.")}
        assert all(name.startswith("migrate.runner") == inside for name in names), path


def test_deepspeed_is_never_imported() -> None:
    for path in FILES:
        assert not any(name.partition(".")[0] == "deepspeed" for name in imports(tree(path))), path


def test_torch_is_imported_when_needed_and_only_in_its_rooms() -> None:
    for path in ckpt_files():
        assert "torch" not in top_imports(path), path
        if any(name.partition(".")[0] == "torch" for name in imports(tree(path))):
            assert room(path) in TORCH_ROOMS


def test_pure_rooms_touch_neither_files_nor_frameworks() -> None:
    forbidden = {"os", "io", "pathlib", "shutil", "torch", "click", "rich", "sys", "mmap"}
    for name in PURE:
        path = REPO / "ckpt" / f"{name}.py"
        assert {n.partition(".")[0] for n in imports(tree(path))} & forbidden == set(), name


def test_only_the_command_line_prints_exits_or_reads_the_environment() -> None:
    for path in OWN:
        if path.name in ("cli.py", "__main__.py"):
            continue
        assert "click" not in top_imports(path), path
        called = {ast.unparse(n.func) for n in ast.walk(tree(path)) if isinstance(n, ast.Call)}
        read = {ast.unparse(n) for n in ast.walk(tree(path)) if isinstance(n, ast.Attribute)}
        assert called & {"print", "sys.exit", "exit", "os.getenv"} == set(), path
        assert "os.environ" not in read, path


@pytest.mark.parametrize("path", RULES, ids=lambda p: p.stem)
def test_a_rule_knows_where_and_a_target_knows_what(path: Path) -> None:
    words = re.findall(r"ddp|fsdp|deepspeed|fully_shard", path.read_text(), re.I)
    assert words == []


def test_rules_and_targets_are_named_in_no_other_file() -> None:
    for path in FILES:
        names = set(imports(tree(path)))
        found = {n for n in names if re.match(r"migrate\.(rules|targets|verify\.causes)\.[a-z]", n)}
        assert found == set(), path


def test_formats_handle_metadata_only() -> None:
    engine = {"ckpt.copying", "ckpt.moves", "ckpt.assemble", "ckpt.execute", "torch", "mmap"}
    for path in FORMATS:
        assert set(imports(tree(path))) & engine == set(), path
        assert not any(
            isinstance(node, ast.Call) and ast.unparse(node.func) in ("open", "np.memmap")
            for node in ast.walk(tree(path))
        ), path


def test_a_format_can_be_deleted_without_touching_another_file() -> None:
    names = {f"ckpt.formats.{p.stem}" for p in FORMATS if not p.name.startswith("_")}
    for path in FILES:
        assert set(imports(tree(path))) & names == set(), path


def test_without_any_one_format_the_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    every = registry.formats()
    for missing in every:
        left = tuple(item for item in every if item is not missing)
        monkeypatch.setattr(registry, "formats", lambda left=left: left)
        for item in left:
            if item.plan is not None:
                assert registry.target(item.name) is item


def test_a_file_name_on_disk_is_known_in_one_room() -> None:
    for path in ckpt_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and node.value in FILE_NAMES:
                assert room(path) == FILE_NAMES[str(node.value)], (path, node.value)


@pytest.mark.parametrize(
    "path", [p for p in FORMATS if p.name != "__init__.py"], ids=lambda p: p.stem
)
def test_facts_about_formats_name_their_source(path: Path) -> None:
    text = ast.get_docstring(tree(path)) or ""
    assert "Source:" in text or "_torch_dict" in path.name


@pytest.mark.parametrize("package", PACKAGES)
def test_the_help_is_quick_because_little_is_imported(package: str) -> None:
    heavy = {"torch", "rich", "libcst"}
    code = f"import sys, {package}.cli; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO)


def test_the_generated_documentation_is_fresh() -> None:
    code = (
        "import generate as g; "
        "assert g.PAGE.read_text() == g.page(); "
        "assert g.RULES_PAGE.read_text() == g.rules_page(); "
        "assert g.README.read_text() == g.readme(g.README.read_text())"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPO / "docs")
