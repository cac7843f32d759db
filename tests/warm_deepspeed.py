"""Lets DeepSpeed compile its C++ operator for CPU collectives now, not inside a test.

DeepSpeed compiles it on the first `init_distributed` of a machine (about a minute on two cores,
kept in ~/.cache/torch_extensions); afterwards this takes a few seconds. `make test` runs it.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read by deepspeed while it is imported


def main() -> None:
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        sys.exit("warm_deepspeed: no C++ compiler found. DeepSpeed needs one on CPU: install g++.")

    from deepspeed.accelerator import get_accelerator

    started = time.monotonic()
    get_accelerator().create_op_builder("ShareMemCommBuilder").load(verbose=False)
    print(f"deepspeed's CPU operator is ready ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
