"""A folder is made, and every process would make it.

Why it matters: between the check that a folder is missing and `os.makedirs` another process makes
it; then the script ends with FileExistsError, now and then.

Safety: safe. Behind a check for existence, `exist_ok=True` is what the check meant. Without one,
the main process alone makes the folder, and still fails if it is there already.

Before::

    import os
    import torch
    if not os.path.exists("out"):
        os.mkdir("out")

After::

    import os
    import torch
    if not os.path.exists("out"):
        os.makedirs("out", exist_ok=True)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, replace, set_argument
from migrate.facts.files import is_path, is_used, keep_to_main
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, dotted, has_star, literal, method_name, positional, receiver

_EXISTENCE = re.compile(r"\b(exists|isdir|is_dir|access|listdir)\b")


class MakeFolder(Rule):
    """Finds calls that make folders and fail where there is one."""

    code = "MG502"
    title = "every process makes the folder"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call that fails in the second process."""
        for source, call in context.facts.calls():
            name = context.facts.callee(source, call)
            is_method = method_name(call) == "mkdir" and is_path(context, source, receiver(call))
            if name not in ("os.mkdir", "os.makedirs") and not (is_method and name is None):
                continue
            if _allows(call, name) or _is_tried(source, call) or has_star(call):
                continue
            if not context.facts.main_process.is_by_rank(source, call):
                yield self._make(context, source, call, name)

    def _make(self, context: Context, source: Source, call: cst.Call, name: str | None) -> Finding:
        if is_used(source, call):
            message = "every process makes this folder"
            advice = "let the main process make it, or allow that it exists"
            return self.finding(source, call, message, advice=advice)
        checked = _is_checked(source, call) and not _is_emptied(context, source, call)
        func = dotted(call.func) or ""
        if checked and (name != "os.mkdir" or func.endswith(".mkdir")):
            edits: list[Edit] = [set_argument(source, call, "exist_ok", "True")]
            if name == "os.mkdir":
                edits.append(replace(source, call.func, func.removesuffix("mkdir") + "makedirs"))
            return self.finding(source, call, "allows that another process made the folder", edits)
        edits = keep_to_main(context, source, call)
        return self.finding(source, call, "leaves making the folder to the main process", edits)


def _allows(call: cst.Call, name: str | None) -> bool:
    """Whether a folder that exists is no error."""
    index = {"os.makedirs": 2, "os.mkdir": None}.get(name or "", 2)
    given = argument(call, "exist_ok", index)
    return given is not None and literal(given.value) is not False


def _is_tried(source: Source, call: cst.Call) -> bool:
    """Whether the error is caught."""
    inner: cst.CSTNode = call
    for item in source.ancestors(call):
        if isinstance(item, cst.FunctionDef):
            return False
        if isinstance(item, cst.Try) and inner is item.body:
            return any(
                handler.type is None or re.search(r"Error|Exception", source.code(handler.type))
                for handler in item.handlers
            )
        inner = item
    return False


def _is_checked(source: Source, call: cst.Call) -> bool:
    """Whether the call stands under a test that asks whether the folder is there."""
    for item in source.ancestors(call):
        if isinstance(item, cst.FunctionDef):
            return False
        if isinstance(item, cst.If | cst.IfExp | cst.BooleanOperation):
            test = item.left if isinstance(item, cst.BooleanOperation) else item.test
            if _EXISTENCE.search(source.code(test)):
                return True
    return False


def _is_emptied(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether the function also deletes the folder: then the main process does both."""
    made = positional(call, 0)
    path = source.code(made.value) if made else ""
    scope: cst.CSTNode = source.function_of(call) or source.module
    return any(
        context.facts.callee(source, item) == "shutil.rmtree"
        and item.args
        and source.code(item.args[0].value) == path
        for item in source.inside(scope, cst.Call)
    )
