"""The process's number is an argument, `--local_rank`, that torchrun does not give.

Why it matters: torchrun tells it by the environment, and newer launchers write `--local-rank`. A
program that waits for `--local_rank` keeps its default and takes itself for a single process.

Safety: safe. Both spellings are accepted; without torchrun the default is the same.

Before::

    import argparse

    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)

After::

    import argparse

    import torch

    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", "--local-rank", type=int, default=local_rank_or(-1))
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from migrate.edit import Edit, add_argument, enclose
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.syntax import argument, has_star, method_name, string_value


class LocalRankArgument(Rule):
    """Finds `add_argument("--local_rank")`."""

    code = "MG108"
    title = "the process's number is a command line argument"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each such argument that does not ask the environment yet."""
        for source, call in context.facts.calls():
            names = [string_value(arg.value) for arg in call.args if arg.keyword is None]
            if method_name(call) != "add_argument" or has_star(call):
                continue
            if not {"--local_rank", "--local-rank"} & set(names):
                continue
            edits: list[Edit] = []
            missing = {"--local_rank", "--local-rank"} - set(names)
            if missing:
                first = next(a for a in call.args if string_value(a.value) in names)
                edits += enclose(source, first.value, "", f', "{missing.pop()}"')
            default = argument(call, "default")
            if default is None or not re.search(
                r"environ|getenv|local_rank_or", source.code(default)
            ):
                name, need = context.helper(source, "local_rank_or")
                edits.append(need)
                if default is None:
                    edits.append(add_argument(source, call, f"default={name}(None)"))
                else:
                    edits += enclose(source, default.value, f"{name}(", ")")
            if edits:
                message = "the process's number comes from torchrun's environment"
                yield self.finding(source, call, message, edits)
