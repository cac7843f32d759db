"""What the rules about models share: the text of a wrap."""

from __future__ import annotations

from migrate.edit import Need
from migrate.models import repeated_blocks
from migrate.rule import Context
from migrate.source import Source
from migrate.values import Instance, Values

CONVERT = "torch.nn.SyncBatchNorm.convert_sync_batchnorm"


def wrap_options(context: Context, values: Values) -> list[str]:
    """The arguments of the target's wrapping definition beside the model."""
    if context.target.has_wrapper:
        return ["find_unused_parameters=True"] if context.options.find_unused else []
    chosen = list(context.options.wrap_classes)
    inner = frozenset(value for value in values if isinstance(value, Instance))
    blocks = chosen or repeated_blocks(context.facts, inner)
    names = ", ".join(f'"{name}"' for name in blocks)
    return [f"blocks=[{names}]"] if blocks else []


def wrap_text(context: Context, source: Source, model: str, values: Values) -> tuple[str, Need]:
    """A call that makes `model` parallel, and what it needs."""
    name, need = context.helper(source, context.target.wrap)
    return f"{name}({', '.join([model, *wrap_options(context, values)])})", need
