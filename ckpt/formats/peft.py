"""PEFT adapters: `adapter_model.safetensors` with `adapter_config.json`, LoRA's weights alone.

Read: a folder with `adapter_model.safetensors` or `adapter_model.bin`, as weights. Written out of a
checkpoint of a PEFT model (ZeRO-3 shards too): what has `lora_` in its name and `modules_to_save`,
under PEFT's names, without the adapter's own name (`lora_A.default.weight` becomes `lora_A.weight`)
and with `base_model.model.` in front. `--hf-config` names the folder whose `adapter_config.json`
and tokenizer go along. The base model's weights are not part of an adapter; biases that were
trained (`bias` other than "none") are not written.

Source: peft src/peft/utils/save_and_load.py (`get_peft_model_state_dict`), src/peft/utils/other.py
(`ModulesToSaveWrapper.adapter_state_dict`), main branch of 2026.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt.errors import AmbiguousSource, CorruptCheckpoint, MissingPart
from ckpt.format import Format, Match, Part, ReadOptions, WriteOptions
from ckpt.formats._trainer_files import notes_beside
from ckpt.model import Checkpoint, Origin, Param, Plain, StoredTensor
from ckpt.names import clean_names
from ckpt.note import Note, NoteKind
from ckpt.outgoing import state_dict, weight_notes
from ckpt.plan import CommitFile, CopiedFile, WritePlan
from ckpt.storage import safetensors_file, torch_file
from ckpt.storage.safetensors_file import SafetensorsFile

NAME = "peft"
WEIGHTS, OLD_WEIGHTS, CONFIG = (
    "adapter_model.safetensors",
    "adapter_model.bin",
    "adapter_config.json",
)
OBJECT = "adapter_config"
PREFIX = "base_model.model."
LORA = re.compile(r"^(?P<module>.+\.lora_[A-Za-z_]+)(?:\.(?P<adapter>[^.]+))??(?P<end>\.weight)?$")
SAVED = re.compile(r"^(?P<module>.+)\.modules_to_save\.(?P<adapter>[^.]+)\.(?P<end>.+)$")
MAGNITUDE = "lora_magnitude_vector"
TAKEN_ALONG = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*")


def _matches(path: Path) -> Match:
    if path.is_file():
        return Match.NO
    found = any((path / name).is_file() for name in (WEIGHTS, OLD_WEIGHTS))
    return Match.MAYBE if found else Match.NO


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The adapter's weights, and its configuration as `adapter_config`; metadata only."""
    tensors = _weights(path)
    cleaned = clean_names(tensors)
    config = path / CONFIG
    return Checkpoint(
        params={cleaned[name]: Param(tensor) for name, tensor in tensors.items()},
        buffers={},
        order=tuple(cleaned[name] for name in tensors),
        ties={},
        groups=(),
        objects={OBJECT: _json(config)} if config.is_file() else {},
        origin=Origin(NAME, str(path), None, None, cleaned.stripped),
        notes=notes_beside(path),
    )


def _weights(path: Path) -> Mapping[str, StoredTensor]:
    if (path / WEIGHTS).is_file():
        return safetensors_file.read(path / WEIGHTS)[0]
    content = torch_file.read(path / OLD_WEIGHTS)
    if not isinstance(content, Mapping) or not all(
        isinstance(value, StoredTensor) for value in content.values()
    ):
        raise CorruptCheckpoint(f"{path / OLD_WEIGHTS}: not a dict of an adapter's tensors")
    return content


def _json(file: Path) -> Plain:
    try:
        return json.loads(file.read_text())
    except ValueError as problem:
        raise CorruptCheckpoint(f"{file}: not JSON") from problem


def plan(checkpoint: Checkpoint, options: WriteOptions) -> WritePlan:
    """`adapter_model.safetensors` and the files that go along.

    Raises:
        MissingPart: no LoRA weights, or a config folder without adapter_config.json.
        AmbiguousSource: weights of several adapters.
    """
    names = _adapter_names(checkpoint)
    weights = state_dict(checkpoint, options)
    file = SafetensorsFile(
        WEIGHTS, {new: weights[old] for old, new in names.items()}, {"format": "pt"}
    )
    copied, commit, notes = _config(checkpoint, options.hf_config)
    return WritePlan(
        files=(file,),
        notes=(*_kept(weight_notes(checkpoint, options), names), *_left(checkpoint, names), *notes),
        commit=commit,
        copied=copied,
    )


def _adapter_names(checkpoint: Checkpoint) -> dict[str, str]:
    """Names as PEFT writes them, by names in the checkpoint."""
    if checkpoint.origin.format == NAME:
        return {name: name for name in checkpoint.params}
    found: dict[str, re.Match[str]] = {}
    for name in checkpoint.params:
        match = LORA.match(name) or SAVED.match(name)
        if match:
            found[name] = match
    if not any("lora_" in name for name in found):
        raise MissingPart(
            f"{checkpoint.origin.path}: holds no LoRA weights (names with `lora_`), so there is no "
            "adapter to write"
        )
    adapters = sorted({match["adapter"] for match in found.values() if match["adapter"]})
    if len(adapters) > 1:
        raise AmbiguousSource(
            f"{checkpoint.origin.path}: holds several adapters ({', '.join(adapters)}), and a PEFT "
            "folder is one. Rename those that stay behind with --rename, such as "
            f"'lora_(.*)\\.{adapters[1]}\\.=other_\\1.'"
        )
    return {name: _peft_name(match) for name, match in found.items()}


def _peft_name(match: re.Match[str]) -> str:
    module, end = match["module"], match["end"] or ""
    if match.re is SAVED:
        name = f"{module}.{end}"
    else:
        name = module if module.endswith(MAGNITUDE) else f"{module}{end}"
    return name if name.startswith(PREFIX) else PREFIX + name


def _kept(notes: Iterable[Note], names: Mapping[str, str]) -> list[Note]:
    """The notes about weights that are written."""
    kept = []
    for note in notes:
        subjects = tuple(name for name in note.subjects if name in names)
        if subjects:
            kept.append(Note(note.kind, subjects, note.detail, note.needs_consent))
    return kept


def _left(checkpoint: Checkpoint, names: Mapping[str, str]) -> list[Note]:
    """What stays behind: the base model as a matter of course, what was trained with consent."""
    trained = {fqn for group in checkpoint.groups for fqn in group.fqns}
    rest = [name for name in checkpoint.order if name not in names]
    base = tuple(name for name in rest if name not in trained)
    other = tuple(name for name in rest if name in trained)
    notes = []
    if base:
        notes.append(Note(NoteKind.DROPPED, base, "weights of the base model, not of the adapter"))
    if other:
        detail = "trained, and not part of a LoRA adapter"
        notes.append(Note(NoteKind.DROPPED, other, detail, needs_consent=True))
    return notes


def _config(
    checkpoint: Checkpoint, folder: Path | None
) -> tuple[tuple[CopiedFile, ...], tuple[CommitFile, ...], list[Note]]:
    """adapter_config.json and what goes along with it, from the folder or from the source."""
    if folder is not None:
        if not (folder / CONFIG).is_file():
            raise MissingPart(f"--hf-config {folder}: no {CONFIG} there")
        patterns = (CONFIG, *TAKEN_ALONG)
        found = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
        return tuple(CopiedFile(file.name, str(file)) for file in sorted(found)), (), []
    if OBJECT in checkpoint.objects:
        text = json.dumps(checkpoint.objects[OBJECT], indent=2) + "\n"
        return (), (CommitFile(CONFIG, lambda _spans: text.encode()),), []
    detail = "not written, and PEFT needs it to load the adapter; --hf-config FOLDER takes it along"
    return (), (), [Note(NoteKind.UNVERIFIED, (CONFIG,), detail)]


FORMAT = Format(
    name=NAME,
    title="PEFT LoRA adapter",
    matches=_matches,
    read=read,
    plan=plan,
    keeps=frozenset({Part.WEIGHTS}),
    outputs=(WEIGHTS, CONFIG, *TAKEN_ALONG),
)
