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
from wassail.certificates.ball_radii import proved_by_balls
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep, margins
from wassail.certificates.bounds.quadratic import (
    CUBE,
    QUADRATIC,
    has_quadratics,
    proved_samples,
)
from wassail.certificates.graph.graph import Graph
from wassail.certificates.radius_search import batch_of, branched, least_value
from wassail.certificates.search.leaves import Forest
from wassail.certificates.search.margins import STEPS as ASCENT
from wassail.geometry import maximiser
from wassail.threat import Domain

# Domains of a sample, from the least effort to the most. More steps on the slopes of inner bounds
# cost ten times as much as the first branching, and prove less.
EFFORTS = (48, 192, 768, 3072, 12288)
# Quadratic bounds come before any branching. A proof takes one sample much farther than the least
# branching does, so that radii grow by a share of the way to the flip, and the next effort comes
# once that is short.
WAY = 0.35
SHORT_WAY = 0.1
FEW = 16  # samples in one attempt then
RIVALS = 4  # that a sample has, before one was tried
BALL_STEPS = 60 * 3  # passes through the network of an ascent with balls
INNER = 4  # times as much with narrower inner boxes, which are for all efforts but the least
ROWS = 0.2  # passes that a coefficient vector of a sweep takes: most end halfway


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
        return SHORT_WAY if self.efforts[level][0] else step

    def price(self, level: int) -> float:
        """Operations that an attempt on one sample may take, before one was made."""
        undecided = 0.5 * sum(self.graph.nodes[j].size for j in self.graph.read_by_others)
        steps, count = self.efforts[level]
        passes = ROWS * undecided + 3 * ASCENT * count
        cube = CUBE * (self.graph.inputs + undecided) ** 3
        quadratic = steps / 3 * RIVALS * cube
        return self.unit * (passes + self._ball_passes(level)) + quadratic

    def _ball_passes(self, level: int) -> int:
        """Passes through the network that balls take for one row of margins."""
        if not self.balls:
            return 0
        return BALL_STEPS * (INNER if level > 0 else 1)

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
        sweep = Sweep(self.graph, Balls.make(x, radius, self.norm, self.domain)).run()
        lower, _, a = margins(sweep, y)
        points = self._lowest(sweep, x, y, lower, a, radius)
        lower = lower.cpu()
        proved = least_value(lower, labels) > 0
        by = ["crown" if good else "" for good in proved.tolist()]
        work = ROWS * sweep.rows * self.unit
        left = (~proved).nonzero()[:, 0]
        if self.balls and len(left):
            some = left.to(x.device)
            where = (x[some], y[some], radius[left], self.norm, self.domain)
            good = proved_by_balls(self.graph, *where, inner=level > 0)
            work += self._ball_passes(level) * self.unit * len(left) * self.graph.outputs
            proved[left] = good
            by = ["ball" if proved[k] and not name else name for k, name in enumerate(by)]
            left = left[~good]
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
            names = rows[left].tolist()
            most = [count] * len(left)
            decided = branched(
                sweep, lower, left.tolist(), labels, most, math.inf, None, self.forest, names
            )
            for k, (closed, bounded) in zip(left.tolist(), decided):
                domains += bounded
                if closed:
                    proved[k] = True
                    by[k] = "branch"
        work += 3 * ASCENT * domains * self.unit
        clock.spend(work)
        return Outcome(proved, by, points, work, domains)

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
