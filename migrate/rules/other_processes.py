"""The script starts processes of its own, in code that will run once per device.

Why it matters: torchrun starts one process per device already. Each of them would start the
processes again: `mp.spawn` trains several times over, an evaluation script runs once per device on
the same files.

Safety: not edited. Worker pools that preprocess data, and commands whose output is read, are not
reported.

Before::

    import os
    import torch
    for epoch in range(3):
        model(images).sum().backward()
        os.system("python evaluate.py")

Finding::

    MG813 os.system("python evaluate.py") runs once in every process
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.files import whole_statement
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import training
from migrate.source import Source
from migrate.values import Function

_SPAWN = re.compile(r"^(torch\.)?multiprocessing(\.spawn)?\.(spawn|start_processes|Process)$")
_COMMAND = re.compile(r"^(os\.(system|popen)|subprocess\.(run|call|check_call|Popen))$")


class OtherProcesses(Rule):
    """Finds spawned training processes and commands that training code runs."""

    code = "MG813"
    title = "the script starts processes of its own"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call."""
        for source, call in context.facts.calls():
            name = context.facts.callee(source, call) or ""
            if _SPAWN.match(name):
                yield from self._spawn(context, source, call)
                continue
            is_command = _COMMAND.match(name) and whole_statement(source, call) is not None
            if not is_command or context.facts.main_process.is_by_rank(source, call):
                continue
            if self._trains(context, source, call):
                yield self._command(context, source, call)

    def _spawn(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        for arg in call.args:
            for value in context.flow.of(source, arg.value):
                is_step = isinstance(value, Function) and (
                    value.node in context.facts.training_functions
                )
                if is_step:
                    yield self.finding(
                        source, call,
                        f"{source.code(call.func)}(…) starts {source.code(arg.value)} again in "
                        "every process",
                        effect=Effect.DIFFERENT,
                        advice=f"call {source.code(arg.value)} directly, once: torchrun starts the "
                        "processes; the number that it is given is os.environ['LOCAL_RANK']",
                    )  # fmt: skip
                    return

    def _trains(self, context: Context, source: Source, call: cst.Call) -> bool:
        """Whether a call is part of the program that trains, not of a helper it does not reach."""
        function = source.function_of(call)
        know = training(context)
        if know.runs_each_step(source, call):
            return True
        return function in context.facts.training_functions or (
            function is None and source is context.facts.entry
        )

    def _command(self, context: Context, source: Source, call: cst.Call) -> Finding:
        main, _ = context.helper(source, "is_main_process")
        wait, _ = context.helper(source, "wait_for_everyone")
        code = source.one_line(call)
        code = code if len(code) < 60 else f"{source.code(call.func)}(…)"
        return self.finding(
            source, call, f"{code} runs once in every process", effect=Effect.SAME,
            advice=f"put it under `if {main}():`, and {wait}() after that if the script uses "
            "what it writes",
        )  # fmt: skip
