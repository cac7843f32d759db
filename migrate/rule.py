"""What a rule is, and what it is given.

A rule finds one pattern in the user's code and says what to do there. It knows where; a target
knows what is written. The module docstring is its page in the documentation:

    One sentence: what it finds.

    Why it matters: …
    Safety: …

    Before::

        code

    After::

        code
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import libcst as cst

from migrate.edit import Edit, Need
from migrate.facts.program import Facts
from migrate.finding import Applicability, Effect, Finding
from migrate.flow import Flow
from migrate.project import Project
from migrate.source import Source


@dataclass(frozen=True)
class Options:
    """The choices of the command line that change what is written."""

    batch: Literal["global", "per-rank"] = "global"
    evaluation: Literal["whole", "sharded"] = "whole"
    batch_norm: Literal["sync", "keep"] = "sync"
    ckpt_keys: Literal["keep", "clean"] = "keep"
    save: Literal["full", "sharded"] = "full"
    wrap_classes: tuple[str, ...] = ()
    find_unused: bool = False


@dataclass(frozen=True)
class Target:
    """A way to train, and what scripts need for it. Targets are in `targets/`, one file each.

    Attributes:
        name: the word after `--to`.
        title: the same in prose.
        snippets: the files of `snippets/` that its definitions come from.
        wrap: the definition that makes a model parallel.
        has_wrapper: the result is a wrapper: `.module` is the model, names begin with `module.`.
        shards: weights and optimizer state are sharded: reading them whole is a collective.
        other_methods: advice for `{model}.{method}(…)` in a step, where only forward is prepared.
        half_precision: the definition instead of a cast to half precision, where weights can stay
            in full precision.
    """

    name: str
    title: str
    snippets: tuple[str, ...]
    wrap: str
    has_wrapper: bool
    shards: bool
    other_methods: str = ""
    half_precision: str = ""


@dataclass(eq=False)
class Context:
    """Everything a rule may look at."""

    project: Project
    flow: Flow
    facts: Facts
    target: Target
    options: Options = field(default_factory=Options)

    @property
    def sources(self) -> list[Source]:
        """The files, the entry first."""
        return self.project.sources

    def helper(self, source: Source, name: str) -> tuple[str, Need]:
        """What a definition is called in a file, and the edit that makes sure it is there."""
        return self.facts.definitions[source].name(name), Need(source, name)


class Rule(ABC):
    """One pattern. `code` is never used again for another; its first digit is the family.

    1 processes and devices, 2 models, 3 data, 4 losses and numbers, 5 files and state, 6 output,
    7 randomness, 8 hazards in the control flow, 9 what cannot be moved.
    """

    code: ClassVar[str]
    title: ClassVar[str]

    @abstractmethod
    def check(self, context: Context) -> Iterator[Finding]:
        """The findings of this rule in the whole program, in any order."""

    def finding(
        self,
        source: Source,
        node: cst.CSTNode,
        message: str,
        edits: Iterable[Edit] = (),
        applicability: Applicability | None = None,
        effect: Effect = Effect.SAME,
        advice: str = "",
        assumption: str = "",
        requires: Iterable[str] = (),
    ) -> Finding:
        """A finding of this rule at `node`; without edits it is manual, with edits safe."""
        edits = tuple(edits)
        default = Applicability.SAFE if edits else Applicability.MANUAL
        return Finding(
            self.code,
            message,
            source.path,
            source.line_of(node),
            source.column_of(node),
            applicability or default,
            edits,
            effect,
            advice,
            assumption,
            frozenset(requires),
        )
