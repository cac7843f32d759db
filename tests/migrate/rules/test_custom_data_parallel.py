"""Rule MG207: a DataParallel class of the script's own."""

from __future__ import annotations

from rewriting import findings, rewritten

CLASS = "class Scatter(nn.DataParallel):\n    def scatter(self, *args):\n        return args\n"


def test_it_is_left_to_a_human() -> None:
    code = CLASS + "model = Scatter(nn.Linear(2, 2))\n"
    (found,) = findings(code, "MG207")
    assert "wrap_model" in found.advice
    assert rewritten(code, "MG20") == code


def test_a_class_that_is_not_used_is_not_reported() -> None:
    assert findings(CLASS, "MG207") == []
