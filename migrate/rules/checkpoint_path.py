"""A checkpoint that becomes a folder is copied, moved, removed or looked for as a file.

Why it matters: with `--save sharded`, where the target shards, a checkpoint is a folder. A function
for files fails there: the best one is not copied, a resumed run does not find the last one.

Safety: safe. What is written in its place takes files and folders. The paths of folders are known
by their texts and by the variables that hold them; `os.remove` is edited also where its path comes
out of a list or a folder. Sizes are not edited. Without the option nothing is found.

Before::

    import os
    import torch
    import shutil
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    def save(path):
        torch.save(model.state_dict(), path)
        if os.path.isfile(path):
            shutil.copyfile(path, "best.pt")

After::

    import os
    import torch
    import shutil
    model = torch.nn.DataParallel(torch.nn.Linear(2, 2))
    def save(path):
        torch.save(model.state_dict(), path)
        if os.path.exists(path):
            copy_saved(path, "best.pt")
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, replace
from migrate.facts.files import is_path, writes
from migrate.facts.folders import folder_loads, folder_saves, is_folder, path_keys
from migrate.facts.state import bindings
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import has_star, method_name, receiver

_REMOVES = re.compile(r"^os\.(remove|unlink)$")
_FUNCTIONS = (
    (re.compile(r"^shutil\.(copyfile|copy|copy2)$"), "copy_saved", "copies"),
    (re.compile(r"^(os\.(rename|replace)|shutil\.move)$"), "move_saved", "moves"),
    (_REMOVES, "remove_saved", "removes"),
)
_SIZE = re.compile(r"^os\.(path\.getsize|stat)$")


class CheckpointPath(Rule):
    """Finds functions for files that are called for a checkpoint that is a folder now."""

    code = "MG511"
    title = "a checkpoint is a folder now"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call that a folder does not suit."""
        if not folder_saves(context):
            return
        for source, call in context.facts.calls():
            name = context.facts.callee(source, call) or ""
            if has_star(call):
                continue
            if name == "os.path.isfile" and call.args:
                yield from self._exists(context, source, call, call.args[0].value)
            elif method_name(call) == "is_file" and is_path(context, source, receiver(call)):
                yield from self._exists(context, source, call, receiver(call))
            elif _SIZE.match(name) and call.args:
                yield from self._size(context, source, call)
            else:
                yield from self._changed(context, source, call, name)

    def _changed(
        self, context: Context, source: Source, call: cst.Call, name: str
    ) -> Iterator[Finding]:
        """Copied, moved or removed."""
        path = call.args[0].value if call.args else None
        for pattern, helper, verb in _FUNCTIONS:
            if path is None or not pattern.match(name):
                continue
            removes = helper == "remove_saved" and _is_unknown(context, source, path)
            if not removes and not is_folder(context, source, path):
                continue
            shown = source.code(path)
            if any(arg.keyword is not None for arg in call.args):
                message = f"{source.code(call.func)} is called for {shown}, a folder now"
                yield self.finding(source, call, message, advice="call what works for folders")
                return
            own, need = context.helper(source, helper)
            edits: list[Edit] = [replace(source, call.func, own), need]
            yield self.finding(source, call, f"{verb} {shown}, be it a file or a folder", edits)

    def _exists(
        self, context: Context, source: Source, call: cst.Call, path: cst.BaseExpression | None
    ) -> Iterator[Finding]:
        if path is None or not _is_read_or_saved(context, source, path):
            return
        shown = source.code(path)
        message = f"finds {shown} also if it is a folder"
        if isinstance(call.func, cst.Attribute):
            edit = replace(source, call.func.attr, "exists")
            yield self.finding(source, call, message, [edit])
            return
        message = f"{source.code(call.func)}({shown}) is false for a folder"
        yield self.finding(source, call, message, advice=f"write os.path.exists({shown})")

    def _size(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        path = call.args[0].value
        if is_folder(context, source, path):
            message = f"the size of {source.code(path)}, which is a folder now"
            yield self.finding(source, call, message, advice="add up the sizes of its files")


def _is_unknown(context: Context, source: Source, path: cst.BaseExpression) -> bool:
    """Whether a path was kept in a list or found in a folder, so that its text is not seen."""
    if isinstance(path, cst.Call):
        return method_name(path) in ("pop", "popleft")
    if isinstance(path, cst.Name):
        return not any(bindings(context, source, path)) and not _is_written(context, source, path)
    return isinstance(path, cst.Subscript)


def _is_written(context: Context, source: Source, path: cst.BaseExpression) -> bool:
    """Whether another kind of file is written to a path."""
    keys = path_keys(context, source, path)
    return any(
        keys & path_keys(context, write.source, write.path)
        for write in writes(context)
        if write.path is not None
        and not _REMOVES.match(context.facts.callee(write.source, write.call) or "")
    )


def _is_read_or_saved(context: Context, source: Source, path: cst.BaseExpression) -> bool:
    """Whether a checkpoint is saved to a path, or read from it."""
    if is_folder(context, source, path):
        return True
    keys = path_keys(context, source, path)
    return any(keys & path_keys(context, home, p) for home, _, p in folder_loads(context))
