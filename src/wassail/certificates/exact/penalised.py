"""The largest output less a price of distance, on small piecewise-linear networks.

    sup { max_j (theta_j - theta_0)(x') - price ||x' - x||_r : x' in the box },    r in {1, 2, inf}.

The box is cut into shells `near <= ||x' - x|| <= far`: few neurons are unstable in the inner ones,
and in the outer ones most of the price is paid already. Each shell is a branch and bound on the
sides of neurons, with the nodes and the lines of `nearest_flip.py`: on a node `theta_0 - theta_j`
is at least `<a, x'> + b`. With d = x' - x, `|d_i| <= room_i` and any `0 <= p <= |a|`

    <a, d> + price ||d||_r  >=  min { (price - ||p||_s) t : near <= t <= far }
                                - sum_i room_i (|a_i| - p_i),

Hoelder on p and the walls on the rest. Where all neurons are fixed an exact program is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.exact.flip_problem import (
    Nodes,
    Relaxed,
    RelaxedLine,
    affine_neurons,
    moving,
)
from wassail.certificates.exact.nearest_flip import Search
from wassail.certificates.exact.programs import cell_programs, least_distance
from wassail.certificates.graph.graph import Graph
from wassail.certificates.search.frontier import Frontier, Table
from wassail.geometry import clip, steepest
from wassail.rounding import UNIT
from wassail.threat import Domain, dual


@dataclass(frozen=True)
class Shell:
    """`near <= ||x' - x|| <= far`, where the value is known to be at most `most`."""

    near: float
    far: float
    most: float


@dataclass(frozen=True, eq=False)
class Highest:
    """`value <= sup <= upper`; value is attained at the point `(n,)`, if there is one."""

    value: float
    upper: float
    point: Tensor | None


def highest_less_price(
    graph: Graph,
    x: Tensor,
    norm: float,
    box: Domain,
    price: float,
    shells: Sequence[Shell],
    known: float,
    tolerance: float,
) -> Highest:
    """The supremum over some shells.

    Args:
        graph: output 0 is what the others are compared with.
        x: the sample, `(*shape)`.
        norm: 1, 2 or inf.
        box: of flat points.
        price: of a unit of distance, above 0.
        shells: from the sample outward.
        known: a value that is attained.
        tolerance: what upper may leave open above the value, in units of the outputs.
    """
    search = _Penalised(graph, x, norm, box, price, known, tolerance)
    upper = known
    for shell in shells:
        near_enough = shell.most <= search.goal
        upper = max(upper, shell.most if near_enough else search.searched(shell))
    return Highest(search.value, upper, search.best)


class _Penalised(Search):
    """The search for one sample. goal: what is not above it need not be looked at.

    margin: what the steps on multipliers are in units of; the price of the largest distance.
    """

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        norm: float,
        box: Domain,
        price: float,
        known: float,
        tolerance: float,
    ) -> None:
        super().__init__(graph.to(HOST), x, 0, norm, box, None, tolerance)
        self.price = price
        self.value = known
        self.best: Tensor | None = None
        self.near = 0.0
        self.net: Relaxed

    @property
    def goal(self) -> float:
        """A tolerance above the best value."""
        return self.value + self.tolerance

    def searched(self, shell: Shell) -> float:
        """The supremum over a shell, from above: what is known of it if it is late."""
        if clock.late():
            return shell.most
        self.near = shell.near
        size = self.price * shell.far
        self.margin = torch.full((len(self.rivals),), size, dtype=torch.float64)
        self.net = self.relaxed(shell.far)
        least = -math.inf
        with suppress(clock.Late):
            search = _ShellSearch(self, self.net)
            least = search.least
            search.sift()
            search.proceed()
            least = search.least
        return min(-least, shell.most)

    def offer(self, points: Tensor) -> None:
        """Keep the best of the points `(m, n)`, if it is better than what is known."""
        points = clip(points, self.domain)
        paid = self.price * torch.linalg.vector_norm(points - self.x, self.norm, dim=1)
        values = -self.margins(points).amin(1) - paid
        k = int(values.argmax())
        if float(values[k]) > self.value:
            self.value, self.best = float(values[k]), points[k].clone()

    def height(self, line: RelaxedLine, points: Tensor) -> Tensor:
        """As in `Search`, with the price, above what closes a node."""
        length: Tensor = torch.linalg.vector_norm(points - self.x, self.norm, dim=1)
        return super().height(line, points) + self.price * length.clamp(min=self.near) + self.goal

    def lowest(self, line: RelaxedLine, reach: float) -> Tensor:
        """Where each line and the price are lowest in the shell and the box, `(m, n)`."""
        return self.x + self.step(line)

    def step(self, line: RelaxedLine) -> Tensor:
        """From the sample to there."""
        a = line.a
        room = torch.where(a > 0, self.net.below, self.net.above)
        t, _ = worthwhile(a.abs(), room, self.price, self.norm)
        t = t.clamp(self.near, self.net.radius)
        return steepest(self.x.expand_as(a), -a, self.norm, t, self.domain)

    def least(self, net: Relaxed, line: RelaxedLine) -> Tensor:
        """The least value of each line and the price in the shell, rounded down, `(m,)`."""
        size = line.a.abs()
        room = torch.where(line.a > 0, net.below, net.above)
        terms = (size.shape[1] + 16) * UNIT
        here = line.a * self.x
        most = here.abs().sum(1) + line.b.abs() + (room * size).sum(1)
        best = torch.full_like(line.b, -math.inf)
        # Of no end of the shell, or of the end that the step is at.
        free = worthwhile(size, room, self.price, self.norm)[1]
        for p in (free, moving(size, self.step(line).abs(), self.norm)):
            length = rounding.length(p, dual(self.norm), 1) * (1 + terms)
            rest = self.price - length
            # float64: of two numbers torch.where makes float32
            away = rest * torch.where(rest > 0, self.near, torch.full_like(rest, net.radius))
            value = here.sum(1) + line.b - (room * (size - p)).sum(1) + away
            error = terms * (most + (self.price + length) * net.radius)
            best = torch.maximum(best, value - error)
        return torch.where(best.isnan(), -math.inf, best)

    def bounded(self, net: Relaxed, nodes: Nodes, radius: float) -> Nodes:
        """Nodes with better multipliers, the bounds that these prove, and the neurons to split
        on next.
        """
        if not len(nodes):
            return nodes
        self.charge(nodes)
        nodes = self.ascend(net, nodes, radius)
        line = net.line(nodes)
        points = self.lowest(line, radius)
        self.offer(points)
        bound = torch.maximum(nodes.bound, self.least(net, line))
        nodes = replace(nodes, bound=bound, pick=self.choose(net, nodes, line, points))
        left = (nodes.side >= 0).all(1) & (bound < -self.goal)
        for i in left.nonzero().flatten().tolist():
            if self.late:
                break
            nodes = self.solved(net, nodes, i, radius)
        return nodes

    def solved(self, net: Relaxed, nodes: Nodes, i: int, radius: float) -> Nodes:
        """With the best multipliers for node i, all of whose neurons are fixed: those of its cell,
        or a proof that it has none, which is worth as much as it is multiplied by.
        """
        clock.spend(clock.STEP)  # of least squares; a linear program counts itself
        one = nodes.take(torch.tensor([i]))
        side = one.side[0].numpy()
        n = len(self.x)
        v, z = affine_neurons(net, side, np.zeros(len(side)), np.zeros(0, dtype=np.int64), 1.0)
        j = int(one.rival[0])
        a = net.D[j].numpy() @ z[:, :n] + net.C[j].numpy()
        walls = np.flatnonzero(((one.low < 0) & (one.high > 0))[0].numpy())
        rows = np.where(side[walls] == 1, -1.0, 1.0)[:, None] * v[walls]
        unit = np.linalg.norm(rows[:, :n], axis=1).clip(min=1e-300)
        eye = np.eye(n)
        table = np.concatenate([rows[:, :n] / unit[:, None], eye, -eye])
        limits = np.concatenate([-rows[:, n] / unit, net.above.numpy(), net.below.numpy()])
        answer = cell_programs([(-a, table, limits, self.price)], self.norm)[0]
        if answer is None:
            _, u = least_distance(table, limits, np.zeros(n))
            gap = -float(u @ limits)
            flat = self.least(net, net.line(replace(one, beta=torch.zeros_like(one.beta))))
            missing = max(-self.goal - float(flat[0]), 0.0) + self.price * radius
            u = u * (2 * missing / gap) if gap > 0 else 0 * u
        else:
            self.offer(self.x + torch.from_numpy(answer[0])[None])
            u = answer[1]
        beta = torch.zeros_like(one.beta)
        beta[0, walls] = torch.from_numpy(u[: len(walls)] / unit)
        proved = self.least(net, net.line(replace(one, beta=beta)))
        bound = nodes.bound.clone()
        bound[i] = torch.maximum(bound[i], proved[0])
        return replace(nodes, bound=bound)


class _ShellSearch(Frontier[Nodes]):
    """The open nodes of a shell; settled: the least bound of the closed ones."""

    def __init__(self, search: _Penalised, net: Relaxed) -> None:
        self.search = search
        self.net = net
        self.settled = math.inf
        roots = net.roots()
        roots = replace(roots, bound=torch.full_like(roots.bound, -math.inf))
        self.open: Table[Nodes] = Table(search.bounded(net, roots, net.radius))

    @property
    def over(self) -> bool:
        """Whether the time or the work has run out."""
        return clock.late()

    @property
    def least(self) -> float:
        """The least bound of all nodes."""
        return min(self.settled, self.open.loosest if len(self.open) else math.inf)

    def step(self) -> None:
        """The nodes with the least bounds replaced by their children."""
        with self.taken(self.open.first(self.net.batch)) as nodes:
            children = self.search.children(self.net, nodes)
            self.open.add(self.search.bounded(self.net, children, self.net.radius))

    def sift(self) -> None:
        """Close the nodes that hold nothing above the goal, and those that cannot be split."""
        nodes = self.open.everything()
        done = (nodes.bound >= -self.search.goal) | (nodes.side >= 0).all(1)
        self.settled = min([self.settled, *nodes.bound[done].tolist()])
        self.open.split(done)


def worthwhile(size: Tensor, room: Tensor, price: float, norm: float) -> tuple[Tensor, Tensor]:
    """The length of the step `d`, `0 <= d_i <= room_i`, that makes `<size, d> - price ||d||_r`
    largest, `(m,)`, and the part `0 <= p <= size` of `||p||_s <= price` that leaves least to the
    walls, `sum_i room_i (size_i - p_i)`, which is that value; both up to rounding.

    Args:
        size: of the coefficients, `(m, n)`.
        room: how far each coordinate may go, `(m, n)`.
        price: of a unit of length.
        norm: r.
    """
    if norm == 1:
        return torch.where(size > price, room, 0.0).sum(1), size.clamp(max=price)
    if norm == math.inf:  # as long as those with room left are worth more than the price
        room, order = room.sort(1)
        own = size.gather(1, order)
        worth = own.flip(1).cumsum(1).flip(1)
        part = torch.minimum((price - (worth - own)).clamp(min=0), own)
        length = torch.where(worth > price, room, 0.0).amax(1)
        return length, torch.zeros_like(size).scatter(1, order, part)
    size = torch.where(room > 0, size, 0.0)
    # `p = min(size, s room)` and `d = p / s`: the walls that are met are those where `size / room`
    # is above s.
    ratio, order = (size / room.clamp(min=1e-300)).sort(1)
    none = torch.zeros_like(size[:, :1])
    free = torch.cat([none, size.gather(1, order).square().cumsum(1)], 1)
    met = torch.cat([room.gather(1, order).square().flip(1).cumsum(1).flip(1), none], 1)
    s = ((price**2 - free).clamp(min=0) / met.clamp(min=1e-300)).sqrt()
    fits = (s >= torch.cat([none, ratio], 1) * (1 - 1e-12)) & (met > 0)
    fits &= s <= torch.cat([ratio, none + math.inf], 1) * (1 + 1e-12)
    s = torch.where(fits, s, math.inf).amin(1, keepdim=True)
    p = torch.where(s < math.inf, torch.minimum(size, s * room), size)
    step = torch.where(s > 0, torch.minimum(size / s, room), room)
    inside = size.square().sum(1) <= price**2
    length = torch.where(inside, 0.0, torch.linalg.vector_norm(step, dim=1))
    return length, torch.where(inside[:, None], size, p)
