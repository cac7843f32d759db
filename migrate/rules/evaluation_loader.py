"""A DataLoader that is only evaluated on is read whole by every process.

Why it matters: the numbers that come out are exactly those of the script, in every process, so that
what is decided by them (best model, early stopping) is decided alike. It takes as long as before.

Safety: nothing is edited. With `--eval sharded` the loaders are named that could be dealt out, with
what that takes: DistributedSampler is no way, it repeats samples.

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

from collections.abc import Iterator

from migrate.facts.loader_plan import evaluating_loops, loader_argument
from migrate.facts.loading import Loader
from migrate.finding import Applicability, Finding
from migrate.rule import Context, Rule


class EvaluationLoader(Rule):
    """Says how evaluation goes on."""

    code = "MG305"
    title = "an evaluation loader is read whole by every process"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for the program; with sharded evaluation one for every such loader."""
        loaders = [x for x in context.facts.loaders if not x.trains and evaluating_loops(x)]
        loaders = [x for x in loaders if not self._is_part(context, x)]
        if context.options.evaluation == "sharded":
            yield from (self._sharded(loader) for loader in loaders)
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

    def _sharded(self, loader: Loader) -> Finding:
        name = _dataset(loader)
        return self.finding(
            loader.source,
            loader.call,
            f"every process evaluates on all of {name}: its numbers are not seen to be sums",
            advice=f"load Subset({name}, range(process_rank(), len({name}), process_count())) and "
            "put global_sum around every sum and every count before they are divided",
        )

    def _is_part(self, context: Context, loader: Loader) -> bool:
        """Whether the loader gives a part only, by hand or by its sampler."""
        source = loader.source
        sampler = loader_argument(loader.call, "sampler")
        made = context.flow.made_by(source, sampler.value if sampler else None)
        text = source.code(loader.call)
        return "process_rank" in text or any("Distributed" in value.name for value in made)


def _dataset(loader: Loader) -> str:
    arg = loader_argument(loader.call, "dataset")
    text = " ".join(loader.source.code(arg.value if arg else loader.call).split())
    return text if len(text) < 60 else text[:50] + " …"
