"""Data is split or shuffled at random, and nothing seeds the draw.

Why it matters: every process draws for itself. What one process trains on, another one validates
on; and parts that are dealt out of differently ordered lists overlap.

Safety: not edited, because which seed the runs should have is the user's choice. A call inside a
method that Python calls for every sample (`__getitem__`, `__iter__`, `__call__`, `forward`) is
augmentation and is left alone, as is one in a training loop.

Before::

    def train(model, data):
        train_set, val_set = torch.utils.data.random_split(data, [80, 20])
        for inputs in DataLoader(train_set, batch_size=8):
            model(inputs).mean().backward()

Finding::

    MG308 torch.utils.data.random_split draws other samples in every process
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.syntax import argument, has_star

_TORCH, _NUMPY = r"^torch\.(random\.)?manual_seed$", r"^numpy\.random\.seed$"
_DRAWS = {
    r"^torch\.utils\.data\.(dataset\.)?random_split$": (_TORCH, "generator"),
    r"^sklearn\.model_selection(\.\w+)*\.train_test_split$": (_NUMPY, "random_state"),
    r"^numpy\.random\.(shuffle|permutation)$": (_NUMPY, ""),
    r"^random\.shuffle$": (r"^random\.seed$", ""),
}
_SEEDS_ALL = r"(seed_everything|set_seed|setup_seed|fix_seed|seed_all|set_random_seed)$"
_PER_SAMPLE = ("__getitem__", "__iter__", "__call__", "__next__", "forward", "collate_fn")


class RandomSplit(Rule):
    """Finds unseeded random draws that decide which data there is.

    A function that is named as one that seeds (`set_seed`) and is not the project's is believed.
    """

    code = "MG308"
    title = "data is split at random without a seed"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every such call."""
        if context.facts.calls_of(_SEEDS_ALL):
            return
        for pattern, (seed, parameter) in _DRAWS.items():
            if context.facts.calls_of(seed):
                continue
            for source, call in context.facts.calls_of(pattern):
                if has_star(call) or (parameter and argument(call, parameter) is not None):
                    continue
                if _decides_data(context, source, call):
                    yield self._drawn(context, source, call, seed)

    def _drawn(self, context: Context, source: Source, call: cst.Call, seed: str) -> Finding:
        name = re.sub(r"[\\^$]|\(random\\?\.\)\?", "", seed)
        return self.finding(
            source,
            call,
            f"{source.code(call.func)} draws other samples in every process",
            advice=f"seed it alike in all processes before: {name}(0)",
            effect=Effect.DIFFERENT,
        )


def _decides_data(context: Context, source: Source, call: cst.Call) -> bool:
    """Whether a draw happens before the training: not for every sample, and in no training loop."""
    function = source.function_of(call)
    if function is not None and function.name.value in _PER_SAMPLE:
        return False
    if source.class_of(call) is not None and (
        function is None or function.name.value != "__init__"
    ):
        return False
    loops = context.facts.loops_around(source, call)
    if any(context.facts.reaches_backward(source, loop.body) for loop in loops):
        return False
    callers = context.facts.callers.get(function, []) if function else []
    if function is not None and not callers:
        return function in context.facts.training_functions
    return not any(
        context.facts.reaches_backward(s, loop.body)
        for s, user in callers
        for loop in context.facts.loops_around(s, user)
    )
