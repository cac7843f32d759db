"""What one process did, kept as JSON: how it ended, its files, and each of its optimizer steps."""

from __future__ import annotations

import json
import os
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from shim.files import Files

FLUSH_EVERY_S = 0.5


class Recorder:
    """Writes `folder/rank<r>.json`, now and then and at the end, from one process alone."""

    def __init__(self, folder: Path, rank: int, files: Files) -> None:
        self._folder, self._rank, self._files = folder, rank, files
        self._pid = os.getpid()  # a forked worker has another one, and nothing to say
        self._steps: list[dict[str, Any]] = []
        self._numbers: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._flushed_s = 0.0

    def watch(self) -> None:
        """Start to record optimizer steps."""
        register_optimizer_step_post_hook(self._step)
        self.write("running")

    def write(self, status: str, exit_code: int | None = None, error: str = "") -> None:
        """Write what is known; of a process that is killed, the last such record remains."""
        if os.getpid() != self._pid:
            return
        self._flushed_s = time.monotonic()
        content = {
            "rank": self._rank,
            "pid": self._pid,
            "status": status,
            "exit_code": exit_code,
            "error": error,
            "files": self._files.listed(),
            "steps": self._steps,
        }
        path = self._folder / f"rank{self._rank}.json"
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(content))
        partial.replace(path)

    def _step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        number = self._numbers.setdefault(optimizer, len(self._numbers))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._steps.append(
            {
                "optimizer": number,
                "lr": [float(group["lr"]) for group in optimizer.param_groups if "lr" in group],
                "sum": sum(_sum(param) for param in params),
                "sharded": any(_is_sharded(param) for param in params),
            }
        )
        if time.monotonic() - self._flushed_s > FLUSH_EVERY_S:
            self.write("running")


def _is_sharded(param: torch.Tensor) -> bool:
    """Without the import, which takes a second and which a script with DTensors has made."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(param, module.DTensor)


def _sum(param: Any) -> float:
    """Of a DTensor the part of this rank: asking the others here could make the script hang."""
    with torch.no_grad():
        local = param.detach().to_local() if _is_sharded(param) else param.detach()
        dtype = torch.complex128 if local.is_complex() else torch.float64
        return float(local.sum(dtype=dtype).real)
