"""Rule MG105: where files of tensors are loaded to."""

from __future__ import annotations

import pytest
from rewriting import findings, rewritten, run

from migrate.finding import Applicability


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("m.load_state_dict(torch.load(p))",
         'm.load_state_dict(torch.load(p, map_location="cpu"))'),
        ("c = torch.load(p)\nm.load_state_dict(c['m'])\ne = c['epoch']",
         "c = torch.load(p, map_location=\"cpu\")\nm.load_state_dict(c['m'])\ne = c['epoch']"),
        ("m = torch.load(p)\nm = m.cuda()", 'm = torch.load(p, map_location="cpu")\nm = m.cuda()'),
        ("c = torch.load(p, map_location='cuda:0')", 'c = torch.load(p, map_location="cuda")'),
        ("c = torch.load(p, lambda s, l: s.cuda(0))", "c = torch.load(p, lambda s, l: s.cuda())"),
        ('c = torch.load(p, map_location={"cuda:1": "cuda:0"})',
         'c = torch.load(p, map_location="cuda")'),
    ],
)  # fmt: skip
def test_a_load_gets_a_location_of_the_process_s_own(before: str, after: str) -> None:
    assert rewritten(before, "MG105") == after + "\n"
    assert not run(run(before, "MG105").files[0].after.decode(), "MG105").files[0].changed


@pytest.mark.parametrize(
    "location",
    ['"cpu"', "device", "lambda storage, loc: storage", 'f"cuda:{local_rank}"', '"cuda"'],
)
def test_a_right_location_stays(location: str) -> None:
    assert findings(f"c = torch.load(p, map_location={location})", "MG105") == []


def test_what_else_is_loaded_is_only_mentioned() -> None:
    (found,) = findings("features = torch.load(p)\nuse(features)", "MG105")
    assert (found.applicability, found.edits) == (Applicability.INFO, ())
