"""Evaluation on more than one process or machine, with Ray: `evaluate(..., runner=Ray(workers=8))`.

Workers are Ray actors. A result depends on its task alone, so the files of a run are those of a run
in one process, to the byte, for the same chunk size and number of threads.

Ray keeps the model and the samples in its store, places the workers, and starts one that died
again where there is room (`max_restarts`). Its task goes to any worker that is free: see `jobs.py`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, Self

from wassail.connection import Link, line_of
from wassail.errors import InputError
from wassail.evaluation.jobs import Job, Queue
from wassail.evaluation.ray.worker import Actor, UnreadError, is_memory, packed
from wassail.evaluation.tasks.task import Result, Task
from wassail.evaluation.work import Worker

IN_A_ROW = 12  # failures with nothing done in between: then it is not the samples
LATE = 60.0  # seconds without a worker until a warning
POLL = 0.5  # seconds between looks at the clock

_log = logging.getLogger("wassail")


class WorkerError(Exception):
    """Where in a worker an exception came from: the cause of the exception that is raised here."""


class Ray:
    """A runner that does the tasks on Ray actors; also a context manager, which ends them.

    address: of a running cluster ("auto" for the one that this machine belongs to, or `host:port`);
    None starts one on this machine, which no other machine can reach. workers: how many processes,
    by default as many as the cluster has room for. gpus: of each worker; with more than 0 the model
    is moved to `cuda` there (0.5 puts two workers on one device). threads: of each worker. timeout:
    seconds after which a task is taken to hang; its worker is killed then.
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
        self._actors: list[Any] = []
        self._worker: Worker | None = None
        self._recipe: Any = None
        self._lost: dict[int, str] = {}  # samples that no pass of the model survives, and why
        self.sends = False  # samples, with every task: not every worker can read them

    @property
    def workers(self) -> int:
        """How many processes work at once."""
        return len(self._actors) if self._actors else self._room(self._connected())

    @property
    def about(self) -> dict[str, Any]:
        """What the results depend on: a run records it in place of this process's device and
        threads.
        """
        return {"device": "cuda" if self.gpus else "cpu", "threads": self.threads}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, and the cluster if it was started here."""
        self._dismiss()
        if self._link is not None:
            self._link.close()
        self._link = None

    def run(
        self, worker: Worker, tasks: Iterable[Task], tick: Callable[[Task, float], None]
    ) -> Iterator[tuple[Task, Result, float]]:
        """See `Runner`. Tasks are made when a worker is free, results come as they are ready."""
        source = iter(tasks)
        first = next(source, None)
        if first is None:  # all of it was done before: no need for a cluster
            return
        try:
            self._hire(worker)
            queue = Queue(worker, chain([first], source), self._lost, IN_A_ROW + 2 * self.workers)
            yield from self._results(queue, tick)
        except BaseException:  # Ctrl-C, or the rest is not wanted
            self._dismiss()
            raise

    def _connected(self) -> Any:
        if self._link is None:
            cpus = None if self.wanted is None else self.wanted * self.threads
            self._link = Link(self.address, cpus)
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
                f"each worker needs {self.threads} and {self.gpus:g}: ask for less, or for fewer "
                "workers."
            )
        return self.wanted or int(room)

    def _hire(self, worker: Worker) -> None:
        """The workers, and the model that is now wanted."""
        ray = self._connected()
        if self._worker is not worker:
            self._worker = worker
            self._recipe = ray.put(packed(worker))
            self._lost = {}
            self.sends = False
        if self._actors:
            return
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        kind = ray.remote(
            num_cpus=self.threads,
            num_gpus=self.gpus,
            max_restarts=-1,
            max_task_retries=-1,
            runtime_env={"env_vars": dict.fromkeys(names, str(self.threads))},
        )(Actor)
        for _ in range(self._room(ray)):
            self._actors.append(kind.remote(self.threads, self.gpus > 0))

    def _dismiss(self) -> None:
        for actor in self._actors:
            with contextlib.suppress(Exception):  # it may be gone, or the cluster may
                self._connected().kill(actor)
        self._actors = []
        self._worker = None
        self._recipe = None

    def _results(
        self, queue: Queue, tick: Callable[[Task, float], None]
    ) -> Iterator[tuple[Task, Result, float]]:
        """Until every task is done: each worker has one at a time."""
        ray = self._connected()
        idle = list[Any]()
        busy: dict[Any, tuple[Any, Job]] = {}
        starting = {actor.__ray_ready__.remote(): actor for actor in self._actors}
        late = time.monotonic() + LATE
        while True:
            while idle and (sent := queue.next()) is not None:
                actor = idle.pop()
                busy[self._sent(actor, sent, queue)] = (actor, sent)
                tick(sent.whole.task if sent.whole else sent.task, 0.0)
            while queue.finished:
                found = queue.finished.popleft()
                tick(found[0], 1.0)
                yield found
            if idle and not busy:
                return
            done, _ = ray.wait([*busy, *starting], num_returns=1, timeout=POLL)
            for ref in done:
                if ref in starting:
                    idle.append(starting.pop(ref))
                    continue
                actor, job = busy.pop(ref)
                if self._take(ref, job, queue):
                    idle.append(actor)
                else:
                    starting[actor.__ray_ready__.remote()] = actor
            self._watch(busy.values())
            if not (idle or busy) and time.monotonic() > late:
                late = math.inf
                _log.warning(
                    "no worker has started yet: the cluster is busy, or has no machine with %d "
                    "CPUs and %g GPUs",
                    self.threads,
                    self.gpus,
                )

    def _sent(self, actor: Any, job: Job, queue: Queue) -> Any:
        samples = queue.samples(job) if job.whole or job.task.sent or self.sends else None
        job.since = time.monotonic()
        # Ray would do it again on the same actor, which may wait for a machine that is lost.
        work = actor.work.options(max_task_retries=0)
        return work.remote([self._recipe], job.task, samples)

    def _watch(self, busy: Iterable[tuple[Any, Job]]) -> None:
        """Kill workers whose task takes too long: Ray starts them again."""
        now = time.monotonic()
        for actor, job in busy:
            if self.timeout is not None and now - job.since > self.timeout:
                job.since = math.inf
                self._connected().kill(actor, no_restart=False)

    def _take(self, ref: Any, job: Job, queue: Queue) -> bool:
        """A result, or what kept it from coming; returns whether the worker is alive."""
        ray = self._connected()
        try:
            result, seconds = ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UnreadError):
                self.sends = True
                queue.again.appendleft(job)
            elif is_memory(cause):
                queue.failed(job, f"it needs more memory than there is ({line_of(cause)})")
            else:
                raise cause from WorkerError(str(error))
        except ray.exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):  # not killed: it could not even begin
                reason = str(error).strip().splitlines()[-1]
                raise InputError(
                    f"a worker could not start ({reason}): install wassail on every machine alike."
                ) from error
            late = f"it took more than {self.timeout or 0:g} s"
            queue.failed(job, late if job.since == math.inf else "it killed its worker")
            return False
        else:
            queue.done(job, result, seconds)
        return True
