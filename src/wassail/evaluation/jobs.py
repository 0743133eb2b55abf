"""The tasks of a stage on their way to workers that may die of them.

A task that failed at every try is cut in halves, and these again, down to single samples: most of a
chunk can be saved when one of its samples kills its worker. A sample that is left alone and fails
is skipped, and the run says so.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from wassail.errors import InputError
from wassail.evaluation.pieces import Whole, join
from wassail.evaluation.tasks.clean import Clean
from wassail.evaluation.tasks.task import Result, Samples, Task
from wassail.evaluation.work import Worker

TRIES = 3  # of a task
TRIES_ALONE = 2  # of a sample that is left alone

_log = logging.getLogger("wassail")


@dataclass(eq=False)
class Job:
    """A task on its way, perhaps a piece of one. since: when it was sent."""

    task: Task
    whole: Whole | None = None
    tries: int = 0
    since: float = 0.0


@dataclass(eq=False)
class Queue:
    """What is to be done next, and what is done.

    Args:
        worker: with the data.
        tasks: made when they are asked for.
        lost: samples that no pass of the model survives, and why; more may join.
        most: failures in a row until it is not the samples that are to blame.
        failures: in a row, so far.
        again: to be done before the tasks that are not made yet.
        finished: results that nothing has fetched yet, with the seconds they took.
    """

    worker: Worker
    tasks: Iterator[Task]
    lost: dict[int, str]
    most: int
    failures: int = 0
    again: deque[Job] = field(default_factory=deque)
    finished: deque[tuple[Task, Result, float]] = field(default_factory=deque)

    def next(self) -> Job | None:
        """What to send now; None if there is nothing left."""
        while True:
            if self.again:
                job = self.again.popleft()
            elif (task := next(self.tasks, None)) is not None:
                job = Job(task)
            else:
                return None
            place = job.task.place
            lost = sorted(i for i in self.lost if place.start <= i < place.stop)
            if not lost or isinstance(job.task, Clean):
                return job
            if job.task.divisible:  # lost samples are pieces of their own
                self._cut(job, sorted({place.start, place.stop, *lost, *(i + 1 for i in lost)}))
            else:
                self._skip(job, self.lost[lost[0]])

    def samples(self, job: Job) -> Samples:
        """The samples of a job, as the data have them."""
        place = job.task.place
        if job.whole is not None:
            return job.whole.samples_of(place)
        data = self.worker.data
        return (*data.read(place.start, place.stop), data.ids(place.start, place.stop))

    def done(self, job: Job, result: Result, seconds: float) -> None:
        """A result came."""
        self.failures = 0
        self._keep(job, result, seconds)

    def failed(self, job: Job, why: str) -> None:
        """A worker died of a job, or had too little memory: again, in halves, or not any more."""
        place = job.task.place
        job.tries += 1
        self.failures += 1
        if self.failures >= self.most:
            raise InputError(
                f"{self.failures} tasks in a row failed, the last because {why}: give the workers "
                "more memory, a smaller chunk or batch size, or look at the model's own code."
            )
        _log.info("%s, samples %d to %d: %s", place.key, place.start, place.stop - 1, why)
        tries = TRIES
        if job.whole is not None:  # a piece is suspect already
            tries = 1 if job.task.divisible else TRIES_ALONE
        if job.tries < tries:
            self.again.appendleft(job)
        elif job.task.divisible:
            self._cut(job, [place.start, (place.start + place.stop) // 2, place.stop])
        else:
            self._skip(job, f"{why} {job.tries} times")

    def _keep(self, job: Job, result: Result, seconds: float) -> None:
        if job.whole is None:
            self.finished.append((job.task, result, seconds))
            return
        whole = job.whole
        whole.parts.append((job.task, result))
        whole.seconds += seconds
        whole.left -= 1
        if not whole.left:
            self.finished.append((whole.task, join(whole.parts), whole.seconds))

    def _cut(self, job: Job, edges: Sequence[int]) -> None:
        if job.whole is None:
            x, y = self.worker.rows(job.task.place)  # compared with their hashes
            job.whole = Whole(job.task, (x, y, self.samples(job)[2]))
        job.whole.left += len(edges) - 2
        pieces = [Job(job.task.cut(*ends), job.whole) for ends in pairwise(edges)]
        self.again.extendleft(reversed(pieces))

    def _skip(self, job: Job, reason: str) -> None:
        place = job.task.place
        samples = self.samples(job)
        if isinstance(job.task, Clean):  # a pass is enough to kill: no other task tries it
            self.lost |= dict.fromkeys(range(place.start, place.stop), reason)
        names = ", ".join(samples[2])
        _log.warning("%s: nothing is known about sample %s: %s", place.key, names, reason)
        mu = self.worker.mu[place.start : place.stop]
        self._keep(job, job.task.empty(samples, mu, reason), 0.0)
