"""python …/migrate/runner --record DIR [options] script.py args…

Runs one script as Python would, with what is missing stood in for, and records what it did.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK",
            "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


def main() -> None:
    """Run the script; its exceptions and its exit code become this process's."""
    options = _options()
    if options.alone:
        for name in LAUNCHED:
            os.environ.pop(name, None)
    sys.path[0] = str(HERE.parent.parent)
    from migrate.runner.session import Session

    session = Session(options)
    _forget_this_package()
    sys.argv = [options.script, *options.args]
    sys.path[0] = str(Path(options.script).resolve().parent)
    sys.exit(session.run(options.script))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="migrate.runner")
    parser.add_argument("--record", type=Path, required=True, help="folder for rank<r>.json")
    parser.add_argument("--root", type=Path, required=True, help="the folder it may write to")
    parser.add_argument("--allow-write", type=Path, action="append", default=[])
    parser.add_argument("--protect", type=Path, action="append", default=[])
    parser.add_argument("--alone", action="store_true", help="one process, not torchrun's")
    parser.add_argument("--devices", type=int, default=2, help="GPUs that the process sees")
    parser.add_argument("--data-parallel", default="whole")
    parser.add_argument("--seed", type=int, help="of torch, numpy and random; none: as it comes")
    parser.add_argument("--steer", action="store_true", help="the same samples in every run")
    parser.add_argument("--calm", action="store_true", help="no dropout, augmentation by sample")
    parser.add_argument("--steps", type=int, default=0, help="optimizer steps; 0: all")
    parser.add_argument("--pass-batches", type=int, default=0, help="batches of each pass; 0: all")
    parser.add_argument("--pass-samples", default="", help="the same by loader, in samples")
    parser.add_argument("--synthetic", type=int, default=0, help="samples of each data set")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args()


def _forget_this_package() -> None:
    """The script may have a module of this name; what is loaded goes on working."""
    for name in list(sys.modules):
        if name.partition(".")[0] == "migrate":
            del sys.modules[name]


if __name__ == "__main__":
    main()
