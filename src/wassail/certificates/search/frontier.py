"""One branch and bound for all problems: open nodes with bounds, and what is known so far.

A search begins with a few open nodes, each with a bound on what it may hold. `step` replaces the
nodes with the loosest bounds by their children, `sift` closes the nodes that cannot matter any
more. What is claimed is always taken over everything: what is closed, what is open, and what is
out at workers, with the bounds it was handed out with. So a search may stop at any time.

With a pool (`workers`) the open nodes are shared among processes or machines. Once there are enough
of them the search hands out parts, each with the best solution known at that moment. A worker goes
on with its part for a second or so and returns the nodes that it left open and what it found, so
that no subtree keeps the others waiting. A worker may die: its part is handed out once more, and
when that is lost too its bounds stand: a valid bracket that may not close.

An answer does not depend on the worker that found it beyond the tolerance of the search; witnesses
and the number of nodes do.
"""

from __future__ import annotations

import copy
import logging
import pickle
import time
import traceback
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from wassail.certificates import clock
from wassail.certificates.search.open_nodes import NodesT, Open
from wassail.certificates.search.workers import Pool
from wassail.errors import InputError

ENOUGH = 8  # open nodes for each worker, before any are handed out
# seconds for a part; the second while there are fewer than so many nodes for each worker
LONG = 1.0
SHORT = 0.2
FEW = 16
POLL = 0.2  # seconds between looks at the clock
LOSSES = 2  # of a part, until its bounds stand
_log = logging.getLogger("wassail")
FoundT = TypeVar("FoundT")  # what a search knows besides its nodes


class Frontier(ABC, Generic[NodesT]):
    """A branch and bound on one processor; the mathematics is in the classes below it.

    open: the open nodes. Between steps what is claimed is valid, and a step that is interrupted
    leaves it so.
    """

    open: Open[NodesT]

    @abstractmethod
    def step(self) -> None:
        """Replace the loosest nodes by their children (see `taken`)."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether to stop although nodes are open: decided, out of time or of nodes."""

    def sift(self) -> None:
        """Close the nodes that cannot matter any more; called after every change."""

    def tell(self) -> None:
        """Say how far it is; called after `sift`."""

    def proceed(self) -> None:
        """Step by step until no node is open, or it is over."""
        while len(self.open) and not self.over:
            self.step()
            self.sift()
            self.tell()

    @contextmanager
    def taken(self, nodes: NodesT) -> Iterator[NodesT]:
        """Nodes that were taken out to be split. If that is interrupted they are open again."""
        try:
            yield nodes
        except BaseException:
            self.open.add(nodes)
            raise


@dataclass(frozen=True, eq=False)
class Part(Generic[NodesT, FoundT]):
    """Nodes for a worker to go on with.

    bound: the loosest of them; found: what is known when it begins; left: seconds.
    """

    nodes: NodesT
    bound: float
    found: FoundT
    left: float


@dataclass(frozen=True, eq=False)
class Report(Generic[NodesT, FoundT]):
    """What became of a part: the nodes that are open now, and what was found since it began."""

    nodes: NodesT
    found: FoundT


class SharedFrontier(Frontier[NodesT], Generic[NodesT, FoundT]):
    """A branch and bound whose open nodes can be handed out.

    out: the parts that workers have.
    """

    out: list[Part[NodesT, FoundT]]

    @abstractmethod
    def known(self, workers: int) -> FoundT:
        """What one of so many workers begins with."""

    @abstractmethod
    def begin(self, found: FoundT) -> None:
        """In a worker: begin with this. What is changed must not be shared with other parts."""

    @abstractmethod
    def since(self, found: FoundT) -> FoundT:
        """In a worker: what was found, if it began with this."""

    @abstractmethod
    def learn(self, found: FoundT) -> None:
        """Take over what a worker found."""

    @abstractmethod
    def stand(self, part: Part[NodesT, FoundT]) -> None:
        """Close a part that was lost, with the bounds it was handed out with."""

    def add(self, nodes: NodesT) -> None:
        """Nodes that are open again."""
        self.open.add(nodes)

    def behind(self, part: Part[NodesT, FoundT]) -> bool:
        """In a worker: whether others are likely to have nodes that matter more."""
        return False

    def bare(self) -> Self:
        """What a worker needs of the search: no nodes."""
        other = copy.copy(self)
        other.open = self.open.emptied()
        other.out = []
        return other

    @property
    def bounds(self) -> list[float]:
        """The loosest bounds of the nodes that are open here and of all parts that are out."""
        here = [self.open.loosest] if len(self.open) else []
        return here + [part.bound for part in self.out]

    def proceed(self, pool: Pool | None = None) -> None:
        """Until no node is open, or it is over; pool: where nodes are handed out."""
        while len(self.open) and not self.over:
            if pool is not None and len(self.open) >= ENOUGH * pool.workers:
                self.share(pool)
            else:
                self.step()
                self.sift()
                self.tell()

    def take(self, shares: int, workers: int = 1) -> Part[NodesT, FoundT] | None:
        """Hand out one of so many equal shares of the open nodes; None if there are none.

        workers: how many there are in all.
        """
        if not len(self.open):
            return None
        bound = self.open.loosest
        nodes = self.open.share(shares)
        part = Part(nodes, bound, self.known(workers), clock.seconds_left())
        self.out.append(part)
        return part

    def merge(self, part: Part[NodesT, FoundT], report: Report[NodesT, FoundT]) -> None:
        """What a worker made of a part: its open nodes are open here."""
        self.learn(report.found)
        self._back(part, report.nodes)

    def back(self, part: Part[NodesT, FoundT], lost: bool) -> None:
        """A part without a report: open again, or, if it is lost for good, closed."""
        if lost:
            self.stand(part)
            self._back(part, None)
        else:
            self._back(part, part.nodes)

    def _back(self, part: Part[NodesT, FoundT], nodes: NodesT | None) -> None:
        if nodes is not None:
            self.add(nodes)
        self.out.remove(part)
        self.sift()
        self.tell()

    def work(self, part: Part[NodesT, FoundT], seconds: float) -> Report[NodesT, FoundT]:
        """In a worker: go on with a part for about so many seconds, one step at least."""
        begin = time.monotonic()
        own = self.bare()
        own.begin(part.found)
        own.add(part.nodes)
        with clock.limited(part.left), suppress(clock.Late):
            own.sift()
            while len(own.open) and not own.over:
                own.step()
                own.sift()
                spent = time.monotonic() - begin
                if spent > seconds or (spent > seconds / 5 and own.behind(part)):
                    break
        return Report(own.open.everything(), own.since(part.found))

    def share(self, pool: Pool) -> None:
        """Hand out the open nodes until there are none, or the search is over."""
        desk = _Desk(pool, pickle.dumps(self.bare()))
        try:
            while not self.over and (len(self.open) or self.out):
                while (free := pool.workers - len(desk.flying)) > 0:
                    # Some stay here for the next worker that comes back, so that parts are mixed
                    # and none waits.
                    shares = max(free, min(2, pool.workers))
                    fresh = (self.take(shares, pool.workers), 0) if not desk.again else None
                    part, losses = fresh or desk.again.pop()
                    if part is None:
                        break
                    short = len(self.open) < FEW * pool.workers
                    desk.send(part, losses, SHORT if short else LONG)
                if not desk.flying:
                    break
                for part, report in desk.returned():
                    if report is None:
                        self.back(part, lost=True)
                    else:
                        self.merge(part, report)
        finally:  # Ctrl-C too: what is out counts with the bounds it was handed out with
            for part in desk.cancelled():
                self.back(part, lost=False)
        desk.complain()


class _Desk:
    """Parts that are out at the workers of a pool.

    flying: by their futures, with how often each was lost; again: to be handed out once more.
    """

    def __init__(self, pool: Pool, problem: bytes) -> None:
        self.pool = pool
        self.problem = problem
        self.key = uuid.uuid4().hex
        self.flying: dict[Future[Any], tuple[Any, int]] = {}
        self.again: list[tuple[Any, int]] = []
        self.reports = 0
        self.given_up = ""

    def send(self, part: Any, losses: int, seconds: float) -> None:
        """Hand out a part."""
        try:
            future = self.pool.submit(_work, self.key, self.problem, part, seconds)
        except Exception as error:  # a pool that has ended: as lost as a part whose worker died
            future = Future()
            future.set_exception(error)
        self.flying[future] = (part, losses)

    def returned(self) -> Iterator[tuple[Any, Any]]:
        """The parts that came back, with their reports; None for one that is lost for good."""
        for future in wait(self.flying, POLL, FIRST_COMPLETED).done:
            part, losses = self.flying[future]
            error = future.exception()
            if error is None:
                report = future.result()
                if isinstance(report, _Failure):
                    raise report.error from RuntimeError(report.trace)
                del self.flying[future]
                self.reports += 1
                yield part, report
                continue
            del self.flying[future]
            if losses + 1 < LOSSES:
                self.again.append((part, losses + 1))
            else:
                self.given_up = f"{type(error).__name__}: {error}".strip().splitlines()[0]
                yield part, None

    def cancelled(self) -> list[Any]:
        """Every part that is out, or waits to be handed out again; nothing comes back any more."""
        for future in self.flying:
            future.cancel()
        return [part for part, _ in (*self.flying.values(), *self.again)]

    def complain(self) -> None:
        """Say what was lost."""
        if self.given_up and not self.reports:
            raise InputError(
                f"no worker came back ({self.given_up}): they need wassail and memory, and a "
                "script that starts processes must guard "
                'itself with if __name__ == "__main__".'
            )
        if self.given_up:
            _log.warning(
                "part of the search was lost twice (%s): the bracket is valid but may not close",
                self.given_up,
            )


@dataclass(frozen=True)
class _Failure:
    """An exception in a worker, which goes on: the caller raises it."""

    error: Exception
    trace: str


_known: dict[str, SharedFrontier[Any, Any]] = {}  # in a worker: the problem at hand


def _work(key: str, data: bytes, part: Part[Any, Any], seconds: float) -> Any:
    """In a worker: go on with a part."""
    problem = _known.get(key)
    if problem is None:
        _known.clear()
        problem = _known[key] = pickle.loads(data)
    try:
        return problem.work(part, seconds)
    except MemoryError:
        raise  # as if the worker had died: another one may have more memory
    except Exception as error:
        trace = traceback.format_exc()
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # an exception that cannot travel
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return _Failure(error.with_traceback(None), trace)
