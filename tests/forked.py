"""Runs a check in forked processes, so that what it changes in torch is gone afterwards."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
import torch._dynamo  # optimizers and DDP import it when used: here once, not in every fork
import torch.distributed as dist

from migrate.runner import session

TIMEOUT_S = 60


def check(
    body: Callable[[], None], *, devices: int = 2, mode: str = "replicas", ranks: int = 0
) -> None:
    """Run the body under the stand-in for CUDA; raises AssertionError with its traceback.

    With `ranks`, in so many processes at once, in a process group over gloo.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.NamedTemporaryFile(prefix="runner-store-") as store:
        children = []
        for rank in range(max(ranks, 1)):
            ours, theirs = context.Pipe(duplex=False)
            start = (body, theirs, devices, mode, rank, ranks, store.name)
            child = context.Process(target=_child, args=start)
            child.start()
            theirs.close()
            children.append((child, ours))
        problems = [_result(ours) for _, ours in children]
        for child, _ in children:
            child.kill()
            child.join()
    found = "\n".join(filter(None, problems))
    if found:
        raise AssertionError(found)


def _result(ours: Connection) -> str:
    try:
        return str(ours.recv()) if ours.poll(TIMEOUT_S) else f"no end after {TIMEOUT_S} s"
    except EOFError:
        return "the process died"


def _child(
    body: Callable[[], None],
    theirs: Connection,
    devices: int,
    mode: str,
    rank: int,
    ranks: int,
    store: str,
) -> None:
    torch.set_num_threads(1)
    try:
        session.stand_in(devices, mode)
        if ranks:
            dist.init_process_group(
                "nccl", init_method=f"file://{store}", rank=rank, world_size=ranks
            )
        body()
        theirs.send("")
    except BaseException:  # the parent reports whatever it was
        theirs.send(traceback.format_exc())
