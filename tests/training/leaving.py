"""How a training process ends: gloo's threads now and then abort an interpreter's normal exit."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def run_and_leave(action: Callable[[], object]) -> NoReturn:
    """Run it, and end the process at once: with 0, or with 1 and the traceback."""
    code = 0
    try:
        action()
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
