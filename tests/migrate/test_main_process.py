"""Who comes to a place: the main process alone, some processes, or all of them."""

from __future__ import annotations

import textwrap
from pathlib import Path

import libcst as cst
import pytest

from migrate.facts.main_process import is_rank_name, names_rank
from migrate.facts.program import Facts
from migrate.flow import Flow
from migrate.project import load_project
from migrate.source import Source
from migrate.syntax import dotted

HEAD = "import os, sys\nimport torch\nimport torch.distributed as dist\n"


def facts(code: str) -> Facts:
    contents = {Path("train.py"): (HEAD + textwrap.dedent(code)).encode()}
    project = load_project(contents, Path("train.py"), contents)
    return Facts(project, Flow(project), ("common", "ddp"))


def call(found: Facts, name: str = "save") -> tuple[Source, cst.Call]:
    """The first call of `name`."""
    calls = found.entry.all(cst.Call)
    return found.entry, next(c for c in calls if dotted(c.func) == name)


def answers(code: str) -> tuple[bool, bool]:
    """Does the number decide who comes to `save()`? Does only the main process come there?"""
    found = facts(code)
    room = found.main_process
    return room.is_by_rank(*call(found)), room.only_main(*call(found))


ONLY_MAIN, BY_RANK, ALL = (True, True), (True, False), (False, False)


# Conditions


@pytest.mark.parametrize(
    "test",
    [
        "rank == 0",
        "0 == rank",
        "rank < 1",
        "rank <= 0",
        "not rank",
        "not args.local_rank",
        "args.local_rank in (-1, 0)",
        "args.local_rank in [0, -1]",
        "RANK in {-1, 0}",
        "dist.get_rank() == 0",
        "get_rank() == 0",
        "int(os.environ['RANK']) == 0",
        "int(os.environ.get('LOCAL_RANK', 0)) == 0",
        "getattr(args, 'rank', 0) == 0",
        "kwargs['rank'] == 0",
        "'rank' not in kwargs or kwargs['rank'] == 0",
        "args.rank % ngpus == 0",
        "rank is None or rank == 0",
        "is_main_process()",
        "is_main_process_()",
        "is_main",
        "self.is_master",
        "is_world_master()",
        "isMaster",
        "accelerator.is_main_process",
        "main_process",
        "master_process",
        "is_rank_0",
        "is_rank_zero()",
        "trainer.is_world_process_zero()",
        "rank == 0 and epoch % 5 == 0",
        "step % 10 == 0 and (verbose and rank == 0)",
        "rank == 0 or is_main_process()",
        "not dist.is_initialized() or dist.get_rank() == 0",
        "not (rank != 0)",
        "not rank > 0",
        "local_rank == -1 or dist.get_rank() == 0",
    ],
)
def test_only_the_main_process_comes_under_its_condition(test: str) -> None:
    assert answers(f"if {test}:\n    if x:\n        save()\n") == ONLY_MAIN


@pytest.mark.parametrize(
    "test",
    [
        "rank != 0",
        "rank",
        "rank > 0",
        "rank == 1",
        "rank < 4",
        "rank == -1",
        "not is_main_process()",
        "rank == 0 or verbose",
        "rank == args.writer",
        "rank in writers",
        "not args.distributed or rank == 0",
        "RANK == -1 and batch_size == -1",
    ],
)
def test_other_conditions_on_the_number_are_the_scripts_own_arrangement(test: str) -> None:
    assert answers(f"if {test}:\n    save()\n") == BY_RANK


@pytest.mark.parametrize(
    "test",
    [
        "epoch % 2 == 0",
        "args.gpu == 0",
        "args.distributed",
        "local_rank != -1",
        "rank >= 0",
        "cuda and RANK != -1",
        "'RANK' in os.environ",
        "rank is not None",
        "dist.is_initialized()",
    ],
)
def test_all_processes_come_under_conditions_that_hold_for_all(test: str) -> None:
    assert answers(f"if {test}:\n    save()\n") == ALL


@pytest.mark.parametrize(
    "test",
    [
        "ranking",
        "args.as_reranker",
        "args.low_rank",
        "args.lora_rank == 0",
        "dt_rank == 0",
        "rank_length == 0",
        "ranks_with_data",
        "torch.linalg.matrix_rank(x) == 0",
        "frank == 0",
        "from_main_process(loss < best)",
        "is_maintained",
        "train(model, rank) > best",
    ],
)
def test_words_that_are_like_rank_are_none(test: str) -> None:
    assert answers(f"if {test}:\n    save()\n") == ALL


# Branches, and ways out


def test_the_other_branch_is_for_the_others() -> None:
    assert answers("if rank == 0:\n    pass\nelse:\n    save()\n") == BY_RANK
    assert answers("if rank != 0:\n    pass\nelse:\n    save()\n") == ONLY_MAIN
    assert answers("if rank > 0:\n    pass\nelif x:\n    save()\n") == ONLY_MAIN
    assert answers("if x:\n    pass\nelif rank == 0:\n    save()\n") == ONLY_MAIN


def test_expressions_have_branches_too() -> None:
    assert answers("save() if rank == 0 else None") == ONLY_MAIN
    assert answers("None if rank == 0 else save()") == BY_RANK
    assert answers("rank == 0 and save()") == ONLY_MAIN
    assert answers("rank == 0 or save()") == BY_RANK
    assert answers("rank != 0 or save()") == ONLY_MAIN


def test_what_the_condition_itself_does_all_do() -> None:
    assert answers("if rank == save():\n    pass\n") == ALL
    assert answers("if save() and rank == 0:\n    pass\n") == ALL


@pytest.mark.parametrize(
    ("way_out", "expected"),
    [
        ("if rank != 0: return", ONLY_MAIN),
        ("if rank != 0:\n        wait()\n        return None", ONLY_MAIN),
        ("if not is_main_process():\n        return", ONLY_MAIN),
        ("if not dist.is_initialized():\n        return", ALL),
        ("if rank == 0:\n        x()\n    else:\n        return", ONLY_MAIN),
        ("if x:\n        return\n    elif rank != 0:\n        return", ONLY_MAIN),
        ("if rank != 0:\n        sys.exit()", ONLY_MAIN),
        ("if rank == 0:\n        return", BY_RANK),
        ("if rank == -1:\n        return", ALL),
        ("if rank >= count:\n        raise ValueError", ALL),
        ("if rank != 0:\n        wait()", ALL),
        ("if rank != 0:\n        def f():\n            return", ALL),
        ("if 'RANK' in os.environ:\n        pass\n    else:\n        return", ALL),
    ],
)
def test_who_is_sent_away_does_not_come_below(way_out: str, expected: tuple[bool, bool]) -> None:
    assert answers(f"def f():\n    {way_out}\n    with x:\n        save()\n") == expected


def test_a_loop_goes_on_without_the_others() -> None:
    code = "for epoch in epochs:\n    if rank: continue\n    save()\n"
    assert answers(code) == ONLY_MAIN
    assert answers("for epoch in epochs:\n    if rank: continue\n    x()\nsave()\n") == ALL


def test_the_main_process_that_is_sent_away_does_not_come_either() -> None:
    assert answers("if rank == 0:\n    if rank == 1:\n        save()\n") == BY_RANK


# Names and functions


@pytest.mark.parametrize(
    "code",
    [
        "chief = rank == 0\nif chief:\n    save()\n",
        "chief = not dist.is_initialized() or dist.get_rank() == 0\nif chief and x:\n    save()\n",
        "def f():\n    me = dist.get_rank()\n    if me == 0:\n        save()\n",
        "from torch.distributed import get_rank as number\nif number() == 0:\n    save()\n",
        "def first():\n    return dist.get_rank() == 0\nif first():\n    save()\n",
        "me = int(os.environ['RANK'])\nchief = me < 1\nif chief:\n    save()\n",
        "if (me := dist.get_rank()) == 0:\n    save()\n",
    ],
)
def test_a_condition_may_have_a_name(code: str) -> None:
    assert answers(code) == ONLY_MAIN


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("chief = rank == 0\nchief = x\nif chief:\n    save()\n", ALL),
        ("chief = rank == 0\nif x:\n    chief = True\nif chief:\n    save()\n", BY_RANK),
        ("def f(chief):\n    if chief:\n        save()\nf(rank == 0)\nf(True)\n", ALL),
        ("loss = train(model, rank)\nif loss < best:\n    save()\n", ALL),
    ],
)
def test_a_name_that_may_be_something_else_is_not_trusted(
    code: str, expected: tuple[bool, bool]
) -> None:
    assert answers(code) == expected


# Functions around


def test_a_function_that_is_only_called_by_rank_is_by_rank() -> None:
    code = "def write():\n    save()\nif rank == 0:\n    write()\n"
    assert answers(code) == BY_RANK
    assert answers(code + "write()\n") == ALL
    assert answers("def write():\n    save()\n") == ALL
    assert answers("def g():\n    save()\ndef write():\n    g()\nif rank == 0:\n    write()\n") == (
        BY_RANK
    )
    assert answers("def write():\n    save()\n    write()\n") == ALL


def test_a_function_that_is_made_under_a_condition_may_be_called_by_all() -> None:
    assert answers("if rank == 0:\n    def f():\n        save()\n") == ALL


# Programs that also run without processes


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("if args.local_rank == -1:\n    save()", True),
        ("if rank < 0 and x:\n    save()", True),
        ("if rank != -1:\n    pass\nelse:\n    save()", True),
        ("if rank == 0:\n    save()", False),
        ("if not dist.is_initialized():\n    save()", False),
        ("if not args.distributed:\n    save()", False),
        ("save()", False),
    ],
)
def test_places_for_runs_without_processes(code: str, expected: bool) -> None:
    found = facts(code)
    assert found.main_process.without_processes(*call(found)) is expected


# Words


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("f'log_{rank}.txt'", True),
        ("os.path.join(out, 'log%d' % args.local_rank)", True),
        ("os.environ['LOCAL_RANK']", True),
        ("seed + dist.get_rank()", True),
        ("path if is_main_process() else os.devnull", True),
        ("{'cuda:0': f'cuda:{local_rank}'}", True),
        ("lambda s, _: s.cuda(gpu_rank)", True),
        ("f(rank=0)", False),
        ("'rank.txt'", False),
        ("f'ranking_{epoch}.txt'", False),
        ("from_main_process(time.time())", False),
    ],
)
def test_what_has_to_do_with_the_number(code: str, expected: bool) -> None:
    found = facts(f"x = {code}\n")
    (assign,) = found.entry.all(cst.Assign)
    assert names_rank(found.entry, assign.value) is expected


def test_names_of_numbers_and_of_conditions() -> None:
    yes = "rank LOCAL_RANK global_rank worldRank myrank get_rank rank_id node_rank PROC_ID is_main"
    no = "ranks ranked rerank low_rank lowrank rank_loss frank rank_n order matrix_rank is_mainnet"
    assert [name for name in yes.split() if not is_rank_name(name)] == []
    assert [name for name in no.split() if is_rank_name(name)] == []
