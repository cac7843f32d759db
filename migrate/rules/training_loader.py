"""A DataLoader whose batches are trained on gives every process all samples.

Why it matters: every process runs the whole script. Without a sampler that deals the samples out,
all of them train on the same ones, or, shuffled, on random ones that overlap.

Safety: policy where the samples cannot be dealt out evenly: the sampler then draws up to one less
than there are processes a second time in the last batch of an epoch, so that all processes take as
many steps; with `drop_last` it leaves them out, as the script did. In every step the processes
together see what one saw before. Samplers and batch samplers of the script keep their order: they
are wrapped, and the main process draws for all. A loader that is read for evaluation too is
reported: it shows each process a part only.

Before::

    import torch
    from torch.utils.data import DataLoader, RandomSampler
    def train(model, train_set):
        sampler = RandomSampler(train_set)
        train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
        for inputs in train_loader:
            model(inputs).mean().backward()

After::

    import torch
    from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
    def train(model, train_set):
        sampler = DistributedSampler(train_set)
        train_loader = DataLoader(train_set, batch_size=8, sampler=sampler)
        for inputs in train_loader:
            model(inputs).mean().backward()
"""

from __future__ import annotations

from collections.abc import Iterator

import libcst as cst

from migrate.facts.loader_plan import Plan, Way, evaluating_loops, plans
from migrate.finding import Applicability, Effect, Finding
from migrate.rule import Context, Rule
from migrate.rules._dealing import EDITS, subject
from migrate.syntax import literal, method_name


class TrainingLoader(Rule):
    """Finds loaders that train, and deals their samples out."""

    code = "MG301"
    title = "a training loader gives every process all samples"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every loader that is not dealt out yet; more for its other uses."""
        for plan in plans(context):
            if plan.way is Way.MANUAL:
                message = (
                    f"every process would train on all samples of {subject(plan)}: {plan.problem}"
                )
                yield self.finding(plan.source, plan.call, message, advice=plan.advice,
                                   effect=Effect.DIFFERENT)  # fmt: skip
                continue
            if plan.way is not Way.DONE:
                yield self._dealt_out(context, plan)
            yield from self._parts(context, plan)

    def _dealt_out(self, context: Context, plan: Plan) -> Finding:
        edits, assumption = EDITS[plan.way](context, plan)
        message = f"every process gets its part of {subject(plan)}: {plan.way.value}"
        called = context.flow.qualified(plan.source, plan.call.func) or "torch."
        is_torch = called.startswith(("torch.", "torch_geometric.", "monai."))
        if not is_torch:
            assumption = f"{called} is torch's DataLoader; {assumption}"
        drops = plan.argument("drop_last")
        is_even = (
            drops is not None and literal(drops.value) is True and plan.way is not Way.ITERABLE
        )
        return self.finding(
            plan.source,
            plan.call,
            message,
            edits,
            Applicability.SAFE if is_even and is_torch else Applicability.POLICY,
            assumption="" if is_even and is_torch else assumption,
        )

    def _parts(self, context: Context, plan: Plan) -> Iterator[Finding]:
        """The places that evaluate on a loader that shows a process a part only."""
        sampler = plan.argument("sampler")
        if plan.condition or (sampler and isinstance(sampler.value, cst.IfExp)):
            return
        for loop in evaluating_loops(plan.loader):
            function = loop.source.function_of(loop.node)
            scope = function or loop.source.module
            names = {
                method_name(c) or loop.source.code(c.func)
                for c in loop.source.inside(scope, cst.Call)
            }
            if names & {
                "all_reduce",
                "all_gather",
                "all_gather_object",
                "global_sum",
                "global_mean",
            }:
                continue
            yield self.finding(
                loop.source,
                loop.node,
                f"evaluates on {loop.source.code(loop.iterable)}, of which a process sees its part",
                advice="add the sums and counts up over all processes with global_sum, or evaluate "
                "on a second loader without a sampler",
            )
