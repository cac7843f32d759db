"""Moves PyTorch training scripts to distributed training.

The rewriter is being built: this version holds the command's entry point only. Neither torch nor
the checkpoint converter `ckpt` is ever imported here.
"""

from __future__ import annotations

__all__: list[str] = []
