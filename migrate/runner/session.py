"""One run of a script: what is installed before it, and what is written down around it."""

from __future__ import annotations

import argparse
import os
import random
import runpy
import sys
import traceback
from types import TracebackType

import torch

from migrate.runner import (
    batch_norms,
    collectives,
    cuda,
    data_parallel,
    distributed,
    order,
    randomness,
    sync_batchnorm,
    synthetic,
    wraps,
)
from migrate.runner.batches import Batches
from migrate.runner.files import Files
from migrate.runner.losses import Losses
from migrate.runner.record import Record
from migrate.runner.steps import EnoughSteps, Steps


class Session:
    """Everything that hooks into a process; `run` runs the script."""

    def __init__(self, options: argparse.Namespace) -> None:
        stand_in(options.devices, options.data_parallel)
        if options.steer:
            order.install()
        if options.calm:
            randomness.install()
        if options.synthetic:
            synthetic.install(options.synthetic)
        options.record.mkdir(parents=True, exist_ok=True)
        rank = int(os.environ.get("RANK", "0"))
        self._record = Record(options.record.resolve(), rank)
        files = Files(options.root, options.allow_write, options.record, options.protect)
        losses = Losses()
        batches = Batches(options.pass_batches, options.pass_samples)
        steps = Steps(self._record, losses, batches, options.steps)
        for part in (files, batches, losses, steps):
            part.watch()
        calls = collectives.watch(lambda: batches.clock)
        self._record.ask = lambda: {
            "files": files.listed(),
            "outside": files.outside(),
            "refused": files.refused(),
            "loaders": batches.listed(),
            "collectives": calls.listed(),
            "batch_norms": batch_norms.kinds(),
            "wraps": wraps.listed(),
            "synthetic": synthetic.used(),
        }
        self._steps = steps
        batch_norms.watch()
        wraps.watch()
        seed(options.seed, rank)
        self._record.start(calls)

    def run(self, script: str) -> int:
        """Run the script to its end; the exit code that it means this process to have."""
        try:
            runpy.run_path(script, run_name="__main__")
        except EnoughSteps:  # a good end: it was asked to stop
            return self._end("stopped", 0)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if isinstance(end.code, str):
                sys.stderr.write(end.code + "\n")
            return self._end("exited", code)
        except BaseException as error:
            text = "".join(traceback.format_exception(type(error), error, _own(error, script)))
            sys.stderr.write(text)
            self._record.end("raised", 1, f"{type(error).__name__}: {error}", text)
            return 1
        return self._end("ended", 0)

    def _end(self, status: str, code: int) -> int:
        self._steps.save_weights()
        self._record.end(status, code)
        return code


def _own(error: BaseException, script: str) -> TracebackType | None:
    """The traceback from the script on: how it was started is not its business."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != script:
        trace = trace.tb_next
    return trace or error.__traceback__


def stand_in(devices: int, data_parallel_mode: str) -> None:
    """Install everything that a machine without GPUs needs; nothing where they are."""
    if torch.cuda.is_available():
        return
    cuda.install(devices)
    distributed.install()
    data_parallel.install(data_parallel_mode)
    sync_batchnorm.install()


def seed(number: int | None, rank: int) -> None:
    """Torch starts alike in every process, as it does by itself; numpy and random do not."""
    if number is None:
        return
    torch.manual_seed(number)
    random.seed(number + rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number + rank)
