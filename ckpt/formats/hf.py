"""Hugging Face safetensors: `model.safetensors`, or shards with `model.safetensors.index.json`.

Holds weights and buffers. Tied names are written once, and remembered in the header's metadata as
`{alias: owner}`, the convention of `safetensors.torch.save_model`, so that a later conversion gives
them back. `--hf-config` takes config, generation config and tokenizer files along and compares
names and shapes with the model that the config describes.

Source: transformers 5 modeling_utils.py, huggingface_hub serialization (file names, index);
safetensors 0.8 torch.py `save_model`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckpt.errors import CorruptCheckpoint, MissingPart
from ckpt.format import Format, Match, Part, ReadOptions, WriteOptions
from ckpt.formats._safetensors_folder import INDEX_FILE, SINGLE_FILE, SUFFIX, read_weights
from ckpt.formats._trainer_files import notes_beside
from ckpt.meta_model import ModelNames, build_model, transformers_model
from ckpt.model import Checkpoint, Origin, Param
from ckpt.names import clean_names
from ckpt.note import Note, NoteKind, summarise
from ckpt.outgoing import state_dict, weight_notes
from ckpt.plan import CommitFile, CopiedFile, FileSpans, OutTensor, WritePlan
from ckpt.storage.safetensors_file import SafetensorsFile
from ckpt.training_dict import NameOrder, as_in_model, buffers_among, find_ties

ADAPTER = "adapter_"  # of PEFT, which is another format
METADATA = {"format": "pt"}
TAKEN_ALONG = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
)


def _matches(path: Path) -> Match:
    if path.is_file():
        return Match.YES if path.suffix == SUFFIX or path.name.endswith(INDEX_FILE) else Match.NO
    files = (file for file in path.glob(f"*{SUFFIX}") if not file.name.startswith(ADAPTER))
    return Match.MAYBE if any(files) or (path / INDEX_FILE).exists() else Match.NO


# --- reading ------------------------------------------------------------------------------------


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The weights in a safetensors file or folder; metadata only."""
    tensors, aliases = read_weights(path)
    cleaned = clean_names([*tensors, *aliases])
    names = {cleaned[name]: tensor for name, tensor in tensors.items()}
    names |= {cleaned[alias]: tensors[owner] for alias, owner in aliases.items()}
    model = build_model(options.model) if options.model else None
    names, notes = as_in_model(names, NameOrder(model, "--model", is_kept=False))
    ties = find_ties(names)
    ties |= {cleaned[a]: cleaned[o] for a, o in aliases.items() if not tensors[o].numel}
    owners = {name: tensor for name, tensor in names.items() if name not in ties}
    buffers = buffers_among(owners, model)
    return Checkpoint(
        params={name: Param(t) for name, t in owners.items() if name not in buffers},
        buffers={name: t for name, t in owners.items() if name in buffers},
        order=tuple(names),
        ties=ties,
        groups=(),
        objects={},
        origin=Origin("hf", str(path), stripped=cleaned.stripped, keeps_order=model is not None),
        notes=(*notes, *notes_beside(path.parent if path.is_file() else path)),
    )


# --- writing ------------------------------------------------------------------------------------


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """safetensors shards, their index, and the files that go along.

    Raises:
        MissingPart: no weights, or a config folder without config.json.
        CorruptCheckpoint: the config describes a model with other names or shapes.
    """
    if not checkpoint.order:
        raise MissingPart(f"{checkpoint.origin.path}: holds no weights to write")
    copied, notes = _config(checkpoint, options.hf_config)
    weights = {
        name: tensor
        for name, tensor in state_dict(checkpoint, options).items()
        if name not in checkpoint.ties
    }
    notes += _dtype_notes(checkpoint, weights, options.hf_config)
    parts = list(_shards(weights, options.max_shard_bytes))
    names = _shard_names(len(parts))
    files = tuple(
        SafetensorsFile(name, part, METADATA | _ties_of(part, checkpoint.ties))
        for name, part in zip(names, parts, strict=True)
    )
    if checkpoint.extra_state:
        detail = "what modules keep beside tensors cannot be held"
        notes.append(Note(NoteKind.DROPPED, tuple(checkpoint.extra_state), detail))
    if checkpoint.ties:
        pairs = tuple(f"{alias} = {owner}" for alias, owner in checkpoint.ties.items())
        notes.append(Note(NoteKind.TIED, pairs, "written once"))
    return WritePlan(
        files=files,
        notes=(*weight_notes(checkpoint, options), *notes),
        commit=(_index(files),) if len(files) > 1 else (),
        copied=copied,
    )


def _ties_of(part: Mapping[str, OutTensor], ties: Mapping[str, str]) -> dict[str, str]:
    return {alias: owner for alias, owner in ties.items() if owner in part and alias != "format"}


def _shards(weights: Mapping[str, OutTensor], limit: int) -> Iterator[dict[str, OutTensor]]:
    """Weights in files of at most `limit` bytes, a larger tensor alone; order kept."""
    part: dict[str, OutTensor] = {}
    size = 0
    for name, tensor in weights.items():
        if part and size + tensor.nbytes > limit:
            yield part
            part, size = {}, 0
        part[name] = tensor
        size += tensor.nbytes
    yield part


def _shard_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{number:05d}-of-{count:05d}{SUFFIX}" for number in range(1, count + 1)]


def _index(files: Sequence[SafetensorsFile]) -> CommitFile:
    def render(_spans: FileSpans) -> bytes:
        weight_map = {name: file.path for file in files for name in file.tensors}
        total = sum(file.nbytes for file in files)
        content = {"metadata": {"total_size": total}, "weight_map": weight_map}
        return (json.dumps(content, indent=2) + "\n").encode()

    return CommitFile(INDEX_FILE, render)


def _config(
    checkpoint: Checkpoint, folder: Path | None
) -> tuple[tuple[CopiedFile, ...], list[Note]]:
    """The files to take along, after comparing the weights with the config's model."""
    if folder is None:
        return (), []
    if not (folder / "config.json").is_file():
        raise MissingPart(f"--hf-config {folder}: no config.json there")
    found = {file for pattern in TAKEN_ALONG for file in folder.glob(pattern) if file.is_file()}
    files = tuple(CopiedFile(file.name, str(file)) for file in sorted(found))
    model = transformers_model(folder)
    if model is None:
        detail = "transformers is not installed or does not know the architecture"
        return files, [Note(NoteKind.UNVERIFIED, ("names and shapes against config.json",), detail)]
    _compare(checkpoint, model, folder)
    return files, []


def _dtype_notes(
    checkpoint: Checkpoint, weights: Mapping[str, OutTensor], folder: Path | None
) -> list[Note]:
    """A note when the config names another dtype than the weights have; on loading it decides."""
    if folder is None:
        return []
    content = json.loads((folder / "config.json").read_text())
    stated = content.get("dtype") or content.get("torch_dtype")
    written = {
        tensor.dtype.torch_name
        for name, tensor in weights.items()
        if name in checkpoint.params and tensor.dtype.is_floating_point
    }
    if stated is None or written <= {stated}:
        return []
    detail = f"config.json says {stated}, and transformers loads the weights as that"
    return [Note(NoteKind.UNVERIFIED, tuple(sorted(written)), detail)]


def _compare(checkpoint: Checkpoint, model: ModelNames, folder: Path) -> None:
    shapes = {name: param.shape for name, param in checkpoint.params.items()}
    shapes |= {name: buffer.shape for name, buffer in checkpoint.buffers.items()}
    ours = {name: shapes[checkpoint.ties.get(name, name)] for name in checkpoint.order}
    tied = model.ties.keys() | set(model.ties.values())
    missing = [n for n in model.state if n not in ours and n not in tied]
    extra = [n for n in ours if n not in model.state]
    other = [n for n, shape in ours.items() if model.state.get(n, shape) != shape]
    for names, what in (
        (missing, "the checkpoint lacks"),
        (extra, "the config's model does not have"),
        (other, "the shape differs for"),
    ):
        if names:
            raise CorruptCheckpoint(
                f"{checkpoint.origin.path}: does not fit {folder / 'config.json'}: {what} "
                f"{summarise(names)}. Give the right config, or bring the names in line with "
                "--rename."
            )


FORMAT = Format(
    name="hf",
    title="Hugging Face safetensors",
    matches=_matches,
    read=read,
    plan=plan,
    keeps=frozenset({Part.WEIGHTS, Part.BUFFERS, Part.TIES}),
    outputs=(SINGLE_FILE, "model-?????-of-?????.safetensors", INDEX_FILE, *TAKEN_ALONG),
)
