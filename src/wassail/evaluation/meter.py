"""How much of an evaluation is done, for its progress bar."""

from __future__ import annotations

from collections.abc import Callable

from wassail.evaluation.tasks.task import Task


class Meter:
    """The share of the whole evaluation that is done, in passes."""

    def __init__(self, report: Callable[[float], None], total: float) -> None:
        self.report = report
        self.total = max(total, 1.0)
        self.before = 0.0

    def stage(self, passes: int, samples: int) -> Stage:
        """A stage of so many passes for each of the samples; what is in the store already
        counts at once when it ends.
        """
        return Stage(self, passes, samples)


class Stage:
    """One stage: a context that gives the `tick(task, share)` of a runner."""

    def __init__(self, meter: Meter, passes: int, samples: int) -> None:
        self.meter = meter
        self.passes = passes
        self.samples = samples
        self.done = dict[int, float]()

    def __enter__(self) -> Callable[[Task, float], None]:
        self.meter.report(self.meter.before / self.meter.total)
        return self._tick

    def __exit__(self, *_: object) -> None:
        self.meter.before += self.passes * self.samples
        self.meter.report(self.meter.before / self.meter.total)

    def _tick(self, task: Task, share: float) -> None:
        start = task.place.start
        self.done[start] = max(self.done.get(start, 0.0), share * len(task.place))
        self.meter.report(
            (self.meter.before + self.passes * sum(self.done.values())) / self.meter.total
        )
