"""A whole model is pickled, not its state.

Why it matters: the file would hold the wrapper that trains over several processes, which can be
loaded only where such processes have joined. A sharded model cannot be pickled at all.

Safety: safe. The file holds the DataParallel object that it held until now, with the same model in
it. With `--ckpt-keys clean` it holds the model.

Before::

    model = nn.DataParallel(nn.Linear(2, 2))
    torch.save(model, "model.pt")

After::

    model = nn.DataParallel(nn.Linear(2, 2))
    torch.save(as_data_parallel(model), "model.pt")
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import enclose
from migrate.facts.state import bare_values, is_parallel, is_wrapper, saves
from migrate.facts.wrappers import is_unwrapped
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.source import Source


class ModelPickle(Rule):
    """Finds models that are saved as objects."""

    code = "MG505"
    title = "a whole model is pickled"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every model in what is saved."""
        for source, _, saved in saves(context):
            for node in _parts(saved):
                found = self._pickled(context, source, node)
                if found is not None:
                    yield found

    def _pickled(
        self, context: Context, source: Source, node: cst.BaseExpression
    ) -> Finding | None:
        if context.target.shards:
            parallel = is_parallel(context, source, node)
            return self._sharded(source, node) if parallel else None
        if is_unwrapped(context, source, node):
            return None
        if is_wrapper(context, source, node):
            return self._wrapped(context, source, node)
        if _is_bare(context, source, node):
            edits = enclose(source, node, "", ".module")
            message = f"pickles the model in {source.code(node)}, as before"
            return self.finding(source, node, message, edits, requires=["MG204"])
        return None

    def _sharded(self, source: Source, node: cst.BaseExpression) -> Finding:
        shown = source.code(node)
        message = f"pickles {shown}, whose weights are sharded; that fails"
        advice = f"save its weights: torch.save(full_state({shown}.state_dict()), path)"
        return self.finding(source, node, message, advice=advice)

    def _wrapped(self, context: Context, source: Source, node: cst.BaseExpression) -> Finding:
        shown = source.code(node)
        if context.options.ckpt_keys == "clean":
            edits = [*enclose(source, node, "", ".module")]
            message = f"pickles the model in {shown}, without a wrapper"
            assumption = "whoever loads this file expects the model itself"
            policy = Applicability.POLICY
            return self.finding(source, node, message, edits, policy, assumption=assumption)
        name, need = context.helper(source, "as_data_parallel")
        message = f"pickles {shown} as DataParallel, which loads without other processes"
        return self.finding(source, node, message, [*enclose(source, node, f"{name}(", ")"), need])


def _is_bare(context: Context, source: Source, node: cst.BaseExpression) -> bool:
    """Whether an expression is a model that gets its wrapper only by the rewriting."""
    return bool(context.flow.of(source, node) & bare_values(context))


def _parts(saved: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """What is saved: the expression, or the values of a dict or list that is written out."""
    if isinstance(saved, cst.Dict | cst.List | cst.Tuple):
        for element in saved.elements:
            if isinstance(element, cst.DictElement | cst.Element):
                yield from _parts(element.value)
    elif isinstance(saved, cst.Name | cst.Attribute):
        yield saved
