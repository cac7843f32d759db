"""The command line: arguments in, one answer out, exit codes. All work is done elsewhere.

Exit codes: 0 done (or: the same), 1 differences found, 2 a problem with the input or output, 130
interrupted.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ckpt import __version__
from ckpt.errors import CkptError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ckpt.api import Conversion
    from ckpt.model import Checkpoint

__all__ = ["main"]

EXIT_DIFFERENT, EXIT_PROBLEM, EXIT_INTERRUPTED = 1, 2, 130
SHOWN_DIFFERENCES = 20
SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}

SOURCE_OPTIONS = (
    click.option("--tag", help="DeepSpeed save to read, instead of the one in `latest`."),
    click.option("--key", help="Path of the model in a dict with several, such as `ema.model`."),
    click.option(
        "--rename", "rename_rules", multiple=True, metavar="REGEX=REPLACEMENT",
        help="Change names; may be repeated, applied in order.",
    ),
    click.option(
        "--param-order", type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="File with parameter names, one a line, in the order of the optimizer's groups.",
    ),
    click.option(
        "--model", metavar="PACKAGE.MODULE:FACTORY",
        help="Function that builds the model (on the meta device), for the order of its names.",
    ),
    click.option("--weights-only", is_flag=True, help="Leave the optimizer and the job out."),
)  # fmt: skip


def _source_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(SOURCE_OPTIONS):
        command = option(command)
    return command


class _Group(click.Group):
    """Turns what users can act on into one line and exit code 2."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except CkptError as problem:
            _fail(str(problem))
        except KeyboardInterrupt:
            click.echo("Interrupted; the output was not written.", err=True)
            ctx.exit(EXIT_INTERRUPTED)
        except OSError as problem:
            if isinstance(problem, BrokenPipeError):
                raise
            where = f"{problem.filename}: " if problem.filename else ""
            _fail(f"{where}{problem.strerror or problem}")


def _fail(message: str) -> NoReturn:
    click.echo("Error: " + " ".join(message.split()), err=True)
    sys.exit(EXIT_PROBLEM)


def _show(renderable: RenderableType) -> None:
    from rich.console import Console

    console = Console(soft_wrap=not sys.stdout.isatty())
    console.print(renderable)


def _print_json(data: object) -> None:
    click.echo(json.dumps(data, indent=2, default=str))


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ckpt")
def main() -> None:
    """Convert, inspect and compare training checkpoints of PyTorch and DeepSpeed."""


@main.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.option("--to", required=True, metavar="FORMAT", help="Target format; see `ckpt formats`.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="File or folder to write.")
@_source_options
@click.option(
    "--dtype", type=click.Choice(["fp32", "bf16", "fp16", "keep"]),
    help="Dtype of the weights; `keep` is the one the model computed in.  [default: fp32 master "
    "weights where there are any, else as saved]",
)  # fmt: skip
@click.option(
    "--max-shard-size", default="5GB", show_default=True, help="Largest safetensors file."
)
@click.option(
    "--hf-config", type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder whose config and tokenizer files go along, and whose model the weights must fit.",
)  # fmt: skip
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    help="Ranks of the job that will load DeepSpeed shards.  [default: the source's]",
)
@click.option(
    "--ds-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="DeepSpeed's JSON of that job, whose options decide the layout.",
)
@click.option(
    "--like", type=click.Path(exists=True, path_type=Path),
    help="DeepSpeed checkpoint of that job, for order, groups and layout.",
)  # fmt: skip
@click.option(
    "--stage", type=click.IntRange(1, 3),
    help="ZeRO stage of that job, for a universal checkpoint.  [default: the source's]",
)  # fmt: skip
@click.option(
    "--ds-version", metavar="VERSION",
    help="DeepSpeed's release there, for a universal checkpoint.  [default: 0.18 or newer]",
)  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace an output that is there.")
@click.option("--dry-run", is_flag=True, help="Say what would be done and write nothing.")
@click.option("--allow-loss", is_flag=True, help="Go on although something cannot be kept.")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print errors only.")
def convert(
    source: Path,
    to: str,
    output: Path | None,
    max_shard_size: str,
    param_order: Path | None,
    dry_run: bool,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Convert the checkpoint SOURCE into another format."""
    from ckpt.api import prepare

    conversion = prepare(
        source,
        to,
        output,
        max_shard_bytes=_size(max_shard_size),
        param_order=_read_order(param_order),
        **options,
    )
    if not quiet and not as_json:
        _tell_plan(conversion)
    started = time.monotonic()
    if not dry_run:
        with _progress(conversion.nbytes, hidden=quiet or as_json) as progress:
            conversion.run(progress)
    _tell_result(conversion, time.monotonic() - started, dry_run, as_json, quiet)


def _tell_plan(conversion: Conversion) -> None:
    from ckpt.tables import note_lines, size

    origin = conversion.checkpoint.origin
    click.echo(f"{origin.path} ({origin.format}) -> {conversion.output} ({conversion.target.name})")
    click.echo(f"  kept: {'; '.join(conversion.kept)}")
    for line in note_lines(conversion.notes):
        click.echo(f"  {line}")
    click.echo(f"  {len(conversion.plan.files)} file(s), {size(conversion.nbytes)}")


def _tell_result(
    conversion: Conversion, seconds: float, dry_run: bool, as_json: bool, quiet: bool
) -> None:
    if as_json:
        notes = [
            {"kind": n.kind.value, "subjects": list(n.subjects), "detail": n.detail}
            for n in conversion.notes
        ]
        _print_json(
            {
                "source": conversion.checkpoint.origin.path,
                "source_format": conversion.checkpoint.origin.format,
                "output": str(conversion.output),
                "format": conversion.target.name,
                "files": [file.path for file in conversion.plan.files],
                "bytes": conversion.nbytes,
                "seconds": round(seconds, 3),
                "written": not dry_run,
                "kept": conversion.kept,
                "notes": notes,
            }
        )
    elif not quiet:
        done = "would write" if dry_run else "wrote"
        click.echo(f"{done} {conversion.output}" + ("" if dry_run else f" in {seconds:.2f} s"))


@contextmanager
def _progress(total: int, *, hidden: bool) -> Iterator[Callable[[int], None] | None]:
    """A bar in bytes on a terminal, nothing elsewhere; SIGTERM ends like Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        if hidden or not sys.stderr.isatty():
            yield None
            return
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda nbytes: bar.advance(task, nbytes)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _size(text: str) -> int:
    digits = text.rstrip("BKMGTbkmgt ")
    unit = text[len(digits) :].strip().upper()
    unit = unit if unit in SIZE_UNITS else f"{unit}B"
    try:
        nbytes = int(float(digits) * SIZE_UNITS[unit])
    except (ValueError, KeyError):
        nbytes = 0
    if nbytes <= 0:
        raise click.BadParameter(
            f"{text!r} is no size such as 5GB or 500MB", param_hint="--max-shard-size"
        )
    return nbytes


def _read_order(path: Path | None) -> list[str] | None:
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        _fail(f"--param-order {path}: not a text file; expected one parameter name a line")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _open(
    path: Path, param_order: Path | None, *, need_optimizer: bool, **options: Any
) -> Checkpoint:
    from ckpt.api import open_checkpoint

    order = _read_order(param_order)
    return open_checkpoint(path, param_order=order, need_optimizer=need_optimizer, **options)


def _open_with_optimizer_if_clear(path: Path, **options: Any) -> Checkpoint:
    """Without the optimizer, and with a note, where its parameters cannot be told apart."""
    try:
        return _open(path, need_optimizer=True, **options)
    except CkptError:
        return _open(path, need_optimizer=False, **options)


@main.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--tensors", metavar="GLOB", help="List the tensors whose name matches.")
@_source_options
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def inspect(path: Path, tensors: str | None, as_json: bool, **options: Any) -> None:
    """Say what the checkpoint PATH holds; reads no tensor data."""
    from dataclasses import asdict

    from ckpt.inspection import inspect as describe
    from ckpt.inspection import list_tensors

    checkpoint = _open_with_optimizer_if_clear(path, **options)
    if tensors is not None:
        found = list_tensors(checkpoint, tensors)
        if as_json:
            _print_json([asdict(item) for item in found])
        else:
            from ckpt.tables import tensor_table

            _show(tensor_table(found))
        return
    answer = describe(checkpoint)
    if as_json:
        _print_json(asdict(answer))
    else:
        from ckpt.tables import inspection_view

        _show(inspection_view(answer))


@main.command()
@click.argument("first", type=click.Path(path_type=Path))
@click.argument("second", type=click.Path(path_type=Path))
@click.option("--rtol", type=click.FloatRange(min=0), default=0.0, help="Relative tolerance.")
@click.option("--atol", type=click.FloatRange(min=0), default=0.0, help="Absolute tolerance.")
@_source_options
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def diff(
    first: Path,
    second: Path,
    rtol: float,
    atol: float,
    as_json: bool,
    weights_only: bool,
    **options: Any,
) -> None:
    """Compare the training state of two checkpoints of any formats.

    Exit code 0: the same; 1: different, with the first differences; 2: a problem.
    """
    from ckpt.comparison import diff as differences

    sides = [
        _open(path, need_optimizer=not weights_only, weights_only=weights_only, **options)
        for path in (first, second)
    ]
    found = list(differences(*sides, rtol=rtol, atol=atol, weights_only=weights_only))
    if as_json:
        items = [{"kind": i.kind, "name": i.name, "detail": i.detail} for i in found]
        _print_json({"same": not found, "differences": items})
    elif found:
        for item in found[:SHOWN_DIFFERENCES]:
            click.echo(str(item))
        if len(found) > SHOWN_DIFFERENCES:
            click.echo(f"and {len(found) - SHOWN_DIFFERENCES} more differences")
    else:
        click.echo("the same training state" if not weights_only else "the same weights")
    sys.exit(EXIT_DIFFERENT if found else 0)


@main.command("formats")
@click.option("--json", "as_json", is_flag=True, help="Answer in JSON.")
def list_formats(as_json: bool) -> None:
    """List the formats, and what each can hold."""
    from ckpt.registry import formats

    if as_json:
        _print_json(
            [
                {
                    "name": item.name,
                    "aliases": list(item.aliases),
                    "title": item.title,
                    "read": item.read is not None,
                    "write": item.plan is not None,
                    "holds": sorted(part.value for part in item.keeps),
                }
                for item in formats()
            ]
        )
        return
    from ckpt.tables import format_table

    _show(format_table(formats()))
