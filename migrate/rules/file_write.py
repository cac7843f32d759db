"""A call writes, moves or deletes a file, and every process would do it.

Why it matters: several processes that write one file at the same time leave it damaged; the second
one that deletes or renames it fails.

Safety: safe. Only the call goes under the `if`; what stands beside it, such as the best value so
far, is still done by all processes. Arguments that all processes have to evaluate, such as a
forward pass, stay outside: then `on_main` stands in front of the call. Checkpoints that all
processes write together (`--save sharded`, MG503) are left to them.

Before::

    import torch
    def save(model, path):
        torch.save(model.state_dict(), path)

After::

    import torch
    def save(model, path):
        if is_main_process():
            torch.save(model.state_dict(), path)
"""

from __future__ import annotations

from collections.abc import Iterator

from migrate.edit import Edit, add_argument, enclose
from migrate.facts.files import Write, is_used, keep_to_main, writes
from migrate.facts.folders import folder_saves
from migrate.facts.state import is_parallel
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.syntax import argument, has_star, method_name, receiver


class FileWrite(Rule):
    """Finds calls that write files."""

    code = "MG501"
    title = "every process writes the file"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call that is not yet left to one process."""
        by_rank = context.facts.main_process.is_by_rank
        for write in writes(context):
            is_folder = write.call in folder_saves(context)
            if not is_folder and not by_rank(write.source, write.call):
                yield self._write(context, write)

    def _write(self, context: Context, write: Write) -> Finding:
        source, call = write.source, write.call
        what = source.code(call.func).split("\n")[0]
        if is_used(source, call):
            message = f"every process calls {what}, and something is done with what it returns"
            advice = "call it in the main process only, or let each process use a path of its own"
            return self.finding(source, call, message, advice=advice)
        if context.target.shards and context.facts.callee(source, call) == "torch.onnx.export":
            message = "exports a model whose weights are sharded"
            advice = "export it in a program of its own, from the saved weights"
            return self.finding(source, call, message, advice=advice)
        if _saves_sharded(context, write):
            return self._save_pretrained(context, write)
        edits = keep_to_main(context, source, call)
        return self.finding(source, call, f"leaves {what} to the main process", edits)

    def _save_pretrained(self, context: Context, write: Write) -> Finding:
        """A model that saves itself is given its whole weights, which all processes gather."""
        source, call = write.source, write.call
        model = receiver(call)
        if argument(call, "state_dict") or has_star(call) or model is None:
            message = f"saves {source.code(call.func)} with a state_dict of its own"
            advice = "pass state_dict=full_state(...), evaluated by all processes"
            return self.finding(source, call, message, advice=advice)
        whole, need = context.helper(source, "full_state")
        text = f"state_dict={whole}({source.code(model)}.state_dict())"
        name, need_main = context.helper(source, "on_main")
        edits: list[Edit] = [
            *enclose(source, call.func, f"{name}(", ")"),
            add_argument(source, call, text),
            need,
            need_main,
        ]
        message = f"gathers the weights for {source.code(call.func)}; the main process writes them"
        return self.finding(source, call, message, edits)


def _saves_sharded(context: Context, write: Write) -> bool:
    """Whether a sharded model is asked to save itself."""
    if not context.target.shards or method_name(write.call) != "save_pretrained":
        return False
    return is_parallel(context, write.source, receiver(write.call))
