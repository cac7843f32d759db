"""Fully qualified names: wrapper prefixes off, in one place, with a report of what went.

A wrapper leaves its mark where it sits: in front (`module.` of DataParallel, DDP and DeepSpeed,
`_forward_module.` of Lightning) or between two modules (`_orig_mod.` of torch.compile,
`_fsdp_wrapped_module.`, `_checkpoint_wrapped_module.`), and wrappers nest in any order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ckpt.dtypes import DType
from ckpt.errors import AmbiguousSource
from ckpt.model import Checkpoint
from ckpt.note import Note, NoteKind

__all__ = ["CleanNames", "clean_names", "is_buffer", "parse_renames", "rename"]

ANYWHERE = (
    "_orig_mod.",
    "_fsdp_wrapped_module.",
    "_checkpoint_wrapped_module.",
    "_forward_module.",
)
"""Segments that no user's module is called; source: torch 2.13.0 torch/_dynamo/eval_frame.py,
torch/distributed/fsdp/_common_utils.py, torch/distributed/algorithms/_checkpoint/
checkpoint_wrapper.py; lightning 2.6 strategies."""

BUFFER_SUFFIXES = ("running_mean", "running_var", "num_batches_tracked")
"""BatchNorm's buffers; source: torch 2.13.0 torch/nn/modules/batchnorm.py."""

LEADING = "module."
"""The attribute of DataParallel, DDP and DeepSpeedEngine. Only taken off in front, and only when
every name carries it: a model may own a child called `module`."""


@dataclass(frozen=True, slots=True)
class CleanNames:
    """Clean FQNs by original name, and the wrapper segments that were taken off."""

    by_original: Mapping[str, str]
    stripped: tuple[str, ...]

    def __getitem__(self, original: str) -> str:
        return self.by_original[original]


def is_buffer(name: str, dtype: DType) -> bool:
    """True for a name or a dtype that only buffers have, where nothing else tells them apart."""
    return name.endswith(BUFFER_SUFFIXES) or not (dtype.is_floating_point or dtype.is_complex)


def parse_renames(rules: Iterable[str]) -> list[tuple[re.Pattern[str], str]]:
    """`REGEX=REPLACEMENT` rules, compiled.

    Raises:
        AmbiguousSource: a rule without `=`, or a regular expression that does not compile.
    """
    parsed = []
    for rule in rules:
        pattern, separator, replacement = rule.rpartition("=")
        if not separator:
            raise AmbiguousSource(f"--rename {rule!r}: expected REGEX=REPLACEMENT")
        try:
            parsed.append((re.compile(pattern), replacement))
        except re.error as problem:
            raise AmbiguousSource(f"--rename {rule!r}: {problem}") from problem
    return parsed


def clean_names(names: Iterable[str]) -> CleanNames:
    """Names without wrapper segments, each still unique.

    Raises:
        AmbiguousSource: two different names become one.
    """
    originals = list(dict.fromkeys(names))
    cleaned, stripped = originals, list[str]()
    while True:
        before = cleaned
        for segment in ANYWHERE:
            shorter = [_without_segment(name, segment) for name in cleaned]
            stripped += [segment] if shorter != cleaned else []
            cleaned = shorter
        if cleaned and all(name.startswith(LEADING) for name in cleaned):
            cleaned = [name.removeprefix(LEADING) for name in cleaned]
            stripped.append(LEADING)
        if cleaned == before:
            break
    by_original = dict(zip(originals, cleaned, strict=True))
    _refuse_collisions(by_original)
    return CleanNames(by_original, tuple(dict.fromkeys(stripped)))


def rename(checkpoint: Checkpoint, rules: Iterable[str]) -> Checkpoint:
    """The checkpoint with the user's `REGEX=REPLACEMENT` rules applied to every name.

    Raises:
        AmbiguousSource: a rule that cannot be read, or two names that become one.
    """
    names = {name: name for name in (*checkpoint.order, *checkpoint.extra_state)}
    for pattern, replacement in parse_renames(rules):
        rule = f"--rename {pattern.pattern}={replacement}"
        if not any(pattern.search(name) for name in names.values()):
            raise AmbiguousSource(f"{rule}: no name matches")
        try:
            names = {k: pattern.sub(replacement, v) for k, v in names.items()}
        except (re.error, IndexError) as problem:
            raise AmbiguousSource(f"{rule}: {problem}") from problem
    _refuse_collisions(names)
    changed = tuple(f"{old} -> {new}" for old, new in names.items() if old != new)
    if not changed:
        return checkpoint
    note = Note(NoteKind.RENAMED, changed, "by --rename")
    return replace(
        checkpoint,
        params={names[fqn]: param for fqn, param in checkpoint.params.items()},
        buffers={names[fqn]: buffer for fqn, buffer in checkpoint.buffers.items()},
        order=tuple(names[name] for name in checkpoint.order),
        extra_state={names[name]: value for name, value in checkpoint.extra_state.items()},
        ties={names[alias]: names[owner] for alias, owner in checkpoint.ties.items()},
        groups=tuple(
            replace(group, fqns=tuple(names[fqn] for fqn in group.fqns))
            for group in checkpoint.groups
        ),
        notes=(*checkpoint.notes, note),
    )


def _without_segment(name: str, segment: str) -> str:
    """`name` without the segment where it stands as a whole path component."""
    return re.sub(rf"(^|(?<=\.)){re.escape(segment)}", "", name)


def _refuse_collisions(cleaned: Mapping[str, str]) -> None:
    seen: dict[str, str] = {}
    for original, name in cleaned.items():
        if name in seen:
            raise AmbiguousSource(
                f"the names {seen[name]!r} and {original!r} both become {name!r}; "
                "keep them apart with --rename"
            )
        seen[name] = original
