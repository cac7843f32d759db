"""Models built on the meta device, for their names and shapes: `--model` and `--hf-config`.

The only place that runs somebody's code, and only when the user names it (`--model`) or when
transformers itself knows the architecture (`--hf-config`; remote code is never run).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt.errors import AmbiguousSource

__all__ = ["ModelNames", "build_model", "names_of", "transformers_model"]


@dataclass(frozen=True, slots=True)
class ModelNames:
    """What a model on the meta device tells.

    Attributes:
        params: shapes by FQN in the order of `named_parameters()`, tied ones once.
        trainable: those that require gradients.
        buffers: persistent buffers.
        state: shapes of the whole state dict, tied names too.
        ties: alias -> owner.
    """

    params: Mapping[str, tuple[int, ...]]
    trainable: frozenset[str]
    buffers: frozenset[str]
    state: Mapping[str, tuple[int, ...]]
    ties: Mapping[str, str]


def build_model(spec: str) -> ModelNames:
    """The names of the model that `package.module:factory` returns, built on the meta device.

    Raises:
        AmbiguousSource: the spec cannot be imported, or the factory fails or returns no module.
    """
    import torch

    module_name, _, factory_name = spec.partition(":")
    if not factory_name:
        raise AmbiguousSource(f"--model {spec}: expected package.module:factory")
    sys.path.insert(0, str(Path.cwd()))
    try:
        factory = getattr(importlib.import_module(module_name), factory_name)
        with torch.device("meta"):
            model = factory()
    except Exception as problem:  # the user's own code may raise anything
        raise AmbiguousSource(f"--model {spec}: {type(problem).__name__}: {problem}") from problem
    finally:
        sys.path.remove(str(Path.cwd()))
    if not isinstance(model, torch.nn.Module):
        raise AmbiguousSource(f"--model {spec}: returned {type(model).__name__}, expected a Module")
    return names_of(model)


def names_of(model: Any) -> ModelNames:
    """Names and shapes of a torch module."""
    state = model.state_dict()
    params = dict(model.named_parameters())
    owners = {id(param): name for name, param in params.items()}
    ties = {
        name: owners[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        if owners[id(param)] != name
    }
    return ModelNames(
        params={name: tuple(param.shape) for name, param in params.items()},
        trainable=frozenset(name for name, param in params.items() if param.requires_grad),
        buffers=frozenset(name for name, _ in model.named_buffers() if name in state),
        state={name: tuple(value.shape) for name, value in state.items()},
        ties=ties,
    )


def transformers_model(folder: Path) -> ModelNames | None:
    """The model that a folder's config.json describes; None where transformers cannot tell.

    A config without `architectures` is taken to be a causal language model's.
    """
    try:
        import torch
        import transformers
    except ImportError:
        return None
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    names = getattr(config, "architectures", None) or []
    model_class = getattr(transformers, names[0], None) if names else None
    with torch.device("meta"):
        if model_class is not None:
            model = model_class(config)
        elif not names and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            auto_class: Any = transformers.AutoModelForCausalLM
            model = auto_class.from_config(config)
        else:
            return None
        model.tie_weights()
    return names_of(model)
