"""DeepSpeed universal checkpoints: each parameter whole, in files of its own, for any world size.

`zero/<name>/` holds `fp32.pt` and a file for each optimizer state, `zero/optimizer_state.pt` the
param groups, and the model_states files of the save come along. Stages 1 and 2 read
`{"param": tensor, "cat_dim": 0}` and `step.pt`; stage 3 reads bare 1-D tensors (dicts only since
0.19.3) and one step for all out of `optimizer_state.pt`. A folder is written for one of the two.

Which releases load it: stages 1 and 2 since 0.14.1, which brought `step.pt`; stage 3 since 0.14.5
with one param group in one sub-group, since 0.18.0 with several. `--ds-version` names the release
of the job, and what it cannot load is refused.

DeepSpeed's `load_universal` restores neither buffers nor frozen parameters; that is said. In stage
3 it gives all sub-groups one `step` tensor, which torch's AdamW then counts up once for each: with
several sub-groups, bias corrections run ahead afterwards. ZeRO-3 shards do not have this.

Source: deepspeed 0.19.8 checkpoint/ds_to_universal.py (`main`, `merge_tp_slices`,
`merge_zero3_slices`, `_save_optimizer_state`, `_save_optimizer_state_stage3`),
checkpoint/universal_checkpoint.py (`load_hp_checkpoint_state`), runtime/base_optimizer.py
(`load_hp_checkpoint_state_from_checkpoint_dir`), runtime/zero/stage3.py
(`load_hp_checkpoint_state_from_checkpoint_dir_stage3`), runtime/engine.py (`load_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from pathlib import Path
from typing import Any

from ckpt.errors import CorruptCheckpoint, MissingPart, Unsupported
from ckpt.format import Format, Match, ReadOptions, WriteOptions
from ckpt.formats._deepspeed import (
    DATA_CLASSES,
    MODEL,
    STAGE_3_MODEL,
    UNIVERSAL_FOLDER,
    FlatPiece,
    Save,
    cut_from_flat,
    rank_files,
    read_file,
    shapes_by_group,
    stage_number,
)
from ckpt.formats._deepspeed import (
    LATEST as DEEPSPEED_LATEST,
)
from ckpt.formats._universal_files import LATEST, MASTER, OPTIMIZER_STATE, PARAM, STEP, SUFFIX
from ckpt.formats._universal_out import plan_universal
from ckpt.formats._zero import Trained, build
from ckpt.model import Checkpoint, Origin, Plain, StoredTensor
from ckpt.note import Note, NoteKind
from ckpt.plan import WritePlan
from ckpt.storage import torch_file
from ckpt.values import read_number

VOCABULARY, IS_EXPERT = "vocab_tensor", "is_expert_param"
UNFINISHED = (
    "ds_to_universal writes it last, so it did not finish; run it again, or convert the "
    "checkpoint it was reading"
)

Shapes = Mapping[str, tuple[int, ...]]


# --- finding ------------------------------------------------------------------------------------


def _matches(path: Path) -> Match:
    folder = _folder(path)
    if folder is None:
        return Match.NO
    is_root_of_others = folder.parent == path and (path / DEEPSPEED_LATEST).is_file()
    return Match.MAYBE if is_root_of_others else Match.YES


def _folder(path: Path) -> Path | None:
    """The folder with `zero/` that a path means: itself, a file's, or the root's latest."""
    if path.is_file() and path.name != LATEST:
        path = path.parent if path.name.endswith("_model_states.pt") else path
        return path if _is_universal(path) else None
    root = path.parent if path.is_file() else path
    if _is_universal(root):
        return root
    latest = root / LATEST
    if not latest.is_file():
        return None
    named = root / latest.read_text(errors="replace").strip()
    return named if _is_universal(named) else None


def _is_universal(folder: Path) -> bool:
    inner = folder / UNIVERSAL_FOLDER
    return inner.is_dir() and (
        (inner / OPTIMIZER_STATE).is_file() or any(inner.glob(f"*/{MASTER}{SUFFIX}"))
    )


def _located(path: Path, tag: str | None) -> Save:
    """The folder and the names in it."""
    folder = path / tag if tag is not None and _is_universal(path / tag) else _folder(path)
    if folder is None:
        raise MissingPart(f"{path}: no universal checkpoint {tag or ''} there".rstrip())
    if tag is not None and folder.name != tag:
        raise MissingPart(f"{path}: is the save {folder.name!r}, not --tag {tag!r}")
    return Save(folder, tuple(sorted(entry.name for entry in folder.iterdir())))


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Source:
    """What a universal folder holds beside its parameters' files.

    Attributes:
        files: the model_states file, or those of all ranks where stage 3 wrote them.
        content: of the first of them.
        optimizer: of optimizer_state.pt.
    """

    save: Save
    stage: int
    files: tuple[Path, ...]
    content: Mapping[str, Any]
    optimizer: Mapping[str, Any]

    @property
    def zero(self) -> Path:
        """The folder of the parameters' folders."""
        return self.save.folder / UNIVERSAL_FOLDER


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in a universal checkpoint; metadata only."""
    source = _open(_located(path, options.tag))
    shapes = shapes_by_group(source.content.get("param_shapes"), source.files[0])
    trained = Trained()
    steps = _steps(source, len(shapes))
    for index, group in enumerate(shapes):
        for name, shape in group.items():
            master, states = _states(source, name, shape, options.need_optimizer)
            trained.masters[name] = master
            number = steps[index]
            if states and STEP not in states and number is not None:
                states[STEP] = number
            trained.states[name] = states
    trained.groups = _groups(source, shapes)
    trained.frozen = _frozen(source)
    origin = Origin(
        format=f"zero{source.stage}",
        path=str(path),
        writer=f"deepspeed {source.content.get('ds_version')}",
        world_size=source.content.get("dp_world_size"),
    )
    scaler, notes = source.optimizer.get("loss_scaler"), list(_reading_notes(source))
    checkpoint = build(source.content, source.files[0], trained, scaler, origin, notes)
    return replace(checkpoint, origin=replace(checkpoint.origin, format="universal"))


def _open(save: Save) -> _Source:
    """The files beside the parameters', which have to be there and to agree."""
    state_path = save.folder / UNIVERSAL_FOLDER / OPTIMIZER_STATE
    if not state_path.is_file():
        raise MissingPart(f"{state_path}: is missing; {UNFINISHED}")
    whole, sharded = save.ranks(MODEL), save.ranks(STAGE_3_MODEL)
    if not whole and not sharded:
        raise MissingPart(f"{save.folder}: no *_model_states.pt file; {UNFINISHED}")
    content = read_file(next(iter((sharded or whole).values())), "module")
    optimizer = torch_file.read(state_path, DATA_CLASSES)
    if not isinstance(optimizer, Mapping) or "param_groups" not in optimizer:
        raise CorruptCheckpoint(f"{state_path}: no 'param_groups' inside; not DeepSpeed's file")
    stage = stage_number(optimizer, state_path) or (3 if sharded else 1)
    if (stage == 3) is not bool(sharded):
        raise CorruptCheckpoint(
            f"{save.folder}: optimizer_state.pt is of ZeRO stage {stage} and the model_states "
            "files are of another; files of two different saves are mixed"
        )
    first = (sharded or whole).get(0)
    if first is None:
        raise MissingPart(f"{save.folder}: the model_states file of rank 0 is missing")
    files = [first]
    if sharded and content.get("frozen_param_shapes"):
        files = rank_files(save, STAGE_3_MODEL, content.get("dp_world_size"))
    return _Source(save, stage, tuple(files), content, optimizer)


def _steps(source: _Source, groups: int) -> list[float | int | None]:
    """The step of each group of shapes, where it is not beside the parameters."""
    if source.stage == 3:
        inner = source.optimizer.get("optimizer_state_dict")
        states = inner.get("state") if isinstance(inner, Mapping) else None
        known = states if isinstance(states, Mapping) else {}
        first = known.get(0, {})
        return [read_number(known.get(index, first).get(STEP)) for index in range(groups)]
    listed = [read_number(group.get(STEP)) for group in source.optimizer["param_groups"]]
    return (listed + [None] * groups)[:groups]


def _states(
    source: _Source, name: str, shape: tuple[int, ...], need_optimizer: bool
) -> tuple[StoredTensor, dict[str, Plain]]:
    """A parameter's fp32 weight, and its optimizer states by name."""
    folder = source.zero / name
    found = sorted(folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
    files = {file.name.removesuffix(SUFFIX): file for file in found}
    if MASTER not in files:
        raise MissingPart(
            f"{folder / (MASTER + SUFFIX)}: is missing; copy the whole folder again, or run "
            "ds_to_universal again"
        )
    master = _tensor(files.pop(MASTER), shape)
    if not need_optimizer:
        return master, {}
    states: dict[str, Plain] = {}
    for key, file in files.items():
        if key == STEP:
            states[STEP] = _step(file)
        else:
            states[key] = _tensor(file, master.shape)
    return master, states


def _step(file: Path) -> float | int:
    number = read_number(torch_file.read(file, DATA_CLASSES))
    if number is None:
        raise CorruptCheckpoint(f"{file}: holds no number; not a step that DeepSpeed wrote")
    return number


def _tensor(file: Path, shape: tuple[int, ...]) -> StoredTensor:
    """The tensor in a parameter's file, in the parameter's shape.

    Bare tensors of converters before 0.19.3 may have elements too many at their end, where a
    parameter has fewer elements than there were ranks (fixed there: `padding_free_numel`).
    """
    content = torch_file.read(file, DATA_CLASSES)
    is_dict = isinstance(content, Mapping)
    tensor = content.get(PARAM) if is_dict else content
    if not isinstance(tensor, StoredTensor):
        raise CorruptCheckpoint(f"{file}: no tensor inside; not a file of a universal checkpoint")
    if is_dict and content.get(IS_EXPERT):
        raise Unsupported(f"{file}: a mixture-of-experts parameter; these cannot be converted")
    if tensor.shape == shape:
        return tensor
    if is_dict and content.get(VOCABULARY) and tensor.shape[1:] == shape[1:]:
        return tensor  # ds_to_universal has cut off the rows that only pad the vocabulary
    if len(tensor.shape) != 1 or tensor.numel < prod(shape):
        raise CorruptCheckpoint(
            f"{file}: a tensor of shape {list(tensor.shape)}, expected {list(shape)}; files of "
            "two different saves are mixed"
        )
    return cut_from_flat([FlatPiece(0, tensor)], 0, shape, str(file))


def _groups(
    source: _Source, shapes: Sequence[Shapes]
) -> list[tuple[list[str], Mapping[str, Plain]]]:
    """Param groups: one for each group of shapes, or (stage 3) made of several sub-groups."""
    groups = source.optimizer["param_groups"]
    parts = [list(group["params"]) for group in groups]
    if source.stage != 3:
        parts = [[index] for index in range(len(groups))]
    if sorted(number for part in parts for number in part) != list(range(len(shapes))):
        raise CorruptCheckpoint(
            f"{source.save.folder}: {len(groups)} param groups and {len(shapes)} groups of "
            "parameter shapes do not fit; files of two different saves are mixed"
        )
    return [
        (
            [name for number in part for name in shapes[number]],
            {k: v for k, v in group.items() if k not in ("params", STEP)},
        )
        for part, group in zip(parts, groups, strict=True)
    ]


def _frozen(source: _Source) -> dict[str, StoredTensor]:
    """Frozen parameters of stage 3, out of the fragments in every rank's file."""
    shapes = source.content.get("frozen_param_shapes") or {}
    if source.stage != 3 or not shapes:
        return {}
    ranks = [read_file(file, "module").get("frozen_param_fragments") or {} for file in source.files]
    frozen = {}
    for name, size in shapes.items():
        shape, share = tuple(size), ceil(prod(size) / len(ranks))
        fragments = [rank.get(name) for rank in ranks]
        pieces = [
            FlatPiece(rank * share, fragment)
            for rank, fragment in enumerate(fragments)
            if isinstance(fragment, StoredTensor) and (rank * share < prod(shape) or not rank)
        ]
        frozen[str(name)] = cut_from_flat(pieces, 0, shape, f"{source.save.folder}: {name}")
    return frozen


def _reading_notes(source: _Source) -> Iterator[Note]:
    zero = (source.content.get("ds_config") or {}).get("zero_optimization")
    if isinstance(zero, Mapping) and zero.get("round_robin_gradients") and source.stage == 2:
        detail = "round_robin_gradients was on; they are in the order of the flat groups"
        yield Note(NoteKind.UNVERIFIED, ("members of the param groups",), detail, of_job=True)


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """A folder for one ZeRO stage, any world size, with `latest_universal` beside it."""
    return plan_universal(checkpoint, options)


FORMAT = Format(
    name="universal",
    title="DeepSpeed universal checkpoint",
    matches=_matches,
    read=read,
    plan=plan,
    has_tags=True,
    outputs=(LATEST,),
    takes=frozenset({"stage", "ds_version"}),
)
