"""Files of a job that trainers put beside a checkpoint: read where they are plain data, else named.

Source: transformers 5 trainer.py (`checkpoint-N` folders); accelerate 1.15 checkpointing.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from ckpt.errors import CkptError
from ckpt.model import Origin, Plain
from ckpt.note import Note, NoteKind
from ckpt.plan import CopiedFile
from ckpt.storage import torch_file

__all__ = [
    "carried",
    "is_of_accelerate",
    "job_beside",
    "left_out",
    "notes_beside",
    "rank_files",
    "trainer_files",
]

OPTIMIZER = "optimizer.*"
STATE = "trainer_state.json"
JOB = (
    "scheduler*.*",
    "scaler.*",
    STATE,
    "rng_state*",
    "random_states_*",
    "sampler*.bin",
    "dl_state_dict*.bin",
    "custom_checkpoint_*",
)

SETTINGS = (
    "config.json",
    "generation_config.json",
    "training_args.bin",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
)
RANDOM_STATES = "random_states_"  # accelerate's; Trainer's are rng_state
RANK = re.compile(rf"^(?:rng_state|{RANDOM_STATES[:-1]})_(\d+)\.(?:pth|pkl)$")


def notes_beside(folder: Path) -> tuple[Note, ...]:
    """A note that names such files; a conversion of the whole job without them needs consent."""
    return left_out([file.name for file in _files(folder, (OPTIMIZER, *JOB))])


def job_beside(folder: Path, taken: Collection[str]) -> tuple[dict[str, Plain], tuple[Note, ...]]:
    """What such files hold, each under its file's name without suffix, and a note about the rest.

    Files with objects of a class, such as a sampler, are not plain data and stay behind.

    Args:
        taken: names that the job has already.
    """
    objects: dict[str, Plain] = {}
    unread = []
    for file in _files(folder, JOB):
        try:
            content = _content(file)
        except (CkptError, ValueError):
            unread.append(file.name)
            continue
        name = file.stem if file.stem not in (*taken, *objects) else file.name
        objects[name] = content
    return objects, left_out(unread)


def _files(folder: Path, patterns: Collection[str]) -> list[Path]:
    found = [file for pattern in patterns for file in sorted(folder.glob(pattern))]
    return [file for file in dict.fromkeys(found) if file.is_file()]


def _content(file: Path) -> Plain:
    return json.loads(file.read_text()) if file.suffix == ".json" else torch_file.read(file)


def rank_files(folder: Path) -> int:
    """How many ranks left their random states there, which every one of them does; 0 if none."""
    found = (RANK.match(file.name) for file in folder.iterdir())
    return max((int(match[1]) + 1 for match in found if match), default=0)


def trainer_files(folder: Path) -> tuple[str, ...]:
    """What a trainer wants again in a folder from which it goes on; nothing in other folders."""
    job = _files(folder, JOB)
    is_trainers = any(file.name == STATE or RANK.match(file.name) for file in job)
    return tuple(str(f.absolute()) for f in (*job, *_files(folder, SETTINGS)) if is_trainers)


def carried(origin: Origin, world_size: int) -> tuple[tuple[CopiedFile, ...], list[Note]]:
    """Those files, unchanged, for a job of so many ranks; random states of others stay behind."""
    names = {Path(path).name: path for path in origin.trainer_files}
    of_ranks = tuple(name for name in names if RANK.match(name))
    if len(of_ranks) == world_size:
        of_ranks = ()
    files = tuple(CopiedFile(name, path) for name, path in names.items() if name not in of_ranks)
    detail = f"not taken along as files, for the job has {world_size} ranks"
    note = Note(NoteKind.DROPPED, of_ranks, detail, of_job=True)
    return files, [note] if of_ranks else []


def is_of_accelerate(origin: Origin) -> bool:
    """True for a folder of accelerate's `save_state`."""
    return any(Path(path).name.startswith(RANDOM_STATES) for path in origin.trainer_files)


def left_out(names: Sequence[str]) -> tuple[Note, ...]:
    """A note that names files which do not go along; none without files."""
    detail = "the trainer's files beside the weights, which are not read"
    note = Note(NoteKind.DROPPED, tuple(names), detail, needs_consent=True, of_job=True)
    return (note,) if names else ()
