"""Weights are trained on batches that no visible DataLoader gives.

Why it matters: batches that are cut out of arrays, drawn from a replay memory or made by another
library are the same in every process, or random and overlapping: more processes then train no
faster, or on other samples than the script did.

Safety: not edited. How such batches are drawn is not seen. A loop that names the process's rank is
taken for one that was adapted by hand (told by the words in it).

Before::

    def fit(model, inputs, batch_size):
        for start in range(0, len(inputs), batch_size):
            loss = model(inputs[start : start + batch_size]).mean()
            loss.backward()
    fit(nn.Linear(2, 2), torch.ones(8, 2), 4)

Finding::

    MG304 no DataLoader feeds this loop: every process would train on the same samples
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.facts.loader_plan import loader_argument
from migrate.facts.loading import Loader
from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import assigned_targets, dotted, literal
from migrate.values import Made

_ADAPTED = re.compile(r"process_(rank|count)|get_rank|world_size|\brank\b|num_replicas")
_EVALUATION = re.compile(r"val|test|eval|dev", re.I)
_COUNTING = re.compile(r"(^|\.)(range|trange|count)$")
_ADVICE = (
    "let every process take its own part of each batch, such as batch[process_rank()::"
    "process_count()], and draw random numbers alike in all of them"
)


class BatchesWithoutLoader(Rule):
    """Finds training loops without a loader, and loaders whose use is not seen.

    A loader that is not seen in use is reported if it shuffles and is not named as one for
    evaluation.
    """

    code = "MG304"
    title = "training data comes from no visible DataLoader"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such loop, and for every loader that is not seen in use."""
        yield from self._unused(context)
        trains = {loop.node for x in context.facts.loaders for loop in x.loops if loop.trains}
        seen: set[cst.CSTNode] = set()
        for source, call in context.facts.backwards:
            if _is_fed(context, source, call, trains, 0):
                continue
            for user, loop in _innermost(context, source, call):
                if loop not in seen and not _is_adapted(user, loop):
                    seen.add(loop)
                    yield self._loop(context, user, loop)

    def _loop(self, context: Context, source: Source, loop: cst.For | cst.While) -> Finding:
        origin = _unseen_origin(context, source, loop)
        if origin:
            return self.finding(
                source,
                loop,
                f"where {origin} comes from is not seen: every process may train on all samples",
                advice="give the file that makes it as well; or let it give every process its part",
                effect=Effect.UNKNOWN,
            )
        message = "no DataLoader feeds this loop: every process would train on the same samples"
        return self.finding(source, loop, message, advice=_ADVICE, effect=Effect.DIFFERENT)

    def _unused(self, context: Context) -> Iterator[Finding]:
        for loader in context.facts.loaders:
            name = _unseen_use(context, loader)
            if name:
                yield self.finding(
                    loader.source,
                    loader.call,
                    f"where {name} is read is not seen: every process may train on all its samples",
                    advice="if it trains, give it sampler=DistributedSampler(dataset), its part of "
                    "the batch size, and call its sampler's set_epoch in every epoch",
                    effect=Effect.UNKNOWN,
                )


def _is_fed(
    context: Context,
    source: Source,
    node: cst.CSTNode,
    trains: set[cst.For | cst.CompFor | cst.Yield | cst.Call],
    depth: int,
) -> bool:
    """Whether a loop around a backward, or around a call that leads to it, reads a loader."""
    loops = context.facts.loops_around(source, node)
    function = source.function_of(node)
    scope = loops[-1] if loops else function
    if any(loop in trains for loop in loops):
        return True
    if scope is not None and any(call in trains for call in source.inside(scope, cst.Call)):
        return True
    callers = context.facts.callers.get(function, []) if function and depth < 5 else []
    return any(_is_fed(context, s, call, trains, depth + 1) for s, call in callers)


def _innermost(
    context: Context, source: Source, node: cst.CSTNode, depth: int = 0
) -> list[tuple[Source, cst.For | cst.While]]:
    """The nearest loops around a node, in its function or around the calls of it."""
    loops = context.facts.loops_around(source, node)
    function = source.function_of(node)
    if loops or function is None or depth > 4:
        return [(source, loops[0])] if loops else []
    callers = context.facts.callers.get(function, [])
    return [item for s, call in callers for item in _innermost(context, s, call, depth + 1)]


def _is_adapted(source: Source, loop: cst.CSTNode) -> bool:
    """Whether the code around names the process's rank."""
    return bool(_ADAPTED.search(source.code(source.function_of(loop) or loop)))


def _unseen_origin(context: Context, source: Source, loop: cst.For | cst.While) -> str:
    """The iterable of a loop, if it is no counter and nothing is known about it."""
    if isinstance(loop, cst.While):
        return ""
    core = context.facts.loading.cores(source, loop.iter)[0]
    while isinstance(core, cst.Call) and core.args and dotted(core.func) in ("enumerate", "tqdm"):
        core = core.args[0].value
    if isinstance(core, cst.Call) and _COUNTING.search(dotted(core.func) or ""):
        return ""
    made = [v.name for v in context.flow.of(source, core) if isinstance(v, Made)]
    is_known = any(_COUNTING.search(name) or name in ("list", "tuple", "dict") for name in made)
    if is_known or not isinstance(core, cst.Name | cst.Attribute | cst.Subscript):
        return ""
    return source.code(core)


def _unseen_use(context: Context, loader: Loader) -> str:
    """The name of a loader that shuffles and is read nowhere."""
    shuffle = loader_argument(loader.call, "shuffle")
    small = loader.source.around(loader.call, cst.Assign, cst.AnnAssign)
    targets = assigned_targets(small) if small is not None else []
    name = (dotted(targets[0]) or "") if targets else ""
    function = loader.source.function_of(loader.call)
    is_dead = function is not None and not context.facts.callers.get(function)
    orders = shuffle is not None and literal(shuffle.value) not in (False, None)
    if loader.loops or is_dead or not orders or not name or _EVALUATION.search(name):
        return ""
    return name
