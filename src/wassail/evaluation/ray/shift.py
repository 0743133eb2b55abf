"""Evaluation on more than one process or machine, with Ray: `evaluate(..., runner=Ray(workers=8))`.

Workers are Ray actors: processes that load the model once and take one chunk of samples after the
other, whoever is free the next. A result depends on its task alone, so the files of a run are those
of a run in one process, to the byte, for the same chunk size and number of threads; a run may begin
here and go on there.

A worker may die (killed, out of memory, its machine gone) or hang (`timeout`): another one takes
its place and its chunk. A chunk that kills two workers is halved, then quartered and so on, and a
sample that kills even when it is alone is given up: the run goes on without it and says so. Only
such a chunk is not the same to the byte, for its pieces are batches of another size.

Samples are read where the run was started and travel with the tasks, so no other machine needs the
files. Where a worker finds the same files (a folder of images on a shared disk, say) it reads them
itself, and what it reads is compared by its hash.

A cluster that is started here listens on the loopback interface only, with a password of its own;
`address` joins one that is running. Ray is imported when it is needed: `pip install
"wassail[ray]"`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from types import TracebackType
from typing import Any, Self

from wassail.connection import Link, line_of
from wassail.errors import InputError
from wassail.evaluation.pieces import join
from wassail.evaluation.ray.actor import (
    Actor,
    Failure,
    Job,
    Whole,
    WorkerError,
    node_of,
    packed,
)
from wassail.evaluation.tasks.clean import Clean
from wassail.evaluation.tasks.task import Result, Samples, Task
from wassail.evaluation.work import Worker

DEATHS = 2  # of workers, until a chunk is taken to be the cause


# deaths with nothing finished in between, and two of each worker: then it is not the samples
IN_A_ROW = 12


QUICK = 5.0  # seconds: tasks that take less are sent before the one ahead of them is done


POLL = 0.5  # seconds between looks at clocks


ASK = 2.0  # seconds between questions for a worker's progress


LATE = 60.0  # seconds without a single worker until somebody should be told


_log = logging.getLogger("wassail")


@dataclass(eq=False)
class _Hand:
    """A worker as it is seen from here; queue: what it was sent, oldest first, `since` when
    that one was begun.
    """

    actor: Any
    loading: Any
    recipe: Any
    pid: int = 0
    node: str = ""
    sees: bool = False
    queue: deque[tuple[int, Job, Any]] = field(default_factory=deque)
    since: float = 0.0
    last: float = 0.0
    asked: Any = None
    heard: float = 0.0


class Ray:
    """A runner that does the tasks on Ray actors; also a context manager, which ends them.

    address: of a running cluster ("auto" for the one that this machine belongs to, or `host:port`);
    None starts one on this machine, which nobody else can reach. workers: how many processes, by
    default as many as the cluster has room for. gpus: of each worker; with more than 0 the model is
    moved to `cuda` there (0.5 puts two workers on one device). threads: of each worker. timeout:
    seconds after which a chunk is taken to hang; its worker is killed then.
    """

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        gpus: float = 0.0,
        threads: int = 1,
        timeout: float | None = None,
    ) -> None:
        for name, value, least in (
            ("workers", workers, 1),
            ("gpus", gpus, 0),
            ("threads", threads, 1),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} is {value}: give a number of at least {least}.")
        if timeout is not None and not timeout > 0:
            raise InputError(f"timeout is {timeout}: give a positive number of seconds.")
        self.address = address
        self.wanted = workers
        self.gpus = gpus
        self.threads = threads
        self.timeout = timeout
        self._link: Link | None = None
        self._hands: list[_Hand] = []
        self._worker: Worker | None = None
        self._recipe: Any = None
        self._kind: Any = None
        self._deadly: dict[int, str] = {}  # samples that no pass of the model survives, and why

    @property
    def workers(self) -> int:
        """How many processes work at once."""
        return len(self._hands) if self._hands else self._room(self._connected())

    @property
    def about(self) -> dict[str, Any]:
        """What the results depend on: a run records it in place of this process's device and
        threads.
        """
        return {"device": "cuda" if self.gpus else "cpu", "threads": self.threads}

    def pids(self) -> list[int]:
        """The process ids of the workers that are ready, each on its own machine."""
        return [hand.pid for hand in self._hands if hand.pid]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and the cluster if it was started here."""
        self._dismiss()
        if self._link is not None:
            self._link.close()
        self._link = self._kind = None

    def run(
        self, worker: Worker, tasks: Iterable[Task], tick: Callable[[Task, float], None]
    ) -> Iterator[tuple[Task, Result, float]]:
        """See `Runner`. Tasks are asked for when a worker is free, results come as they are
        ready, in any order.
        """
        source = iter(tasks)
        first = next(source, None)
        if first is None:  # all of it was done before: no need for a cluster
            return
        try:
            self._hire(worker)
            yield from _Shift(self, worker, chain([first], source), tick).results()
        except BaseException:  # Ctrl-C, or whoever asked does not want the rest
            self._dismiss()
            raise

    # Workers come and go.

    def _connected(self) -> Any:
        if self._link is None:
            cpus = None if self.wanted is None else self.wanted * self.threads
            self._link = Link(self.address, cpus)
            options = {
                "num_cpus": self.threads,
                "num_gpus": self.gpus,
                "max_restarts": 0,
                "max_task_retries": 0,
            }
            names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
            env = {"env_vars": dict.fromkeys(names, str(self.threads))}
            self._kind = self._link.ray.remote(
                **options, concurrency_groups={"ask": 1}, runtime_env=env
            )(Actor)
        return self._link.ray

    def _room(self, ray: Any) -> int:
        """How many workers there are to be."""
        if self.wanted is not None and not (self.gpus and self.address is None):
            return self.wanted  # a cluster may grow, this machine will not
        has = ray.cluster_resources()
        room = has.get("CPU", 0) // self.threads
        room = min(room, has.get("GPU", 0) // self.gpus) if self.gpus else room
        if room < (self.wanted or 1):
            raise InputError(
                f"the cluster has {has.get('CPU', 0):g} CPUs and {has.get('GPU', 0):g} GPUs, and "
                "each worker needs "
                f"{self.threads} and {self.gpus:g}: ask for less, or for fewer workers."
            )
        return self.wanted or int(room)

    def _hire(self, worker: Worker) -> None:
        """As many workers as there are to be, with the model that is now wanted."""
        ray = self._connected()
        if self._worker is not worker:
            self._worker = worker
            self._recipe = ray.put(packed(worker))
            self._deadly = {}
        for hand in self._hands:
            if hand.recipe is not self._recipe:
                hand.loading = hand.actor.load.remote(self._recipe)
                hand.recipe = self._recipe
        while len(self._hands) < self._room(ray):
            self._hands.append(self._hired())

    def _hired(self) -> _Hand:
        actor = self._kind.remote(self.threads, self.gpus > 0)
        return _Hand(actor, actor.load.remote(self._recipe), self._recipe)

    def _dismiss(self) -> None:
        for hand in self._hands:
            self._end(hand)
        self._hands = []
        self._worker = None
        self._recipe = None

    def _end(self, hand: _Hand) -> None:
        assert self._link is not None
        with contextlib.suppress(Exception):  # it may be gone, or the cluster may
            self._link.ray.kill(hand.actor, no_restart=True)


class _Shift:
    """One stage of a run: tasks given out, results taken back, the dead replaced."""

    def __init__(
        self,
        office: Ray,
        worker: Worker,
        tasks: Iterator[Task],
        tick: Callable[[Task, float], None],
    ) -> None:
        self.office = office
        self.worker = worker
        self.tasks = tasks
        self.tick = tick
        self.ray = office._connected()
        self.again: deque[Job] = deque()
        self.numbers = 0
        self.deaths = 0
        self.begun = time.monotonic()
        self.told = False
        self.finished: deque[tuple[Task, Result, float]] = deque()

    @property
    def hands(self) -> list[_Hand]:
        return self.office._hands

    def results(self) -> Iterator[tuple[Task, Result, float]]:
        """Until every task is done."""
        while self._give_out():
            self._look()
            while self.finished:
                task, result, seconds = self.finished.popleft()
                self.tick(task, 1.0)
                yield task, result, seconds

    # Giving out.

    def _give_out(self) -> bool:
        """Send tasks to those that are free, one each before anybody gets a second; whether
        there is anything to wait for.
        """
        for depth in (1, 2):
            for hand in self.hands:
                ready = (
                    hand.loading is None
                    and len(hand.queue) < depth
                    and (depth == 1 or 0 < hand.last < QUICK)
                )
                job = self._next() if ready else None
                if job is not None:
                    self._send(hand, job)
        return bool(
            self.finished or self.again or any(hand.queue for hand in self.hands) or self._more()
        )

    def _more(self) -> bool:
        """Whether there is a task left; it is put where the next one is taken from."""
        job = self._next()
        if job is not None:
            self.again.appendleft(job)
        return job is not None

    def _next(self) -> Job | None:
        while not self.again:
            task = next(self.tasks, None)
            if task is None:
                return None
            deadly = sorted(
                i for i in self.office._deadly if task.place.start <= i < task.place.stop
            )
            if not deadly or isinstance(task, Clean):
                return Job(task)
            self._around(task, deadly)
        return self.again.popleft()

    def _send(self, hand: _Hand, job: Job) -> None:
        task = job.task
        if job.whole is not None:
            a = task.place.start - job.whole.task.place.start
            b = task.place.stop - job.whole.task.place.start
            x, y, ids = job.whole.samples
            samples = (x[a:b].clone(), y[a:b].clone(), ids[a:b])
        elif hand.sees and not task.sent:
            samples = None
        else:
            samples = self._read(task)
        self.numbers += 1
        if not hand.queue:
            hand.since = time.monotonic()
        hand.queue.append((self.numbers, job, hand.actor.work.remote(self.numbers, task, samples)))

    def _read(self, task: Task) -> Samples:
        data = self.worker.data
        return (
            *data.read(task.place.start, task.place.stop),
            data.ids(task.place.start, task.place.stop),
        )

    # Taking back.

    def _look(self) -> None:
        """Wait for something to happen, and see to it."""
        waiting: dict[Any, tuple[_Hand, str]] = {}
        now = time.monotonic()
        for hand in self.hands:
            if hand.loading is not None:
                waiting[hand.loading] = (hand, "loaded")
            if hand.queue:
                waiting[hand.queue[0][2]] = (hand, "worked")
                if hand.asked is None and now - hand.heard > ASK:
                    hand.asked = hand.actor.share.options(concurrency_group="ask").remote()
        if waiting:
            done, _ = self.ray.wait(list(waiting), num_returns=1, timeout=POLL)
            for ref in done:
                hand, what = waiting[ref]
                self._loaded(hand, ref) if what == "loaded" else self._worked(hand, ref)
        self._watch()

    def _loaded(self, hand: _Hand, ref: Any) -> None:
        found = self._got(hand, ref)
        if isinstance(found, Failure):
            raise InputError(
                f"a worker could not load the model ({type(found.error).__name__}: "
                f"{line_of(found.error)}): install the model's "
                "code and wassail on every machine of the cluster, in the same versions."
            ) from WorkerError(found.trace)
        if found is not None:
            (hand.pid, hand.node, hand.sees), hand.loading = found, None

    def _worked(self, hand: _Hand, ref: Any) -> None:
        found = self._got(hand, ref)
        if found is None:
            return
        _, job, _ = hand.queue.popleft()
        hand.since = time.monotonic()
        if isinstance(found, Failure):
            if not found.memory:
                raise found.error from (
                    None if isinstance(found.error, InputError) else WorkerError(found.trace)
                )
            self._suspect(job, f"it needs more memory than there is ({line_of(found.error)})")
            return
        self.deaths = 0
        result, hand.last = found
        self._done(job, result, hand.last)

    def _got(self, hand: _Hand, ref: Any) -> Any:
        """What a worker returned; None if it died."""
        errors = self.ray.exceptions
        try:
            return self.ray.get(ref)
        except (
            errors.RayActorError,
            errors.WorkerCrashedError,
            errors.OutOfMemoryError,
            errors.ObjectLostError,
        ) as error:
            if "creation task" in str(error):  # not killed: it could not even begin
                reason = str(error).strip().splitlines()[-1]
                raise InputError(
                    f"a worker could not start ({reason}): install wassail on every machine alike."
                ) from error
            self._died(hand, "it killed its worker", line_of(error))
            return None

    def _done(self, job: Job, result: Result, seconds: float) -> None:
        if job.whole is None:
            self.finished.append((job.task, result, seconds))
            return
        whole = job.whole
        whole.parts.append((job.task, result))
        whole.open = whole.open - 1
        whole.seconds = whole.seconds + seconds
        if not whole.open:
            parts = sorted(whole.parts, key=lambda part: part[0].place.start)
            self.finished.append(
                (whole.task, join(parts) if len(parts) > 1 else parts[0][1], whole.seconds)
            )

    # Deaths.

    def _watch(self) -> None:
        """Progress, and who has taken too long."""
        now = time.monotonic()
        limit = self.office.timeout
        for hand in list(self.hands):
            if hand.asked is not None and self.ray.wait([hand.asked], timeout=0)[0]:
                with contextlib.suppress(
                    self.ray.exceptions.RayError
                ):  # its death is seen by the task
                    number, share = self.ray.get(hand.asked)
                    if hand.queue and hand.queue[0][0] == number and hand.queue[0][1].whole is None:
                        self.tick(hand.queue[0][1].task, share)
                hand.asked = None
                hand.heard = now
            late = limit is not None and hand.queue and now - hand.since > limit
            if (
                late and not self.ray.wait([hand.queue[0][2]], timeout=0)[0]
            ):  # else it is we who are late
                if hand.node == node_of(self.ray):  # a process that is stopped does not hear ray
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(hand.pid, signal.SIGKILL)
                self._died(hand, f"it took more than {limit:g} s", "killed")
        if any(hand.loading is None for hand in self.hands):
            self.begun = now
        elif now - self.begun > LATE and not self.told:
            self.told = True
            _log.warning(
                "no worker has started yet: the cluster is busy, or has no machine with %d CPUs "
                "and %g GPUs",
                self.office.threads,
                self.office.gpus,
            )

    def _died(self, hand: _Hand, why: str, detail: str) -> None:
        """Another worker in its place; what it had in hand is suspect, what it had not begun is
        not.
        """
        self.office._end(hand)
        self.hands[self.hands.index(hand)] = self.office._hired()
        self.deaths += 1
        if self.deaths >= IN_A_ROW + 2 * len(self.hands):
            raise InputError(
                f"{self.deaths} workers in a row died with nothing done ({detail}): give them "
                "more memory, a smaller chunk or "
                "batch size, or look at the model's own code."
            )
        jobs = [job for _, job, _ in hand.queue]
        self.again.extendleft(reversed(jobs[1:]))
        if jobs:
            _log.info(
                "%s, samples %d to %d: %s (%s)",
                jobs[0].task.place.key,
                jobs[0].task.place.start,
                jobs[0].task.place.stop - 1,
                why,
                detail,
            )
            self._suspect(jobs[0], why)

    def _suspect(self, job: Job, why: str) -> None:
        """A task that somebody died of: again, in halves, or not any more."""
        task = job.task
        job.deaths = job.deaths + 1
        halves = task.divisible
        if job.deaths < (1 if job.whole is not None and halves else DEATHS):
            self.again.appendleft(job)
        elif halves:
            middle = (task.place.start + task.place.stop) // 2
            self._cut(job, [(task.place.start, middle), (middle, task.place.stop)])
        else:
            self._give_up(job, f"{why} twice")

    def _cut(self, job: Job, bounds: Sequence[tuple[int, int]]) -> None:
        whole = job.whole or Whole(
            job.task, (*self.worker.rows(job.task.place), self._read(job.task)[2]), 1
        )
        whole.open += len(bounds) - 1
        self.again.extendleft(Job(job.task.cut(*bound), 0, whole) for bound in reversed(bounds))

    def _give_up(self, job: Job, reason: str) -> None:
        task = job.task
        x, y, ids = self._read(task)
        if isinstance(task, Clean):  # a pass is enough to kill: nothing else needs to try it
            self.office._deadly |= dict.fromkeys(range(task.place.start, task.place.stop), reason)
        _log.warning(
            "%s: nothing is known about sample %s: %s", task.place.key, ", ".join(ids), reason
        )
        self._done(
            job,
            task.empty((x, y, ids), self.worker.mu[task.place.start : task.place.stop], reason),
            0.0,
        )

    def _around(self, task: Task, deadly: Sequence[int]) -> None:
        """A task without the samples that no model pass survives."""
        job = Job(task)
        if not task.divisible:
            self._give_up(job, f"sample {deadly[0]}: {self.office._deadly[deadly[0]]}")
            return
        edges = sorted({task.place.start, task.place.stop, *deadly, *(i + 1 for i in deadly)})
        self._cut(job, list(pairwise(edges)))
        for piece in [
            piece
            for piece in self.again
            if piece.task.place.start in deadly and piece.whole is not None
        ]:
            self.again.remove(piece)
            self._give_up(piece, self.office._deadly[piece.task.place.start])
