"""The library: open a checkpoint of any format, convert it into another.

`prepare` reads, plans and says what will happen without writing anything; a `Conversion` then
runs. `convert` does both. The command line is a thin layer over these.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from importlib.metadata import version
from pathlib import Path
from typing import ParamSpec

import ckpt.registry as registry
from ckpt import __version__
from ckpt.checks import remarks
from ckpt.errors import AmbiguousSource, LossRefused, Unsupported
from ckpt.execute import check_output, check_replaceable, check_space, execute
from ckpt.format import (
    DEFAULT_SHARD_BYTES,
    WORLD_OPTIONS,
    Format,
    Part,
    ReadOptions,
    WeightDType,
    WriteOptions,
)
from ckpt.inspection import kept
from ckpt.model import Checkpoint, Plain
from ckpt.names import rename
from ckpt.note import Note, NoteKind
from ckpt.plan import WritePlan
from ckpt.ties import tie_equal_weights

__all__ = ["Conversion", "convert", "open_checkpoint", "prepare"]

PathLike = str | os.PathLike[str]


def open_checkpoint(
    path: PathLike,
    *,
    tag: str | None = None,
    key: str | None = None,
    rename_rules: Sequence[str] = (),
    param_order: Sequence[str] | None = None,
    model: str | None = None,
    weights_only: bool = False,
    need_optimizer: bool = True,
) -> Checkpoint:
    """The training state at `path`, of any format that can be read. No tensor data is touched.

    Args:
        path: a file, a folder, or the root of a DeepSpeed job.
        tag: the DeepSpeed save, when not the one in `latest`.
        key: dotted path of the model's state dict in a dict that holds several.
        rename_rules: `REGEX=REPLACEMENT` for names, applied after wrapper prefixes are gone.
        param_order: FQNs in the optimizer's order, where its states are numbered.
        model: `package.module:factory`, built on the meta device for the order of its names.
        weights_only: leave the optimizer and the rest of the job out.
        need_optimizer: False to get the weights, with a note, when the optimizer's parameters
            cannot be told apart.

    Raises:
        CkptError: see `ckpt.errors`; the message says what to do.
    """
    source = Path(path)
    order = None if param_order is None else tuple(param_order)
    options = ReadOptions(tag, key, order, model, need_optimizer and not weights_only)
    found = registry.detect(source)
    assert found.read is not None, "detect returns formats that can be read"
    if tag is not None and not found.has_tags:
        raise AmbiguousSource(f"{path}: --tag {tag}: {found.title} has no tags")
    checkpoint = rename(found.read(source, options), rename_rules)
    return checkpoint.without_job() if weights_only else checkpoint


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion that is planned and not begun.

    Attributes:
        notes: everything it drops, casts, renames or makes up.
        output: the file or folder that will appear.
    """

    checkpoint: Checkpoint
    target: Format
    output: Path
    plan: WritePlan
    notes: tuple[Note, ...]
    digest: str

    @property
    def nbytes(self) -> int:
        """Bytes of tensors to be written."""
        return self.plan.nbytes

    @property
    def kept(self) -> list[str]:
        """What goes along, in a few words each; `notes` says the rest."""
        dropped = {s for n in self.notes if n.kind is NoteKind.DROPPED for s in n.subjects}
        return kept(self.checkpoint, self.target.keeps, dropped)

    def run(self, progress: Callable[[int], None] | None = None) -> Path:
        """Write the output; returns its path. See `ckpt.execute.execute`."""
        execute(self.plan, self.output, self.digest, progress)
        return self.output


def prepare(
    source: PathLike,
    to: str,
    output: PathLike | None = None,
    *,
    tag: str | None = None,
    key: str | None = None,
    rename_rules: Sequence[str] = (),
    param_order: Sequence[str] | None = None,
    model: str | None = None,
    weights_only: bool = False,
    dtype: WeightDType | str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    hf_config: PathLike | None = None,
    world_size: int | None = None,
    ds_config: PathLike | Mapping[str, Plain] | None = None,
    like: PathLike | None = None,
    stage: int | None = None,
    ds_version: str | None = None,
    overwrite: bool = False,
    allow_loss: bool = False,
) -> Conversion:
    """Plan a conversion; reads metadata only (and possibly tied weights), writes nothing.

    Args:
        to: the target format, one of `ckpt formats`.
        output: default: a name beside the source made of its name and the format.
        dtype: of floating-point parameters; None keeps fp32 master weights where there are any.
        max_shard_bytes: largest safetensors file.
        hf_config: folder whose config and tokenizer files go along.
        world_size: ranks of the job that will load DeepSpeed shards; None for the source's.
        ds_config: DeepSpeed's configuration of that job, or a JSON file with it.
        like: a DeepSpeed checkpoint of that job, for order, groups and layout.
        stage: its ZeRO stage, for a universal checkpoint; None for the source's.
        ds_version: DeepSpeed's release there, for a universal checkpoint; None for 0.18 or newer.
        overwrite: replace an output that is there, once the new one is complete.
        allow_loss: go on although something is lost that the target could hold.
        Others: see `open_checkpoint`.

    Raises:
        CkptError: see `ckpt.errors`; the message says what to do.
    """
    target, path = registry.target(to), Path(source)
    job: Job = (world_size, ds_config, like, stage, ds_version)
    options = _write_options(target, dtype, max_shard_bytes, hf_config, job)
    goal = Path(output) if output is not None else default_output(path, target)
    if path.exists():
        check_output(goal, path, overwrite=overwrite)
    checkpoint = open_checkpoint(
        path, tag=tag, key=key, rename_rules=rename_rules, param_order=param_order, model=model,
        need_optimizer=Part.OPTIMIZER in target.keeps and not weights_only,
    )  # fmt: skip
    asked = (to, options, str(like), tag, key, [*rename_rules], param_order, model, weights_only)
    return _planned(checkpoint, path, target, goal, options, weights_only, allow_loss, repr(asked))


def _planned(
    checkpoint: Checkpoint,
    path: Path,
    target: Format,
    goal: Path,
    options: WriteOptions,
    weights_only: bool,
    allow_loss: bool,
    asked: str,
) -> Conversion:
    """The plan for a checkpoint that is open, with everything that has to be said and agreed to."""
    keeps_optimizer = Part.OPTIMIZER in target.keeps and not weights_only
    if checkpoint.origin.repeats_ties:
        checkpoint = tie_equal_weights(checkpoint)
    told = [*remarks(checkpoint), *_losses(checkpoint, target, weights_only)]
    if weights_only:
        checkpoint = checkpoint.without_job()
    assert target.plan is not None, "registry.target returns formats that can be written"
    plan = target.plan(checkpoint, options)
    notes = _without_carried((*checkpoint.notes, *told, *plan.notes), plan)
    _require_consent(path, notes, allow_loss, of_job=keeps_optimizer)
    check_replaceable(plan, goal)
    check_space(plan, goal)
    return Conversion(checkpoint, target, goal, plan, notes, _digest(checkpoint, plan, asked))


Job = tuple[
    int | None, PathLike | Mapping[str, Plain] | None, PathLike | None, int | None, str | None
]
"""The values of `WORLD_OPTIONS`."""


def _write_options(
    target: Format,
    dtype: WeightDType | str | None,
    max_shard_bytes: int,
    hf_config: PathLike | None,
    job: Job,
) -> WriteOptions:
    _refuse_unused(target, job)
    world_size, ds_config, like, stage, ds_version = job
    return WriteOptions(
        None if dtype is None else WeightDType(dtype),
        max_shard_bytes,
        None if hf_config is None else Path(hf_config),
        world_size,
        _configuration(ds_config),
        _model_job(like),
        stage,
        ds_version,
    )


def _refuse_unused(target: Format, values: Sequence[object]) -> None:
    """Refuses options about the job that will load an output which is not cut for its ranks."""
    for name, value in zip(WORLD_OPTIONS, values, strict=True):
        if value is not None and name not in target.takes:
            users = ", ".join(item.name for item in registry.formats() if name in item.takes)
            raise Unsupported(
                f"--{name.replace('_', '-')}: {target.title} is the same for every job, so there "
                f"is no use for it; it is for {users}"
            )


def _configuration(given: PathLike | Mapping[str, Plain] | None) -> Mapping[str, Plain] | None:
    """The content of `--ds-config`."""
    if given is None or isinstance(given, Mapping):
        return given
    try:
        content = json.loads(Path(given).read_text(encoding="utf-8"))
    except ValueError as problem:
        raise Unsupported(f"--ds-config {given}: no JSON file ({problem})") from problem
    if not isinstance(content, Mapping):
        raise Unsupported(f"--ds-config {given}: expected a JSON object, DeepSpeed's configuration")
    return content


def _model_job(path: PathLike | None) -> Checkpoint | None:
    """The checkpoint of `--like`."""
    if path is None:
        return None
    checkpoint = open_checkpoint(path)
    if not checkpoint.origin.format.startswith("zero"):
        raise Unsupported(
            f"--like {path}: is a {checkpoint.origin.format} checkpoint; expected one that "
            "DeepSpeed wrote"
        )
    return checkpoint


P = ParamSpec("P")


def _run_at_once(plan: Callable[P, Conversion]) -> Callable[P, Path]:
    @wraps(plan)
    def run(*args: P.args, **kwargs: P.kwargs) -> Path:
        return plan(*args, **kwargs).run()

    run.__doc__ = "Convert a checkpoint; returns the output's path. Arguments: see `prepare`."
    return run


convert = _run_at_once(prepare)


def _require_consent(
    source: Path, notes: Sequence[Note], allow_loss: bool, *, of_job: bool
) -> None:
    """Refuses losses that nobody agreed to; those of the job only where it is to be kept."""
    refused = [str(n) for n in notes if n.needs_consent and (of_job or not n.of_job)]
    if refused and not allow_loss:
        raise LossRefused(
            f"{source}: {'; '.join(refused)}. Convert with --allow-loss to go on without."
        )


def default_output(source: Path, target: Format) -> Path:
    """`zero3/` becomes `zero3-hf`, `ddp.pt` to `dcp` becomes `ddp-dcp`, `dcp/` `dcp-torch.pt`."""
    resolved = source.resolve()
    stem = resolved.stem if resolved.is_file() else resolved.name
    return source.parent / f"{stem}-{target.name}{target.output_suffix}"


def _without_carried(notes: Sequence[Note], plan: WritePlan) -> tuple[Note, ...]:
    """Files that were not read and go along unchanged are not lost."""
    carried = {file.path for file in plan.copied}
    return tuple(n for n in notes if n.kind is not NoteKind.DROPPED or not carried >= {*n.subjects})


def _losses(checkpoint: Checkpoint, target: Format, weights_only: bool) -> list[Note]:
    """What does not go along: by the target's nature, or because the user asked for weights."""
    why = "left out, as asked" if weights_only else f"{target.title} holds weights only"
    losses = []
    if checkpoint.has_optimizer and (weights_only or Part.OPTIMIZER not in target.keeps):
        losses.append(Note(NoteKind.DROPPED, (Part.OPTIMIZER.value, Part.GROUPS.value), why))
    if checkpoint.objects and (weights_only or Part.JOB not in target.keeps):
        losses.append(Note(NoteKind.DROPPED, tuple(checkpoint.objects), why))
    return losses


def _digest(checkpoint: Checkpoint, plan: WritePlan, asked: str) -> str:
    """Identifies the files of a source as they are now, what was asked for, and by which code."""
    paths = {chunk.record.path for _, tensor in checkpoint.tensors() for chunk in tensor.chunks}
    found = {path: Path(path).stat() for path in sorted(paths)}
    stats = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in found.items()]
    files = [(file.path, file.nbytes) for file in plan.files]
    code = (__version__, version("torch"))
    return hashlib.sha256(repr((asked, stats, files, code)).encode()).hexdigest()
