"""Where numbers of a part of the batch become the whole batch's: by whom, and by now.

By a collective of the script, by a definition that an earlier run wrote, or, for all that is left,
by the rewriting; that reduces a number where it leaves a training step.
"""

from __future__ import annotations

from functools import cached_property

import libcst as cst

from migrate.facts.kinds import Batch, Kind
from migrate.facts.loading import Loader
from migrate.facts.trained import Trained
from migrate.names import Slot
from migrate.source import Source
from migrate.syntax import dotted
from migrate.values import Function

_COLLECTIVE = ("all_reduce", "all_gather", "reduce", "all_gather_object", "all_gather_into_tensor")


class Reduced(Trained):
    """Tells numbers of a part of the batch from numbers that all processes agree on."""

    @cached_property
    def loops(self) -> dict[cst.CSTNode, Loader]:
        """The loops over batches, with the loader of each."""
        return {loop.node: loader for loader in self.facts.loaders for loop in loader.loops}

    # Which batches are parts

    def dealt_out(self, origin: cst.CSTNode) -> bool | None:
        """Whether a loop's batches are parts: True or False where its loader is known."""
        loader = self.loops.get(origin)
        return None if loader is None else loader.trains

    def is_reduced_here(self, source: Source, node: cst.CSTNode, value: Batch) -> bool:
        """Whether a number of a part of the batch is taken at `node`, and not further out.

        In a function that only helps, such as one that computes an accuracy, it is not: what its
        callers give it may be whole.
        """
        dealt = {self.dealt_out(origin) for origin in value.origins}
        if not (value.is_local or value.kind is Kind.METRIC) or False in dealt:
            return False
        function = source.function_of(node)
        if not dealt:
            return value.is_mean and self.in_step(source, node)
        is_home = any(
            origin in source.spans and source.function_of(origin) is function
            for origin in value.origins
        )
        return is_home or function in self.facts.training_functions

    def in_step(self, source: Source, node: cst.CSTNode) -> bool:
        """Whether the innermost loop, or the function where there is none, makes training steps."""
        loops = self.facts.loops_around(source, node)
        function = source.function_of(node)
        if not loops:
            return any(
                s is source and source.function_of(c) is function for s, c in self.facts.backwards
            )
        body = loops[0].body
        inner = [*source.inside(body, cst.For), *source.inside(body, cst.While)]
        return self.facts.reaches_backward(source, body) and not any(
            self.facts.reaches_backward(source, loop.body) for loop in inner
        )

    def is_whole(self, value: Batch) -> bool:
        """Whether the batch is known not to be dealt out: evaluation."""
        return bool(value.origins) and all(self.dealt_out(o) is False for o in value.origins)

    # What all processes agree on

    def is_own_helper(self, source: Source, call: cst.Call) -> bool:
        """Whether a call is of a definition that an earlier run wrote."""
        return dotted(call.func) in self.facts.definitions[source].own_names

    def is_reduced_by(self, source: Source, call: cst.Call) -> bool:
        """Whether a call gives a number of all processes: ours, or a function with a collective."""
        if self.is_own_helper(source, call):
            return True
        return any(self._reduces(function) for function in self.flow.callees.get(call, ()))

    def _reduces(self, function: Function) -> bool:
        # Methods of models and trainers do more than reduce a number.
        return function.owner is None and function.node in self._reducing

    @cached_property
    def _reducing(self) -> set[cst.FunctionDef | None]:
        """The functions in which a collective is called."""
        return {
            source.function_of(call)
            for source, call in self.facts.calls_of(r"^torch\.distributed\.")
            if (self.facts.callee(source, call) or "").endswith(_COLLECTIVE)
        }

    def is_reduced_in_place(self, source: Source, node: cst.Name) -> bool:
        """`dist.all_reduce(x)` before this read of `x`."""
        places = self._in_place.get(self.facts.slot(source, node), ())
        return any(start < source.span(node).start for start in places)

    @cached_property
    def _in_place(self) -> dict[Slot, list[int]]:
        """For each variable, where a collective changes it."""
        found: dict[Slot, list[int]] = {}
        for source, call in self.facts.calls_of(r"^torch\.distributed\."):
            full = self.facts.callee(source, call) or ""
            first = call.args[0].value if call.args else None
            if full.endswith(_COLLECTIVE) and isinstance(first, cst.Name):
                slot = self.facts.slot(source, first)
                found.setdefault(slot, []).append(source.span(call).start)
        return found
