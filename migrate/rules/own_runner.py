"""Training is run by a library that has its own way to use several devices.

Why it matters: horovod, Lightning, accelerate, ignite, mmcv, fastai and the transformers Trainer
start processes, deal out the data and average the gradients themselves. What this tool writes
would do it a second time. Model parts that are copied and called by hand have no counterpart.

Safety: not edited. The advice says where the library has the switch.

Before::

    import torch
    import torch.nn as nn
    import horovod.torch as hvd
    hvd.init()

Finding::

    MG901 hvd.init(…) is horovod's: it distributes the training itself
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import libcst as cst

from migrate.finding import Effect, Finding
from migrate.rule import Context, Rule
from migrate.source import Source
from migrate.values import Class, External

_RUNNERS = (
    (r"^horovod\.\w+\.init$", "horovod",
     "horovodrun starts its processes; remove horovod first, or stay with it"),
    (r"^(pytorch_lightning|lightning(\.pytorch|\.fabric)?)(\.\w+)*\.(Trainer|Fabric)$", "Lightning",
     "give its Trainer strategy= and devices=, and leave the script as it is"),
    (r"^accelerate(\.\w+)*\.Accelerator$", "accelerate",
     "start it with `accelerate launch`, and leave the script as it is"),
    (r"^ignite\.distributed\.(Parallel|auto_model|initialize)$", "ignite",
     "use ignite.distributed.Parallel, and leave the script as it is"),
    (r"^(mmcv|mmengine)(\.\w+)*\.(MMDataParallel|\w*Runner)$", "OpenMMLab",
     "use its launcher argument, and leave the script as it is"),
    (r"^fastai(\.\w+)*\.(Learner|cnn_learner|vision_learner|\w+_learner)$", "fastai",
     "use its learn.distrib_ctx(), and leave the script as it is"),
    (r"^transformers(\.\w+)*\.(Seq2Seq)?Trainer$", "transformers",
     "start the script with torchrun: its Trainer does the rest"),
    (r"^catalyst(\.\w+)*\.\w*Runner$", "catalyst", "give its runner an engine"),
)  # fmt: skip
_BY_HAND = re.compile(r"^torch\.nn\.parallel(\.\w+)*\.(replicate|scatter|gather|parallel_apply"
                      r"|scatter_kwargs)$|^torch\.cuda\.comm\.\w+$")  # fmt: skip
_ENCODING = re.compile(r"(^|\.)DataParallel(Model|Criterion)$")


class OwnRunner(Rule):
    """Finds libraries that distribute training, and data parallelism by hand."""

    code = "MG901"
    title = "a library that distributes training itself"

    def check(self, context: Context) -> Iterator[Finding]:
        """One finding for every call."""
        for source, call in context.facts.calls():
            name = self._name(context, source, call)
            for pattern, library, advice in _RUNNERS:
                if re.search(pattern, name):
                    code = f"{source.code(call.func)}(…)"
                    yield self.finding(
                        source, call,
                        f"{code} is {library}'s: it distributes the training itself",
                        effect=Effect.DIFFERENT, advice=advice,
                    )  # fmt: skip
            if _BY_HAND.search(name):
                yield self._by_hand(source, call)
            elif _ENCODING.search(name):
                yield self._encoding(source, call)

    @staticmethod
    def _name(context: Context, source: Source, call: cst.Call) -> str:
        """The full name of what is called, or of the external class it derives from."""
        for value in context.flow.of(source, call.func):
            if isinstance(value, External):
                return value.name
            if isinstance(value, Class):
                names = context.flow.bases(value)[1]
                trainers = [n for n in names if any(re.search(p, n) for p, _, _ in _RUNNERS)]
                return trainers[0] if trainers else value.node.name.value
        return ""

    def _by_hand(self, source: Source, call: cst.Call) -> Finding:
        return self.finding(
            source, call, f"{source.code(call.func)}(…) spreads a batch over devices by hand",
            effect=Effect.DIFFERENT,
            advice="a process has one device: call the model on the whole batch, and make it "
            "parallel where it is made",
        )  # fmt: skip

    def _encoding(self, source: Source, call: cst.Call) -> Finding:
        return self.finding(
            source, call,
            f"{source.code(call.func)}(…) computes on the devices of one process",
            effect=Effect.DIFFERENT,
            advice="use the model and the criterion themselves; outputs are then tensors, not "
            "lists with one entry per device",
        )  # fmt: skip
