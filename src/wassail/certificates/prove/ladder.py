"""The one ladder: ways to prove samples at a radius each, from cheap to dear.

An attempt begins with linear bounds for all of its samples. What they leave open goes up the
ladder, level by level; a level is a few rungs that follow each other. What an attempt costs is
counted in operations for each sample, by what is bounded for it, so that no plan looks at a clock
and no sample depends on the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.rungs import (
    DOMAIN_PASSES,
    LEAST_DOMAINS,
    ROW_PASSES,
    BallRung,
    BranchRung,
    QuadraticRung,
    batch_of,
    least_value,
    unstable_share,
)
from wassail.certificates.relax.ball_margins import BallEffort
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.quadratic import QUADRATIC, has_quadratics
from wassail.certificates.relax.rows import Length
from wassail.certificates.search.leaves import Forest
from wassail.certificates.search.workers import Pool
from wassail.geometry import clip, maximiser

# Domains of branching, from the least effort to the most. More steps on the slopes of inner bounds
# cost ten times as much as the first branching, and prove less.
DOMAINS = (LEAST_DOMAINS, 192, 768, 3072, 12288)
# What balls may spend, at l2. Splits with balls prove far more there than those with boxes, at
# fifty times the price of a domain. One level comes after these, without balls.
BALLS = (
    BallEffort(depth=6, width=8, near=0.3, inner=False),
    BallEffort(depth=12, width=48, near=0.5, inner=True, early=False),
    BallEffort(depth=16, width=192, near=0.8, inner=True, early=False),
)
# From so many domains on better slopes of inner bounds come before branching.
SLOPES_FROM = 2400
# What linear bounds cost, in those at linf: others know how far neurons move together.
SWEEP_PRICE = {1.0: 3.0, 2.0: 2.0, math.inf: 1.0}
# Quadratic bounds up to this price prove as much as branching at so many times that price.
QUADRATIC_CHEAP = 3.0 * clock.SECOND
QUADRATIC_PROMISE = 8.0
QUADRATIC_BATCH = 16  # samples in one attempt where quadratic bounds are tried


class Rung(Protocol):
    """One way to prove what linear bounds leave open."""

    @property
    def name(self) -> str:
        """The method, as results name it."""

    def price(self, problem: Problem) -> float:
        """Operations for one sample, before it was tried."""

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Try some samples of an attempt, and note what is proved and spent.

        Args:
            attempt: with the sweep of its samples.
            left: places of the samples that are open, `(L,)` on the CPU.
            purse: operations that each of these may take, `(L,)`.
        """


@dataclass(eq=False)
class Attempt:
    """Samples at a radius each, and what is proved of them so far; all but the sweep on the CPU.

    Args:
        problem: the samples.
        names: of the samples, for what is kept between attempts.
        radius: float64 `(M,)`.
        sweep: linear bounds on their balls.
        lengths: how far the unstable neurons of each layer move together; None if not asked.
        lower: bounds on their margins, `(M, K)`.
        points: where the linear bound is lowest, `(M, *shape)` in float64.
        proved: bool `(M,)`.
        by: the rung that proved each sample, "" for none.
        unstable: neurons of each sample, `(M,)`.
        swept: operations of the linear bounds of each sample, float64 `(M,)`.
        work: operations spent on each sample in all, float64 `(M,)`.
        gain: how far branching is expected to bring each sample, as a share of the way from where
            linear bounds prove it to here, float64 `(M,)`; infinite where that is not known.
        forest: what earlier proofs of the samples left.
        domains: bounded by branching.
        provers: threads that share the samples of quadratic bounds.
        pool: shares the domains of one sample.
    """

    problem: Problem
    names: list[int]
    radius: Tensor
    sweep: Sweep
    lengths: dict[int, Length] | None
    lower: Tensor
    points: Tensor
    proved: Tensor
    by: list[str]
    unstable: Tensor
    swept: Tensor
    work: Tensor
    gain: Tensor
    forest: Forest
    domains: int = 0
    provers: int = 1
    pool: Pool | None = None

    @property
    def least(self) -> Tensor:
        """The least bound on the margins of each sample, `(M,)`."""
        return least_value(self.lower, self.problem.labels)

    def note(self, rows: Tensor, good: Tensor, name: str) -> None:
        """Samples that a rung proved.

        Args:
            rows: places `(L,)`.
            good: which of them are proved, bool `(L,)`.
            name: of the rung.
        """
        for k in rows[good].tolist():
            if not self.proved[k]:
                self.proved[k] = True
                self.by[k] = name

    def spend(self, rows: Tensor, work: Tensor) -> None:
        """Operations spent on some samples.

        Args:
            rows: places `(L,)`.
            work: float64 `(L,)`.
        """
        self.work[rows] += work
        clock.spend(float(work.sum()))


class Ladder:
    """The levels for one problem. A method is a part of it: see `levels_of`.

    Args:
        problem: the samples.
        method: "auto", "crown", "ball" or "branch".
        provers: threads that share the samples of quadratic bounds.
        pool: shares the domains of one sample.
    """

    def __init__(
        self,
        problem: Problem,
        method: str = "auto",
        provers: int = 1,
        pool: Pool | None = None,
    ) -> None:
        self.problem = problem
        self.levels = levels_of(problem, method)
        self.forest = Forest()
        self.provers = provers
        self.pool = pool

    @property
    def balls(self) -> bool:
        """Whether some level uses balls, which need to know how far layers move."""
        return any(isinstance(rung, BallRung) for level in self.levels for rung in level)

    @property
    def quadratic(self) -> bool:
        """Whether some level uses quadratic bounds."""
        return any(isinstance(rung, QuadraticRung) for level in self.levels for rung in level)

    @property
    def batch(self) -> int:
        """Samples in one attempt."""
        return QUADRATIC_BATCH if self.quadratic else batch_of(self.problem.graph)

    def sweep_price(self) -> float:
        """Operations for the linear bounds of one sample, before they were made."""
        rows = ROW_PASSES * unstable_share(self.problem.graph)
        return SWEEP_PRICE[self.problem.norm] * rows * self.problem.unit

    def price(self, level: int) -> float:
        """Operations that a level takes for one sample, linear bounds included."""
        return self.sweep_price() + self.level_price(level)

    def least_price(self, level: int) -> float:
        """Operations without which a level is not begun: linear bounds and its first rung."""
        return self.sweep_price() + self.levels[level][0].price(self.problem)

    def level_price(self, level: int) -> float:
        """Operations that the rungs of a level take for one sample."""
        return sum(rung.price(self.problem) for rung in self.levels[level])

    def begin(self, rows: Tensor, radius: Tensor, polish: str = "all") -> Attempt:
        """Linear bounds for some samples.

        Args:
            rows: which samples, `(M,)` on the CPU.
            radius: float64 `(M,)`, on the CPU.
            polish: as in `margins`.
        """
        part = self.problem.take(rows)
        lengths: dict[int, Length] | None = {} if self.balls else None
        sweep = Sweep(part.graph, part.balls(radius), 0, None, lengths).run()
        lower, _, a = margins(sweep, part.y, polish)
        points = _lowest(part, sweep, lower, a, radius)
        lower = lower.cpu()
        proved = least_value(lower, part.labels) > 0
        unstable = _unstable(sweep).cpu().double()
        work = 2 * SWEEP_PRICE[part.norm] * ROW_PASSES * part.unit * unstable
        clock.spend(float(work.sum()))
        return Attempt(
            part,
            rows.tolist(),
            radius,
            sweep,
            lengths,
            lower,
            points,
            proved,
            ["crown" if good else "" for good in proved.tolist()],
            unstable,
            work,
            work.clone(),
            torch.full_like(work, math.inf),
            self.forest,
            provers=self.provers,
            pool=self.pool,
        )

    def climb(self, attempt: Attempt, level: int, purse: Tensor | None = None) -> None:
        """The rungs of one level, for the samples that are open.

        Args:
            attempt: what `begin` returned.
            level: place in `levels`.
            purse: operations that each sample may take in all, `(M,)`; None for no limit.
        """
        for rung in self.levels[level]:
            left = (~attempt.proved).nonzero()[:, 0]
            rest = torch.full((len(left),), math.inf, dtype=torch.float64)
            if purse is not None:
                rest = (purse - attempt.work)[left]
            if len(left):
                rung.prove(attempt, left, rest)

    def attempt(self, rows: Tensor, radius: Tensor, level: int) -> Attempt:
        """Linear bounds and one level, without a limit.

        Args:
            rows: which samples, `(M,)` on the CPU.
            radius: float64 `(M,)`, on the CPU.
            level: place in `levels`.
        """
        attempt = self.begin(rows, radius)
        if level < len(self.levels):
            self.climb(attempt, level)
        return attempt


def levels_of(problem: Problem, method: str) -> list[tuple[Rung, ...]]:
    """The levels that a method climbs, from cheap to dear.

    Balls at l2, quadratic bounds at linf on small networks, else branching. Every order was chosen
    on images from 1000 on.

    Args:
        problem: the samples.
        method: "auto" for all that fit, else the rungs of this name only.
    """
    balls = _balls(problem) if method in ("auto", "ball") else []
    quadratics = _quadratics(problem) if method == "auto" else []
    if method in ("crown", "ball") or (problem.graph.curved and method == "auto"):
        return [(rung,) for rung in balls]
    branches = _branches(problem, not balls and not quadratics)
    if balls:
        return [*zip(balls, branches), (branches[len(balls)],)]
    if quadratics:  # few inputs make quadratic bounds cheap, many make them the dearest
        rungs = [*branches, *quadratics]
        return [(rung,) for rung in sorted(rungs, key=lambda rung: _place(rung, problem))]
    return [(rung,) for rung in branches]


def _place(rung: Rung, problem: Problem) -> float:
    """The price at which a rung has its place in the order: what it promises for it counts."""
    price = rung.price(problem)
    cheap = isinstance(rung, QuadraticRung) and price <= QUADRATIC_CHEAP
    return price / QUADRATIC_PROMISE if cheap else price


def _balls(problem: Problem) -> list[Rung]:
    """The efforts of balls, none where they do not fit."""
    if not has_balls(problem):
        return []
    return [BallRung(effort, level) for level, effort in enumerate(BALLS)]


def _quadratics(problem: Problem) -> list[Rung]:
    """The efforts of quadratic bounds, none where they do not fit."""
    if not has_quadratics(problem.graph, problem.norm):
        return []
    return [QuadraticRung(steps) for steps in QUADRATIC]


def _branches(problem: Problem, alone: bool) -> list[Rung]:
    """The efforts of branching; alone: no other rung goes before, so that many domains are worth
    better slopes of inner bounds.
    """
    graph = problem.graph
    passes = ROW_PASSES * unstable_share(graph) / DOMAIN_PASSES
    dear = max(1.0, passes / LEAST_DOMAINS)
    slopes = alone and not graph.smooth and not graph.curved
    return [BranchRung(count, slopes and count * dear >= SLOPES_FROM) for count in DOMAINS]


def has_balls(problem: Problem) -> bool:
    """Whether balls of all neurons of a layer prove more than boxes: at l2, for ReLUs."""
    graph = problem.graph
    return problem.norm == 2 and not graph.smooth and not graph.curved


def _unstable(sweep: Sweep) -> Tensor:
    """How many neurons of each sample are unstable on its ball, `(N,)`."""
    count = torch.zeros(len(sweep.balls.x), device=sweep.balls.x.device)
    for j in sweep.graph.read_by_others:
        low, high = sweep.spans[j]
        here = sweep.centre[j]
        open_ = (here + low < 0) & (here + high > 0)
        count = count + open_.flatten(1).sum(1)
    return count


def _lowest(part: Problem, sweep: Sweep, lower: Tensor, a: Tensor, radius: Tensor) -> Tensor:
    """Where the linear bound on the worst margin of each sample is least, on the CPU."""
    x = part.x
    if not len(x) or lower.shape[1] < 2:
        return x.double().cpu()
    rival = lower.scatter(1, part.y[:, None], math.inf).argmin(1)
    order = torch.argsort(sweep.order)
    pull = -a[torch.arange(len(a), device=a.device), rival][:, order]
    step = maximiser(pull.double().reshape(x.shape), part.norm)
    size = radius.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
    point = x.double() + size * step
    return clip(point, part.domain).cpu()
