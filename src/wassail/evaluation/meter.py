"""The progress of an evaluation: which phase it is in, and the share of that and of everything."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from wassail.evaluation.tasks.task import Place, Task
from wassail.progress import Report

NEARLY = 0.9  # the share of a task that is taken to be done at most, until it is


class Meter:
    """Work is counted in passes of the model; what an earlier run has done counts as done.

    Args:
        report: where progress goes.
        total: passes of the whole evaluation, about.
    """

    def __init__(self, report: Report, total: float) -> None:
        self.report = report
        self.total = max(total, 1.0)
        self.before = 0.0

    @contextmanager
    def phase(
        self, name: str, passes: float, samples: int, places: Sequence[Place]
    ) -> Iterator[Callable[[Task, float], None]]:
        """One phase: gives the `tick(task, share)` of a runner. Not shown if nothing is to do.

        passes: of each sample, about; places: those that are to do.
        """
        todo = sum(len(place) for place in places)
        whole = passes * samples
        ahead = max(whole - passes * todo, 0.0)
        phase = _Phase(todo)

        def tick(task: Task, share: float) -> None:
            part = phase.part(task.place, share)
            self.report((self.before + ahead + (whole - ahead) * part) / self.total, part)

        if todo:
            self.report.begin(name)
        yield tick
        self.before += whole
        if todo:
            self.report(self.before / self.total, 1.0)


class _Phase:
    """The share of a phase that is done.

    Tasks under way whose own share is not known are taken to need as long as those that are done:
    else the first result of many workers would look like all that they have done.
    """

    def __init__(self, todo: int) -> None:
        self.todo = todo
        self.least = 0.0  # it never goes back
        self.done: dict[int, int] = {}  # samples, by start
        self.seconds: list[float] = []  # of the tasks that are done
        self.under_way: dict[int, tuple[float, float, int]] = {}  # since, share, samples, by start

    def part(self, place: Place, share: float) -> float:
        """The share of the phase, once a task has come so far."""
        now = time.monotonic()
        start = place.start
        if start not in self.done:
            since, known, size = self.under_way.pop(start, (now, 0.0, len(place)))
            if share < 1:
                self.under_way[start] = (since, max(known, share), size)
            else:
                self.done[start] = size
                self.seconds.append(now - since)
        mean = sum(self.seconds) / max(len(self.seconds), 1)
        found = float(sum(self.done.values()))
        for begun, told, samples in self.under_way.values():
            guess = min((now - begun) / mean, NEARLY) if mean else 0.0
            found += samples * max(told, guess)
        self.least = max(self.least, min(found / self.todo, 1.0))
        return self.least
