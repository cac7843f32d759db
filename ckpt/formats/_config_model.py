"""The model that the config.json beside some weights describes, where it is the one they are of.

Names come in the order of transformers' own class, which the optimizer's numbers follow. Nothing is
taken from a config whose model has other names or shapes than the weights.

Source: transformers 5 modeling_utils.py (`save_pretrained` writes config.json beside the weights).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from ckpt.meta_model import ModelNames, transformers_model
from ckpt.model import StoredTensor
from ckpt.names import is_buffer
from ckpt.note import Note, NoteKind

__all__ = ["CONFIG_FILE", "model_of_config", "notes_on_versions"]

CONFIG_FILE = "config.json"


def model_of_config(
    folder: Path, tensors: Mapping[str, StoredTensor]
) -> tuple[ModelNames | None, str]:
    """The model's names in order, or None and the reason in words.

    Args:
        tensors: the weights and buffers beside the config, under clean names.
    """
    if not (folder / CONFIG_FILE).is_file():
        return None, f"there is no {CONFIG_FILE} beside the weights"
    try:
        model = transformers_model(folder)
    except Exception as problem:  # a class of transformers, given somebody's config, may raise any
        return None, f"transformers makes no model of {CONFIG_FILE} ({_first_line(problem)})"
    if model is None:
        return None, (
            f"{CONFIG_FILE} would tell, if transformers were installed and knew the architecture"
        )
    other = _difference(model, tensors)
    return (None, f"{CONFIG_FILE} describes another model: {other}") if other else (model, "")


def notes_on_versions(folder: Path) -> tuple[Note, ...]:
    """A note where another version of transformers wrote the config than the one that is asked.

    Another version may have the same parameters in another order.
    """
    content = json.loads((folder / CONFIG_FILE).read_text())
    wrote, asked = content.get("transformers_version"), version("transformers")
    if wrote is None or _series(str(wrote)) == _series(asked):
        return ()
    detail = (
        f"saved with transformers {wrote}, and the order is that of {asked}; --param-order or "
        "--model leaves no doubt"
    )
    return (Note(NoteKind.UNVERIFIED, ("order of the model's parameters",), detail),)


def _series(text: str) -> list[str]:
    return text.split(".")[:2]


def _first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {str(problem).strip().partition(chr(10))[0][:200]}"


def _difference(model: ModelNames, tensors: Mapping[str, StoredTensor]) -> str:
    """What the weights have otherwise than the model; a tied one is there under any of its names.

    Buffers do not matter, since the optimizer has none.
    """
    for name, tensor in tensors.items():
        if name not in model.state and not is_buffer(name, tensor.dtype):
            return f"it has no {name}"
        if model.state.get(name, tensor.shape) != tensor.shape:
            return f"its {name} has shape {model.state[name]}, not {tensor.shape}"
    aliases: dict[str, list[str]] = {name: [name] for name in model.params}
    for alias, owner in model.ties.items():
        aliases[owner].append(alias)
    missing = next((o for o, names in aliases.items() if not tensors.keys() & {*names}), None)
    return f"its {missing} is not there" if missing else ""
