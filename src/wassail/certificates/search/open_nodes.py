"""The open nodes of a branch and bound, in the order of their bounds: the loosest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from wassail.ties import in_order

HANDED_OUT_NODES = 512  # nodes handed out at once


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
