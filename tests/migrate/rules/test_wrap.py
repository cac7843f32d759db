"""Rule MG201: the model is put into DataParallel."""

from __future__ import annotations

import pytest
from rewriting import expect, findings, rewritten

MODEL = "model = nn.Linear(2, 2)\n"


@pytest.mark.parametrize(
    "spelling",
    ["nn.DataParallel", "torch.nn.DataParallel", "torch.nn.parallel.DataParallel"],
)
def test_every_spelling_is_found(spelling: str) -> None:
    assert rewritten(f"{MODEL}model = {spelling}(model)", "MG201") == expect(
        f"""
        {MODEL.strip()}
        model = wrap_model(model)
        """
    )


@pytest.mark.parametrize(
    "arguments",
    ["model, device_ids=[0, 1]", "model, [0, 1]", "model, args.gpus, dim=0",
     "module=model, device_ids=None", "model, device_ids=range(2), output_device=0"],
)  # fmt: skip
def test_arguments_about_devices_go(arguments: str) -> None:
    text = rewritten(f"{MODEL}model = nn.DataParallel({arguments})", "MG201")
    assert text.endswith(("= wrap_model(model)\n", "= wrap_model(module=model)\n"))


def test_a_model_that_is_distributed_already_is_left_alone() -> None:
    code = f"{MODEL}model = nn.parallel.DistributedDataParallel(model)"
    assert findings(code, "MG201") == []
