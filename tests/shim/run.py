"""Runs one script as Python would, with what is missing stood in for, and records what it did.

python -m shim.run --record DIR [--devices N] [--data-parallel MODE] [--steer] script.py args…
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

import torch

from shim import cuda, data_parallel, distributed, order, sync_batchnorm
from shim.files import Files
from shim.record import Recorder

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Run the script; its exceptions and its exit code become this process's."""
    options = _options()
    stand_in(options.devices, options.data_parallel)
    if options.steer:
        order.install()
    options.record.mkdir(parents=True, exist_ok=True)
    files = Files(Path.cwd())
    recorder = Recorder(options.record.resolve(), int(os.environ.get("RANK", "0")), files)
    files.watch()
    recorder.watch()
    _run(options.script, options.args, recorder)


def stand_in(devices: int, data_parallel_mode: str) -> None:
    """Install everything that a machine without GPUs needs; nothing where they are."""
    if torch.cuda.is_available():
        return
    cuda.install(devices)
    distributed.install()
    data_parallel.install(data_parallel_mode)
    sync_batchnorm.install()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shim.run")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--data-parallel", choices=data_parallel.MODES, default="whole")
    parser.add_argument("--steer", action="store_true")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _run(script: str, args: list[str], recorder: Recorder) -> None:
    sys.argv = [script, *args]
    sys.path[0] = str(Path(script).resolve().parent)
    # The folder of the tests holds names, such as `training`, that a user's module may have too.
    sys.path[1:] = [entry for entry in sys.path[1:] if Path(entry).resolve() != HERE.parent]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        recorder.write("exited", code)
        raise
    except BaseException as error:
        recorder.write("raised", 1, f"{type(error).__name__}: {error}")
        raise
    recorder.write("ended", 0)


if __name__ == "__main__":
    main()
