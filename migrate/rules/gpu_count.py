"""The number of GPUs stands for the number that train.

Why it matters: DataParallel trains on all GPUs that a process sees. With one process per device
the number that trains is the number of processes, whatever each of them can see.

Safety: policy. Right if there is one process per device. Checks that a device is there at all,
loops over devices, and comparisons with other numbers stay.

Before::

    print("Let's use", torch.cuda.device_count(), "GPUs!")

After::

    print("Let's use", process_count(), "GPUs!")
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.edit import replace
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._counting import becomes_process_count


class GpuCount(Rule):
    """Finds `torch.cuda.device_count()`."""

    code = "MG104"
    title = "the number of GPUs stands for the number that train"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each count that means the GPUs that train."""
        for source, call in context.facts.calls_of(r"^torch\.cuda\.device_count$"):
            if not becomes_process_count(context, source, call):
                continue
            name, need = context.helper(source, "process_count")
            yield self.finding(
                source, call, f"{source.code(call)} becomes the number of processes",
                [replace(source, call, f"{name}()"), need], Applicability.POLICY,
                assumption="there is one process for each device that trains",
            )  # fmt: skip
