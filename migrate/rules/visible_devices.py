"""The program itself chooses the devices that it sees.

Why it matters: all processes run this line. They need as many visible devices as there are
processes, each its own.

Safety: nothing is edited. A list is fine, if as many processes are started; a single device would
be shared by all.

Before::

    import os

    import torch

    os.environ["CUDA_VISIBLE_DEVICES"] = "1"

Finding::

    MG103 all processes would share device 1
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._process import VISIBLE, names_own_number, visible_devices
from migrate.syntax import string_value


class VisibleDevices(Rule):
    """Finds where CUDA_VISIBLE_DEVICES is set."""

    code = "MG103"
    title = "the program chooses the devices it sees"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each place that sets it."""
        for source, node, value in visible_devices(context.facts):
            text = string_value(value)
            names = [name for name in (text or "").split(",") if name.strip()]
            if text is not None and (not names or names == ["-1"]):
                continue
            if text is None and names_own_number(source, value):
                if not context.facts.process_groups:
                    yield self.finding(
                        source, node, "each process would see one device, and choose by number",
                        advice=f"delete this line: set-up chooses the process's device ({VISIBLE})",
                    )  # fmt: skip
            elif text is not None and len(names) == 1:
                yield self.finding(
                    source, node, f"all processes would share device {names[0].strip()}",
                    advice="delete this line, and choose the devices where the program is started",
                )  # fmt: skip
            else:
                count = str(len(names)) if names else f"as many as {source.code(value)} names"
                message = f"start one process for each visible device: {count}"
                yield self.finding(source, node, message, applicability=Applicability.INFO)
