"""The problem of the nearest flip in one ball: its relaxation on nodes, and exact programs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wassail import rounding
from wassail.certificates.exact.programs import Array, shortest, shortest_euclidean
from wassail.certificates.exact.relaxation import Triangle, substitute, triangle
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.relax.ranges import SLOPE_STEPS, bounds_on, gamma, layered
from wassail.certificates.search.frontier import TensorRows
from wassail.geometry import plane_step
from wassail.rounding import UNIT, sized
from wassail.threat import Domain, dual
from wassail.ties import steep_below

# nodes split at once, and numbers in the largest tensor of that: at most
BATCH = 128
MEMORY = 2**25


@dataclass(frozen=True, eq=False)
class Nodes(TensorRows):
    """Nodes of the search, one row each: rival `(m,)`; side, low, high, alpha, beta `(m, H)`; bound
    `(m,)`; pick `(m, .)`.

    side: 1 on, 0 off, -1 unstable; low, high: the span of v in the ball, given the sides; pick:
    the neurons to split on next.
    """

    rival: Tensor
    side: Tensor
    low: Tensor
    high: Tensor
    alpha: Tensor
    beta: Tensor
    bound: Tensor
    pick: Tensor


@dataclass(frozen=True, eq=False)
class RelaxedLine(TensorRows):
    """`<a, x> + b` below the margin on each node, rounding taken off b: a `(m, n)`, b `(m,)`.

    w `(m, H)`: the coefficient that every neuron's output had; factor, shift `(m, H)`: the line
    that replaced it.
    """

    a: Tensor
    b: Tensor
    w: Tensor
    factor: Tensor
    shift: Tensor


class Relaxed:
    """The network in a ball around a sample, over the neurons that may change sides there, with one
    margin for each rival.

    `v = A x + B z + c`, margins `C x + D z + e`; size, top: the magnitudes in v and in the margins
    that rounding errors are relative to.
    """

    def __init__(
        self, graph: Graph, x: Tensor, y: int, radius: float, norm: float, domain: Domain
    ) -> None:
        region = Region.make(Ball(x, radius, norm, domain), graph.inputs)
        first = bounds_on(graph, region)
        states = first.states()
        net = graph.piecewise(states)
        most = graph.absolute().piecewise(states)
        small = replace(layered(net, most), rounding=gamma(graph))
        again = bounds_on(small, region, SLOPE_STEPS)
        none = torch.zeros(0, dtype=torch.float64)
        self.low, self.high = (
            torch.cat([none, *(span[k].flatten() for span in again.spans.values())]) for k in (0, 1)
        )
        rivals = [j for j in range(graph.outputs) if j != y]
        self.A = net.A
        self.B = net.B
        self.c = net.c
        self.slope = net.slope
        self.C, self.D, self.e = (p[y] - p[rivals] for p in (net.C, net.D, net.e))
        self.blocks = net.blocks() if net.neurons else []
        self.x = x.flatten()
        self.norm = norm
        self.domain = domain
        self.radius = radius
        low, high = region.box
        # Room to the walls and to the ball, rounded up.
        self.below, self.above = (
            (side * (1 + 4 * UNIT)).clamp(min=0) for side in (self.x - low, high - self.x)
        )
        far = torch.maximum(low.abs(), high.abs())
        size = sized(most.A @ far + most.c)
        for rows in self.blocks:  # |z| <= |v|: slopes are between 0 and 1
            size[rows] = sized(size[rows] + most.B[rows, : rows.start] @ size[: rows.start])
        out = sized(most.C @ far + most.D @ size + most.e)
        self.size = size
        self.top = out[y] + out[rivals]
        # Coefficients are off by gamma(graph) of their magnitudes, sums of H + n terms by less than
        # the rest of gamma(small) of theirs; along a line these magnitudes add up to `lam top +
        # <|v|, size>` in all. Twice, for products and lines.
        self.error = 2 * gamma(small)
        # `tighten` holds (2 batch, 2 widest, n + H)
        widest = max((rows.stop - rows.start for rows in self.blocks), default=1)
        self.batch = max(1, min(BATCH, MEMORY // (4 * widest * (net.inputs + net.neurons))))

    def roots(self) -> Nodes:
        """One node for each rival."""
        m = len(self.e)
        h = len(self.c)
        low = self.low.expand(m, h)
        high = self.high.expand(m, h)
        side = torch.where(high <= 0, 0, torch.where(low >= 0, 1, -1))
        alpha = torch.where(steep_below(low, high), 1.0, self.slope)
        zero = torch.zeros(m, dtype=torch.float64)
        none = torch.zeros(m, 0, dtype=torch.int64)
        return Nodes(torch.arange(m), side, low, high, alpha, torch.zeros_like(low), zero, none)

    def lines(self, nodes: Nodes) -> Triangle:
        """The lines of each neuron on each node, `(m, H)` each."""
        return triangle(nodes.low, nodes.high, self.slope, nodes.side)

    def line(self, nodes: Nodes, weight: Tensor | float = 1.0) -> RelaxedLine:
        """The line of the multipliers of each node; weight `(m, 1)`: `lam`, of the margin
        itself.
        """
        _, up, shift = self.lines(nodes)
        down = torch.where(nodes.side < 0, nodes.alpha, up)
        sign = torch.where(nodes.side == 1, 1.0, -1.0)
        push = torch.where(nodes.side < 0, 0.0, -sign * nodes.beta)
        z = weight * self.D[nodes.rival]
        x = weight * self.C[nodes.rival]
        a, w, v = substitute(self.blocks, (self.A, self.B), x, z, (down, up), push)
        shift = torch.where(w < 0, shift, 0.0)
        weight = weight[:, 0] if isinstance(weight, Tensor) else weight
        b = weight * self.e[nodes.rival] + v @ self.c + (w * shift).sum(1)
        error = self.error * (weight * self.top[nodes.rival] + v.abs() @ self.size)
        return RelaxedLine(a, b - error, w, torch.where(w >= 0, down, up), shift)

    def forward(self, line: RelaxedLine, x: Tensor) -> Tensor:
        """The inputs `(m, H)` of the neurons at points `(m, n)`, every neuron replaced by its
        line.
        """
        v = x @ self.A.T + self.c
        z = torch.zeros_like(v)
        for rows in self.blocks:
            v[:, rows] += z[:, : rows.start] @ self.B[rows, : rows.start].T
            z[:, rows] = line.factor[:, rows] * v[:, rows] + line.shift[:, rows]
        return v

    def tighten(self, nodes: Nodes) -> Nodes:
        """The spans again, given the sides, and the sides that follow from them; nodes that
        cannot be are dropped.
        """
        for rows in self.blocks[1:]:
            low, high, side = (v.clone() for v in (nodes.low, nodes.high, nodes.side))
            least, most = self.spans(rows, self.lines(nodes))
            low[:, rows] = torch.maximum(low[:, rows], least)
            high[:, rows] = torch.minimum(high[:, rows], most)
            free = side[:, rows] < 0
            on = free & (low[:, rows] >= 0)
            off = free & (high[:, rows] <= 0)
            side[:, rows] = torch.where(on, 1, torch.where(off, 0, side[:, rows]))
            nodes = replace(nodes, side=side, low=low, high=high)
        low, high, side = nodes.low, nodes.high, nodes.side
        impossible = (low > high) | ((side == 1) & (high < 0)) | ((side == 0) & (low > 0))
        return nodes.take(~impossible.any(1))

    def spans(self, rows: slice, lines: Triangle) -> tuple[Tensor, Tensor]:
        """Bounds on the neurons of a layer in the ball, `(m, rows)` each, by the lines of those
        before it.
        """
        m = len(lines.lower)
        x, z, c = (
            torch.cat([v, -v]) for v in (self.A[rows], self.B[rows, : rows.start], self.c[rows])
        )
        sides = (lines.lower[:, None], lines.upper[:, None])
        z = z.expand(m, -1, -1)
        a, w, v = substitute(self.blocks, (self.A, self.B), x, z, sides)
        before = slice(0, rows.start)
        b = c + v @ self.c[before] + (w.clamp(max=0) * lines.shift[:, None, before]).sum(2)
        size = self.size[rows].repeat(2) + v.abs() @ self.size[before]
        least = b + a @ self.x - self.swing(a) - self.error * size
        half = rows.stop - rows.start
        return least[:, :half], -least[:, half:]

    def swing(self, a: Tensor) -> Tensor:
        """An upper bound on `max <-a, x' - x>` over the ball and the box, for rows `(..., n)`."""
        box = a.clamp(min=0) @ self.below - a.clamp(max=0) @ self.above
        if self.norm == math.inf:
            return box
        return torch.minimum(box, self.radius * rounding.length(a, dual(self.norm), -1))

    def reach(self, line: RelaxedLine) -> Tensor:
        """How far from the sample `<a, x'> + b <= 0` is at least, inside box and ball, `(m,)`;
        rounded down, inf if nowhere.

        For any `0 <= p <= |a|`: where `<a, d> <= -g` with `|d_i| <= room_i`, Hoelder on p and the
        walls on the rest give `||d||_r ||p||_s >= g - sum_i room_i (|a_i| - p_i)`. The p of the
        nearest point makes this an equality.
        """
        size = line.a.abs()
        gap = (line.a * self.x).sum(1) + line.b
        step = plane_step(
            self.x.expand_as(line.a), -line.a, gap.clamp(min=0), self.norm, self.domain
        ).abs()
        p = moving(size, step, self.norm)
        room = torch.where(line.a > 0, self.below, self.above)
        best = torch.zeros_like(gap)
        # nothing left to Hoelder: the walls alone keep it away
        for part in (p, torch.zeros_like(p)):
            rest = gap - (room * (size - part)).sum(1)
            length = rounding.length(part, dual(self.norm), 1)
            far = torch.where(length > 0, rest / torch.where(length > 0, length, 1.0), math.inf)
            far = far * (1 - (size.shape[1] + 8) * UNIT)
            best = torch.maximum(best, torch.where(rest > 0, far, 0.0))
        return best


def moving(size: Tensor, step: Tensor, norm: float) -> Tensor:
    """The part `0 <= p <= size` that Hoelder's inequality holds with equality for, along a step of
    these lengths `(m, n)` that is best against coefficients of this size; the walls take the rest.
    """
    if norm == 1:
        price = torch.where(step > 0, size, math.inf).amin(1, keepdim=True)
        return torch.minimum(size, price)
    if norm == 2:
        pace = torch.where(size > 0, step / torch.where(size > 0, size, 1.0), 0.0)
        pace = pace.amax(1, keepdim=True)
        near = torch.where(pace > 0, step / torch.where(pace > 0, pace, 1.0), size)
        return torch.minimum(size, near)
    return torch.where(step >= step.amax(1, keepdim=True) * (1 - 1e-12), size, 0.0)


@dataclass(frozen=True, eq=False)
class Answer:
    """Multipliers of a node: weight of the margin, alpha and beta `(H,)`; the nearest point `(n,)`,
    and gap `(H,)`: what each neuron's relaxation costs there, its multiplier times how far it is
    from its value.
    """

    weight: float
    alpha: Tensor
    beta: Tensor
    point: Tensor
    gap: Tensor


def solve_program(
    net: Relaxed, node: Nodes, margin: Tensor, noise: float, reach: float
) -> Answer | None:
    """The relaxed problem of one node, solved exactly; None if the solver gives up.

    Over `u = (x' - x) / reach` and the unstable `z / width`, rows `table (u, z) <= limit`: the
    margin, the sides, and the triangles, all of them of order one. The margin has to fall below 0
    by the noise of its evaluation, so that the point that comes out is seen as a flip.
    """
    side = node.side[0].numpy()
    slope = net.slope.numpy()
    low = node.low[0].numpy()
    high = node.high[0].numpy()
    width = np.maximum(high - low, 1e-12)
    free = np.flatnonzero(side < 0)
    walls = np.flatnonzero((side >= 0) & (low < 0) & (high > 0))
    n = len(net.x)
    k = len(free)
    v, z = affine_neurons(net, side, width, free, reach)
    table, unit = _rows(net, node, (v, z), walls, free, width, float(margin[node.rival[0]]), reach)
    limit = -table[:, -1]
    limit[0] -= noise / unit[0]
    room = _room(net, reach)
    if net.norm == 2:
        answer = shortest_euclidean(table[:, :-1], limit, room, noise / unit[0])
    else:
        answer = shortest(table[:, :-1], limit, room, 1 + len(walls), net.norm)
    if answer is None:
        return None
    u, y = answer
    y = np.maximum(y, 0.0) / unit
    beta = np.zeros(len(side))
    alpha = np.zeros(len(side))
    gap = np.zeros(len(side))
    beta[walls] = y[1 : 1 + len(walls)]
    one, two, three = y[1 + len(walls) :].reshape(3, k)
    mix = (one + slope[free] * two) / np.where(one + two > 0, one + two, 1.0)
    alpha[free] = np.where(one + two > 0, np.clip(mix, slope[free], 1.0), 1.0)
    at = v[free] @ np.append(u, 1.0)
    value = width[free] * u[n:]
    away = np.maximum(value - np.maximum(at, slope[free] * at), 0.0)
    gap[free] = (one + two + three) * away + 1e-9 * away
    point = net.x + reach * torch.from_numpy(u[:n])
    multipliers = (torch.from_numpy(alpha), torch.from_numpy(beta))
    return Answer(float(y[0]), *multipliers, point, torch.from_numpy(gap))


def affine_neurons(
    net: Relaxed, side: Array, width: Array, free: NDArray[np.int64], reach: float
) -> tuple[Array, Array]:
    """Every neuron before and after its activation, as an affine function of (u, z, 1)."""
    n = len(net.x)
    k = len(free)
    slope = net.slope.numpy()
    here = (net.A @ net.x + net.c).numpy()[:, None]
    v = np.concatenate([reach * net.A.numpy(), np.zeros((len(side), k)), here], 1)
    z = np.zeros_like(v)
    b = net.B.numpy()
    z[free, n + np.arange(k)] = width[free]
    for rows in net.blocks:
        v[rows] += b[rows, : rows.start] @ z[: rows.start]
        fixed = rows.start + np.flatnonzero(side[rows] >= 0)
        z[fixed] = np.where(side[fixed] == 1, 1.0, slope[fixed])[:, None] * v[fixed]
    return v, z


def _rows(
    net: Relaxed,
    node: Nodes,
    forms: tuple[Array, Array],
    walls: NDArray[np.int64],
    free: NDArray[np.int64],
    width: Array,
    margin: float,
    reach: float,
) -> tuple[Array, Array]:
    """The rows `<= 0` over (u, z, 1) in units of order one, and these units: the margin, the sides
    of fixed neurons, and three for each triangle.
    """
    v, z = forms
    n = len(net.x)
    j = int(node.rival[0])
    slope = net.slope.numpy()[free][:, None]
    _, up, shift = (part[0].numpy()[free] for part in net.lines(node))
    top = net.D[j].numpy() @ z
    top[:n] += reach * net.C[j].numpy()
    top[-1] += float(net.C[j] @ net.x + net.e[j])
    chord = z[free] - up[:, None] * v[free]
    chord[:, -1] -= shift
    sign = np.where(node.side[0].numpy()[walls] == 1, -1.0, 1.0)[:, None]
    unit = np.concatenate([[margin], width[walls], width[free], width[free], width[free]])
    lower = slope * v[free] - z[free]
    table = np.concatenate([top[None], sign * v[walls], v[free] - z[free], lower, chord])
    return table / unit[:, None], unit


def _room(net: Relaxed, reach: float) -> tuple[Array, Array]:
    """How far u may go inside the box, from below and from above; infinite without one."""
    if net.domain is None:
        return np.full(len(net.x), -math.inf), np.full(len(net.x), math.inf)
    x = net.x.numpy()
    low, high = (np.asarray(side) for side in net.domain)
    return (low - x) / reach, (high - x) / reach
