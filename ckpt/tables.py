"""What the commands show, as rich renderables. Nothing here prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ckpt.format import Format
from ckpt.inspection import GroupSummary, Inspection, TensorSummary
from ckpt.note import Note, summarise

__all__ = ["format_table", "inspection_view", "note_lines", "size", "tensor_table"]

UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def size(nbytes: float) -> str:
    """Bytes for people: three digits and a decimal unit."""
    for unit in UNITS:
        if nbytes < 1000 or unit == UNITS[-1]:
            return f"{nbytes:.0f} {unit}" if unit == UNITS[0] else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    raise AssertionError("unreachable")


def note_lines(notes: Iterable[Note]) -> list[str]:
    """One line a note."""
    return [str(note) for note in notes]


def _rows(pairs: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        table.add_row(name, Text(value))
    return table


def inspection_view(found: Inspection) -> RenderableType:
    """The whole answer of `ckpt inspect`."""
    kinds = ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in found.nbytes.items())
    dtypes = "; ".join(
        f"{kind}: " + ", ".join(f"{name} x{count}" for name, count in counts.items())
        for kind, counts in found.dtypes.items()
    )
    pairs = [
        ("path", found.path),
        ("format", found.format),
        ("written by", found.writer or "unknown"),
        ("world size", str(found.world_size or "unknown")),
        ("parameters", f"{found.params} tensors, {found.numel:,} elements"),
        ("bytes", kinds),
        ("dtypes", dtypes),
        ("step", str(found.step if found.step is not None else "unknown")),
    ]
    optional = [
        ("taken off names", ", ".join(found.stripped)),
        ("tied", summarise(f"{alias} = {owner}" for alias, owner in found.tied.items())),
        ("frozen", summarise(found.frozen)),
        ("buffers", summarise(found.buffers)),
        *((f"extra: {name}", value) for name, value in found.extras.items()),
        *(("note", problem) for problem in found.problems),
    ]
    groups = [(f"param group {i}", _group_line(g)) for i, g in enumerate(found.groups)]
    return _rows([*pairs, *groups, *(pair for pair in optional if pair[1])])


def _group_line(group: GroupSummary) -> str:
    options = [f"{k}={v}" for k, v in group.options.items() if v is not None and v is not False]
    return f"{group.params} tensors, {group.numel:,} elements: {', '.join(options)}"


def tensor_table(tensors: Iterable[TensorSummary]) -> Table:
    """The answer of `ckpt inspect --tensors`."""
    table = Table()
    table.add_column("tensor", overflow="fold")
    for column in ("dtype", "shape", "size", "pieces"):
        table.add_column(column, no_wrap=True)
    for item in tensors:
        shape = "x".join(map(str, item.shape)) or "scalar"
        table.add_row(item.name, item.dtype, shape, size(item.nbytes), str(item.pieces))
    return table


def format_table(formats: Iterable[Format]) -> Table:
    """The answer of `ckpt formats`."""
    table = Table()
    for column in ("--to", "format", "read", "write", "holds"):
        table.add_column(column)
    for item in formats:
        names = ", ".join((item.name, *item.aliases))
        holds = "everything" if len(item.keeps) == len(type(next(iter(item.keeps)))) else (
            ", ".join(sorted(part.value for part in item.keeps))
        )  # fmt: skip
        read, write = "yes" if item.read else "", "yes" if item.plan else ""
        table.add_row(names if item.plan else item.name, item.title, read, write, holds)
    return table
