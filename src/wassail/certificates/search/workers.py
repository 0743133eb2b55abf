"""One hard problem on several workers: the open nodes of a branch and bound, shared among processes
or machines.

The search begins where it was called. Once it has enough open nodes it hands out parts of them,
each with the best solution known at that moment; a worker goes on with its part for a second or so
and returns what it closed, the best solution that it found, and the nodes that it left open, so
that no subtree keeps the others waiting. What is claimed is always taken over everything: what is
closed, what is open, and what is out at the workers, with the bounds it was handed out with. So a
worker may die: its part is handed out once more, and when that is lost too its bounds stand: a
valid bracket that may not close.

Workers are processes of this machine (`Processes`), of a Ray cluster (`OnRay`), or anything else
with `submit`. An answer does not depend on who found it beyond the tolerance of the search;
witnesses and the number of nodes do.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, TypeAlias

import torch
from typing_extensions import Self

from wassail.errors import InputError

ENOUGH = 8  # open nodes for each worker, before any are handed out
MOST = 512  # nodes handed out at once
# seconds for a part; the second while there are fewer than so many nodes for each worker
LONG = 1.0
SHORT = 0.2
FEW = 16
POLL = 0.2  # seconds between looks at the clock
LOSSES = 2  # of a part, until its bounds stand

_log = logging.getLogger("wassail")


class Pool(Protocol):
    """Where calls are made: `submit` of a `concurrent.futures.Executor`, and how many of them
    run at once.
    """

    @property
    def workers(self) -> int:
        """How many calls run at once."""

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Make a call somewhere; the future fails if its worker dies."""


Workers: TypeAlias = "int | Pool | None"


class Problem(Protocol):
    """What every worker of a search needs; pickled, and sent along with every part."""

    def work(self, part: Any, seconds: float) -> Any:
        """Go on with a part for about so many seconds (one step at least): a report for
        `Shared.merge`. Changes nothing.
        """


class Shared(Protocol):
    """A search with open nodes that others can work on."""

    @property
    def over(self) -> bool:
        """Whether the search may stop: closed, decided, out of time."""

    def __len__(self) -> int:
        """How many nodes are open here, those that are out at workers not counted."""

    def take(self, shares: int) -> Any:
        """One of so many equal shares of the open nodes, hard and easy ones alike, at most
        MOST; None if there are none.
        """

    def merge(self, part: Any, report: Any) -> None:
        """What a worker made of a part; from now on the part is in again."""

    def back(self, part: Any, lost: bool) -> None:
        """A part that nobody worked on is open again; lost: nobody ever will, its bounds stand."""


def share(search: Shared, problem: Problem, pool: Pool) -> None:
    """Hand out the open nodes of a search until there are none, or it is over."""
    key = uuid.uuid4().hex
    data = pickle.dumps(problem)
    flying: dict[Future[Any], tuple[Any, int]] = {}
    again: list[tuple[Any, int]] = []
    returned = 0
    given_up = ""
    try:
        while not search.over:
            while (free := pool.workers - len(flying)) > 0:
                # Some stay here for whoever comes back next, so that parts are mixed and nobody
                # waits.
                part, losses = (
                    again.pop() if again else (search.take(max(free, min(2, pool.workers))), 0)
                )
                if part is None:
                    break
                seconds = SHORT if len(search) < FEW * pool.workers else LONG
                flying[_sent(pool, key, data, part, seconds)] = (part, losses)
            if not flying:
                break
            for future in wait(flying, POLL, FIRST_COMPLETED).done:
                part, losses = flying.pop(future)
                error = future.exception()
                if error is None:
                    returned += 1
                    search.merge(part, _opened(future.result()))
                elif losses + 1 < LOSSES:
                    again.append((part, losses + 1))
                else:
                    given_up = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                    search.back(part, lost=True)
    finally:  # Ctrl-C too: what is out counts with the bounds it was handed out with
        for future, (part, _) in flying.items():
            future.cancel()
            search.back(part, lost=False)
        for part, _ in again:
            search.back(part, lost=False)
    if given_up and not returned:
        raise InputError(
            f"no worker came back ({given_up}): they need wassail and memory, and a script that "
            "starts processes must guard "
            'itself with if __name__ == "__main__".'
        )
    if given_up:
        _log.warning(
            "part of the search was lost twice (%s): the bracket is valid but may not close",
            given_up,
        )


def _sent(pool: Pool, key: str, data: bytes, part: Any, seconds: float) -> Future[Any]:
    try:
        return pool.submit(_work, key, data, part, seconds)
    except Exception as error:  # a pool that has ended: as lost as a part whose worker died
        future: Future[Any] = Future()
        future.set_exception(error)
        return future


@dataclass(frozen=True)
class _Failure:
    """An exception in a worker: a mistake, not a death."""

    error: Exception
    trace: str


def _opened(report: Any) -> Any:
    if isinstance(report, _Failure):
        raise report.error from RuntimeError(report.trace)
    return report


_known: dict[str, Problem] = {}  # in a worker: the problem at hand


def _work(key: str, data: bytes, part: Any, seconds: float) -> Any:
    """In a worker: go on with a part."""
    problem = _known.get(key)
    if problem is None:
        _known.clear()
        problem = _known[key] = pickle.loads(data)
    try:
        return problem.work(part, seconds)
    except MemoryError:
        raise  # as good as dead: somebody else may have more
    except Exception as error:
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception that cannot travel
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _Failure(error.with_traceback(None), trace)


# ---- Who does the work
# --------------------------------------------------------------------------------------------------


@contextmanager
def crew(workers: Workers) -> Iterator[Pool | None]:
    """The pool that was given, or as many processes as were asked for, which end with the
    block; None for none.
    """
    if isinstance(workers, int):
        with Processes(workers) as pool:
            yield pool
    elif workers is None or (hasattr(workers, "submit") and hasattr(workers, "workers")):
        yield workers
    else:
        raise InputError(
            f"workers is {workers!r}: give a number of processes, or "
            "certificates.search.workers.OnRay(...)."
        )


class Processes:
    """Worker processes on this machine, with so many threads each. One that dies is replaced. Also
    a context manager.

    They start when they are needed, and import the main script as `multiprocessing` does: it needs
    the usual guard.
    """

    def __init__(self, workers: int, threads: int = 1) -> None:
        if workers < 1 or threads < 1:
            raise InputError(
                f"{workers} workers with {threads} threads each cannot work: give at least 1 of "
                "both."
            )
        self.workers = workers
        self.threads = threads
        # One process per pool: a pool ends with the first process that dies. A server process that
        # has imported torch once makes new ones at once, and unlike a fork of this process it has
        # no threads to break.
        methods = multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context(
            "forkserver" if "forkserver" in methods else "spawn"
        )
        if "forkserver" in methods:
            self._context.set_forkserver_preload(["__main__", "wassail.certificates.radii"])
        self._pools: list[ProcessPoolExecutor | None] = [None] * workers
        self._last: list[Future[Any] | None] = [None] * workers

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call it in a process that is free, else after what the first of them is doing."""
        free = (i for i, last in enumerate(self._last) if last is None or last.done())
        i = next(free, 0)
        pool = self._pools[i] or self._hired()
        try:
            future = pool.submit(function, *args)
        except BrokenProcessPool:
            pool = self._hired()
            future = pool.submit(function, *args)
        self._pools[i], self._last[i] = pool, future
        return future

    def _hired(self) -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, self._context, _begin, (self.threads,))

    def close(self) -> None:
        """Let them go; what they have in hand is of no use to anybody."""
        for pool in self._pools:
            if pool is not None:
                pool.shutdown(wait=False, cancel_futures=True)
        self._pools = [None] * self.workers
        self._last = [None] * self.workers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _begin(threads: int) -> None:
    """In a new process: Ctrl-C is for the one that was started by hand."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)


class OnRay:
    """Workers on a Ray cluster, each call a task of its own with so many threads. Also a context
    manager.

    address: as of `wassail.evaluation.ray.shift.Ray`; None starts a cluster on this machine that
    nobody else can reach. workers: how many calls run at once, by default as many as the cluster
    has CPUs for.
    """

    def __init__(
        self, address: str | None = None, workers: int | None = None, threads: int = 1
    ) -> None:
        from wassail.connection import Link

        if threads < 1 or (workers is not None and workers < 1):
            raise InputError(
                f"{workers} workers with {threads} threads each cannot work: give at least 1 of "
                "both."
            )
        self.threads = threads
        self._link = Link(address, None if workers is None else workers * threads)
        ray = self._link.ray
        self.workers = workers or max(1, int(ray.cluster_resources().get("CPU", 0) // threads))
        # Who dies is told once: parts that are lost are counted here.
        self._call: Any = ray.remote(num_cpus=threads, max_retries=0)(_threaded)

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future[Any]:
        """Call it as a task of the cluster."""
        future: Future[Any] = self._call.remote(self.threads, function, *args).future()
        return future

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _threaded(threads: int, function: Callable[..., Any], *args: Any) -> Any:
    """In a task of a cluster: the call, on that many threads."""
    torch.set_num_threads(threads)
    return function(*args)
