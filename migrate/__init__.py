"""migrate: moves PyTorch training scripts to distributed training.

    import migrate
    from pathlib import Path

    result = migrate.rewrite([Path("train.py")], to="ddp")   # nothing is written
    migrate.write(result)

Everything is imported when it is first used. Neither torch nor the checkpoint converter `ckpt` is
ever imported here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from migrate.api import Choice, FileResult, Result, rewrite, write
    from migrate.errors import MigrateError
    from migrate.finding import Applicability, Effect, Finding
    from migrate.rule import Options

__all__ = [
    "Applicability",
    "Choice",
    "Effect",
    "FileResult",
    "Finding",
    "MigrateError",
    "Options",
    "Result",
    "rewrite",
    "write",
]

_HOMES = {
    "Applicability": "migrate.finding",
    "Choice": "migrate.api",
    "Effect": "migrate.finding",
    "FileResult": "migrate.api",
    "Finding": "migrate.finding",
    "MigrateError": "migrate.errors",
    "Options": "migrate.rule",
    "Result": "migrate.api",
    "rewrite": "migrate.api",
    "write": "migrate.api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'migrate' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
