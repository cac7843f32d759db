"""The definitions that edits need: where they go, under which names, and that they go in once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import libcst as cst
import pytest

from migrate.definitions import Definitions, definitions
from migrate.edit import apply
from migrate.names import Names
from migrate.registry import targets
from migrate.source import parse_source

COMMON = ("common", "ddp")


def of(text: str, files: tuple[str, ...] = COMMON) -> Definitions:
    source = parse_source(Path("a.py"), text.encode())
    return Definitions(source, Names(source), files)


def added(text: str, *names: str, files: tuple[str, ...] = COMMON) -> str:
    """The text with definitions added."""
    own = of(text, files)
    return apply(own.source, own.texts(names))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch\n", "x = 1\n"),
        ("import torch\nfrom a import b\n", "\n\ndef f():\n    import late\n"),
        ('"""Doc."""\n', "x = 1\n"),
        ('"""Doc."""\nfrom __future__ import print_function\n', "x = 1\n"),
        ("# c\nimport os  # c\n", "# about x\nx = 1\n"),
        ("try:\n    import a\nexcept ImportError:\n    a = None\n", "x = 1\n"),
        ("import a\nif True:\n    import b\n", "x = 1\n"),
        ("import a; import b\n", "x = 1\n"),
        ("from a import (\n    b,\n    c,\n)\n", "x = 1\n"),
        ("import a\nwarnings.filterwarnings('ignore')\nimport b\n", "x = 1\n"),
        ("import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nimport b\n", "x = 1\n"),
        ("import a\n", "args = parse()\nimport b\n"),
        ("import a\n", "model = f()\nif args.half:\n    from apex import amp\n"),
        ("import a\nif has():\n    import b\n", "x = 1\n"),
        ("import a\ntry:\n    import b\nexcept ImportError:\n    raise E('b')\n", "f()\n"),
        ("import a\n", "class C: pass\nimport b\n"),
        ("import a\n", "if __name__ == '__main__':\n    import b\n"),
        ("#!/usr/bin/python\n# -*- coding: utf-8 -*-\n# Copyright\n", "\nx = 1\n"),
        ("# -*- coding: utf-8 -*-\n", "x = 1\n"),
        ("#!/usr/bin/python\n", "\n# about x\nx = 1\n"),
        ("", "x = 1\n"),
    ],
)
def test_definitions_stand_after_the_imports(before: str, after: str) -> None:
    text = added(before + after, "process_rank")
    assert text.startswith(before)
    assert text.endswith(after)
    assert text.index("def process_rank") >= len(before)
    ast.parse(text)


def test_two_blank_lines_part_definitions_from_what_is_around_them() -> None:
    text = added("import torch\nx = 1\n", "process_rank")
    assert "dist\n\n\ndef process_rank():" in text
    assert text.endswith("else 0\n\nx = 1\n")
    assert added("x = 1\n", "process_rank").endswith("else 0\n\n\nx = 1\n")


@pytest.mark.parametrize("text", ["import torch", "", "x = 1", '"""Doc."""', "# only a comment"])
def test_short_files_get_them_as_well(text: str) -> None:
    ast.parse(added(text, "process_rank"))


def test_newlines_are_those_of_the_file() -> None:
    text = added("import torch\r\nx = 1\r\n", "per_process")
    assert text.count("\r\n") == text.count("\n")


def test_a_definition_brings_those_it_uses_and_its_imports_once() -> None:
    text = added("import torch\n", "global_mean", "global_sum")
    assert text.count("def global_sum(") == text.count("def process_count(") == 1
    assert text.count("import torch.distributed as dist\n") == 1
    assert text.count("import torch\n") == 1


def test_an_import_that_is_there_is_not_repeated() -> None:
    text = added("import os\nfrom torch import distributed as dist\nimport torch\n", "process_rank")
    assert text.count("dist\n") == 1
    assert "torch.distributed as dist" not in text


@pytest.mark.parametrize(
    "imports",
    [
        "import torch\ndef f():\n    import torch.distributed as dist\n",
        "import torch\nif flag:\n    import torch.distributed as dist\n",
        "import torch\nx = 1\ndef f(): pass\nimport torch.distributed as dist\n",
        "import torch\nif __name__ == '__main__':\n    import torch.distributed as dist\n",
    ],
)
def test_an_import_that_may_come_late_or_never_does_not_count(imports: str) -> None:
    text = added(imports, "process_rank")
    assert "\nimport torch.distributed as dist\n\n\ndef process_rank" in text


@pytest.mark.parametrize(
    ("taken", "name", "line", "use"),
    [
        ("dist = 3\n", "process_rank", "import torch.distributed as dist_\n", "dist_.get_rank()"),
        ("from a import b as dist\n", "process_rank", "distributed as dist_\n", "dist_.get_rank()"),
        ("os = 1\n", "local_rank_or", "import os as os_\n", 'os_.environ["LOCAL_RANK"]'),
        ("import a as torch\n", "global_sum", "import torch as torch_\n", "torch_.is_tensor("),
    ],
)
def test_a_taken_import_gets_an_underscore(taken: str, name: str, line: str, use: str) -> None:
    text = added(taken, name)
    assert line in text
    assert use in text
    assert added(text, name) == text


def test_a_taken_import_of_a_name_gets_an_underscore() -> None:
    text = added("from mine import fully_shard\n", "shard_model", files=("common", "fsdp"))
    assert "from torch.distributed.fsdp import fully_shard as fully_shard_\n" in text
    assert "return fully_shard_(model" in text


def test_an_import_under_another_name_is_used_by_later_definitions() -> None:
    text = added(added("dist = 3\n", "process_rank"), "process_count")
    assert text.count("import torch.distributed as dist_\n") == 1
    assert "return dist_.get_world_size()" in text


def test_a_taken_name_gets_an_underscore_in_every_use() -> None:
    text = added("import torch\nprocess_count = 3\n", "global_mean")
    assert "def process_count_():" in text
    assert "value / process_count_()" in text.replace("global_sum(value)", "value")
    assert of("def per_process(): pass\n").name("per_process") == "per_process_"
    assert of("def f(per_process, per_process_): pass\n").name("per_process") == "per_process__"


@pytest.mark.parametrize("name", sorted(definitions(COMMON)))
def test_what_was_added_is_recognised_and_not_added_again(name: str) -> None:
    text = added("import torch\n", name)
    assert added(text, name) == text
    assert of(text).name(name) == name


@pytest.mark.parametrize("target", sorted(targets()))
def test_renamed_definitions_are_recognised(target: str) -> None:
    files = targets()[target].snippets
    names = sorted(definitions(files))
    taken = "import torch\n" + "".join(f"{name} = 1\n" for name in names)
    text = added(taken, *names, files=files)
    assert added(text, *names, files=files) == text


def test_another_definition_comes_beside_the_ones_that_are_there() -> None:
    text = added(added("import torch\n", "process_rank"), "process_count")
    assert text.count("def process_rank") == text.count("def process_count") == 1


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\n\n\ndef ", "\ndef "),
        ('"""This process\'s part', '\n\n    """This process\'s part'),
        ("    return batch_size", "\n\n    return batch_size"),
        (
            "    if batch_size is None:\n        return None",
            "    if batch_size is None: return None",
        ),
        ("    ", "\t"),
        ("\n", "\r\n"),
        ("process_count())\n        )", "process_count()),\n        )"),
    ],
)
def test_what_formatters_do_is_seen_through(old: str, new: str) -> None:
    text = added("import torch\n", "per_process")
    assert old in text
    changed = text.replace(old, new)
    changed = (
        changed.replace('processes evenly"', "processes evenly'") if "'batch" in new else changed
    )
    assert len(of(changed).own) == 2


def test_a_real_formatter_is_seen_through(tmp_path: Path) -> None:
    names = sorted(definitions(COMMON))
    path = tmp_path / "a.py"
    path.write_text(added("import torch\n", *names))
    options = ["--isolated", "--line-length=60", "--config=format.quote-style='single'"]
    command = [sys.executable, "-m", "ruff", "format", *options, str(path)]
    subprocess.run(command, check=True, timeout=60)
    assert len(of(path.read_text()).own) == len(names)


def test_a_definition_that_was_changed_is_the_users() -> None:
    text = added("import torch\n", "process_rank").replace("else 0", "else 1")
    own = of(text)
    assert own.own == frozenset()
    assert own.name("process_rank") == "process_rank_"


def test_what_stands_in_a_definition_is_told() -> None:
    text = added("import torch\n", "process_rank") + "print(1)\n"
    own = of(text)
    calls = {own.source.code(call): own.is_own(call) for call in own.source.all(cst.Call)}
    assert calls == {"dist.get_rank()": True, "dist.is_initialized()": True, "print(1)": False}


@pytest.mark.parametrize("target", sorted(targets()))
def test_every_definition_compiles_alone(target: str) -> None:
    files = targets()[target].snippets
    for name in definitions(files):
        compile(added("", name, files=files), name, "exec")
