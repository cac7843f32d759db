"""A logger writes to a file.

Why it matters: every process would open the log file, and one that starts later would truncate it.

Safety: safe. The other processes' handlers write to the null device; what they log on the screen is
switched off where the processes join.

Before::

    import logging
    import torch
    logging.basicConfig(filename="train.log")

After::

    import logging
    import torch
    logging.basicConfig(filename="train.log" if is_main_process() else os.devnull)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from migrate.facts.files import keep_to_main
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.rules._opening import is_for_main, main_path
from migrate.syntax import argument, literal, string_value

_HANDLER = re.compile(
    r"^logging\.(basicConfig|FileHandler|handlers\.(\w*RotatingFileHandler|WatchedFileHandler))$"
)


class LogFile(Rule):
    """Finds log files."""

    code = "MG603"
    title = "every process opens the log file"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every handler that opens a file."""
        for source, call in context.facts.calls_of(r"^logging\.|^loguru\.logger\.add$"):
            name = context.facts.callee(source, call) or ""
            if context.facts.main_process.is_by_rank(source, call):
                continue
            path = argument(call, "filename", None if name.endswith("basicConfig") else 0)
            if name == "loguru.logger.add":
                if call.args and string_value(call.args[0].value) is not None:
                    message = "only the main process writes this log file"
                    yield self.finding(source, call, message, keep_to_main(context, source, call))
            elif _HANDLER.match(name) and path is not None and literal(path.value) is not None:
                if is_for_main(source, path.value):
                    continue
                message = f"only the main process writes the log file {source.code(path.value)}"
                edits = main_path(context, source, call, path.value)
                yield self.finding(source, call, message, edits)
