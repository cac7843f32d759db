"""Programs that mark an expression, `probe(x)`, and which values reach it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import libcst as cst

from migrate.flow import Flow
from migrate.project import load_project
from migrate.source import Source
from migrate.syntax import dotted
from migrate.values import Class, External, File, Function, Instance, Made, Method, Value


def flow(files: str | dict[str, str]) -> Flow:
    texts = {"train.py": files} if isinstance(files, str) else files
    contents = {Path(name): textwrap.dedent(text).encode() for name, text in texts.items()}
    return Flow(load_project(contents, next(iter(contents)), contents))


def shown(value: Value) -> str:
    match value:
        case External() | Made():
            return value.name
        case File():
            return f"file {value.source.path}"
        case Function():
            return f"def {value.node.name.value}"
        case Class():
            return f"class {value.node.name.value}"
        case Instance():
            return f"{value.cls.node.name.value}()"
        case Method():
            return f"method {value.function.node.name.value}"


def probes(found: Flow) -> list[tuple[Source, cst.Call]]:
    return [
        (source, call)
        for source in found.project.sources
        for call in source.all(cst.Call)
        if dotted(call.func) == "probe"
    ]


def probe(files: str | dict[str, str]) -> set[str]:
    """What the argument of the first `probe(…)` can be."""
    found = flow(files)
    source, call = probes(found)[0]
    return {shown(value) for value in found.of(source, call.args[0].value)}
