"""Bars on a terminal, log lines without one."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from wassail.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress as Bars

Progress: TypeAlias = "bool | Callable[[float], None]"
Tick: TypeAlias = Callable[[float], None]
PAUSE = 5.0  # seconds between two lines where no terminal shows a bar


class Report:
    """Takes the share done, and shows nothing. `begin` names a phase of the work.

    `report(share, part)`: the share of all work, and of the phase where there is one.
    """

    def begin(self, phase: str) -> None:
        """A phase begins."""

    def __call__(self, share: float, part: float | None = None) -> None:
        """Progress."""


@contextlib.contextmanager
def progress_bar(progress: Progress, description: str) -> Iterator[Report]:
    """A reporter of the share done: the caller's own, a progress bar with the time left on a
    terminal, a line every few seconds where standard error is none, or nothing.
    """
    if not callable(progress) and progress not in (True, False, None):
        raise InputError(
            f"progress is {progress!r}: give True, False, or a function of the share done."
        )
    if callable(progress):
        yield _Given(progress)
    elif progress and not sys.stderr.isatty():
        yield _Lines(description)
    elif progress:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn
        from rich.progress import Progress as Bars

        columns = ("{task.description}", BarColumn(), TaskProgressColumn())
        left = TextColumn("{task.fields[left]}")
        # Results go to stdout, progress does not.
        with Bars(*columns, left, console=Console(stderr=True), transient=True) as bars:
            yield _Bar(description, bars)
    else:
        yield Report()


class _Given(Report):
    """A function of the share of all work."""

    def __init__(self, function: Callable[[float], None]) -> None:
        self.function = function

    def __call__(self, share: float, part: float | None = None) -> None:
        self.function(share)


class _Timed(Report):
    """The time left in a phase, by the rate since the first report in it: what comes before that,
    as the start of workers, is no measure. The clock decides about what is shown only.
    """

    def __init__(self, description: str) -> None:
        self.description = description
        self.phase = ""
        self.first: tuple[float, float] | None = None

    @property
    def title(self) -> str:
        """What is being done."""
        return f"{self.description}, {self.phase}" if self.phase else self.description

    def begin(self, phase: str) -> None:
        self.phase = phase
        self.first = None

    def left(self, now: float, share: float) -> str:
        """The time left in words, "" while nothing is known of it."""
        if self.first is None:
            self.first = (now, share)
        began, start = self.first
        if share <= start:
            return ""
        seconds = (1 - share) * (now - began) / (share - start)
        return f"about {seconds:.0f} s left" + (" in this phase" if self.phase else "")


class _Bar(_Timed):
    """A bar on a terminal, of the phase if there is one."""

    def __init__(self, description: str, bars: Bars) -> None:
        super().__init__(description)
        self.bars = bars
        self.task = bars.add_task(description, total=1.0, left="")

    def begin(self, phase: str) -> None:
        super().begin(phase)
        self.bars.update(self.task, description=self.title, completed=0.0, left="")

    def __call__(self, share: float, part: float | None = None) -> None:
        shown = share if part is None else part
        left = self.left(time.monotonic(), shown)
        self.bars.update(self.task, completed=shown, left=left)


class _Lines(_Timed):
    """A line on standard error every few seconds: the share done, time spent and time left.

    The first comes after the first pause, so that short work stays silent.
    """

    def __init__(self, description: str, pause: float = PAUSE) -> None:
        super().__init__(description)
        self.pause = pause
        self.began = time.monotonic()
        self.last = self.began

    def begin(self, phase: str) -> None:
        super().begin(phase)
        self._line(0.0, "")

    def __call__(self, share: float, part: float | None = None) -> None:
        shown = share if part is None else part
        self._line(shown, self.left(time.monotonic(), shown))

    def _line(self, share: float, left: str) -> None:
        now = time.monotonic()
        if now - self.last < self.pause:
            return
        self.last = now
        told = f"{self.title}: {100 * share:.0f} % after {now - self.began:.0f} s"
        print(f"{told}, {left}" if left else told, file=sys.stderr, flush=True)
