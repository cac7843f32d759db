"""Are two records compared as a person would?"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from migrate.verify.comparison import Comparison, Sharing
from migrate.verify.report import as_json, lines
from migrate.verify.trace import Call, Loader, Pass, Rank, Run, Step, Sums
from migrate.verify.verdict import judge

NOTHING = Sums((0.0, 0.0), (0.0, 0.0))


def step(loss: float = 1.0, gradient: float = 1.0, **changes: Any) -> Step:
    sums = Sums((gradient, gradient**2), (0.0, 0.0))
    facts = {"at": "train.py:7", "optimizer": 0, "losses": (loss,), "samples": 8, "lr": (0.1,),
             "before": NOTHING, "gradients": sums, "after": NOTHING, "without_gradient": 0,
             "batch_norm": None}  # fmt: skip
    return Step(**{**facts, **changes})


def one_pass(*batches: tuple[Any, ...], trains: bool = True, begin: int = 0) -> Pass:
    end = begin + len(batches)
    return Pass(batches, tuple(map(len, batches)), trains, begin, end)


def loader(*passes: Pass) -> Loader:
    return Loader(None, passes)


def rank(number: int, *steps: Step, loaders: tuple[Loader, ...] = (), **changes: Any) -> Rank:
    facts = {"rank": number, "pid": 1, "status": "ended", "exit_code": 0, "error": "",
             "traceback": "", "at": "", "waiting": None, "steps": steps, "loaders": loaders,
             "files": (), "outside": (), "refused": (), "collectives": (), "batch_norms": {},
             "wraps": {}, "synthetic": ()}  # fmt: skip
    return Rank(**{**facts, **changes})


def run(*ranks: Rank, **changes: Any) -> Run:
    facts = {"returncode": 0, "ended": "itself", "stdout": "", "stderr": "",
             "cwd": Path("copy"), "record": Path("record")}  # fmt: skip
    return Run(**{**facts, **changes}, ranks={rank.rank: rank for rank in ranks})


def compared(original: Run, candidate: Run) -> Comparison:
    return Comparison(original, candidate, 1e-4)


def test_the_loss_after_is_the_mean_over_the_processes() -> None:
    c = compared(run(rank(0, step(2.0))), run(rank(0, step(1.0)), rank(1, step(3.0))))
    assert (c.rows[0].loss_before, c.rows[0].loss_after) == (2.0, 2.0)
    assert c.first_parting is None


def test_shards_count_once_and_whole_tensors_once() -> None:
    parts = [Sums((3.0, 9.0), (0.0, 8.0)), Sums((3.0, 9.0), (0.0, 8.0))]
    ranks = [rank(number, step(gradients=part)) for number, part in enumerate(parts)]
    c = compared(run(rank(0, step(gradient=5.0))), run(*ranks))
    assert c.rows[0].norm_after == 5.0


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [(1.0, 1.00005, True), (1.0, 1.001, False), (0.0, 0.0, True), (math.nan, math.nan, True),
     (math.nan, 1.0, False), (math.inf, math.inf, True), (math.inf, 1.0, False),
     (1e-13, -1e-13, True), (1e-9, 2e-9, False)],
)  # fmt: skip
def test_numbers_are_close_within_the_tolerance(one: float, other: float, same: bool) -> None:
    assert compared(run(), run()).close(one, other) is same


def test_the_first_step_that_differs_is_named() -> None:
    before = run(rank(0, step(1.0), step(0.9), step(0.8)))
    after = run(rank(0, step(1.0), step(0.95), step(0.7)))
    verdict = judge(compared(before, after))
    assert verdict.sentence == "trains differently: parts at step 2 of 3"
    assert verdict.causes[0].name == "unknown"


@pytest.mark.parametrize(
    ("parts", "sharing"),
    [
        ([[(0, 1), (2, 3)], [(0, 1), (2, 3)]], Sharing.WHOLE),
        ([[(0,), (2,)], [(1,), (3,)]], Sharing.SPLIT),
        ([[(0, 1), (2, 3)], [(), ()]], Sharing.SPLIT),
        ([[(2,), (0,)], [(3,), (1,)]], Sharing.OTHER),
        ([[(0,), (2,), (4,)], [(1,), (3,), (5,)]], Sharing.OTHER),
        ([[(0,)], [(1,)]], Sharing.OTHER),
    ],
)
def test_samples_are_whole_split_or_others(parts: list[Any], sharing: Sharing) -> None:
    before = run(rank(0, loaders=(loader(one_pass((0, 1), (2, 3))),)))
    ranks = [rank(n, loaders=(loader(one_pass(*part)),)) for n, part in enumerate(parts)]
    assert compared(before, run(*ranks)).passes[0].sharing is sharing


def test_a_stream_is_compared_by_its_sizes() -> None:
    before = run(rank(0, loaders=(loader(one_pass((None, None))),)))
    ranks = [rank(n, loaders=(loader(one_pass((None,))),)) for n in range(2)]
    assert compared(before, run(*ranks)).passes[0].sharing is Sharing.SPLIT


def test_samples_that_are_seen_twice_or_never_are_counted() -> None:
    before = run(rank(0, loaders=(loader(one_pass((0, 1, 2), trains=False)),)))
    ranks = [
        rank(n, loaders=(loader(one_pass(part, trains=False)),))
        for n, part in enumerate([(0, 1), (0, 1)])
    ]
    one = compared(before, run(*ranks)).passes[0]
    assert (one.seen_twice, one.never_seen) == (2, 1)


def test_training_and_evaluation_loaders_are_paired_by_themselves() -> None:
    train, test = loader(one_pass((0,))), loader(one_pass((1,), trains=False))
    c = compared(run(rank(0, loaders=(train, test))), run(rank(0, loaders=(test, train))))
    assert [one.sharing for one in c.passes] == [Sharing.WHOLE, Sharing.WHOLE]


def test_a_candidate_that_fails_is_never_said_to_train_the_same() -> None:
    failed = run(rank(0, status="raised", error="ValueError: no"), returncode=1)
    verdict = judge(compared(run(rank(0, step())), failed))
    assert (verdict.is_same, verdict.causes[0].name) == (False, "does-not-run")


def calling(number: int, *names: str) -> Rank:
    calls = tuple(Call(name, f"train.py:{number}", 0) for name in names)
    return rank(number, step(), collectives=calls)


def test_processes_may_call_the_same_from_other_lines_but_not_something_else() -> None:
    original = run(rank(0, step()))
    same = run(calling(0, "broadcast", "barrier"), calling(1, "broadcast", "barrier"))
    assert judge(compared(original, same)).is_same
    for other in (("broadcast",), ("broadcast", "all_reduce")):
        found = judge(
            compared(original, run(calling(0, "broadcast", "barrier"), calling(1, *other)))
        )
        assert found.causes[0].name == "processes-apart"


def test_fewer_steps_are_a_difference() -> None:
    verdict = judge(compared(run(rank(0, step(), step())), run(rank(0, step()))))
    assert verdict.causes[0].name == "number-of-steps"


def test_the_report_and_its_json_hold_the_verdict() -> None:
    verdict = judge(compared(run(rank(0, step(math.nan))), run(rank(0, step(math.nan)))), ["how"])
    assert lines(verdict)[-1].startswith("trains the same: 1 step compared")
    assert "run with: how" in lines(verdict)
    assert '"same": true' in as_json(verdict)
    assert '"nan"' in as_json(verdict)
