"""Weights or an optimizer's state are saved.

Why it matters: the names of the weights in the file, with or without `module.` in front, decide who
can load it. Where the target shards, each process holds only a part of every tensor; a file of one
process would hold only its part, and nothing would say so.

Safety: safe. With a wrapper nothing changes. Sharded tensors are made whole by all processes, where
the state was read: `full_state(model.state_dict())`, and the file has the names that it had.
With `--ckpt-keys clean` it has those of the model itself.

With `--save sharded`, `torch.save(obj, path)` becomes `save_sharded(obj, path)` where `obj` holds
sharded state: `path` is a folder then, to which every process writes its part, so all of them need
one file system. In it are a torch.distributed.checkpoint and, in `values.pt`, the rest. What only
one process comes to, what is written by other means than `torch.save` to a path, and states that
are taken apart where they are read stay files.

Before::

    model = nn.Linear(2, 2)
    model = nn.DataParallel(model)
    torch.save(model.module.state_dict(), "model.pt")

After::

    model = nn.Linear(2, 2)
    model = nn.DataParallel(model)
    torch.save(full_state(model.module.state_dict()), "model.pt")
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, Text, enclose, replace
from migrate.facts.folders import folder_saves, folder_states, is_gathered
from migrate.facts.state import is_sharded_state, is_wrapper, saved_states
from migrate.facts.wrappers import is_unwrapped
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import receiver


class SavedState(Rule):
    """Finds the `state_dict()` calls whose results are saved."""

    code = "MG503"
    title = "what a checkpoint file holds"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every state that is read in another way than before."""
        for save, home in folder_saves(context).items():
            yield self._folder(context, home, save)
        states = saved_states(context)
        for call, source in states.items():
            if call in folder_states(context):
                yield from self._prefixed(context, source, call)
            elif context.target.shards:
                if is_sharded_state(context, source, call):
                    yield from self._whole(context, source, call)
            elif context.target.has_wrapper and context.options.ckpt_keys == "clean":
                yield from self._clean(context, source, call)
        if states and context.options.save == "sharded" and not context.target.shards:
            call, source = next(iter(states.items()))
            message = "--save sharded: nothing is sharded"
            yield self.finding(source, call, message, applicability=Applicability.INFO)

    def _folder(self, context: Context, source: Source, save: cst.Call) -> Finding:
        name, need = context.helper(source, "save_sharded")
        message = "saves a folder, to which every process writes its part"
        return self.finding(source, save, message, [replace(source, save.func, name), need])

    def _prefixed(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        """The names in a folder are those that the file had."""
        if context.options.ckpt_keys != "keep" or not _has_prefix(context, source, receiver(call)):
            return
        name, need = context.helper(source, "add_prefix")
        around = source.around(call, cst.Call)
        if around is not None and source.code(around.func) == name:
            return
        edits: list[Edit] = [*enclose(source, call, f"{name}(", ")"), need]
        message = f"keeps `module.` before the names of {source.code(receiver(call))}"  # type: ignore[arg-type]
        yield self.finding(source, call, message, edits)

    def _whole(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        if is_gathered(context, source, call):
            return
        shown = source.code(receiver(call))  # type: ignore[arg-type]
        if context.facts.main_process.is_by_rank(source, call):
            message = f"only one process reads the state of {shown}, which all hold a part of"
            advice = f"call full_state({source.code(call)}) in all processes, before the condition"
            yield self.finding(source, call, message, advice=advice)
            return
        name, need = context.helper(source, "full_state")
        prefix = ""
        if context.options.ckpt_keys == "keep" and _has_prefix(context, source, receiver(call)):
            prefix = ', prefix="module."'
        edits: list[Edit] = [*enclose(source, call, f"{name}(", f"{prefix})"), need]
        yield self.finding(source, call, f"gathers the whole state of {shown}", edits)

    def _clean(self, context: Context, source: Source, call: cst.Call) -> Iterator[Finding]:
        model = receiver(call)
        if model is None or not _has_prefix(context, source, model):
            return
        stop = source.span(model).stop
        edits: list[Edit] = [Text(source, stop, stop, ".module")]
        message = f"saves {source.code(model)} without `module.` before the names"
        assumption = "whoever loads this file expects the model's own names"
        policy = Applicability.POLICY
        yield self.finding(source, call, message, edits, policy, assumption=assumption)


def _has_prefix(context: Context, source: Source, model: cst.BaseExpression | None) -> bool:
    """Whether the names in a model's state began with `module.`."""
    is_bare = is_unwrapped(context, source, model)
    return is_wrapper(context, source, model) and not is_bare
