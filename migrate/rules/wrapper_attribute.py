"""Something is read of a model that has a wrapper now and had none before.

Why it matters: a wrapper hides the model's own attributes and methods, and puts `module.` before
the names in its state dict. The files must keep the names they had.

Safety: safe. `.module` is put in where the model, once it is made parallel (MG204), is used for
something else than a forward pass, its parameters, its mode or its device.

Before::

    import torch
    import torch.nn as nn
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    torch.save(model.state_dict(), "model.pt")

After::

    import torch
    import torch.nn as nn
    model = nn.Linear(2, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    torch.save(model.module.state_dict(), "model.pt")
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.edit import Text
from migrate.facts.models import Bare, bare_models
from migrate.finding import Finding
from migrate.rule import Context, Rule
from migrate.source import Source

_SAME_IN_A_WRAPPER = frozenset(
    (
        "parameters", "named_parameters", "buffers", "train", "eval", "training", "zero_grad",
        "modules", "requires_grad_", "cuda", "to", "apply", "module", "forward", "children",
    )
)  # fmt: skip


class WrapperAttribute(Rule):
    """Finds attributes of models that MG204 wraps."""

    code = "MG211"
    title = "an attribute of a model that has a wrapper now"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every read."""
        if not context.target.has_wrapper:
            return
        for bare in bare_models(context.facts):
            for source in context.sources:
                for node in source.all(cst.Attribute):
                    if self._is_read_later(context, bare, source, node):
                        yield self._read(bare, source, node)

    def _read(self, bare: Bare, source: Source, node: cst.Attribute) -> Finding:
        stop = source.span(node.value).stop
        text = source.code(node)
        message = f"{text} is the model's own: {source.code(node.value)}.module.{node.attr.value}"
        edit = Text(source, stop, stop, ".module")
        return self.finding(source, node, message, [edit], requires=["MG204"])

    def _is_read_later(
        self, context: Context, bare: Bare, source: Source, node: cst.Attribute
    ) -> bool:
        if node.attr.value in _SAME_IN_A_WRAPPER or context.facts.definitions[source].is_own(node):
            return False
        base = node.value
        is_inner = isinstance(base, cst.Attribute) and base.attr.value == "module"
        if is_inner or isinstance(base, cst.Call):
            return False
        if bare.value not in context.flow.of(source, base):
            return False
        parent = source.parent(node)
        if isinstance(parent, cst.AssignTarget):
            return False
        function, home = source.function_of(node), bare.source.function_of(bare.statement)
        if source is bare.source and function is home:
            return source.span(node).start > bare.source.span(bare.statement).stop
        return function is not None and _runs_after(context, bare, function)


def _runs_after(context: Context, bare: Bare, function: cst.FunctionDef) -> bool:
    """Whether a function is reached from below the place where the model is made parallel."""
    seen: set[cst.FunctionDef] = set()
    queue = [function]
    home = bare.source.function_of(bare.statement)
    while queue:
        item = queue.pop()
        if item in seen:
            continue
        seen.add(item)
        for source, call in context.facts.callers.get(item, ()):
            caller = source.function_of(call)
            if source is bare.source and caller is home:
                if source.span(call).start > bare.source.span(bare.statement).stop:
                    return True
            elif caller is not None:
                queue.append(caller)
    return False
