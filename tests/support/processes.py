"""Work in a process of its own."""

import os
import warnings
from collections.abc import Callable
from typing import Any


def fork(work: Callable[[], Any], failed: int = 1) -> int:
    """Start `work` in a process of its own, which ends with its return value, `failed` for an
    exception.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        code = failed
        try:
            code = int(work() or 0)
        finally:
            os._exit(code)
    return child


def wait(child: int) -> int:
    """How it ended: its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
