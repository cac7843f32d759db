"""A model that is going to be sharded gets its weights in half precision.

Why it matters: half weights lose the small steps of an optimizer. Sharded, weights can stay in
full precision at a fraction of the memory, and be cast for forward and backward only.

Safety: policy. The same cast is written as a precision policy: forward and backward compute in the
half type as before, inputs stay as the script casts them, gradients are added up and applied in
full precision. So training is not equal to the original's, but closer to full precision; saved
weights are full precision, and load where half ones were. With one process everything is as it
was. BatchNorm that is cast back with `.float()` computes in full precision. A cast below the line
that makes the model parallel is moved above it where that changes nothing else; a script that keeps
a full-precision copy of the weights itself is reported.

Before::

    model = nn.Linear(2, 2).cuda().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

After::

    model = compute_in(nn.Linear(2, 2).cuda(), torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst

from migrate.edit import Edit, Text, delete_statement, insert_before, remove_argument
from migrate.facts.half import (
    Cast,
    full_copies,
    half_casts,
    is_part,
    is_trained_below,
    others_cast,
)
from migrate.facts.models import bare_models
from migrate.facts.program import Wrap
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import are_exclusive, training
from migrate.rules._wrapping import base_name, early_optimizer
from migrate.source import Source
from migrate.syntax import method_name

_ASSUMPTION = (
    "half precision was meant for computing, not for what the optimizer adds up; with "
    "--ignore MG408 the optimizer trains half weights as before"
)


@dataclass(frozen=True)
class _Place:
    """Where a model is made parallel, in the function of its cast, and whose edit that is."""

    node: cst.CSTNode
    rule: tuple[str, ...]
    wrap: Wrap | None = None


class HalfPrecision(Rule):
    """Finds casts of trained models to half precision."""

    code = "MG408"
    title = "a model that is going to be sharded is cast to half precision"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every cast, but those below the last step."""
        if context.target.half_precision:
            for cast in half_casts(context.facts):
                yield from self._cast(context, cast)

    def _cast(self, context: Context, cast: Cast) -> Iterator[Finding]:
        place = _place(context, cast)
        early = _early(context, cast, place)
        edits: list[Edit] | None = None
        if place is None:
            is_below = training(context).is_after_wrap(cast.source, cast.call)
        else:
            is_below = early is not None or _is_below(cast, place)
        if is_below and not is_trained_below(context.facts, cast):
            return
        if is_below and training(context).runs_each_step(cast.source, cast.call):
            return  # MG809's
        obstacle = _obstacle(context, cast)
        name, need = context.helper(cast.source, context.target.half_precision)
        if obstacle is None:
            edits = _in_place(cast, name) if not is_below else _moved(cast, place, early, name)
        if edits is not None:
            yield self._edited(cast, [*edits, need], place.rule if place else ())
            return
        if obstacle is None:
            where = early or (place.node if place else None)
            line = f"line {cast.source.line_of(where)}" if where else "the line that shards it"
            obstacle = "casts weights that are sharded by then", f"move it above {line}"
        what, advice = obstacle
        message = f"{cast.source.one_line(cast.call)} {what}"
        yield self.finding(cast.source, cast.call, message, effect=Effect.DIFFERENT, advice=advice)

    def _edited(self, cast: Cast, edits: list[Edit], rule: tuple[str, ...]) -> Finding:
        message = (
            f"{cast.name or 'the model'} computes in {cast.dtype}; its weights, and those that are "
            "saved, stay in full precision"
        )
        return self.finding(
            cast.source, cast.call, message, edits, Applicability.POLICY,
            effect=Effect.BETTER, assumption=_ASSUMPTION, requires=rule,
        )  # fmt: skip


# When the model is sharded


def _place(context: Context, cast: Cast) -> _Place | None:
    """Where the model is made parallel in the same function; below the cast, if it is."""
    found = [
        place
        for source, place in _places(context, cast)
        if source is cast.source
        and source.function_of(place.node) is source.function_of(cast.call)
        and not are_exclusive(source, place.node, cast.call)
    ]
    first = next((place for place in found if not _is_below(cast, place)), None)
    return first or (found[-1] if found else None)


def _places(context: Context, cast: Cast) -> Iterator[tuple[Source, _Place]]:
    facts, flow = context.facts, context.flow
    for wrap in facts.wraps:
        is_ours = (wrap.inner | flow.of(wrap.source, wrap.call)) & cast.values
        if is_ours and not (wrap.functional or wrap.distributed or wrap.custom):
            yield wrap.source, _Place(wrap.call, ("MG201",), wrap)
    for source, call in facts.own_wraps:
        if flow.of(source, call.args[0].value) & cast.values:
            yield source, _Place(call, ())
    for bare in bare_models(facts):
        if bare.value in cast.values:
            yield bare.source, _Place(bare.statement, ("MG204",))


def _is_below(cast: Cast, place: _Place) -> bool:
    start = cast.source.span(cast.call).stop
    return cast.source.span(place.node).stop < start


def _early(context: Context, cast: Cast, place: _Place | None) -> cst.CSTNode | None:
    """The optimizer above the cast that the model is sharded above."""
    wrap = place.wrap if place else None
    if wrap is None or base_name(wrap.model) is None:
        return None
    early = early_optimizer(context, wrap)
    start = cast.source.span(cast.call).start
    return early if early is not None and cast.source.span(early).start < start else None


def _obstacle(context: Context, cast: Cast) -> tuple[str, str] | None:
    """What keeps the cast from becoming a policy, and what to do about it."""
    facts, model = context.facts, cast.name or "the model"
    if is_part(facts, cast):
        return (
            "casts a part of a model that is sharded as a whole",
            "leave the cast out, and run the part's forward pass under "
            f'torch.autocast("cuda", dtype={cast.dtype})',
        )
    wrapped = [wrap for wrap in facts.wraps if wrap.inner & cast.values]
    models = cast.values.union(*(facts.flow.of(wrap.source, wrap.call) for wrap in wrapped))
    for source, node, values in full_copies(facts):
        if values & models:
            return (
                "goes with a full-precision copy of the weights, which is not sharded",
                f"take out the copy of line {source.line_of(node)}: give the optimizer "
                f"{model}.parameters(), which stay in full precision, and copy no gradients or "
                "weights; rewrite again",
            )
    others = others_cast(facts, cast)
    if others:
        return (
            f"casts {' and '.join(others)}: not only what is sharded",
            "cast each model where it is made, not in code that they share",
        )
    return None


# What is written


def _in_place(cast: Cast, name: str) -> list[Edit]:
    """`model.half()` becomes `compute_in(model, torch.float16)`."""
    source, (start, stop) = cast.source, cast.source.span(cast.call)
    before = Text(source, start, start, f"{name}(", order=(10, 1 - stop))
    after = f", {cast.dtype})"
    if cast.makes or _keeps_call(cast):
        return [before, *_uncast(cast), Text(source, stop, stop, after, order=(-10, -start - 1))]
    (cut,) = _uncast(cast)
    return [before, Text(source, cut.start, cut.stop, after)]


def _keeps_call(cast: Cast) -> bool:
    """Whether the call does more than cast: `.to(device, torch.float16)`."""
    return len(cast.call.args) > 1


def _uncast(cast: Cast) -> list[Text]:
    """The same call without its cast; gone, where it does nothing else."""
    source, call = cast.source, cast.call
    if cast.makes:
        return []
    if _keeps_call(cast) and cast.given is not None:
        return [remove_argument(source, call, cast.given)]
    assert isinstance(call.func, cst.Attribute)
    model = call.func.value
    closed = [source.span(paren).stop for paren in model.rpar if paren in source.spans]
    start, stop = max([source.span(model).stop, *closed]), source.span(call).stop
    if b"#" in source.data[start:stop]:
        start = source.data.rindex(b".", start, stop)
    return [Text(source, start, stop, "")]


def _moved(
    cast: Cast, place: _Place | None, early: cst.CSTNode | None, name: str
) -> list[Edit] | None:
    """The cast above the line that makes the model parallel, if nothing comes in between."""
    wrap = place.wrap if place else None
    if wrap is None or wrap.model is None or early is not None or cast.makes:
        return None
    source = cast.source
    if source.contains(cast.call, wrap.call):
        return [*_around(source, wrap.model, name, cast.dtype), *_uncast(cast)]
    statement, above = source.statement_of(cast.call), _sibling(cast, wrap)
    if above is None or _keeps_call(cast) or not _only_casts(cast, statement):
        return None
    if isinstance(above, cst.SimpleStatementLine) and source.around(wrap.call, cst.IfExp) is None:
        return [*_around(source, wrap.model, name, cast.dtype), delete_statement(source, statement)]
    if isinstance(above, cst.If) and base_name(wrap.model) == cast.name:
        line = f"{name}({cast.name}, {cast.dtype})"
        return [insert_before(source, above, [line]), delete_statement(source, statement)]
    return None


def _around(source: Source, model: cst.BaseExpression, name: str, dtype: str) -> list[Edit]:
    """A call around the model that is wrapped, inside of what other rules put there."""
    start, stop = source.span(model)
    return [
        Text(source, start, start, f"{name}(", order=(11, 0)),
        Text(source, stop, stop, f", {dtype})", order=(-11, 0)),
    ]


def _sibling(cast: Cast, wrap: Wrap) -> cst.CSTNode | None:
    """The statement with the wrap in the cast's block, if none between the two casts back."""
    source = cast.source
    statement = source.statement_of(cast.call)
    siblings = source.siblings(statement)
    index = next((i for i, item in enumerate(siblings) if source.contains(item, wrap.call)), None)
    if index is None or statement not in siblings:
        return None
    between = siblings[index + 1 : siblings.index(statement)]
    calls = [call for item in between for call in source.inside(item, cst.Call)]
    return None if any(method_name(call) == "float" for call in calls) else siblings[index]


def _only_casts(cast: Cast, statement: cst.CSTNode) -> bool:
    """Whether a statement is `model.half()` or `model = model.half()`."""
    code = cast.source.code(cast.call)
    is_bare = cast.source.code(cast.model) == cast.name
    return is_bare and cast.source.code(statement) in (code, f"{cast.name} = {code}")
