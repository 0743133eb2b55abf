"""A network with the inequalities of a property behind it: one function to attack and to bound."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.executed import arithmetic_of
from wassail.vnnlib.clauses import Clause, Part
from wassail.vnnlib.network import Network

GRAPHS = 8  # structures of one network that are kept


class Unsafe(nn.Module):
    """`(0, -g_1, ..., -g_R)` at points of the free inputs; the inequalities of a clause hold where
    all its `g <= 0`.

    worst: one output for each clause instead, minus the largest `g` of the clause. A maximum is
    made of ReLUs, `max(a, b) = a + relu(b - a)`, and a slope below its kink is a combination of
    both inequalities: branching on neurons finds the multipliers of a clause by itself.
    """

    base: Tensor
    spread: Tensor
    rows: Tensor
    offsets: Tensor
    signs: Tensor

    def __init__(self, network: nn.Module, shape: tuple[int, ...], group: Group) -> None:
        super().__init__()
        self.network = network
        self.shape = shape
        self.whole = bool(group.free.all())
        self.count = len(group.clauses) if group.worst else 0
        rows, offsets = group.rows_and_offsets()
        if not self.count:  # with the signs in the rows
            rows, offsets = (torch.cat([v[:1] * 0, -v]) for v in (rows, offsets))
        self.register_buffer("base", torch.where(group.free, 0.0, group.parts[0].low))
        none = torch.zeros(0, 0, dtype=torch.float64)
        spread = none if self.whole else torch.eye(len(self.base)).double()[group.free]
        self.register_buffer("spread", spread)
        self.register_buffer("rows", rows)
        self.register_buffer("offsets", offsets)
        signs = torch.cat([torch.zeros(1, self.count), -torch.eye(self.count)])
        self.register_buffer("signs", signs.double())

    def forward(self, u: Tensor) -> Tensor:
        """Outputs at points of the free inputs, `(m, f) -> (m, 1 + R)`."""
        x = u if self.whole else u @ self.spread + self.base
        z = self.network(x.reshape(x.shape[0], *self.shape))
        over = F.linear(z, self.rows, -self.offsets)
        if not self.count:
            return over
        # The inequalities of all clauses, the first of each, then the second, ...: a power of 2.
        while over.shape[1] > self.count:
            half = over.shape[1] // 2
            over = torch.maximum(over[:, :half], over[:, half:])
        return F.linear(over, self.signs)


class Group:
    """The boxes that share their clauses, as functions of their free inputs.

    Args:
        network: the model.
        parts: the boxes.
        worst: see `Unsafe`.
    """

    def __init__(self, network: Network, parts: list[Part], worst: bool) -> None:
        self.network = network
        self.parts = parts
        self.clauses: tuple[Clause, ...] = parts[0].clauses
        self.worst = worst
        low = torch.stack([part.low for part in parts])
        high = torch.stack([part.high for part in parts])
        self.free = (low < high).any(0) | (low != low[:1]).any(0)
        if not bool(self.free.any()):
            self.free[0] = True  # a single point
        self.low = low[:, self.free]
        self.high = high[:, self.free]
        self.module = Unsafe(network.wide, network.shape, self).eval()

    def rows_and_offsets(self) -> tuple[Tensor, Tensor]:
        """All inequalities, each once; for `worst` as many for each clause, a power of 2, the last
        ones repeated.
        """
        if not self.worst:
            rows = torch.cat([clause.rows for clause in self.clauses])
            offsets = torch.cat([clause.offsets for clause in self.clauses])
            first = [self._merged.index(place) for place in range(1 + max(self._merged))]
            return rows[first], offsets[first]
        most = max(len(clause.offsets) for clause in self.clauses)
        most = 1 << (most - 1).bit_length()
        places = [
            (clause, min(m, len(clause.offsets) - 1))
            for m in range(most)
            for clause in self.clauses
        ]
        rows = torch.stack([clause.rows[m] for clause, m in places])
        return rows, torch.stack([clause.offsets[m] for clause, m in places])

    @property
    def places(self) -> list[list[int]]:
        """Of each clause, where its inequalities are among the outputs."""
        places = iter(self._merged)
        return [[1 + next(places) for _ in clause.offsets] for clause in self.clauses]

    @cached_property
    def _merged(self) -> list[int]:
        """Of the inequalities of all clauses, one after the other, the places of those that are
        different, in the order in which they come.
        """
        known: dict[bytes, int] = {}
        parts = [torch.cat([c.rows, c.offsets[:, None]], 1) for c in self.clauses]
        return [known.setdefault(row.numpy().tobytes(), len(known)) for row in torch.cat(parts)]

    def graph(self) -> Graph:
        """The structure, for bounds on the function of real numbers: read once for a network."""
        known = self.network.graphs
        if self._key not in known:
            shape = (int(self.free.sum()),)
            found = read(self.module, shape, smooth=True)
            if len(known) >= GRAPHS:
                known.pop(next(iter(known)))
            known[self._key] = arithmetic_of(found, "exact", torch.float64)
        return known[self._key]

    @property
    def _key(self) -> tuple[object, ...]:
        """What the function of the free inputs depends on, beside the network."""
        clauses = tuple(clause.key for clause in self.clauses)
        fixed = self.module.base.numpy().tobytes()
        return (self.worst, clauses, self.free.numpy().tobytes(), fixed)

    def full(self, points: Tensor) -> Tensor:
        """Points of the free inputs as points of all inputs, exactly."""
        found = self.parts[0].low.repeat(len(points), 1)
        found[:, self.free] = points
        return found
