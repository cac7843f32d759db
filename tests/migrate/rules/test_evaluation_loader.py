"""Rule MG305: a DataLoader that is only evaluated on is read whole by every process."""

from __future__ import annotations

from rewriting import findings, run

from migrate.finding import Applicability
from migrate.rule import Options

CODE = (
    "model = nn.DataParallel(nn.Linear(2, 2))\nloader = DataLoader(a, 8)\nval = DataLoader(b, 8)\n"
    "test = DataLoader(c, 8)\nfor x in loader:\n    model(x).mean().backward()\n"
    "for x in val:\n    model(x)\nfor x in test:\n    model(x)\n"
)


def test_it_is_said_once() -> None:
    (found,) = findings(CODE, "MG305")
    assert found.message == "every process evaluates on all of b, c"
    assert found.applicability is Applicability.INFO


def test_sharded_evaluation_names_every_loader() -> None:
    result = run(CODE, "MG305", options=Options(evaluation="sharded"))
    assert len(result.manual) == 2
    assert "range(process_rank(), len(b), process_count())" in result.manual[0].advice


def test_a_loader_that_was_dealt_out_by_hand_is_done() -> None:
    part = "torch.utils.data.Subset(b, range(process_rank(), len(b), process_count()))"
    code = CODE.replace("DataLoader(b, 8)", f"DataLoader({part}, 8)")
    (found,) = findings(code, "MG305", options=Options(evaluation="sharded"))
    assert "all of c" in found.message
