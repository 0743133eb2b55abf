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
import heapq
import logging
import pickle
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.errors import InputError
from wassail.ties import in_order

HANDED_OUT_NODES = 512  # nodes handed out at once
ENOUGH = 8  # open nodes for each worker, before any are handed out
# seconds for a part; the second while there are fewer than so many nodes for each worker
LONG = 1.0
SHORT = 0.2
FEW = 16
POLL = 0.2  # seconds between looks at the clock
LOSSES = 2  # of a part, until its bounds stand


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


@contextmanager
def crew(workers: Workers) -> Iterator[Pool | None]:
    """The pool that was given, or as many processes as were asked for, which end with the
    block; None for none.
    """
    if isinstance(workers, int):
        from wassail.certificates.search.workers import Processes

        with Processes(workers) as pool:
            yield pool
    elif workers is None or (hasattr(workers, "submit") and hasattr(workers, "workers")):
        yield workers
    else:
        raise InputError(
            f"workers is {workers!r}: give a number of processes, or an object with `submit` and "
            "`workers`."
        )


class Bounded(Protocol):
    """A node by itself."""

    @property
    def bound(self) -> float:
        """From above, on what it may hold."""


class Rows(Protocol):
    """Nodes as rows of tensors."""

    @property
    def bound(self) -> Tensor:
        """The bound of each node."""

    def take(self, rows: Tensor, /) -> Self:
        """Some of them, by indices."""

    def join(self, other: Self, /) -> Self:
        """These, then the others."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, eq=False)
class TensorRows:
    """A record of tensors with a row for each node: some of them, or two after each other."""

    def take(self, rows: Tensor) -> Self:
        """Some of them, by indices or a mask."""
        return type(self)(*(getattr(self, f.name)[rows] for f in fields(self)))

    def join(self, other: Self) -> Self:
        """These, then the others."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return type(self)(*(torch.cat(pair) for pair in pairs))

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))


NodesT = TypeVar("NodesT")  # several nodes: a list, or rows
NodeT = TypeVar("NodeT", bound=Bounded)
RowsT = TypeVar("RowsT", bound=Rows)


class Open(Protocol[NodesT]):
    """The open nodes of a search, in the order of their bounds: the loosest first."""

    def __len__(self) -> int: ...

    @property
    def loosest(self) -> float:
        """The first bound; there is at least one node."""

    def add(self, nodes: NodesT) -> None:
        """More nodes."""

    def first(self, count: int) -> NodesT:
        """Take out the first so many."""

    def share(self, shares: int) -> NodesT:
        """Take out every so many-th, hard and easy ones alike, at most HANDED_OUT_NODES."""

    def everything(self) -> NodesT:
        """All of them, in no order."""

    def emptied(self) -> Self:
        """The same kind, with no nodes."""


class Heap(Generic[NodeT]):
    """Open nodes that are objects: the largest bound first, equal ones in the order they came."""

    def __init__(self) -> None:
        self.entries: list[tuple[float, int, NodeT]] = []
        self.pushed = 0

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def loosest(self) -> float:
        """The largest bound."""
        return -self.entries[0][0]

    @property
    def top(self) -> NodeT:
        """The node with the largest bound."""
        return self.entries[0][2]

    def push(self, node: NodeT) -> None:
        """One more node."""
        heapq.heappush(self.entries, (-node.bound, self.pushed, node))
        self.pushed += 1

    def add(self, nodes: list[NodeT]) -> None:
        """More nodes."""
        for node in nodes:
            self.push(node)

    def first(self, count: int, like: Callable[[NodeT], bool] = lambda node: True) -> list[NodeT]:
        """Take out the first so many, as long as they are like this."""
        taken: list[NodeT] = []
        while self.entries and len(taken) < count and like(self.top):
            taken.append(heapq.heappop(self.entries)[2])
        return taken

    def share(self, shares: int) -> list[NodeT]:
        """Take out every so many-th, at most HANDED_OUT_NODES."""
        taken: list[NodeT] = []
        rest: list[tuple[float, int, NodeT]] = []
        while self.entries and len(taken) < HANDED_OUT_NODES:
            taken.append(heapq.heappop(self.entries)[2])
            between = min(shares - 1, len(self.entries))
            rest += [heapq.heappop(self.entries) for _ in range(between)]
        for entry in rest:
            heapq.heappush(self.entries, entry)
        return taken

    def prune(self, cut: float) -> list[NodeT]:
        """Take out all nodes with a bound of at most this."""
        closed = [node for bound, _, node in self.entries if -bound <= cut]
        if closed:
            self.entries = [entry for entry in self.entries if -entry[0] > cut]
            heapq.heapify(self.entries)
        return closed

    def everything(self) -> list[NodeT]:
        """All of them."""
        return [node for _, _, node in self.entries]

    def emptied(self) -> Heap[NodeT]:
        """A heap without nodes."""
        return Heap()


class Table(Generic[RowsT]):
    """Open nodes that are rows of tensors.

    Args:
        rows: the nodes.
        descending: whether the largest bound is the loosest; else the least.
        order: the places of bounds from the loosest on; default: `ties.in_order`.
    """

    def __init__(
        self,
        rows: RowsT,
        descending: bool = False,
        order: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.rows = rows
        self.descending = descending
        self._order = order

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def loosest(self) -> float:
        """The first bound."""
        bound = self.rows.bound
        return float(bound.max() if self.descending else bound.min())

    def order(self) -> Tensor:
        """The places of the nodes, the loosest first."""
        if self._order is not None:
            return self._order(self.rows.bound)
        return in_order(self.rows.bound, descending=self.descending)

    def add(self, nodes: RowsT) -> None:
        """More nodes."""
        self.rows = self.rows.join(nodes) if len(self.rows) else nodes

    def first(self, count: int) -> RowsT:
        """Take out the first so many."""
        order = self.order()
        taken = self.rows.take(order[:count])
        self.rows = self.rows.take(order[count:])
        return taken

    def share(self, shares: int) -> RowsT:
        """Take out every so many-th, at most HANDED_OUT_NODES; all stay in their order."""
        chosen = torch.zeros(len(self.rows), dtype=torch.bool)
        chosen[self.order()[::shares][:HANDED_OUT_NODES]] = True
        return self.split(chosen)

    def split(self, chosen: Tensor) -> RowsT:
        """Take out those of a mask `(m,)`."""
        taken = self.rows.take(chosen.nonzero()[:, 0])
        self.rows = self.rows.take((~chosen).nonzero()[:, 0])
        return taken

    def everything(self) -> RowsT:
        """All of them."""
        return self.rows

    def emptied(self) -> Table[RowsT]:
        """A table without rows."""
        none = self.rows.take(torch.zeros(0, dtype=torch.int64))
        return Table(none, self.descending, self._order)


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
        self.flying: dict[Future[Any], tuple[Any, int]] = {}
        self.again: list[tuple[Any, int]] = []
        self.reports = 0
        self.given_up = ""

    def send(self, part: Any, losses: int, seconds: float) -> None:
        """Hand out a part."""
        try:
            future = self.pool.submit(_work, self.problem, part, seconds)
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


def _work(data: bytes, part: Part[Any, Any], seconds: float) -> Any:
    """In a worker: go on with a part of a pickled search."""
    problem: SharedFrontier[Any, Any] = pickle.loads(data)
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
