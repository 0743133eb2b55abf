"""The one ladder: ways to prove samples at a radius each, from cheap to dear.

An attempt begins with linear bounds for all of its samples. What they leave open goes up the
ladder, level by level; a level is a few rungs that follow each other. What an attempt costs is
counted in operations for each sample, by what is bounded for it, so that no plan looks at a clock
and no sample depends on the others.

A new rung is a class here and a line in `levels_of`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.prove.problem import BATCH, Problem
from wassail.certificates.relax.ball_margins import BallEffort, raised_margins
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.quadratic import CUBE, QUADRATIC, has_quadratics, proved_samples
from wassail.certificates.relax.rows import Length
from wassail.certificates.search.margins import (
    ASCENT_STEPS,
    WIDTH,
    Decided,
    branch_leaves,
    branch_shared,
    mixes,
)
from wassail.certificates.search.subproblems import Forest, Leaves
from wassail.certificates.search.workers import Pool
from wassail.geometry import clip, maximiser

SMALL_BATCH = 64  # samples in one sweep on a small network, where overhead is most of the time
ROW_PASSES = 0.2  # that a coefficient vector of a sweep takes: most end halfway
DOMAIN_PASSES = ASCENT_STEPS  # that a domain takes: its steps are in float32, and share a batch
SMOOTH_DOMAIN = 4e6  # operations of a domain with smooth neurons, beside its passes
BALL_PASSES = 60 * 3 * 8  # of the least effort with balls
BALL_GROWTH = 6  # times as many with each effort after it
LEAST_DOMAINS = 48  # of the least effort
LEAST_SHARE = 0.125  # of a step, which more domains must be expected to bring
WEAKER = 1.05  # times as far below 0 as linear bounds: the first bound of branching is weaker
HOPE = 1.5  # times as fast as they did, bounds may rise
RIVALS = 4  # that a sample has open, before one was tried
SLOPE_STEPS = 10  # on the slopes of inner bounds, before branching with many domains
SLOPE_SWEEPS = 13  # sweeps that these steps cost
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


@dataclass(frozen=True)
class BallRung:
    """Bounds that know how far all neurons of a layer move at once (THEORY 7).

    Args:
        effort: what may be spent.
        level: how many efforts come before it.
    """

    effort: BallEffort
    level: int
    name = "ball"

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        return float(problem.unit * BALL_PASSES * BALL_GROWTH**self.level)

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Raise the margins of the samples that can pay."""
        left = left[self.price(attempt.problem) <= purse]
        if not len(left) or attempt.lengths is None:
            return
        problem = attempt.problem
        # Margins above 0 are not raised: those of samples that are not tried are hidden.
        asked = torch.ones_like(attempt.lower)
        asked[left] = attempt.lower[left]
        lower, passes = raised_margins(
            attempt.sweep, attempt.lengths, problem.y, asked.to(problem.x.device), self.effort
        )
        attempt.lower[left] = lower.cpu()[left]
        attempt.note(left, attempt.least[left] > 0, self.name)
        attempt.spend(left, passes.cpu()[left] * problem.unit)


@dataclass(frozen=True)
class QuadraticRung:
    """Quadratic bounds, the dual of a semidefinite relaxation, for each sample on its own.

    Args:
        steps: for each rival.
    """

    steps: int
    name = "quadratic"

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        variables = problem.graph.inputs + unstable_share(problem.graph)
        return float(self.steps / 3 * RIVALS * CUBE * variables**3)

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Try the samples that can pay."""
        left = left[self.price(attempt.problem) <= purse]
        rows = left.tolist()
        known = (attempt.problem.labels, attempt.lower, self.steps, attempt.provers)
        found, work = proved_samples(attempt.sweep, rows, *known)
        attempt.note(left, torch.tensor(found, dtype=torch.bool), self.name)
        attempt.spend(left, torch.tensor(work, dtype=torch.float64))


@dataclass(frozen=True)
class BranchRung:
    """Branch and bound on unstable neurons, going on from the leaves that were left.

    Args:
        count: domains of a sample, more where its linear bounds were dear.
        slopes: whether inner bounds get better slopes first.
    """

    count: int
    slopes: bool
    name = "branch"

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        work = self.count * domain_price(problem)
        if self.slopes:
            rows = ROW_PASSES * unstable_share(problem.graph)
            work += SLOPE_SWEEPS * rows * problem.unit
        return work

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Branch on the samples; one that cannot pay for all domains gets fewer."""
        each = domain_price(attempt.problem)
        swept = attempt.swept[left]
        slopes = SLOPE_SWEEPS * swept if self.slopes else torch.zeros_like(swept)
        # After a sweep the least effort is worth at least that much; balls cost far more than it.
        dear = (swept / each / LEAST_DOMAINS).clamp(min=1.0)
        count = self.count * (dear if attempt.lengths is None else torch.ones_like(dear))
        most = torch.minimum((purse - slopes) / each, count).long()
        able = most >= WIDTH
        left, most, slopes = left[able], most[able], slopes[able]
        if not len(left):
            return
        known = (attempt.sweep, attempt.lower, attempt.problem.labels, left.tolist())
        if self.slopes:
            sweep, lower = _better_slopes(attempt, left)
            known = (sweep, lower, attempt.problem.labels[left], list(range(len(left))))
            attempt.spend(left, slopes)
        # The least effort begins with a few domains, and ends there where more would not do.
        tried = most.clamp(max=LEAST_DOMAINS) if self.count == LEAST_DOMAINS else most
        self._branch(attempt, left, known, tried, purse[able])
        rest = most - tried
        more = (rest >= WIDTH) & ~attempt.proved[left] & (attempt.gain[left] > LEAST_SHARE)
        if bool(more.any()):
            places = [k for k, again in zip(known[3], more.tolist()) if again]
            self._branch(attempt, left[more], (*known[:3], places), rest[more], purse[able][more])

    def _branch(
        self,
        attempt: Attempt,
        left: Tensor,
        known: tuple[Sweep, Tensor, Tensor, list[int]],
        most: Tensor,
        purse: Tensor,
    ) -> None:
        """Branch on some samples, and note what that says of more domains.

        Args:
            attempt: with their sweep.
            left: their places in it, `(L,)`.
            known: the sweep to branch on, bounds and labels of its samples, their places there.
            most: domains of each, `(L,)`.
            purse: operations that each may take, `(L,)`.
        """
        sweep, lower, labels, places = known
        names = [attempt.names[k] for k in left.tolist()]
        found = branched(
            sweep, lower, places, labels, most.tolist(), attempt.pool, attempt.forest, names
        )
        spent = torch.tensor([one.count for one in found], dtype=torch.float64)
        attempt.domains += int(spent.sum())
        attempt.note(left, torch.tensor([one.proved for one in found]), self.name)
        each = domain_price(attempt.problem)
        attempt.spend(left, spent * each)
        deficit = -least_value(lower[places], labels[places])
        for k, one, lack, rest in zip(left.tolist(), found, deficit.tolist(), purse.tolist()):
            attempt.gain[k] = min(float(attempt.gain[k]), expected_gain(one, lack, rest / each))


def _better_slopes(attempt: Attempt, left: Tensor) -> tuple[Sweep, Tensor]:
    """A sweep of some samples with steps on the slopes of inner bounds, and their margins."""
    some = left.to(attempt.problem.x.device)
    old = attempt.sweep
    known = {j: (low[some], high[some]) for j, (low, high) in old.proved().items()}
    sweep = Sweep(old.graph, old.balls.take(some), SLOPE_STEPS, known).run()
    found = margins(sweep, attempt.problem.y[some])[0].cpu()
    return sweep, torch.maximum(attempt.lower[left], found)


def domain_price(problem: Problem) -> float:
    """Operations of one domain of branching."""
    own = SMOOTH_DOMAIN if problem.graph.smooth else 0.0
    return problem.unit * DOMAIN_PASSES + own


def unstable_share(graph: Graph) -> float:
    """Neurons of a sample that a sweep may leave unstable: half of them."""
    return 0.5 * sum(graph.nodes[j].size for j in graph.read_by_others)


def batch_of(graph: Graph) -> int:
    """Samples that are bounded at once, unless told."""
    return SMALL_BATCH if mixes(graph) else BATCH


def least_value(margin: Tensor, y: Tensor) -> Tensor:
    """The least margin over the rivals, `(N, K), (N,) -> (N,)`."""
    return margin.scatter(1, y[:, None], math.inf).amin(1)


def branched(
    sweep: Sweep,
    lower: Tensor,
    rows: list[int],
    y: Tensor,
    most: list[int],
    pool: Pool | None = None,
    forest: Forest | None = None,
    names: list[int] | None = None,
) -> list[Decided]:
    """What branching says of some samples of a sweep.

    Args:
        sweep: of the samples' balls.
        lower: bounds on their margins, `(N, K)` on the CPU.
        rows: places of the samples in the sweep.
        y: labels of all samples of the sweep, `(N,)` on the CPU.
        most: domains for each.
        pool: shares the domains of one sample; the samples come one after the other then.
        forest: what earlier proofs of the samples left; what this one leaves is kept there.
        names: of the samples in the forest.
    """
    label = [int(y[k]) for k in rows]
    rivals = [
        [j for j in range(lower.shape[1]) if j != c and not lower[k, j] > 0]
        for k, c in zip(rows, label)
    ]
    if pool is not None:
        each = zip(rows, label, rivals, most)
        return [branch_shared(sweep, k, c, j, n, pool) for k, c, j, n in each]
    known: list[Leaves | None] = [None] * len(rows)
    if forest is None or names is None:
        return branch_leaves(sweep, rows, label, rivals, most, known)
    every = sweep.balls.radius.tolist()
    radius = [every[k] for k in rows]
    known = [_leaves(forest, i, r, count) for i, r, count in zip(names, radius, most)]
    decided = branch_leaves(sweep, rows, label, rivals, most, known)
    for i, r, found in zip(names, radius, decided):
        forest.keep(i, r, found.leaves)
    return decided


def expected_gain(found: Decided, lack: float, most: float) -> float:
    """How far the radius is expected to grow by branching, as a share of the step that failed;
    infinite where nothing is known of that, and where branching begins with bounds as good as the
    linear ones: those rise faster than this says.

    Bounds rise about as the logarithm of the number of domains. A bound of `-lack` at the step is
    one of 0 where the step began, where linear bounds prove the sample.

    Args:
        found: by branching that failed.
        lack: how far linear bounds are below 0.
        most: domains that can be paid in all.
    """
    known = not found.proved and found.count > 1
    weaker = found.first < -WEAKER * lack
    if not known or not weaker or math.isinf(found.first) or math.isinf(found.last):
        return math.inf
    rise = max(found.last - found.first, 0.0) / math.log(found.count)
    reached = found.first + HOPE * rise * math.log(max(min(most, DOMAINS[-1]), found.count))
    return 1 + reached / lack


def _leaves(forest: Forest, name: int, radius: float, most: int) -> Leaves | None:
    """What earlier proofs of a sample left, if to bound that again leaves room for as many domains:
    else it is better to begin anew.
    """
    left = forest.within(name, radius)
    return left if left is not None and 2 * len(left.rival) <= most else None


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
