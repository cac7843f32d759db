"""torch.distributed.checkpoint folders: FSDP1 sharded, FSDP2, DDP saved with DCP.

Read: `.metadata` with its `planner_data` paths, boxes on any dimension, 2-D meshes, empty chunks,
and the three ways optimizer states are keyed. Written: `model` and `optimizer` by FQN and the rest
of the job, in whole tensors cut into boxes along dimension 0, which `dcp.load` reads into an FSDP2
or FSDP1 model and its optimizer at any world size.

Source: torch 2.13.0 torch/distributed/checkpoint/{metadata,filesystem,_traverse,state_dict}.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt.chunks import row_slabs
from ckpt.errors import MissingPart, Unsupported
from ckpt.format import Format, Match, ReadOptions, WriteOptions
from ckpt.formats._dcp_tree import KeyPath, rank_count, read_tree
from ckpt.model import Checkpoint, InlineTensor, Origin, Plain
from ckpt.note import Note
from ckpt.optimizer_classes import DECOUPLED
from ckpt.optimizers import for_torch
from ckpt.outgoing import (
    job_data,
    named_objects,
    optimizer_tree,
    plain_notes,
    state_dict,
    weight_notes,
)
from ckpt.plan import OutTensor, WritePlan
from ckpt.storage.dcp_files import (
    DATA_SUFFIX,
    METADATA_FILE,
    DcpDataFile,
    OutItem,
    metadata_file,
)
from ckpt.training_dict import read_training_dict

MODEL, OPTIMIZER = "model", "optimizer"
MAX_CHUNK_BYTES = 256 << 20  # a loading rank reads whole chunks
MAX_FILE_BYTES = 4 << 30


def _matches(path: Path) -> Match:
    folder = path.parent if path.is_file() else path
    if path.is_file() and path.name != METADATA_FILE and path.suffix != DATA_SUFFIX:
        return Match.NO
    if (folder / METADATA_FILE).is_file():
        return Match.YES
    return Match.YES if any(folder.glob(f"*{DATA_SUFFIX}")) else Match.NO


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The training state in a DCP folder; metadata only."""
    folder = path.parent if path.is_file() else path
    tree = read_tree(folder)
    writer = "torch.distributed.checkpoint"
    origin = Origin("dcp", str(path), writer, rank_count(folder), repeats_ties=True)
    return read_training_dict(tree, options, origin)


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """`.distcp` files and `.metadata`.

    Raises:
        MissingPart: the source holds no weights.
    """
    if not checkpoint.order:
        raise MissingPart(f"{checkpoint.origin.path}: holds no weights to write")
    checkpoint, told = for_torch(checkpoint)
    items = list(_items(checkpoint, options))
    _refuse_equal_keys(items)
    files = tuple(
        DcpDataFile(f"__0_{number}{DATA_SUFFIX}", tuple(part))
        for number, part in enumerate(_split(items))
    )
    return WritePlan(
        files=files,
        notes=(
            *weight_notes(checkpoint, options),
            *map(_with_what_loading_needs, told),
            *plain_notes(checkpoint.objects, (MODEL, OPTIMIZER)),
        ),
        commit=(metadata_file(files),),
    )


def _with_what_loading_needs(note: Note) -> Note:
    """`dcp.load` fails on an option that the optimizer has and the folder lacks."""
    if note.subjects != (DECOUPLED,):
        return note
    detail = "dcp.load then needs DefaultLoadPlanner(allow_partial_load=True)"
    return replace(note, detail=f"{note.detail}; {detail}")


def _items(checkpoint: Checkpoint, options: WriteOptions) -> Iterator[OutItem]:
    """Every item, in the order in which `dcp.save` would flatten the same dict."""
    for name, tensor in state_dict(checkpoint, options).items():
        yield from _tensor_items((MODEL, name), tensor)
    for name, value in checkpoint.extra_state.items():
        yield from _flatten((MODEL, name), job_data(value))
    if checkpoint.has_optimizer:
        tree = optimizer_tree(checkpoint, lambda fqn, number: fqn, with_names=False)
        yield from _flatten((OPTIMIZER,), tree)
    for name, value in named_objects(checkpoint, (MODEL, OPTIMIZER)).items():
        yield from _flatten((name,), job_data(value))


def _flatten(path: KeyPath, value: Plain) -> Iterator[OutItem]:
    """As torch's `traverse_state_dict`: dicts always, lists when they hold tensors or dicts.

    It leaves empty dicts out, such as a LambdaLR's; here they are kept, a list of them as one
    object, so that torch reads it.
    """
    if isinstance(value, OutTensor | InlineTensor):
        yield from _tensor_items(path, value)
    elif isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten((*path, str(key)), inner)
    elif isinstance(value, list) and any(_is_container(inner) for inner in value):
        for index, inner in enumerate(value):
            yield from _flatten((*path, index), inner)
    else:
        yield OutItem(_fqn(path), path, value)


def _refuse_equal_keys(items: Sequence[OutItem]) -> None:
    """DCP joins paths with dots, so `{"a.b": 1}` and `{"a": {"b": 2}}` have one key.

    Raises:
        Unsupported: two values would have the same key, one of which would be lost.
    """
    paths: dict[str, KeyPath] = {}
    for item in items:
        if paths.setdefault(item.fqn, item.path) != item.path:
            raise Unsupported(
                f"{item.fqn}: two values of the job have this key in a DCP folder; convert with "
                "--weights-only, or to another format"
            )


def _is_container(value: Plain) -> bool:
    if isinstance(value, list):
        return any(_is_container(inner) for inner in value)
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, OutTensor | InlineTensor)


def _fqn(path: KeyPath) -> str:
    return ".".join(str(key) for key in path)


def _tensor_items(path: KeyPath, tensor: OutTensor | InlineTensor) -> Iterator[OutItem]:
    """A tensor in boxes along dimension 0, none larger than MAX_CHUNK_BYTES if rows allow."""
    fqn, shape = _fqn(path), tensor.shape
    if isinstance(tensor, InlineTensor):
        yield OutItem(fqn, path, tensor, shape)
        return
    for box in row_slabs(shape, tensor.dtype.itemsize, MAX_CHUNK_BYTES):
        yield OutItem(fqn, path, OutTensor(tensor.source, tensor.dtype, box), shape)


def _split(items: list[OutItem]) -> Iterator[list[OutItem]]:
    """Items in files of bounded size; objects before tensors, as DCP orders them."""
    part: list[OutItem] = []
    size = 0
    for item in sorted(items, key=lambda i: i.is_tensor):
        nbytes = item.value.nbytes if isinstance(item.value, OutTensor) else 0
        if part and size + nbytes > MAX_FILE_BYTES:
            yield part
            part, size = [], 0
        part.append(item)
        size += nbytes
    yield part


FORMAT = Format(
    name="dcp",
    title="DCP folder (FSDP2, FSDP1 sharded, DDP)",
    matches=_matches,
    read=read,
    plan=plan,
    aliases=("fsdp",),
    outputs=(METADATA_FILE, f"__*{DATA_SUFFIX}"),
)
