"""Proofs at single radii, with as much effort as is asked: linear bounds, balls, quadratic bounds,
branching.

One attempt takes some samples at a radius each. What it costs is counted in operations, so that
whoever plans attempts need not look at a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bounds.ball_margins import BallEffort, raised_margins
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep, margins
from wassail.certificates.bounds.quadratic import (
    CUBE,
    QUADRATIC,
    has_quadratics,
    proved_samples,
)
from wassail.certificates.bounds.rows import Length
from wassail.certificates.graph.graph import Graph
from wassail.certificates.radius_search import batch_of, branched, least_value
from wassail.certificates.search.leaves import Forest
from wassail.certificates.search.margins import STEPS as ASCENT
from wassail.geometry import maximiser
from wassail.threat import Domain

# Domains of a sample, from the least effort to the most. More steps on the slopes of inner bounds
# cost ten times as much as the first branching, and prove less.
EFFORTS = (48, 192, 768, 3072, 12288)
# With balls, at l1 and l2: what goes before the branching of each of these. Splits with balls prove
# far more there than those with boxes, at fifty times the price of a domain. One effort comes after
# these, without balls.
BALLS = (
    BallEffort(depth=6, width=8, near=0.3, inner=False),
    BallEffort(depth=12, width=48, near=0.5, inner=True, early=False),
    BallEffort(depth=16, width=192, near=0.8, inner=True, early=False),
)
# Radii of CROWN grow by about this much, relative, with the least of these. A proof takes seconds,
# so that the next effort comes earlier.
BALL_STEP = 0.2
LEAST_BALL_STEP = 0.05
# Quadratic bounds come before any branching. A proof takes one sample much farther than the least
# branching does, so that radii grow by a share of the way to the flip, and the next effort comes
# once that is short.
WAY = 0.35
SHORT_WAY = 0.1
FEW = 16  # samples in one attempt then
RIVALS = 4  # that a sample has, before one was tried
BALL_PASSES = 60 * 3 * 8  # through the network, of the least effort with balls
DEEPER = 6  # times as many with each effort after it
ROWS = 0.2  # passes that a coefficient vector of a sweep takes: most end halfway
# Steps on the slopes of inner bounds, before branching with at least so many domains: they multiply
# the price of a sweep, and let radii grow by a step at once.
SLOPES = 10
SLOPES_FROM = 2400
DEARER = 13
SLOPES_STEP = 0.06
LEAST_SLOPES_STEP = 0.03
DOMAIN = ASCENT  # passes that a domain takes: its steps are in float32, and shared by a batch


@dataclass(frozen=True, eq=False)
class Outcome:
    """What an attempt found for each of its samples.

    proved: bool `(M,)`; by: the method that proved it, "" for none; points: where the linear bound
    is lowest, `(M, *shape)` in float64; work: operations of the whole attempt; domains: bounded.
    """

    proved: Tensor
    by: list[str]
    points: Tensor
    work: float
    domains: int


class Prover:
    """Attempts on the samples of one problem.

    graph: the network; x `(N, *shape)` and y `(N,)` on its device; norm; domain.
    """

    def __init__(self, graph: Graph, x: Tensor, y: Tensor, norm: float, domain: Domain) -> None:
        self.graph = graph
        self.x = x
        self.y = y
        self.norm = norm
        self.domain = domain
        self.labels = y.cpu()
        self.unit = graph.operations + 10**4 * len(graph.nodes)  # of one pass
        self.balls = norm in (1, 2) and not graph.smooth
        self.splits = not graph.curved
        self.forest = Forest()
        self.provers = 1  # threads that share the samples of quadratic bounds
        self.quadratic = has_quadratics(graph, norm)
        # Of each level: steps of quadratic bounds, domains of branching.
        branching = EFFORTS[1:] if self.quadratic else EFFORTS if self.splits else (0,)
        self.efforts = [(steps, 0) for steps in QUADRATIC if self.quadratic]
        self.efforts += [(0, count) for count in branching]
        if self.balls:
            self.efforts = self.efforts[: len(BALLS) + 1]

    @property
    def together(self) -> int:
        """Samples in one attempt."""
        return FEW if self.quadratic else batch_of(self.graph)

    @property
    def levels(self) -> int:
        """How many efforts there are."""
        return len(self.efforts)

    def first_step(self, lower: Tensor, far: Tensor, step: float) -> Tensor:
        """How much radii grow by at first and after a proof, relative; step: where that does not
        depend on the flip.
        """
        if not self.quadratic:
            return torch.full_like(lower, step)
        way = WAY * (far / lower.clamp(min=1e-300) - 1)
        return torch.where((lower > 0) & far.isfinite(), way, 2 * step)

    def least_step(self, level: int, step: float) -> float:
        """From here on a failure asks for more effort."""
        if self.efforts[level][0]:
            return SHORT_WAY
        if self._ball_effort(level) is not None:
            return LEAST_BALL_STEP
        return LEAST_SLOPES_STEP if self._thorough(level) else step

    def next_step(self, level: int, step: float) -> float:
        """How much a radius grows by at first at a level that it comes to after a proof."""
        return SLOPES_STEP if self._thorough(level) else step

    def price(self, level: int) -> float:
        """Operations that an attempt on one sample may take, before one was made."""
        undecided = self._undecided()
        steps, count = self.efforts[level]
        sweeps = 1 + (DEARER if self._thorough(level) else 0)
        passes = sweeps * ROWS * undecided + DOMAIN * count
        cube = CUBE * (self.graph.inputs + undecided) ** 3
        quadratic = steps / 3 * RIVALS * cube
        return self.unit * (passes + self._ball_passes(level)) + quadratic

    def _thorough(self, level: int) -> bool:
        """Whether branching is worth better slopes of inner bounds before it."""
        if self.balls or self.quadratic or self.graph.smooth or self.graph.curved:
            return False
        dear = max(1.0, ROWS * self._undecided() / DOMAIN / EFFORTS[0])
        return self.efforts[level][1] * dear >= SLOPES_FROM

    def _undecided(self) -> float:
        """Neurons of a sample that a sweep may leave undecided."""
        return 0.5 * sum(self.graph.nodes[j].size for j in self.graph.read_by_others)

    def _ball_effort(self, level: int) -> BallEffort | None:
        """What balls may spend at a level, None for nothing."""
        return BALLS[level] if self.balls and level < len(BALLS) else None

    def _ball_passes(self, level: int) -> float:
        """Passes through the network that balls may take for one sample."""
        return BALL_PASSES * DEEPER**level if self._ball_effort(level) is not None else 0.0

    def attempt(self, rows: Tensor, radius: Tensor, level: int) -> Outcome:
        """Try to prove samples at their radii.

        Long because the methods share the samples that are left.

        Args:
            rows: which samples, `(M,)` on the CPU.
            radius: float64 `(M,)`, on the CPU.
            level: place in `efforts`.
        """
        here = rows.to(self.x.device)
        x = self.x[here]
        y = self.y[here]
        labels = self.labels[rows]
        effort = self._ball_effort(level)
        moved: dict[int, Length] | None = None if effort is None else {}
        balls = Balls.make(x, radius, self.norm, self.domain)
        sweep = Sweep(self.graph, balls, 0, None, moved).run()
        lower, _, a = margins(sweep, y)
        points = self._lowest(sweep, x, y, lower, a, radius)
        lower = lower.cpu()
        proved = least_value(lower, labels) > 0
        by = ["crown" if good else "" for good in proved.tolist()]
        work = ROWS * sweep.rows * self.unit
        left = (~proved).nonzero()[:, 0]
        if effort is not None and moved is not None and len(left):
            raised, passes = raised_margins(sweep, moved, y, lower.to(y.device), effort)
            work += passes * self.unit
            lower = raised.cpu()
            good = least_value(lower, labels) > 0
            by = ["ball" if good[k] and not name else name for k, name in enumerate(by)]
            proved = proved | good
            left = (~proved).nonzero()[:, 0]
        domains = 0
        steps, count = self.efforts[level]
        if steps and len(left):
            rest = left.tolist()
            found, spent = proved_samples(sweep, rest, labels, lower, steps, self.provers)
            work += spent
            for k, done in zip(rest, found):
                if done:
                    proved[k] = True
                    by[k] = "quadratic"
            left = left[~proved[left]]
        if count and len(left):
            once = ROWS * sweep.rows / len(rows) / DOMAIN  # a sweep of one sample, in domains
            # After a sweep the least effort is worth at least that much.
            dear = 1.0 if effort is not None else max(1.0, once / EFFORTS[0])
            most = int(count * dear)
            thorough = self._thorough(level)
            if thorough:
                work += DEARER * once * len(left) * DOMAIN * self.unit
            for k, (closed, bounded) in zip(
                left.tolist(), self._branch(sweep, rows, left, lower, most, thorough)
            ):
                domains += bounded
                if closed:
                    proved[k] = True
                    by[k] = "branch"
        work += DOMAIN * domains * self.unit
        clock.spend(work)
        return Outcome(proved, by, points, work, domains)

    def _branch(
        self, sweep: Sweep, rows: Tensor, left: Tensor, lower: Tensor, most: int, thorough: bool
    ) -> list[tuple[bool, int]]:
        """Whether branching proves some samples of a sweep, and by how many domains.

        Args:
            sweep: of the samples.
            rows: which they are, `(M,)`.
            left: which of these are to prove.
            lower: their margins, `(M, K)`.
            most: domains for each.
            thorough: whether inner bounds get better slopes first.
        """
        labels = self.labels[rows[left]]
        places = left.tolist()
        lower = lower[left]
        if thorough:
            some = left.to(self.x.device)
            known = {j: (low[some], high[some]) for j, (low, high) in sweep.proved().items()}
            sweep = Sweep(self.graph, sweep.balls.take(some), SLOPES, known).run()
            found = margins(sweep, labels.to(self.x.device))[0].cpu()
            lower = torch.maximum(lower, found)
            places = list(range(len(left)))
        # `branched` asks for margins and labels of all samples of the sweep.
        margin = lower.new_zeros(len(sweep.balls.x), lower.shape[1])
        margin[places] = lower
        label = labels.new_zeros(len(margin))
        label[places] = labels
        names = rows[left].tolist()
        counts = [most] * len(left)
        return branched(sweep, margin, places, label, counts, math.inf, None, self.forest, names)

    def _lowest(
        self, sweep: Sweep, x: Tensor, y: Tensor, lower: Tensor, a: Tensor, radius: Tensor
    ) -> Tensor:
        """Where the linear bound on the worst margin of each sample is least, on the CPU."""
        rival = lower.scatter(1, y[:, None], math.inf).argmin(1)
        order = torch.argsort(sweep.order)
        pull = -a[torch.arange(len(a), device=a.device), rival][:, order]
        step = maximiser(pull.double().reshape(x.shape), self.norm)
        size = radius.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
        point = x.double() + size * step
        return (point if self.domain is None else point.clamp(*self.domain)).cpu()
