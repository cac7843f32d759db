"""Files are downloaded.

Why it matters: all processes would download to the same place at once, and unpack half a file.

Safety: policy. Every process has to come to the line: the main one runs it first, then the first
of every other machine, then the rest. Places under a condition on the process's number stay, and
so does `from_pretrained`, which locks its files.

Before::

    import torch
    import torchvision

    train_set = torchvision.datasets.MNIST("data", download=True)

After::

    import torch
    import torchvision

    train_set = main_process_first(torchvision.datasets.MNIST)("data", download=True)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import enclose
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, literal, string_value
from migrate.values import External

_LOADS = re.compile(
    r"^(torch\.hub\.(load|load_state_dict_from_url|download_url_to_file)"
    r"|torch\.utils\.model_zoo\.load_url|urllib\.request\.urlretrieve|wget\.download"
    r"|gdown\.download(_folder)?|torchvision\.datasets\.utils\.download\w*)$"
)
_COMMAND = re.compile(r"\b(wget|curl|gdown|git clone)\b")


class Downloads(Rule):
    """Finds calls that download."""

    code = "MG106"
    title = "files are downloaded"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for each call that would run in all processes."""
        facts = context.facts
        for source, call in facts.calls():
            if not _downloads(context, source, call):
                continue
            function = source.function_of(call)
            if facts.main_process.is_by_rank(source, call):
                continue
            if function and function.name.value in ("__getitem__", "__iter__", "forward"):
                continue
            name, need = context.helper(source, "main_process_first")
            yield self.finding(
                source, call, f"{source.code(call.func)} downloads in the main process first",
                [*enclose(source, call.func, f"{name}(", ")"), need], Applicability.POLICY,
                assumption="every process comes to this line",
            )  # fmt: skip


def _downloads(context: Context, source: Source, call: cst.Call) -> bool:
    if isinstance(call.func, cst.Call):
        return False  # enclosed already
    name = context.facts.callee(source, call) or ""
    if _LOADS.search(name):
        return True
    if name in ("os.system", "subprocess.run", "subprocess.call", "subprocess.check_call"):
        texts = source.inside(call, cst.SimpleString)
        return any(_COMMAND.search(string_value(text) or "") for text in texts)
    download = argument(call, "download")
    if download is None or literal(download.value) in (False, None):
        return False
    return any(isinstance(value, External) for value in context.flow.of(source, call.func))
