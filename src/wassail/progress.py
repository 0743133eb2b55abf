"""Bars on a terminal, log lines without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeAlias

from wassail.errors import InputError

Progress: TypeAlias = "bool | Callable[[float], None]"


Tick: TypeAlias = Callable[[float], None]


@contextlib.contextmanager
def progress_bar(progress: Progress, description: str) -> Iterator[Callable[[float], None]]:
    """A reporter of the share done: the caller's own, a progress bar with the time left on a
    terminal, or none.
    """
    if not callable(progress) and progress not in (True, False, None):
        raise InputError(
            f"progress is {progress!r}: give True, False, or a function of the share done."
        )
    if callable(progress):
        yield progress
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
