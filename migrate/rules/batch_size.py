"""The batch size of a training loader is the one of all devices together.

Why it matters: DataParallel split every batch over the devices. A process that took the same number
by itself would make the global batch as many times larger as there are processes, at the old
learning rate.

Safety: policy. The number is taken for the global one, as it was before, so that steps, samples per
step and learning rates stay what they are; `--batch per-rank` leaves it as each process's own. A
number that cannot be split evenly is an error at the start.

Before::

    def train(model, train_set, opt):
        train_loader = DataLoader(train_set, batch_size=opt.batch, shuffle=True)
        for inputs in train_loader:
            model(inputs).mean().backward()

After::

    def train(model, train_set, opt):
        train_loader = DataLoader(train_set, batch_size=per_process(opt.batch), shuffle=True)
        for inputs in train_loader:
            model(inputs).mean().backward()
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.edit import Edit, enclose
from migrate.facts.loader_plan import Plan, Way, plans
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule

_IS_SPLIT = re.compile(r"per_process|process_count|world_?size|num_replicas|n_?procs?\b|//", re.I)


class BatchSize(Rule):
    """Splits the batch size of the loaders that are dealt out.

    Whether a hand-written number is a process's own already is told by the words in it.
    """

    code = "MG302"
    title = "a training loader's batch size is the global one"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every training loader with a batch size."""
        for plan in plans(context):
            arg = plan.argument("batch_size")
            if arg is None or plan.way in (Way.MANUAL, Way.BATCH_SAMPLER, Way.KEYWORDS):
                continue
            text = plan.source.code(arg.value)
            if plan.way is Way.DONE or context.options.batch == "per-rank":
                if not _IS_SPLIT.search(text):
                    yield self._own(plan, arg, text)
            elif not self._is_split(context, plan, arg):
                yield self._split(context, plan, arg, text)

    def _is_split(self, context: Context, plan: Plan, arg: cst.Arg) -> bool:
        done = context.facts.uses_own(plan.source, "per_process")
        return any(plan.source.contains(arg.value, call) for call in done)

    def _split(self, context: Context, plan: Plan, arg: cst.Arg, text: str) -> Finding:
        name, need = context.helper(plan.source, "per_process")
        after = f") if {plan.condition} else {text}" if plan.condition else ")"
        edits: list[Edit] = [need, *enclose(plan.source, arg.value, f"{name}(", after)]
        return self.finding(
            plan.source,
            arg.value,
            f"batch_size={text} is split over the processes",
            edits,
            Applicability.POLICY,
            assumption=f"the batch size {text} is the global one, as it was before",
            requires=("MG301",),
        )

    def _own(self, plan: Plan, arg: cst.Arg, text: str) -> Finding:
        return self.finding(
            plan.source,
            arg.value,
            f"batch_size={text} is each process's own: the global batch is as many times larger as "
            "there are processes",
            applicability=Applicability.INFO,
            effect=Effect.DIFFERENT,
            advice="the learning rate was chosen for the smaller batch: scale it, or split the "
            "batch size",
        )
