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
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.certificates.exact.flip_problem import Nodes, Relaxed, RelaxedLine, solve_program
from wassail.certificates.graph.graph import Graph
from wassail.certificates.relax.executed import ahead
from wassail.certificates.relax.ranges import gamma
from wassail.certificates.search.frontier import Part, Pool, SharedFrontier, Table, Workers, crew
from wassail.errors import InputError
from wassail.geometry import clip, plane_step, sides, steepest
from wassail.rounding import UNIT
from wassail.threat import Boxes, Domain, boxes_of, fitted, parse_domain, parse_norm
from wassail.ties import in_order, largest

# neurons that a node is split on at once, while that makes at most so many nodes
SPLITS = 3
TOGETHER = 128
ASCENT = 8  # steps on the multipliers of a node
# Operations of a step, measured: passes through the bound, and what a layer costs beside them,
# which the nodes of a batch share.
STEP_PASSES = 9
OVERHEAD = 4000
CHASE_PASSES = 5  # of a step toward a flip: a margin, its gradient and the margins after it
AIM = 0.05  # where the ascent aims: this far above 0, relative to the margin at the sample
NEAR = 0.9999  # nodes whose bound is this close to the nearest flip get an exact program
SOLVED_UP_TO_UNSTABLE = 2  # so do nodes with at most so many unstable neurons
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
    bounded; cut: whether the time or the work ran out for some of them.
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
    workers: Workers = None,
) -> Distances:
    """The distance of samples `(N, *shape)` with labels `(N,)` to the nearest point of the domain
    that is not strictly y.

    Args:
        graph: the network.
        x: the samples.
        y: their labels.
        norm: 1, 2 or inf.
        domain: a box, or None for all of R^n.
        upper: `(N,)`, distances at which flips are said to be: a hint, every flip reported is found
            and evaluated here.
        lower: `(N,)`, radii that are proved.
        slack: `(N, K)`, a point counts as a flip where a rival comes that near to y, which is how
            far the executed network may be from the exact one.
        within: look no farther than this, and stop at the first flip that is not farther: enough
            to decide a fixed budget.
        time_limit: seconds for all samples, shared evenly; what is not closed by then is reported
            as a bracket.
        tolerance: relative, between lower and upper.
        workers: they share the open nodes of a sample (see `frontier`), one sample after the other.
    """
    norm = parse_norm(norm)
    domain = fitted(parse_domain(domain, own=True), x)
    graph = graph.to(HOST)
    x = x.detach().cpu().double()
    y = y.cpu()
    _check(graph, x, y, domain)
    hints = _given(upper, len(x), math.inf).tolist()
    known = _given(lower, len(x), 0.0).tolist()
    found = []
    cut = False
    with crew(workers) as pool, clock.limited(time_limit):
        for i in range(len(x)):
            own = graph if slack is None else ahead(graph, slack[i])
            box = _flat_box(domain, i)
            search = Search(own, x[i].clone(), int(y[i]), norm, box, within, tolerance, pool)
            left = len(x) - i
            with clock.limited(clock.seconds_left() / left, clock.work_left() / left):
                search.run(hints[i], known[i], i == 0)
            cut |= search.cut
            found.append(search)
    low = torch.tensor([s.lower for s in found], dtype=torch.float64)
    high = torch.tensor([s.upper for s in found], dtype=torch.float64)
    points = torch.stack([s.point.reshape(x.shape[1:]) for s in found]) if found else x.clone()
    nodes = torch.tensor([s.nodes for s in found], dtype=torch.int64)
    return Distances(low, high, points, _close(low, high, tolerance), nodes, cut)


def _check(graph: Graph, x: Tensor, y: Tensor, domain: Domain) -> None:
    """Refuse samples that have no nearest flip."""
    if len(x) != len(y):
        raise InputError(f"{len(x)} samples have {len(y)} labels: give one for each.")
    low, high = (x, x) if domain is None else sides(domain, x)
    if domain is not None and not ((x >= low) & (x <= high)).all():
        raise InputError(
            "some samples lie outside the domain: clamp them or give the box they live in."
        )
    if len(y) and not ((y >= 0) & (y < graph.outputs)).all():
        raise InputError(f"labels go from 0 to {graph.outputs - 1} here: some of y do not.")
    if not torch.isfinite(x).all():
        raise InputError("the samples contain NaN or infinity: give real samples.")


def _flat_box(domain: Domain, i: int) -> Domain:
    """The box of sample i, for flat points."""
    own = boxes_of(domain)
    if own is None:
        return domain
    one = own.take(torch.tensor([i]))
    return Boxes(one.low.cpu().flatten(), one.high.cpu().flatten())  # type: ignore[return-value]


def _given(values: Tensor | None, n: int, default: float) -> Tensor:
    """Values of n samples, float64 on the CPU."""
    if values is None:
        return torch.full((n,), default, dtype=torch.float64)
    return values.detach().cpu().double()


def _close(lower: Tensor, upper: Tensor, tolerance: float) -> Tensor:
    return (lower == upper) | (
        upper - lower <= tolerance * torch.where(torch.isfinite(upper), upper, 0.0)
    )


class Search:
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
        pool: Pool | None = None,
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
        self.cut = False  # whether the time or the work ran out
        self.rivals = torch.tensor([j for j in range(graph.outputs) if j != y], dtype=torch.int64)

    @property
    def late(self) -> bool:
        """Whether the time is up."""
        return clock.late()

    @property
    def decided(self) -> bool:
        """Whether a flip is known that is near enough."""
        return self.within is not None and self.upper <= self.within and self.upper < math.inf

    def run(self, hint: float, known: float, eager: bool) -> None:
        """Close the bracket; hint: where a flip is said to be, known: a proved radius, eager:
        whether a flip is looked for even if the time is up.
        """
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
        if clock.out_of_time() and not eager:
            self.cut = True
            return
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
            self.cut = clock.late()
        if away is not None:
            with suppress(clock.Late):
                self.retreat(away)
        if self.lower > self.upper * (1 + self.tolerance):
            raise InputError(
                f"there is a flip at {self.upper:g}, but {known:g} was given as a proved radius: "
                "check it."
            )
        # A radius is never both proved and reached.
        if self.upper < math.inf:
            self.lower = min(self.lower, self.upper * (1 - 4 * UNIT))

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
            net = self.relaxed(radius)
            line = net.line(self.ascend(net, net.roots(), radius))
            # `reach` is rounded down
            self.lower = max(self.lower, min(float(net.reach(line).min()), radius))

    def relaxed(self, radius: float) -> Relaxed:
        """The network in a ball."""
        x = self.x.reshape(self.shape)
        return Relaxed(self.graph, x, self.y, radius, self.norm, self.domain)

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
            clock.spend(CHASE_PASSES * len(points) * self.graph.operations)
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
        unstable.
        """
        net = self.relaxed(radius)
        roots = net.roots()
        start = torch.full_like(roots.bound, min(self.lower, radius))
        ball = _Ball(self, net, radius)
        ball.open.add(self.bounded(net, replace(roots, bound=start), radius))
        ball.sift()
        ball.proceed(self.pool)
        return len(ball.open) > 0 and not (self.late or self.decided)

    def children(self, net: Relaxed, nodes: Nodes) -> Nodes:
        """All sides of the neurons that each node is split on: one, or more while there are few
        nodes.
        """
        room = int(math.log2(min(TOGETHER, 2 * net.batch) / len(nodes)))
        depth = min(nodes.pick.shape[1], max(1, room))
        for k in range(depth):
            twice = nodes.take(torch.arange(2 * len(nodes)) // 2)
            rows = torch.arange(len(twice))
            second = torch.arange(len(twice)) % 2
            free = twice.side[rows, twice.pick[:, k]] < 0
            side = twice.side.clone()
            side[rows, twice.pick[:, k]] = torch.where(free, second, side[rows, twice.pick[:, k]])
            nodes = replace(twice, side=side).take(free | (second == 0))
        return net.tighten(nodes)

    def bounded(self, net: Relaxed, nodes: Nodes, radius: float) -> Nodes:
        """Nodes with better multipliers, the bounds that these prove, and the neurons to split
        on next.
        """
        if not len(nodes):
            return nodes
        self.charge(nodes)
        nodes = self.ascend(net, nodes, min(radius, self.upper))
        line = net.line(nodes)
        points = self.lowest(line, min(radius, self.upper))
        bound = torch.maximum(nodes.bound, net.reach(line).clamp(max=radius))
        nodes = replace(nodes, bound=bound, pick=self.choose(net, nodes, line, points))
        near = in_order(bound)[:CHASED]
        self.chase(points[near], nodes.rival[near], 2)
        cut = min(radius, self.upper) * (1 - self.tolerance / 2)
        unstable = (nodes.side < 0).sum(1)
        worth = (bound > NEAR * cut) | (unstable <= SOLVED_UP_TO_UNSTABLE)
        for i in ((bound < cut) & worth).nonzero().flatten().tolist():
            if self.late:
                break
            nodes = self.solved(net, nodes, i, radius)
        return nodes

    def charge(self, nodes: Nodes) -> None:
        """What bounding nodes costs."""
        self.nodes += len(nodes)
        each = STEP_PASSES * self.graph.operations + OVERHEAD * len(self.graph.nodes)
        clock.spend(ASCENT * each * len(nodes))

    def ascend(self, net: Relaxed, nodes: Nodes, reach: float) -> Nodes:
        """The nodes with better multipliers: Polyak steps on alpha and beta until the line is
        above 0 in the ball.
        """
        start = nodes
        alpha = nodes.alpha.clone()
        beta = nodes.beta.clone()
        best = torch.full_like(nodes.bound, -math.inf)
        rows = torch.arange(len(nodes))
        for step in range(ASCENT + 1):
            clock.look()
            line = net.line(nodes)
            points = self.lowest(line, reach)
            value = self.height(line, points)
            better = value > best[rows]
            now = rows[better]
            alpha[now], beta[now] = nodes.alpha[better], nodes.beta[better]
            best[now] = value[better]
            going = value <= 0
            if step == ASCENT or not going.any():
                break
            if not going.all():
                rows, points, value = rows[going], points[going], value[going]
                nodes, line = nodes.take(going), line.take(going)
            nodes = self.moved(net, nodes, line, points, value, 0.95**step)
        return replace(start, alpha=alpha, beta=beta)

    def moved(
        self,
        net: Relaxed,
        nodes: Nodes,
        line: RelaxedLine,
        points: Tensor,
        value: Tensor,
        factor: float,
    ) -> Nodes:
        """One step up: the derivative of the line at its lowest points, in alpha and beta,
        times what is missing.
        """
        free = nodes.side < 0
        sign = torch.where(nodes.side == 1, 1.0, -1.0)
        scale = self.margin[nodes.rival]
        # to unknowns of order one
        pace = torch.where(free, 0.5, scale[:, None] / (nodes.high - nodes.low).clamp(min=1e-12))
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

    def height(self, line: RelaxedLine, points: Tensor) -> Tensor:
        """How high each line is at its point `(m, n)`: a node is closed above 0, `(m,)`."""
        return (line.a * points).sum(1) + line.b

    def lowest(self, line: RelaxedLine, reach: float) -> Tensor:
        """Where each line is lowest in the ball and the box, `(m, n)`."""
        return self.x + steepest(self.x.expand_as(line.a), -line.a, self.norm, reach, self.domain)

    def choose(self, net: Relaxed, nodes: Nodes, line: RelaxedLine, points: Tensor) -> Tensor:
        """The unstable neurons that cost each node most, `(m, .)`: coefficient times how far
        the line is from the neuron.
        """
        v = net.forward(line, points)
        gap = line.w * (torch.maximum(v, net.slope * v) - line.factor * v - line.shift)
        width = (nodes.high - nodes.low).clamp(min=1e-300)
        gap = gap.clamp(min=0) + 1e-6 * line.w.abs() * nodes.high * -nodes.low / width
        return largest(torch.where(nodes.side < 0, gap, -math.inf), min(SPLITS, gap.shape[1]))

    def solved(self, net: Relaxed, nodes: Nodes, i: int, radius: float) -> Nodes:
        """The nodes with the best multipliers there are for node i, and the bound they prove."""
        clock.spend(clock.STEP)  # of least squares; a linear program counts itself
        one = nodes.take(torch.tensor([i]))
        answer = solve_program(net, one, self.margin, 4 * self.noise, min(radius, self.upper))
        if answer is None:
            return nodes
        self.offer(self.x + (answer.point - self.x) * PUSH[:, None])
        better = replace(one, alpha=answer.alpha[None], beta=answer.beta[None])
        weight = torch.full((1, 1), answer.weight, dtype=torch.float64)
        proved = float(net.reach(net.line(better, weight)))
        bound = nodes.bound.clone()
        pick = nodes.pick.clone()
        bound[i] = max(float(bound[i]), min(proved, radius))
        if (one.side[0] < 0).any():
            pick[i] = largest(torch.where(one.side[0] < 0, answer.gap, -math.inf), pick.shape[1])
        return replace(nodes, bound=bound, pick=pick)


@dataclass(frozen=True, eq=False)
class _Found:
    """The nearest flip so far, the least bound of the closed nodes, and how many were bounded."""

    upper: float
    point: Tensor
    settled: float
    count: int


class _Ball(SharedFrontier[Nodes, _Found]):
    """The search of one sample in one ball.

    settled: the least bound of the closed nodes, the radius at most.
    """

    def __init__(self, search: Search, net: Relaxed, radius: float) -> None:
        self.search = search
        self.net = net
        self.radius = radius
        self.settled = radius
        none = torch.zeros(0, dtype=torch.int64)
        self.open: Table[Nodes] = Table(net.roots().take(none))
        self.out = []

    @property
    def over(self) -> bool:
        """Whether a flip is near enough, or another ball is wanted, or the time is up."""
        search = self.search
        return search.late or search.decided or search.upper < RESTART * self.radius

    def step(self) -> None:
        """The nodes with the least bounds replaced by their children."""
        with self.taken(self.open.first(self.net.batch)) as nodes:
            children = self.search.children(self.net, nodes)
            self.open.add(self.search.bounded(self.net, children, self.radius))

    def sift(self) -> None:
        """Close the nodes that hold no nearer flip: what is left raises the lower side."""
        search = self.search
        nodes = self.open.everything()
        cut = min(self.radius, search.upper) * (1 - search.tolerance / 2)
        full = (nodes.side >= 0).all(1)  # it cannot be split: its bound is final
        done = (nodes.bound >= cut) | full
        if done.any():
            self.settled = min(self.settled, float(nodes.bound[done].min()))
            self.open.split(done)
        # Every bound is rounded down, and the radius is a number.
        search.lower = max(search.lower, min([self.settled, search.upper, *self.bounds]))

    def bare(self) -> _Ball:
        """Without the pool, which stays here."""
        other = super().bare()
        other.search = copy.copy(self.search)
        other.search.pool = None
        return other

    def known(self, workers: int) -> _Found:
        """The nearest flip of all."""
        return _Found(self.search.upper, self.search.point, math.inf, 0)

    def begin(self, found: _Found) -> None:
        """Begin with the nearest flip of all."""
        self.search.upper = found.upper
        self.search.point = found.point
        self.search.nodes = found.count
        self.settled = found.settled

    def since(self, found: _Found) -> _Found:
        """What was found here."""
        search = self.search
        return _Found(search.upper, search.point.clone(), self.settled, search.nodes)

    def learn(self, found: _Found) -> None:
        """A flip counts if it is nearer than ours."""
        self.search.nodes += found.count
        if found.upper < self.search.upper:
            self.search.upper = found.upper
            self.search.point = found.point
        self.settled = min(self.settled, found.settled)

    def stand(self, part: Part[Nodes, _Found]) -> None:
        """Its least bound counts."""
        self.settled = min(self.settled, part.bound)
