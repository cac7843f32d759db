"""The command `migrate`. Only this file prints, exits and imports click."""

from __future__ import annotations

import click


@click.group(epilog="To convert a checkpoint, see `ckpt --help`.")
@click.version_option(package_name="shardport", prog_name="migrate")
def main() -> None:
    """Moves PyTorch training scripts to distributed training.

    The rewriter is still being built and has no subcommands yet. This version of shardport
    contains the checkpoint converter, `ckpt`.
    """
