"""A parallel model is moved to another device or number type, or its inner model is replaced.

Why it matters: the gradients are averaged where they arrive, and that place is tied to the device
and the type the parameters had when the model was made parallel. After `model.cpu()` and
`model.cuda()`, or `model.half()`, every process trains for itself, and nothing says so. A new
inner model, or a copy of sharded weights, is unknown to what surrounds it.

Safety: not edited. A move that changes nothing (`.cuda()`, `.to(device)`) is not reported, nor one
after the last step.

Before::

    model = nn.DataParallel(nn.Linear(2, 1))
    for epoch in range(3):
        model(images).sum().backward()
        torch.save(model.cpu().state_dict(), "model.pt")
        model.cuda()

Finding::

    MG809 model.cpu() moves a parallel model between training steps
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import Training, base_of, training
from migrate.source import Source
from migrate.syntax import method_name, receiver

_TYPES = frozenset({"half", "double", "bfloat16"})


class MovedModel(Rule):
    """Finds moves, replacements and copies of parallel models."""

    code = "MG809"
    title = "a parallel model is moved, replaced or copied"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every place."""
        know = training(context)
        for source, call in context.facts.calls():
            yield from self._moved(know, source, call)
            if context.target.shards:
                yield from self._copied(context, know, source, call)
        if context.target.has_wrapper:
            for source in context.sources:
                yield from self._replaced(context, know, source)

    def _moved(self, know: Training, source: Source, call: cst.Call) -> Iterator[Finding]:
        of, name = receiver(call), method_name(call) or ""
        is_cpu = name == "cpu" or (name == "to" and _names_cpu(source, call))
        if of is None or not (is_cpu or name in _TYPES) or not _is_parallel(know, source, of):
            return
        around = source.parent(call)
        if isinstance(around, cst.Attribute) and around.attr.value == "float":
            return  # rounds the weights, and leaves their type
        each_step = know.runs_each_step(source, call)
        if not each_step and (is_cpu or not know.is_after_wrap(source, call)):
            return
        if not (each_step or is_cpu or name == "double") and know.context.target.half_precision:
            return  # MG408's
        code, model = source.code(call), base_of(of) or "model"
        when = "between training steps" if each_step else "that is trained afterwards"
        advice = f"{name}() the model before it is made parallel"
        if each_step:
            advice = (
                f"leave {model} where it is and move a copy of its state: "
                f"{{k: v.cpu() for k, v in {model}.state_dict().items()}}"
            )
        yield self.finding(
            source, call, f"{code} moves a parallel model {when}", effect=Effect.DIFFERENT,
            advice=advice,
        )  # fmt: skip

    def _copied(
        self, context: Context, know: Training, source: Source, call: cst.Call
    ) -> Iterator[Finding]:
        name = context.facts.callee(source, call) or ""
        if name != "copy.deepcopy" or not call.args:
            return
        of = call.args[0].value
        if not know.is_model(source, of) or not know.is_after_wrap(source, call):
            return
        yield self.finding(
            source, call, f"{source.code(call)} fails: sharded models cannot be copied",
            effect=Effect.DIFFERENT,
            advice="make a second model by its constructor, make it parallel in the same way, and "
            "load the first one's state_dict() into it; to keep the best weights, keep a copy of "
            "state_dict() with tensors cloned",
        )  # fmt: skip

    def _replaced(self, context: Context, know: Training, source: Source) -> Iterator[Finding]:
        for assign in source.all(cst.Assign):
            for target in assign.targets:
                node = target.target
                if not isinstance(node, cst.Attribute) or context.facts.definitions[source].is_own(
                    node
                ):
                    continue
                base = node.value
                is_inner = node.attr.value == "module" and know.is_wrapper(source, base)
                part = isinstance(base, cst.Attribute) and base.attr.value == "module"
                is_layer = part and know.is_wrapper(source, base.value) and any(  # type: ignore[attr-defined]
                    know.facts.is_module(v) for v in know.flow.of(source, assign.value)
                )  # fmt: skip
                if (is_inner or is_layer) and know.is_after_wrap(source, assign):
                    model = base_of(base) or source.code(base)
                    yield self.finding(
                        source, assign,
                        f"{source.code(node)} is replaced after {model} was made parallel",
                        effect=Effect.DIFFERENT,
                        advice="replace it before the model is made parallel: the new part's "
                        "gradients would not be averaged",
                    )  # fmt: skip


def _names_cpu(source: Source, call: cst.Call) -> bool:
    return bool(call.args) and bool(
        re.fullmatch(
            r"""["']cpu["']|torch\.device\(["']cpu["']\)""", source.code(call.args[0].value)
        )
    )


def _is_parallel(know: Training, source: Source, node: cst.BaseExpression) -> bool:
    """Whether an expression is a parallel model as it stands, not a part or a result of it."""
    if isinstance(node, cst.Call) and method_name(node) not in (
        "eval",
        "train",
        "cpu",
        "cuda",
        "to",
    ):
        return isinstance(node.func, cst.Attribute | cst.Name) and any(
            call is node for _, call in [(w.source, w.call) for w in know.facts.wraps]
        )
    return know.is_model(source, node)
