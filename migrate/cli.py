"""The command `migrate`. Only this file prints, exits and imports click."""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from migrate.api import Result
    from migrate.rule import Rule
    from migrate.verify.api import Question

SYNTHETIC_SAMPLES = 256
BATCH, BATCH_NORM, EVALUATION = ("global", "per-rank"), ("sync", "keep"), ("whole", "sharded")

# libcst and the rules are imported when a command runs, so that `--help` is quick.


@click.group(epilog="To convert a checkpoint, see `ckpt --help`.")
@click.version_option(package_name="shardport", prog_name="migrate")
def main() -> None:
    """Moves PyTorch training scripts to distributed training."""


@main.command("rewrite")
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--to", required=True, metavar="TARGET", help="ddp or fsdp (FSDP2, fully_shard).")
@click.option("--entry", type=click.Path(path_type=Path), help="The file that is started.")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write here, not in place.")
@click.option("--diff", "show_diff", is_flag=True, help="Print a unified diff, write nothing.")
@click.option("--check", is_flag=True, help="Write nothing; exit 1 if edits would be made.")
@click.option(
    "--batch",
    type=click.Choice(BATCH),
    default="global",
    show_default=True,
    help="What the script's batch size means.",
)
@click.option(
    "--bn",
    type=click.Choice(BATCH_NORM),
    default="sync",
    show_default=True,
    help="SyncBatchNorm, or per-process statistics as under DataParallel.",
)
@click.option(
    "--eval",
    "evaluation",
    type=click.Choice(EVALUATION),
    default="whole",
    show_default=True,
    help="Whether every process evaluates everything, or its part.",
)
@click.option(
    "--ckpt-keys",
    type=click.Choice(["keep", "clean"]),
    default="keep",
    show_default=True,
    help="Names in checkpoint files: as before, or without `module.`.",
)
@click.option(
    "--save",
    type=click.Choice(["full", "sharded"]),
    default="full",
    show_default=True,
    help="Checkpoints as one file as before, or as DCP folders.",
)
@click.option("--wrap-class", multiple=True, metavar="NAME", help="A class of blocks to shard.")
@click.option("--find-unused", is_flag=True, help="Pass find_unused_parameters=True.")
@click.option("--safe-only", is_flag=True, help="Make only edits that are provably right.")
@click.option("--todo", is_flag=True, help="Leave a comment where a human must look.")
@click.option("--select", metavar="CODES", default="", help="Only these rules, e.g. MG2,MG301.")
@click.option("--ignore", metavar="CODES", default="", help="Not these rules.")
@click.option(
    "--output-format", type=click.Choice(["text", "json", "github", "sarif"]), default="text"
)
@click.option("--quiet", is_flag=True, help="Print only what a human must look at.")
def rewrite_command(
    paths: tuple[Path, ...], to: str, entry: Path | None, output: Path | None, show_diff: bool,
    check: bool, output_format: str, quiet: bool, **choices: Any,
) -> None:  # fmt: skip
    """Rewrite DataParallel training code in PATHS, in place.

    PATHS are scripts or folders; the modules that a single script imports are followed. `-` reads
    one script from stdin and writes the result to stdout. Exit codes: 0 nothing left for a human, 1
    places that a human must look at (with --check: edits would be made), 2 bad input.
    """
    from migrate.errors import MigrateError

    try:
        result, is_stdin = _result(paths, to, entry, choices)
        if not (show_diff or check):
            _emit(result, output, is_stdin)
    except MigrateError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    _report(result, show_diff, output_format, quiet, to_stderr=is_stdin or show_diff)
    edits = any(file.changed for file in result.files)
    sys.exit(1 if result.manual or (check and edits) else 0)


def _result(
    paths: tuple[Path, ...], to: str, entry: Path | None, choices: dict[str, Any]
) -> tuple[Result, bool]:
    from migrate.api import Choice, rewrite
    from migrate.rule import Options

    def codes(text: str) -> tuple[str, ...]:
        return tuple(code.strip().upper() for code in text.split(",") if code.strip())

    options = Options(
        batch=choices["batch"],
        evaluation=choices["evaluation"],
        batch_norm=choices["bn"],
        ckpt_keys=choices["ckpt_keys"],
        save=choices["save"],
        wrap_classes=choices["wrap_class"],
        find_unused=choices["find_unused"],
    )
    choice = Choice(
        codes(choices["select"]), codes(choices["ignore"]), choices["safe_only"], choices["todo"]
    )
    is_stdin = paths == (Path("-"),)
    contents = None
    if is_stdin:
        paths = (Path("stdin.py"),)
        contents = {paths[0]: sys.stdin.buffer.read()}
    result = rewrite(paths, to, entry=entry, options=options, choice=choice, contents=contents)
    return result, is_stdin


def _emit(result: Result, output: Path | None, is_stdin: bool) -> None:
    """Writes the new files, or the one from stdin to stdout."""
    from migrate.api import write

    if is_stdin and output is None:
        sys.stdout.buffer.write(result.files[0].after)
    else:
        write(result, output)


def _report(
    result: Result, show_diff: bool, output_format: str, quiet: bool, to_stderr: bool
) -> None:
    from migrate import report

    if show_diff:
        sys.stdout.buffer.write(report.diff(result.files))
    click.echo(report.render(result, output_format, quiet), nl=False, err=to_stderr)


@main.command("verify")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
@click.option("--to", metavar="TARGET", help="Rewrite a copy of SCRIPT for ddp or fsdp.")
@click.option("--against", type=click.Path(path_type=Path), help="Compare with this script.")
@click.option(
    "--nproc", type=click.IntRange(1), default=2, show_default=True, help="Processes after."
)
@click.option(
    "--steps",
    type=click.IntRange(0),
    default=20,
    show_default=True,
    help="Optimizer steps; 0 lets both run to their end.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="On the CPU a stand-in takes CUDA's place.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Where both start from.")
@click.option(
    "--synthetic", is_flag=True, help="Small data sets instead of torchvision's and Hugging Face's."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0),
    default=1e-4,
    show_default=True,
    help="Relative difference that counts as none.",
)
@click.option(
    "--timeout", type=click.FloatRange(1), default=600, show_default=True, help="Seconds of a run."
)
@click.option("--batch", type=click.Choice(BATCH), default="global", help="As for rewrite.")
@click.option("--bn", type=click.Choice(BATCH_NORM), default="sync", help="As for rewrite.")
@click.option(
    "--eval", "evaluation", type=click.Choice(EVALUATION), default="whole", help="As for rewrite."
)
@click.option(
    "--allow-write",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A folder that the script may write to, beside its own copy.",
)
@click.option("--keep", type=click.Path(path_type=Path), help="Leave copies and records here.")
@click.option("--plot", type=click.Path(path_type=Path), help="Draw both loss curves.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
def verify_command(script: Path, args: tuple[str, ...], **choices: Any) -> None:
    """Train SCRIPT before and after, and compare every step.

    The original runs in one process, the candidate under torchrun, both on copies of the folder;
    GPUs are not needed. What follows -- are the script's own arguments. Exit codes: 0 the same
    within the tolerance, 1 different, 2 one of them could not run.
    """
    from migrate.errors import MigrateError
    from migrate.verify.api import CannotRun

    try:
        same = _verify(script, args, choices)
    except CannotRun as error:
        click.echo(error.traceback, err=True)
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    except MigrateError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    sys.exit(0 if same else 1)


def _verify(script: Path, args: tuple[str, ...], choices: dict[str, Any]) -> bool:
    """Prints the verdict."""
    from rich.console import Console

    from migrate.verify import plot, report
    from migrate.verify.api import verify

    if choices["plot"] is not None:
        plot.refuse_without_matplotlib(choices["plot"])
    stderr = Console(stderr=True)
    with stderr.status("") as status:
        verdict = verify(_question(script, args, choices), lambda text: status.update(text + " …"))
    if choices["plot"] is not None:
        plot.draw(verdict, choices["plot"])
    if choices["as_json"]:
        click.echo(report.as_json(verdict), nl=False)
    else:
        Console().print(report.table(verdict))
        click.echo("\n".join(["", *report.lines(verdict)]))
    return verdict.is_same


def _question(script: Path, args: tuple[str, ...], choices: dict[str, Any]) -> Question:
    from migrate.errors import MigrateError
    from migrate.rule import Options
    from migrate.verify.api import Question

    if (choices["to"] is None) == (choices["against"] is None):
        raise MigrateError("give either --to TARGET or --against OTHER.py")
    options = Options(
        batch=choices["batch"], batch_norm=choices["bn"], evaluation=choices["evaluation"]
    )
    same = ("to", "against", "nproc", "steps", "device", "seed", "tolerance", "allow_write", "keep")
    return Question(
        script=script,
        args=args,
        cwd=Path.cwd(),
        environment=dict(os.environ),
        options=options,
        synthetic=SYNTHETIC_SAMPLES if choices["synthetic"] else 0,
        timeout_s=choices["timeout"],
        **{name: choices[name] for name in same},
    )


@main.command("rules")
@click.argument("code", required=False)
def show_rules(code: str | None) -> None:
    """List the rules, or show the page of one."""
    from migrate import registry

    known = {rule.code: rule for rule in registry.rules()}
    if code is None:
        for rule in known.values():
            click.echo(f"{rule.code}  {rule.title}")
    elif code.upper() in known:
        click.echo(_page(known[code.upper()]))
    else:
        click.echo(f"Error: no rule {code}; `migrate rules` lists them", err=True)
        sys.exit(2)


def _page(rule: Rule) -> str:
    module = inspect.getmodule(type(rule))
    return f"{rule.code}: {rule.title}\n\n{inspect.getdoc(module)}\n"
