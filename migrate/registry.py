"""The rules and targets there are: every module of `rules/` and `targets/`, none is listed."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from migrate import rules as rules_package
from migrate import targets as targets_package
from migrate.errors import MigrateError
from migrate.rule import Rule, Target


@cache
def rules() -> tuple[Rule, ...]:
    """One object of every rule, by code."""
    found: list[Rule] = []
    for name in _modules(rules_package):
        module = importlib.import_module(name)
        for item in vars(module).values():
            if isinstance(item, type) and issubclass(item, Rule) and item.__module__ == name:
                found.append(item())
    return tuple(sorted(found, key=lambda rule: rule.code))


@cache
def targets() -> dict[str, Target]:
    """The targets by the word after `--to`."""
    found = [importlib.import_module(name).TARGET for name in _modules(targets_package)]
    return {target.name: target for target in found}


def target(name: str) -> Target:
    """The target of a name.

    Raises:
        MigrateError: there is none.
    """
    if name not in targets():
        raise MigrateError(f"--to {name}: unknown; known are {', '.join(sorted(targets()))}")
    return targets()[name]


def _modules(package: object) -> list[str]:
    path, prefix = package.__path__, package.__name__  # type: ignore[attr-defined]
    names = sorted(item.name for item in pkgutil.iter_modules(path))
    return [f"{prefix}.{name}" for name in names if not name.startswith("_")]
