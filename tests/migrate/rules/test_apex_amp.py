"""Rule MG407: mixed precision that is not torch's own."""

from __future__ import annotations

import pytest
from rewriting import findings


@pytest.mark.parametrize(
    "line",
    ["model, opt = amp.initialize(model, opt, opt_level='O1')",
     "amp.scale_loss(loss, opt)", "list(amp.master_params(opt))"],
)  # fmt: skip
def test_apex_is_reported_with_the_native_spelling(line: str) -> None:
    (found,) = findings(f"import torch\nfrom apex import amp\n{line}\n", "MG407")
    assert found.advice


@pytest.mark.parametrize("to", ["ddp", "fsdp"])
def test_native_mixed_precision_is_left_alone(to: str) -> None:
    code = """
    import torch
    from torch.cuda.amp import GradScaler, autocast
    scaler = GradScaler()
    with autocast():
        scaler.scale(loss).backward()
    scaler.step(opt)
    """
    assert findings(code, "MG407", to) == []
