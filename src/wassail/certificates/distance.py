"""Exact distances to the nearest flip of small piecewise-linear networks, by branch and bound on
the sides of neurons.

    d = min { ||x' - x||_r : x' in the box, theta_j(x') >= theta_y(x') for some j != y },    r in
    {1, 2, inf}.

A node fixes some neurons to one side, for one rival j. The others are relaxed to their triangle: `z
>= v`, `z >= slope v`, and z below the chord over the span that v has in the ball. For multipliers
`alpha` (the slope of a lower line, between `slope` and
1) and `beta >= 0` (of the sides `s_h v_h >= 0` of fixed neurons), substituting backward gives a
   line below the margin

    lam (theta_y - theta_j)(x') >= lam (theta_y - theta_j)(x') - sum_h beta_h s_h v_h(x') >= <a, x'>
    + b    on the node,

(Wang et al. 2021, beta-CROWN), so a flip there has `<a, x'> + b <= 0`, and the distance to that
half-space inside the box is a lower bound on its distance. ANY multipliers prove something: they
come from a few steps of ascent, for many nodes at once, and near the end from an exact program
(HiGHS for r = 1 and inf, non-negative least squares for r = 2), but what is claimed is always what
the line says, evaluated in float64 with its rounding errors taken off. Upper bounds are evaluated
points.
"""

from __future__ import annotations

import copy
import math
import time
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace

import numpy as np
import torch
from scipy.optimize import linprog, nnls  # type: ignore[import-untyped]
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock, parallel
from wassail.certificates.condense import STEPS, absolute, layered
from wassail.certificates.device import HOST
from wassail.certificates.executed import ahead
from wassail.certificates.propagate import crown, gamma
from wassail.certificates.region import Ball, Region
from wassail.certificates.structure import Graph
from wassail.errors import InputError
from wassail.geometry import clip, plane_step, steepest
from wassail.rounding import sized
from wassail.threat import Domain, dual, parse_domain, parse_norm
from wassail.ties import in_order, largest, steep_below

# nodes split at once, and numbers in the largest tensor of that: at most
BATCH = 128
MEMORY = 2**25
# neurons that a node is split on at once, while that makes at most so many nodes
SPLITS = 3
TOGETHER = 128
ASCENT = 8  # steps on the multipliers of a node
AIM = 0.05  # where the ascent aims: this far above 0, relative to the margin at the sample
NEAR = 0.9999  # nodes whose bound is this close to the nearest flip get an exact program
SMALL = 2  # so do nodes with at most so many undecided neurons
WEIGHT = 1e-5  # of the undecided neurons in the least-distance program, relative to the inputs
# price of violating a side, in distances to the nearest flip: keeps linear programs feasible
ELASTIC = 1e4
# on R^n the search ends so many times farther away than the nearest plane tangent to a margin
FAR = 1e6
# steps of the first search for a flip, and nodes of a batch from whose points it goes on
CHASE = 10
CHASED = 16
RETREAT = 0.2  # share of the time that is kept for smaller balls when a ball is not closed
RESTART = 0.9  # a flip nearer than this, relative to the ball, is worth a smaller ball
# How far past the boundary a point may have to go to be seen as a flip.
PUSH = 1 + torch.tensor([0, 1e-13, 1e-12, 1e-11, 1e-10], dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Distances:
    """The distance of every sample to its nearest flip, from both sides.

    lower `(N,)`: proved, no point of the closed ball of this radius in the domain ties or flips;
    upper `(N,)`: distance of points `(N, *shape)`, which do (inf, and the sample itself, where none
    is known); exact `(N,)`: they agree to the tolerance; nodes `(N,)`: partial sign patterns
    bounded; cut: whether the time ran out for some of them.
    """

    lower: Tensor
    upper: Tensor
    points: Tensor
    exact: Tensor
    nodes: Tensor
    cut: bool = False


def nearest_flip(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: Domain,
    *,
    upper: Tensor | None = None,
    lower: Tensor | None = None,
    slack: Tensor | None = None,
    within: float | None = None,
    time_limit: float | None = None,
    tolerance: float = 1e-9,
    workers: parallel.Workers = None,
) -> Distances:
    """The distance of samples `(N, *shape)` with labels `(N,)` to the nearest point of the domain
    that is not strictly y.

    upper, lower `(N,)`: where to start from: distances at which flips are said to be (a hint: every
    flip reported is found and evaluated here) and radii that are proved. slack `(N, K)`: a point
    counts as a flip where a rival comes that near to y, which is how far the executed network may
    be from the exact one. within: look no farther than this, and stop at the first flip that is not
    farther: enough to decide a fixed budget. time_limit: seconds for all samples, shared evenly;
    what is not closed by then is reported as a bracket. tolerance: relative, between lower and
    upper. workers: who shares the open nodes of a sample (see `parallel`), one sample after the
    other.
    """
    norm = parse_norm(norm)
    domain = parse_domain(domain)
    graph = graph.to(HOST)
    x = x.detach().cpu().double()
    y = y.cpu()
    if len(x) != len(y):
        raise InputError(f"{len(x)} samples have {len(y)} labels: give one for each.")
    if domain is not None and not ((x >= domain[0]) & (x <= domain[1])).all():
        raise InputError(
            "some samples lie outside the domain: clamp them or give the box they live in."
        )
    if len(y) and not ((y >= 0) & (y < graph.outputs)).all():
        raise InputError(f"labels go from 0 to {graph.outputs - 1} here: some of y do not.")
    if not torch.isfinite(x).all():
        raise InputError("the samples contain NaN or infinity: give real samples.")
    hints = (
        torch.full((len(x),), math.inf, dtype=torch.float64)
        if upper is None
        else upper.detach().cpu().double()
    )
    known = (
        torch.zeros(len(x), dtype=torch.float64) if lower is None else lower.detach().cpu().double()
    )
    found = []
    cut = False
    with parallel.crew(workers) as pool, clock.limited(time_limit):
        for i in range(len(x)):
            own = graph if slack is None else ahead(graph, slack[i])
            search = _Search(own, x[i].clone(), int(y[i]), norm, domain, within, tolerance, pool)
            with clock.limited(clock.seconds_left() / (len(x) - i)):
                search.run(float(hints[i]), float(known[i]))
            cut |= search.cut
            found.append(search)
    low, high = (
        torch.tensor([getattr(s, side) for s in found], dtype=torch.float64)
        for side in ("lower", "upper")
    )
    points = torch.stack([s.point.reshape(x.shape[1:]) for s in found]) if found else x.clone()
    nodes = torch.tensor([s.nodes for s in found], dtype=torch.int64)
    return Distances(low, high, points, _close(low, high, tolerance), nodes, cut)


def _close(lower: Tensor, upper: Tensor, tolerance: float) -> Tensor:
    return (lower == upper) | (
        upper - lower <= tolerance * torch.where(torch.isfinite(upper), upper, 0.0)
    )


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Nodes of the search, one row each: rival `(m,)`; side, low, high, alpha, beta `(m, H)`; bound
    `(m,)`; pick `(m, .)`.

    side: 1 on, 0 off, -1 undecided; low, high: the span of v in the ball, given the sides; pick:
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

    def __len__(self) -> int:
        return len(self.rival)

    def take(self, rows: Tensor) -> _Nodes:
        """Some of them, by index or mask."""
        return _Nodes(*(getattr(self, f.name)[rows] for f in fields(self)))

    def join(self, other: _Nodes) -> _Nodes:
        """Both."""
        return _Nodes(
            *(torch.cat([getattr(self, f.name), getattr(other, f.name)]) for f in fields(self))
        )


@dataclass(frozen=True, eq=False)
class _Line:
    """`<a, x> + b` below the margin on each node, rounding taken off b: a `(m, n)`, b `(m,)`.

    w `(m, H)`: the coefficient that every neuron's output had; factor, shift `(m, H)`: the line
    that replaced it.
    """

    a: Tensor
    b: Tensor
    w: Tensor
    factor: Tensor
    shift: Tensor

    def take(self, rows: Tensor) -> _Line:
        """Some of them, by index or mask."""
        return _Line(*(getattr(self, f.name)[rows] for f in fields(self)))


class _Relaxed:
    """The network in a ball around a sample, over the neurons that may change sides there, with one
    margin for each rival.

    `v = A x + B z + c`, margins `C x + D z + e`; size, top: the magnitudes in v and in the margins
    that rounding errors are relative to.
    """

    def __init__(
        self, graph: Graph, x: Tensor, y: int, radius: float, norm: float, domain: Domain
    ) -> None:
        region = Region.make(Ball(x, radius, norm, domain), graph.inputs)
        first = crown(graph, region)
        states = first.states()
        net = graph.piecewise(states)
        most = absolute(graph).piecewise(states)
        small = replace(layered(net, most), rounding=gamma(graph))
        again = crown(small, region, STEPS)
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
            (side * (1 + 2.0**-50)).clamp(min=0) for side in (self.x - low, high - self.x)
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
        widest = max(
            (rows.stop - rows.start for rows in self.blocks), default=1
        )  # `tighten` holds (2 batch, 2 widest, n + H)
        self.batch = max(1, min(BATCH, MEMORY // (4 * widest * (net.inputs + net.neurons))))

    def roots(self) -> _Nodes:
        """One node for each rival."""
        m = len(self.e)
        h = len(self.c)
        low = self.low.expand(m, h)
        high = self.high.expand(m, h)
        side = torch.where(high <= 0, 0, torch.where(low >= 0, 1, -1))
        alpha = torch.where(steep_below(low, high), 1.0, self.slope)
        zero = torch.zeros(m, dtype=torch.float64)
        return _Nodes(
            torch.arange(m),
            side,
            low,
            high,
            alpha,
            torch.zeros_like(low),
            zero,
            torch.zeros(m, 0).long(),
        )

    def chords(self, nodes: _Nodes) -> tuple[Tensor, Tensor, Tensor]:
        """The sign of each side (0: undecided), and the upper line of each neuron: factor and
        shift, `(m, H)` each.
        """
        sign = torch.where(nodes.side < 0, 0.0, torch.where(nodes.side == 1, 1.0, -1.0)).double()
        low = nodes.low.clamp(max=0)
        high = nodes.high.clamp(min=0)
        width = torch.where(high > low, high - low, 1.0)
        up = torch.where(
            nodes.side < 0,
            (high - self.slope * low) / width,
            torch.where(nodes.side == 1, 1.0, self.slope),
        )
        return sign, up, torch.where(nodes.side < 0, (self.slope - up) * low, 0.0)

    def line(self, nodes: _Nodes, weight: Tensor | float = 1.0) -> _Line:
        """The line of the multipliers of each node; weight `(m, 1)`: `lam`, of the margin
        itself.
        """
        sign, up, shift = self.chords(nodes)
        down = torch.where(nodes.side < 0, nodes.alpha, up)
        w = weight * self.D[nodes.rival]
        v = torch.zeros_like(nodes.low)
        factor = torch.zeros_like(nodes.low)
        for rows in reversed(self.blocks):
            factor[:, rows] = torch.where(w[:, rows] >= 0, down[:, rows], up[:, rows])
            v[:, rows] = w[:, rows] * factor[:, rows] - sign[:, rows] * nodes.beta[:, rows]
            w[:, : rows.start] += v[:, rows] @ self.B[rows, : rows.start]
        shift = torch.where(w < 0, shift, 0.0)
        a = weight * self.C[nodes.rival] + v @ self.A
        weight = weight[:, 0] if isinstance(weight, Tensor) else weight
        b = weight * self.e[nodes.rival] + v @ self.c + (w * shift).sum(1)
        return _Line(
            a,
            b - self.error * (weight * self.top[nodes.rival] + v.abs() @ self.size),
            w,
            factor,
            shift,
        )

    def forward(self, line: _Line, x: Tensor) -> Tensor:
        """The inputs `(m, H)` of the neurons at points `(m, n)`, every neuron replaced by its
        line.
        """
        v = x @ self.A.T + self.c
        z = torch.zeros_like(v)
        for rows in self.blocks:
            v[:, rows] += z[:, : rows.start] @ self.B[rows, : rows.start].T
            z[:, rows] = line.factor[:, rows] * v[:, rows] + line.shift[:, rows]
        return v

    def tighten(self, nodes: _Nodes) -> _Nodes:
        """The spans again, given the sides, and the sides that follow from them; nodes that
        cannot be are dropped.
        """
        m = len(nodes)
        _, up, shift = self.chords(nodes)
        low = nodes.low.clone()
        high = nodes.high.clone()
        side = nodes.side.clone()
        for k, rows in enumerate(self.blocks):
            if k > 0:
                own = torch.cat([self.B[rows, : rows.start], -self.B[rows, : rows.start]])
                w = own.expand(m, -1, -1).clone()
                a = torch.cat([self.A[rows], -self.A[rows]]).expand(m, -1, -1)
                b = torch.cat([self.c[rows], -self.c[rows]]).expand(m, -1)
                size = self.size[rows].repeat(2).expand(m, -1)
                down = torch.where(
                    side < 0, torch.where(steep_below(low, high), 1.0, self.slope), up
                )
                for before in reversed(self.blocks[:k]):
                    here = w[:, :, before]
                    v = here * torch.where(here >= 0, down[:, None, before], up[:, None, before])
                    b = b + v @ self.c[before] + (here.clamp(max=0) * shift[:, None, before]).sum(2)
                    a = a + v @ self.A[before]
                    size = size + v.abs() @ self.size[before]
                    w[:, :, : before.start] += v @ self.B[before, : before.start]
                least = b + a @ self.x - self.swing(a) - self.error * size
                half = rows.stop - rows.start
                low[:, rows] = torch.maximum(low[:, rows], least[:, :half])
                high[:, rows] = torch.minimum(high[:, rows], -least[:, half:])
                free = side[:, rows] < 0
                side[:, rows] = torch.where(
                    free & (low[:, rows] >= 0),
                    1,
                    torch.where(free & (high[:, rows] <= 0), 0, side[:, rows]),
                )
                nodes = replace(nodes, side=side, low=low, high=high)
                _, up, shift = self.chords(nodes)
        impossible = (
            (low > high) | ((nodes.side == 1) & (high < 0)) | ((nodes.side == 0) & (low > 0))
        )
        return nodes.take(~impossible.any(1))

    def swing(self, a: Tensor) -> Tensor:
        """An upper bound on `max <-a, x' - x>` over the ball and the box, for rows `(..., n)`."""
        box = a.clamp(min=0) @ self.below - a.clamp(max=0) @ self.above
        if self.norm == math.inf:
            return box
        return torch.minimum(box, self.radius * rounding.length(a, dual(self.norm), -1))

    def reach(self, line: _Line) -> Tensor:
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
        if self.norm == 1:
            price = torch.where(step > 0, size, math.inf).amin(1, keepdim=True)
            p = torch.minimum(size, price)
        elif self.norm == 2:
            pace = torch.where(size > 0, step / torch.where(size > 0, size, 1.0), 0.0).amax(
                1, keepdim=True
            )
            p = torch.minimum(
                size, torch.where(pace > 0, step / torch.where(pace > 0, pace, 1.0), size)
            )
        else:
            p = torch.where(step >= step.amax(1, keepdim=True) * (1 - 1e-12), size, 0.0)
        room = torch.where(line.a > 0, self.below, self.above)
        best = torch.zeros_like(gap)
        for part in (
            p,
            torch.zeros_like(p),
        ):  # nothing left to Hoelder: the walls alone keep it away
            rest = gap - (room * (size - part)).sum(1)
            length = rounding.length(part, dual(self.norm), 1)
            far = torch.where(length > 0, rest / torch.where(length > 0, length, 1.0), math.inf)
            best = torch.maximum(
                best, torch.where(rest > 0, far * (1 - (size.shape[1] + 8) * 2.0**-52), 0.0)
            )
        return best


class _Search:
    """The search for one sample: `lower <= d <= upper` at all times, point `(n,)` at distance
    upper.
    """

    def __init__(
        self,
        graph: Graph,
        x: Tensor,
        y: int,
        norm: float,
        domain: Domain,
        within: float | None,
        tolerance: float,
        pool: parallel.Pool | None = None,
    ) -> None:
        self.graph = graph
        self.x = x.flatten()
        self.y = y
        self.norm = norm
        self.domain = domain
        self.within = within
        self.tolerance = tolerance
        self.pool = pool
        self.shape = x.shape
        self.lower = 0.0
        self.upper = math.inf
        self.point = self.x
        self.nodes = 0
        self.cut = False  # whether the time ran out
        self.rivals = torch.tensor([j for j in range(graph.outputs) if j != y], dtype=torch.int64)

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return clock.late()

    @property
    def decided(self) -> bool:
        """Whether a flip is known that is near enough."""
        return self.within is not None and self.upper <= self.within and self.upper < math.inf

    def run(self, hint: float, known: float) -> None:
        """Close the bracket; hint: where a flip is said to be, known: a proved radius."""
        logits = self.graph.logits(self.x.reshape(1, *self.shape))[0]
        self.margin = logits[self.y] - logits[self.rivals]
        self.noise = gamma(self.graph) * float(logits.abs().max())
        if not (self.margin > 0).all():
            self.upper = 0.0
            return
        if not len(self.rivals):  # one class: nothing can flip
            self.lower = math.inf
            return
        self.lower = known
        first = self.chase(
            self.x.expand(len(self.rivals), -1), torch.arange(len(self.rivals)), CHASE
        )
        far = self.farthest if self.domain is not None else FAR * first
        limit = far if self.within is None else min(far, self.within * (1 + 2 * self.tolerance))
        # A little beyond the hint, so that the flip itself is found.
        near = min(hint * (1 + 1e-6), self.upper, 4 * first if self.upper == math.inf else math.inf)
        radius = min(max(near, known, 1e-3 * first), self.upper, limit)
        with clock.limited(clock.seconds_left() * (1 - RETREAT)):
            try:
                away = self.close(radius, far, limit)
            except clock.Late:
                away = radius
            self.cut = clock.out_of_time()
        if away is not None:
            with suppress(clock.Late):
                self.retreat(away)
        if self.lower > self.upper * (1 + self.tolerance):
            raise InputError(
                f"there is a flip at {self.upper:g}, but {known:g} was given as a proved radius: "
                "check it."
            )
        # A radius is never both proved and reached.
        self.lower = (
            min(self.lower, self.upper * (1 - 2.0**-50)) if self.upper < math.inf else self.lower
        )

    def close(self, radius: float, far: float, limit: float) -> float | None:
        """Ball after ball; the radius of one that is not closed, a flip in it or no more time,
        if it comes to that.
        """
        while not self.decided:
            if self.cover(radius):
                radius = self.upper
            elif self.lower < radius * (1 - self.tolerance):
                return radius
            elif radius >= limit or radius >= self.upper:
                if limit == far <= radius and self.domain is not None:
                    self.lower = math.inf  # no point of the box is that far
                return None
            else:
                radius = min(4 * radius, self.upper, limit)
        return None

    def retreat(self, radius: float) -> None:
        """What bounds without branching prove in smaller balls, when the time is up: a ball
        half as large is easier.
        """
        for _ in range(12):
            radius /= 2
            if self.lower >= radius or self.decided:
                return
            net = _Relaxed(
                self.graph, self.x.reshape(self.shape), self.y, radius, self.norm, self.domain
            )
            line = net.line(self.ascend(net, net.roots(), radius))
            self.lower = max(
                self.lower, min(float(net.reach(line).min()), radius)
            )  # `reach` is rounded down

    @property
    def farthest(self) -> float:
        """A little more than the distance of the farthest corner of the box."""
        assert self.domain is not None
        most = torch.maximum(self.x - self.domain[0], self.domain[1] - self.x)
        return 1.01 * float(torch.linalg.vector_norm(most, self.norm))

    def margins(self, points: Tensor) -> Tensor:
        """`theta_y - theta_j` at points `(m, n)` for all rivals: `(m, K - 1)`."""
        logits = self.graph.logits(points.reshape(-1, *self.shape))
        return logits[:, self.y, None] - logits[:, self.rivals]

    def offer(self, points: Tensor) -> None:
        """Keep the nearest of the points `(m, n)` that ties or flips, if it is nearer than what is
        known.

        Points that flip by more than rounding errors come first: a tie in one summation order may
        be none in another.
        """
        points = clip(points, self.domain)
        length = torch.linalg.vector_norm(points - self.x, self.norm, dim=1)
        least = self.margins(points).amin(1)
        for need, gain in ((-self.noise, 0.0), (0.0, self.tolerance / 2)):
            away = torch.where(least <= need, length, math.inf)
            if len(away) and float(away.min()) < self.upper * (1 - gain):
                self.upper = float(away.min())
                self.point = points[away.argmin()]

    def chase(self, points: Tensor, rival: Tensor, steps: int) -> float:
        """From each of the points toward its rival: the nearest flip of the affine piece there,
        again and again.

        Returns how far the nearest of the first planes is, 1 if there is none.
        """
        first = 1.0
        for step in range(steps):
            with torch.enable_grad():
                at = points.detach().requires_grad_(True)
                margin = self.margins(at).gather(1, rival[:, None])[:, 0]
                (slope,) = torch.autograd.grad(margin.sum(), at)
            margin = margin.detach()
            gap = margin + (slope * (self.x - points)).sum(1)
            start = self.x.expand_as(points)
            move = plane_step(
                start, slope, -(gap + 2 * self.noise).clamp(min=0), self.norm, self.domain
            )
            points = clip(self.x + move, self.domain)
            self.offer(points)
            if step == 0:
                length = torch.linalg.vector_norm(move, self.norm, dim=1)
                first = min(length[length > 0].tolist(), default=1.0)
        return first

    def cover(self, radius: float) -> bool:
        """Raise lower to the radius or to the nearest flip in the ball of that radius, as far as
        time allows.

        Returns True when a much nearer flip was found instead: a smaller ball leaves fewer neurons
        undecided.
        """
        net = _Relaxed(
            self.graph, self.x.reshape(self.shape), self.y, radius, self.norm, self.domain
        )
        settled = radius
        roots = net.roots()
        open_ = self.bounded(
            net, replace(roots, bound=torch.full_like(roots.bound, min(self.lower, radius))), radius
        )
        while True:
            open_, settled = self.sift(open_, settled, radius)
            least = min(settled, float(open_.bound.min()) if len(open_) else math.inf, self.upper)
            self.lower = max(
                self.lower, least
            )  # every bound is rounded down, and the radius is a number
            if not len(open_) or self.late or self.decided:
                return False
            if self.upper < RESTART * radius:
                return True
            if self.pool is not None and len(open_) >= parallel.ENOUGH * self.pool.workers:
                shared = _Shared(self, open_, settled, radius)
                parallel.share(shared, _Problem.of(self, net, radius), self.pool)
                open_ = shared.open
                settled = shared.settled
            else:
                open_ = self.grown(net, open_, radius)

    def sift(self, nodes: _Nodes, settled: float, radius: float) -> tuple[_Nodes, float]:
        """The nodes that may hold a nearer flip, and the least of `settled` and the bounds of
        the others.
        """
        cut = min(radius, self.upper) * (1 - self.tolerance / 2)
        done = (nodes.bound >= cut) | (nodes.side >= 0).all(
            1
        )  # a full pattern cannot be split: its bound is final
        if done.any():
            settled = min(settled, float(nodes.bound[done].min()))
            nodes = nodes.take(~done)
        return nodes, settled

    def grown(self, net: _Relaxed, nodes: _Nodes, radius: float) -> _Nodes:
        """The nodes with the least bounds replaced by their children."""
        order = in_order(nodes.bound)
        chosen = nodes.take(order[: net.batch])
        rest = nodes.take(order[net.batch :])
        return rest.join(self.bounded(net, self.children(net, chosen), radius))

    def children(self, net: _Relaxed, nodes: _Nodes) -> _Nodes:
        """All sides of the neurons that each node is split on: one, or more while there are few
        nodes.
        """
        depth = min(
            nodes.pick.shape[1], max(1, int(math.log2(min(TOGETHER, 2 * net.batch) / len(nodes))))
        )
        for k in range(depth):
            twice = nodes.take(torch.arange(2 * len(nodes)) // 2)
            rows = torch.arange(len(twice))
            second = torch.arange(len(twice)) % 2
            free = twice.side[rows, twice.pick[:, k]] < 0
            side = twice.side.clone()
            side[rows, twice.pick[:, k]] = torch.where(free, second, side[rows, twice.pick[:, k]])
            nodes = replace(twice, side=side).take(free | (second == 0))
        return net.tighten(nodes)

    def bounded(self, net: _Relaxed, nodes: _Nodes, radius: float) -> _Nodes:
        """Nodes with better multipliers, the bounds that these prove, and the neurons to split
        on next.
        """
        self.nodes += len(nodes)
        if not len(nodes):
            return nodes
        nodes = self.ascend(net, nodes, min(radius, self.upper))
        line = net.line(nodes)
        points = self.lowest(line, min(radius, self.upper))
        bound = torch.maximum(nodes.bound, net.reach(line).clamp(max=radius))
        nodes = replace(nodes, bound=bound, pick=self.choose(net, nodes, line, points))
        near = in_order(bound)[:CHASED]
        self.chase(points[near], nodes.rival[near], 2)
        cut = min(radius, self.upper) * (1 - self.tolerance / 2)
        undecided = (nodes.side < 0).sum(1)
        for i in (
            ((bound < cut) & ((bound > NEAR * cut) | (undecided <= SMALL)))
            .nonzero()
            .flatten()
            .tolist()
        ):
            if self.late:
                break
            nodes = self.solved(net, nodes, i, radius)
        return nodes

    def ascend(self, net: _Relaxed, nodes: _Nodes, reach: float) -> _Nodes:
        """The nodes with better multipliers: Polyak steps on alpha and beta until the line is
        above 0 in the ball.
        """
        start = nodes
        alpha = nodes.alpha.clone()
        beta = nodes.beta.clone()
        best = torch.full_like(nodes.bound, -math.inf)
        rows = torch.arange(len(nodes))
        for step in range(ASCENT + 1):
            line = net.line(nodes)
            points = self.lowest(line, reach)
            value = (line.a * points).sum(1) + line.b
            better = value > best[rows]
            alpha[rows[better]], beta[rows[better]], best[rows[better]] = (
                nodes.alpha[better],
                nodes.beta[better],
                value[better],
            )
            going = value <= 0
            if step == ASCENT or not going.any():
                break
            if not going.all():
                rows = rows[going]
                nodes = nodes.take(going)
                points = points[going]
                value = value[going]
                line = line.take(going)
            nodes = self.moved(net, nodes, line, points, value, 0.95**step)
        return replace(start, alpha=alpha, beta=beta)

    def moved(
        self,
        net: _Relaxed,
        nodes: _Nodes,
        line: _Line,
        points: Tensor,
        value: Tensor,
        factor: float,
    ) -> _Nodes:
        """One step up: the derivative of the line at its lowest points, in alpha and beta,
        times what is missing.
        """
        free = nodes.side < 0
        sign = torch.where(nodes.side == 1, 1.0, -1.0)
        scale = self.margin[nodes.rival]
        pace = torch.where(
            free, 0.5, scale[:, None] / (nodes.high - nodes.low).clamp(min=1e-12)
        )  # to unknowns of order one
        v = net.forward(line, points)
        pull = pace * torch.where(free, line.w.clamp(min=0) * v, -sign * v)
        at = torch.where(free, nodes.alpha, nodes.beta)
        floor = torch.where(free, net.slope, 0.0)
        pull = torch.where(
            ((pull < 0) & (at <= floor)) | ((pull > 0) & free & (at >= 1)), 0.0, pull
        )
        length = factor * (AIM * scale - value) / pull.square().sum(1).clamp(min=1e-300)
        at = torch.maximum(at + pace * pull * length[:, None], floor)
        return replace(
            nodes,
            alpha=torch.where(free, at.clamp(max=1), nodes.alpha),
            beta=torch.where(free, 0.0, at),
        )

    def lowest(self, line: _Line, reach: float) -> Tensor:
        """Where each line is lowest in the ball and the box, `(m, n)`."""
        return self.x + steepest(self.x.expand_as(line.a), -line.a, self.norm, reach, self.domain)

    def choose(self, net: _Relaxed, nodes: _Nodes, line: _Line, points: Tensor) -> Tensor:
        """The undecided neurons that cost each node most, `(m, .)`: coefficient times how far
        the line is from the neuron.
        """
        v = net.forward(line, points)
        gap = line.w * (torch.maximum(v, net.slope * v) - line.factor * v - line.shift)
        width = (nodes.high - nodes.low).clamp(min=1e-300)
        gap = gap.clamp(min=0) + 1e-6 * line.w.abs() * nodes.high * -nodes.low / width
        return largest(torch.where(nodes.side < 0, gap, -1.0), min(SPLITS, gap.shape[1]))

    def solved(self, net: _Relaxed, nodes: _Nodes, i: int, radius: float) -> _Nodes:
        """The nodes with the best multipliers there are for node i, and the bound they prove."""
        one = nodes.take(torch.tensor([i]))
        answer = _program(net, one, self.margin, 4 * self.noise, min(radius, self.upper))
        if answer is None:
            return nodes
        self.offer(self.x + (answer.point - self.x) * PUSH[:, None])
        better = replace(one, alpha=answer.alpha[None], beta=answer.beta[None])
        proved = float(
            net.reach(net.line(better, torch.full((1, 1), answer.weight, dtype=torch.float64)))
        )
        bound = nodes.bound.clone()
        pick = nodes.pick.clone()
        bound[i] = max(float(bound[i]), min(proved, radius))
        if (one.side[0] < 0).any():
            pick[i] = largest(torch.where(one.side[0] < 0, answer.gap, -1.0), pick.shape[1])
        return replace(nodes, bound=bound, pick=pick)


@dataclass(frozen=True, eq=False)
class _Part:
    """Nodes for somebody else to go on with, the nearest flip so far, and the seconds that are
    left for the sample.
    """

    nodes: _Nodes
    upper: float
    point: Tensor
    left: float


@dataclass(frozen=True, eq=False)
class _Report:
    """What became of a part: the nodes that are open now, the least bound of the others, what
    was found, how many it took.
    """

    nodes: _Nodes
    settled: float
    upper: float
    point: Tensor
    count: int


@dataclass(frozen=True, eq=False)
class _Problem:
    """What workers need of a search in one ball."""

    search: _Search
    net: _Relaxed
    radius: float

    @classmethod
    def of(cls, search: _Search, net: _Relaxed, radius: float) -> _Problem:
        """Without the pool, which stays here."""
        other = copy.copy(search)
        other.pool = None
        return cls(other, net, radius)

    def work(self, part: _Part, seconds: float) -> _Report:
        """Go on with a part for so many seconds, or until a flip is found that changes the ball."""
        search = copy.copy(self.search)
        begin = time.monotonic()
        search.nodes = 0
        search.upper = part.upper
        search.point = part.point
        nodes, settled = search.sift(part.nodes, math.inf, self.radius)
        with clock.limited(part.left), suppress(clock.Late):
            while len(nodes) and not (
                search.late or search.decided or search.upper < RESTART * self.radius
            ):
                nodes, settled = search.sift(
                    search.grown(self.net, nodes, self.radius), settled, self.radius
                )
                if time.monotonic() > begin + seconds:
                    break
        return _Report(nodes, settled, search.upper, search.point.clone(), search.nodes)


@dataclass(eq=False)
class _Shared:
    """A search in one ball whose open nodes others work on (`parallel.Shared`); out: the parts
    that they have.
    """

    search: _Search
    open: _Nodes
    settled: float
    radius: float
    out: list[_Part] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the ball is closed as far as it can be, or another one is wanted, or the time
        is up.
        """
        search = self.search
        return (
            search.late
            or search.decided
            or search.upper < RESTART * self.radius
            or not (len(self.open) or self.out)
        )

    def __len__(self) -> int:
        return len(self.open)

    def take(self, shares: int) -> _Part | None:
        """Every so many-th of the nodes with the least bounds."""
        if not len(self.open):
            return None
        search = self.search
        order = in_order(self.open.bound)
        chosen = torch.zeros(len(order), dtype=torch.bool)
        chosen[order[::shares][: parallel.MOST]] = True
        part = _Part(self.open.take(chosen), search.upper, search.point, clock.seconds_left())
        self.open = self.open.take(~chosen)
        self.out.append(part)
        return part

    def merge(self, part: _Part, report: _Report) -> None:
        """Its open nodes are open here, its flip counts if it is nearer than ours."""
        search = self.search
        search.nodes += report.count
        if report.upper < search.upper:
            search.upper = report.upper
            search.point = report.point
        self.settled = min(self.settled, report.settled)
        self._in(part, report.nodes)

    def back(self, part: _Part, lost: bool) -> None:
        """As it was handed out; if lost, closed with its bounds."""
        if lost:
            self.settled = min(self.settled, float(part.nodes.bound.min()))
        self._in(
            part,
            part.nodes.take(torch.zeros(len(part.nodes), dtype=torch.bool)) if lost else part.nodes,
        )

    def _in(self, part: _Part, nodes: _Nodes) -> None:
        self.open, self.settled = self.search.sift(self.open.join(nodes), self.settled, self.radius)
        self.out.remove(part)


@dataclass(frozen=True, eq=False)
class _Answer:
    """Multipliers of a node: weight of the margin, alpha and beta `(H,)`; the nearest point `(n,)`,
    and gap `(H,)`: what each neuron's relaxation costs there, its multiplier times how far it is
    from its value.
    """

    weight: float
    alpha: Tensor
    beta: Tensor
    point: Tensor
    gap: Tensor


def _program(
    net: _Relaxed, node: _Nodes, margin: Tensor, noise: float, reach: float
) -> _Answer | None:
    """The relaxed problem of one node, solved exactly; None if the solver gives up.

    Over `u = (x' - x) / reach` and the undecided `z / width`, rows `table (u, z) <= limit`: the
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
    j = int(node.rival[0])
    # Every neuron as an affine function of (u, z, 1).
    v = np.concatenate(
        [reach * net.A.numpy(), np.zeros((len(side), k)), (net.A @ net.x + net.c).numpy()[:, None]],
        1,
    )
    z = np.zeros_like(v)
    b = net.B.numpy()
    z[free, n + np.arange(k)] = width[free]
    for rows in net.blocks:
        v[rows] += b[rows, : rows.start] @ z[: rows.start]
        fixed = rows.start + np.flatnonzero(side[rows] >= 0)
        z[fixed] = np.where(side[fixed] == 1, 1.0, slope[fixed])[:, None] * v[fixed]
    _, up, shift = (part[0].numpy()[free] for part in net.chords(node))
    top = net.D[j].numpy() @ z
    top[:n] += reach * net.C[j].numpy()
    top[-1] += float(net.C[j] @ net.x + net.e[j])
    chord = z[free] - up[:, None] * v[free]
    chord[:, -1] -= shift
    sign = np.where(side[walls] == 1, -1.0, 1.0)[:, None]
    unit = np.concatenate([[float(margin[j])], width[walls], width[free], width[free], width[free]])
    lower = slope[free][:, None] * v[free] - z[free]
    table = (
        np.concatenate([top[None], sign * v[walls], v[free] - z[free], lower, chord])
        / unit[:, None]
    )
    limit = -table[:, -1]
    limit[0] -= noise / unit[0]
    if net.norm == 2:
        answer = _least_distance(net, table[:, :-1], limit, noise / unit[0], reach)
    else:
        answer = _linear_program(net, table[:, :-1], limit, 1 + len(walls), reach)
    if answer is None:
        return None
    y, u = answer
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
    return _Answer(
        float(y[0]), torch.from_numpy(alpha), torch.from_numpy(beta), point, torch.from_numpy(gap)
    )


def _linear_program(
    net: _Relaxed, table: np.ndarray, limit: np.ndarray, elastic: int, reach: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """`min ||u||_r` over `table (u, z) <= limit` in the box, r = 1 or inf, by HiGHS: multipliers of
    the rows, and (u, z).

    The first `elastic` rows may be violated at a price, so that a program always has an answer and
    its multipliers are finite.
    """
    n = len(net.x)
    k = table.shape[1] - len(net.x)
    low = -np.full(n, math.inf)
    high = np.full(n, math.inf)
    if net.domain is not None:
        low = (net.domain[0] - net.x.numpy()) / reach
        high = (net.domain[1] - net.x.numpy()) / reach
    price = -(np.arange(len(table)) < elastic).astype(float)[:, None]
    if net.norm == 1:  # u = p - q
        cost = np.concatenate([np.ones(2 * n), np.zeros(k), [ELASTIC]])
        rows = np.concatenate([table[:, :n], -table[:, :n], table[:, n:], price], 1)
        sizes = [*((0, h) for h in high), *((0, -a) for a in low), *[(None, None)] * k, (0, None)]
    else:  # |u_i| <= t
        cost = np.concatenate([np.zeros(n + k), [1.0, ELASTIC]])
        rows = np.concatenate([table, np.zeros((len(table), 1)), price], 1)
        ball = np.concatenate([np.eye(n), np.zeros((n, k)), -np.ones((n, 1)), np.zeros((n, 1))], 1)
        mirror = ball.copy()
        mirror[:, :n] *= -1
        rows = np.concatenate([rows, ball, mirror])
        limit = np.concatenate([limit, np.zeros(2 * n)])
        sizes = [*zip(low, high), *[(None, None)] * k, (0, None), (0, None)]
    answer = linprog(cost, A_ub=rows, b_ub=limit, bounds=sizes, method="highs-ds")
    if answer.status != 0:
        return None
    u = answer.x[:n] - answer.x[n : 2 * n] if net.norm == 1 else answer.x[:n]
    z = answer.x[2 * n : 2 * n + k] if net.norm == 1 else answer.x[n : n + k]
    return -answer.ineqlin.marginals[: len(table)], np.concatenate([u, z])


def _least_distance(
    net: _Relaxed, table: np.ndarray, limit: np.ndarray, noise: float, reach: float
) -> tuple[np.ndarray, np.ndarray] | None:
    """The same for r = 2 by least-distance programming (see `cells.nearest_point`); z counts as
    WEIGHT times its size.
    """
    n = len(net.x)
    k = table.shape[1] - len(net.x)
    rows = table.copy()
    rows[:, n:] /= WEIGHT
    if net.domain is not None:
        low = (net.x.numpy() - net.domain[0]) / reach
        high = (net.domain[1] - net.x.numpy()) / reach
        eye = np.eye(n, n + k)
        rows = np.concatenate([rows, -eye[low < 1], eye[high < 1]])
        limit = np.concatenate([limit, low[low < 1], high[high < 1]])
    target = np.zeros(n + k + 1)
    u = np.zeros(n + k)
    target[-1] = 1.0
    try:
        for extra in (0.0, noise):  # where the margin can be 0 but not negative
            limit[0] += extra
            system = np.vstack([-rows.T, -limit])
            y, length = nnls(system, target, maxiter=20 * len(limit))
            if length > 1e-9:
                break
    except RuntimeError:
        return None
    if length > 1e-9:
        residual = system @ y - target
        u = -residual[:-1] / residual[-1]
        u[n:] /= WEIGHT
    return y[: len(table)], u
