"""Bars on a terminal, log lines without one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from wassail.errors import InputError

Progress: TypeAlias = "bool | Callable[[float], None]"


Tick: TypeAlias = Callable[[float], None]


PAUSE = 5.0  # seconds between two lines where no terminal shows a bar


@contextlib.contextmanager
def progress_bar(progress: Progress, description: str) -> Iterator[Callable[[float], None]]:
    """A reporter of the share done: the caller's own, a progress bar with the time left on a
    terminal, a line every few seconds where standard error is none, or nothing.
    """
    if not callable(progress) and progress not in (True, False, None):
        raise InputError(
            f"progress is {progress!r}: give True, False, or a function of the share done."
        )
    if callable(progress):
        yield progress
    elif progress and not sys.stderr.isatty():
        yield _Lines(description)
    elif progress:
        from rich.console import Console
        from rich.progress import Progress as Bars

        with Bars(
            console=Console(stderr=True), transient=True
        ) as bars:  # results go to stdout, progress does not
            task = bars.add_task(description, total=1.0)
            yield lambda share: bars.update(task, completed=share)
    else:
        yield lambda share: None


class _Lines:
    """A line on standard error every few seconds: the share done, time spent and time left.

    The first comes after the first pause, so that short work stays silent. The clock decides about
    lines only.
    """

    def __init__(self, description: str, pause: float = PAUSE) -> None:
        self.description = description
        self.pause = pause
        self.began = time.monotonic()
        self.last = self.began

    def __call__(self, share: float) -> None:
        now = time.monotonic()
        if now - self.last < self.pause:
            return
        self.last = now
        spent = now - self.began
        left = f", about {spent / share - spent:.0f} s left" if share > 0 else ""
        print(
            f"{self.description}: {100 * share:.0f} % after {spent:.0f} s{left}",
            file=sys.stderr,
            flush=True,
        )
