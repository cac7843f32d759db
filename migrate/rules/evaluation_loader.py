"""A DataLoader that is only evaluated on is read whole by every process.

Why it matters: the numbers that come out are exactly those of the script, in every process, so that
what is decided by them (best model, early stopping) is decided alike. It takes as long as before.

With `--eval sharded` it is faster: `model(inputs)` becomes `on_parts(model)(inputs)` in the loops
that evaluate, and in the functions that are called only from there. Every process still reads whole
batches, but runs the model on its part of them and gets the whole result, as DataParallel did it:
what comes after is as it was, and no sample counts twice.

Safety: nothing is edited without the option. With it, a forward pass stays whole where only some
processes may come to it (`if rank == 0:`, `try:`), where the order of the batches is drawn by each
process, in a loop that trains too, and in a program with forward hooks. While the script runs,
`on_parts` computes the first batch both ways and goes on with whole batches if that is not the
same, if the model's result has not one row for each sample, if the processes have different
batches, and while gradients are recorded: `torch.no_grad()` and `model.eval()` are needed to gain
anything. In a model that was never in a DataParallel, what forward keeps in attributes is a part's.

Before::

    def train(model, train_set, test_set):
        for inputs in DataLoader(train_set, batch_size=8):
            model(inputs).mean().backward()
        for inputs in DataLoader(test_set, batch_size=8):
            model(inputs)

Finding::

    MG305 every process evaluates on all of test_set
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.loader_plan import evaluating_loops, loader_argument
from migrate.facts.loading import Loader, Loop
from migrate.facts.state import bare_values
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule
from migrate.rules._training import training, without_gradients
from migrate.source import Source
from migrate.syntax import literal, method_name
from migrate.values import Function

_HOOK = re.compile(r"register_(module_)?forward_(pre_)?hook$")
_HOOKED = "the forward hooks would see a part"
_GRADIENTS = "put it under torch.no_grad(): while gradients are recorded, batches stay whole"
Places = dict[cst.CSTNode, Source]
"""Pieces of code, each with its file."""


class EvaluationLoader(Rule):
    """Says how evaluation goes on."""

    code = "MG305"
    title = "an evaluation loader is read whole by every process"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for the program; with sharded evaluation one for every forward pass."""
        loaders = [x for x in context.facts.loaders if not x.trains and evaluating_loops(x)]
        loaders = [x for x in loaders if not self._is_part(context, x)]
        places = {x: _evaluating(context, evaluating_loops(x)) for x in loaders}
        loaders = [x for x in loaders if not _is_done(context, places[x])]
        if context.options.evaluation == "sharded":
            yield from self._sharded(context, {x: places[x] for x in loaders})
            return
        for loader in loaders[:1]:
            names = ", ".join(dict.fromkeys(_dataset(x) for x in loaders))
            yield self.finding(
                loader.source,
                loader.call,
                f"every process evaluates on all of {names}",
                applicability=Applicability.INFO,
                advice="nothing to do: the numbers are exactly those of one process",
            )

    def _sharded(self, context: Context, places: dict[Loader, Places]) -> Iterator[Finding]:
        """The forward passes that are computed in parts, and the loaders that stay whole."""
        kept = [
            loop.node
            for loader in context.facts.loaders
            for loop in loader.loops
            if loop.trains or self._is_part(context, loader) or _draws_order(loader)
        ]
        has_hooks = any(_HOOK.match(method_name(c) or "") for _, c in context.facts.calls())
        edited: set[cst.Call] = set()
        for loader, around in places.items():
            loops = [x for x in evaluating_loops(loader) if x.node not in kept and not has_hooks]
            inside = _evaluating(context, loops)
            calls = [(s, c) for node, s in inside.items() for c in _forwards(context, s, node)]
            for source, call in calls:
                if call not in edited:
                    edited.add(call)
                    yield self._edited(context, source, call)
            if not calls:
                yield self.finding(
                    loader.source,
                    loader.call,
                    f"every process evaluates on all of {_dataset(loader)}",
                    applicability=Applicability.INFO,
                    advice=f"it stays whole: {_HOOKED if has_hooks else _reason(around, inside)}",
                )

    def _edited(self, context: Context, source: Source, call: cst.Call) -> Finding:
        name, need = context.helper(source, "on_parts")
        code = source.one_line(call)
        code = code if len(code) < 60 else f"{code[:50]} …"
        message = f"every process computes its part of {code}"
        edits: list[Edit] = [*enclose(source, call.func, f"{name}(", ")"), need]
        advice = "" if _is_quiet(context, source, call, set()) else _GRADIENTS
        if training(context).model_of(source, call) & bare_values(context):
            model = source.code(call.func)
            assumption = f"nothing that {model} keeps of a batch in itself is read afterwards"
            policy = Applicability.POLICY
            return self.finding(
                source, call, message, edits, policy, advice=advice, assumption=assumption
            )
        return self.finding(source, call, message, edits, advice=advice)

    def _is_part(self, context: Context, loader: Loader) -> bool:
        """Whether the loader gives a part only, by hand or by its sampler."""
        source = loader.source
        sampler = loader_argument(loader.call, "sampler")
        made = context.flow.made_by(source, sampler.value if sampler else None)
        text = source.code(loader.call)
        return "process_rank" in text or any("Distributed" in value.name for value in made)


def _dataset(loader: Loader) -> str:
    arg = loader_argument(loader.call, "dataset")
    text = loader.source.one_line(arg.value if arg else loader.call)
    return text if len(text) < 60 else text[:50] + " …"


def _draws_order(loader: Loader) -> bool:
    """Whether every process reads the loader in an order of its own."""
    shuffle = loader_argument(loader.call, "shuffle")
    return shuffle is not None and literal(shuffle.value) in (True, 1)


def _reason(places: Places, inside: Places) -> str:
    if places and not inside:
        return "its loop is one that trains too, or the order of its batches is random"
    return "no forward pass is seen in its loops that all processes are sure to come to"


def _evaluating(context: Context, loops: Iterable[Loop]) -> Places:
    """The bodies of loops, and of the functions that are called only from there."""
    found: Places = {}
    for loop in loops:
        if isinstance(loop.node, cst.For):
            found[loop.node.body] = loop.source
        elif isinstance(loop.node, cst.CompFor) and (comp := loop.source.parent(loop.node)):
            found[comp] = loop.source
    queue = list(found.items())
    while queue:
        node, source = queue.pop()
        for call in source.inside(node, cst.Call):
            for callee in context.flow.callees.get(call, ()):
                body = callee.node.body
                if body not in found and _is_called_in(context, callee, found):
                    found[body] = callee.source
                    queue.append((body, callee.source))
    return found


def _is_called_in(context: Context, function: Function, places: Places) -> bool:
    """Whether a function, not one of a model, is called in these places only."""
    name = function.node.name.value
    own = context.facts.definitions[function.source]
    if name in ("forward", "__init__", "__call__") or own.is_own(function.node):
        return False
    return all(
        any(home is user and home.contains(node, call) for node, home in places.items())
        for user, call in context.facts.callers.get(function.node, [])
    )


def _is_done(context: Context, places: Places) -> bool:
    """Whether an earlier run has let forward passes be computed in parts."""
    done = {call for s in context.sources for call in context.facts.uses_own(s, "on_parts")}
    return any(call in done for node, s in places.items() for call in s.inside(node, cst.Call))


def _forwards(context: Context, source: Source, place: cst.CSTNode) -> Iterator[cst.Call]:
    """The forward passes of parallel models that all processes come to."""
    known = training(context)
    for call in known.forwards(source, place):
        last = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        is_wrapper = known.is_model(source, call.func) and last not in ("module", "forward")
        is_sure = not _is_in_try(source, call) and not _is_alone(context, source, call, set())
        if is_wrapper and is_sure:
            yield call


def _is_in_try(source: Source, call: cst.Call) -> bool:
    function = source.function_of(call)
    block = source.around(call, cst.Try)
    return block is not None and source.function_of(block) is function


def _is_alone(context: Context, source: Source, node: cst.CSTNode, seen: set[cst.CSTNode]) -> bool:
    """Whether only the main process may come to a place, or to a call of its function."""
    if context.facts.main_process.is_by_rank(source, node):
        return True
    function = source.function_of(node)
    if function is None or function in seen:
        return False
    seen.add(function)
    calls = training(context).calls_of(source, function)
    return any(_is_alone(context, user, call, seen) for user, call in calls)


def _is_quiet(context: Context, source: Source, node: cst.CSTNode, seen: set[cst.CSTNode]) -> bool:
    """Whether a place may run without gradients, also by its callers or `set_grad_enabled`."""
    if without_gradients(source, node) or "set_grad_enabled" in source.text:
        return True
    function = source.function_of(node)
    if function is None or function in seen:
        return False
    seen.add(function)
    calls = training(context).calls_of(source, function)
    return any(_is_quiet(context, user, call, seen) for user, call in calls)
