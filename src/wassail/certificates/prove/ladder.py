"""The one ladder: ways to prove samples at a radius each, from cheap to dear.

An attempt begins with linear bounds for all of its samples. What they leave open goes up the
ladder, level by level; a level is a few rungs that follow each other. What an attempt costs is
counted in operations for each sample, by what is bounded for it, so that no plan looks at a clock
and no sample depends on the others.

A new rung is a class like those here and a line in `levels_of`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from wassail import names
from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.prove.problem import BATCH, Problem
from wassail.certificates.relax.ball_margins import BallEffort, raised_margins
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.quadratic import CUBE, QUADRATIC, has_quadratics, proved_samples
from wassail.certificates.relax.rows import Length
from wassail.certificates.search.frontier import Pool
from wassail.certificates.search.margins import (
    ASCENT_STEPS,
    WIDTH,
    Decided,
    branched,
    mixes,
)
from wassail.certificates.search.subproblems import Forest
from wassail.errors import InputError, unknown
from wassail.geometry import clip, maximiser
from wassail.threat import Number, number

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
LEAST_STEP = 0.02  # of a radius: from here on a failure asks for more effort
LEAST_BALL_STEP = 0.05  # with balls: a proof takes seconds, so that the next effort comes earlier
# Quadratic bounds take a sample much farther than the least branching does, so that radii grow by a
# share of the way to the flip, and the next effort comes once that is short.
SHORT_WAY = 0.1
# Better slopes of inner bounds let radii grow by a step at once.
SLOPES_STEP = 0.06
LEAST_SLOPES_STEP = 0.03
EFFORT = 2.0  # seconds of one core that a sample may take beyond linear bounds
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
METHODS = tuple(names.RADIUS_METHODS)
# From so many domains on better slopes of inner bounds come before branching.
SLOPES_FROM = 2400
# What linear bounds cost, in those at linf: others know how far neurons move together.
SWEEP_PRICE = {1.0: 3.0, 2.0: 2.0, math.inf: 1.0}
# Quadratic bounds up to this price prove as much as branching at so many times that price.
QUADRATIC_CHEAP = 3.0 * clock.SECOND
QUADRATIC_PROMISE = 8.0
QUADRATIC_BATCH = 16  # samples in one attempt where quadratic bounds are tried


@dataclass(frozen=True)
class Pace:
    """How radii grow by proofs of a kind, relative to what they are.

    least: from this step on a failure asks for more effort instead of a shorter step; first: the
    step that begins a level after a proof, None for what the last level left; way: whether steps
    are shares of the way to the flip.
    """

    least: float = LEAST_STEP
    first: float | None = None
    way: bool = False


class Rung(ABC):
    """One way to prove what linear bounds leave open.

    name: the method, as results name it; pace: of the radii that it proves; lengths: whether it
    needs to know how far the neurons of a layer move together; foresees: whether it says in
    `Attempt.gain` what more of it is expected to bring.
    """

    name: ClassVar[str]
    lengths: ClassVar[bool] = False
    foresees: ClassVar[bool] = False
    pace = Pace()

    @abstractmethod
    def price(self, problem: Problem) -> float:
        """Operations for one sample, before it was tried."""

    @abstractmethod
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
        ladder: that they are on.
        names: of the samples, for what is kept between attempts.
        radius: float64 `(M,)`.
        sweep: linear bounds on their balls.
        lengths: how far the unstable neurons of each layer move together; None if not asked.
        pull: coefficients of the linear bounds on their margins, `(M, K, n)`, where the network is.
        lower: bounds on their margins, `(M, K)`.
        proved: bool `(M,)`.
        by: the rung that proved each sample, "" for none.
        unstable: neurons of each sample, `(M,)`.
        swept: operations of the linear bounds of each sample, float64 `(M,)`.
        work: operations spent on each sample in all, float64 `(M,)`.
        gain: how far branching is expected to bring each sample, as a share of the way from where
            linear bounds prove it to here, float64 `(M,)`; infinite where that is not known.
        domains: bounded by branching.
    """

    problem: Problem
    ladder: Ladder
    names: list[int]
    radius: Tensor
    sweep: Sweep
    lengths: dict[int, Length] | None
    pull: Tensor
    lower: Tensor
    proved: Tensor
    by: list[str]
    unstable: Tensor
    swept: Tensor
    work: Tensor
    gain: Tensor
    domains: int = 0

    @property
    def least(self) -> Tensor:
        """The least bound on the margins of each sample, `(M,)`."""
        return least_value(self.lower, self.problem.labels)

    @property
    def points(self) -> Tensor:
        """Where the linear bound on the worst margin of each sample is least, `(M, *shape)` in
        float64.
        """
        part = self.problem
        x = part.x
        if not len(x) or self.lower.shape[1] < 2:
            return x.double().cpu()
        rival = self.lower.scatter(1, part.labels[:, None], math.inf).argmin(1).to(x.device)
        order = torch.argsort(self.sweep.order)
        pull = -self.pull[torch.arange(len(x), device=x.device), rival][:, order]
        step = maximiser(pull.double().reshape(x.shape), part.norm)
        size = self.radius.to(x.device).reshape(-1, *[1] * (x.ndim - 1))
        return clip(x.double() + size * step, part.domain).cpu()

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
class BallRung(Rung):
    """Bounds that know how far all neurons of a layer move at once (THEORY 7).

    Args:
        effort: what may be spent.
        level: how many efforts come before it.
    """

    effort: BallEffort
    level: int
    name = "ball"
    lengths = True
    pace = Pace(LEAST_BALL_STEP)

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
class QuadraticRung(Rung):
    """Quadratic bounds, the dual of a semidefinite relaxation, for each sample on its own.

    Args:
        steps: for each rival.
    """

    steps: int
    name = "quadratic"
    pace = Pace(SHORT_WAY, way=True)

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        variables = problem.graph.inputs + unstable_share(problem.graph)
        return float(self.steps / 3 * RIVALS * CUBE * variables**3)

    def place(self, problem: Problem) -> float:
        """The price at which it has its place among the others: what it promises counts."""
        price = self.price(problem)
        return price / QUADRATIC_PROMISE if price <= QUADRATIC_CHEAP else price

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Try the samples that can pay."""
        left = left[self.price(attempt.problem) <= purse]
        rows = left.tolist()
        known = (attempt.problem.labels, attempt.lower, self.steps, attempt.ladder.provers)
        found, work = proved_samples(attempt.sweep, rows, *known)
        attempt.note(left, torch.tensor(found, dtype=torch.bool), self.name)
        attempt.spend(left, torch.tensor(work, dtype=torch.float64))


@dataclass(frozen=True)
class BranchRung(Rung):
    """Branch and bound on unstable neurons, going on from the leaves that were left.

    Args:
        count: domains of a sample, more where its linear bounds were dear.
        slopes: whether inner bounds get better slopes first.
    """

    count: int
    slopes: bool = False
    name = "branch"
    foresees = True

    @property
    def pace(self) -> Pace:  # type: ignore[override]
        """Better slopes let radii grow by a step at once."""
        return Pace(LEAST_SLOPES_STEP, SLOPES_STEP) if self.slopes else Pace()

    def price(self, problem: Problem) -> float:
        """Operations for one sample."""
        work = self.count * domain_price(problem)
        if self.slopes:
            rows = ROW_PASSES * unstable_share(problem.graph)
            work += SLOPE_SWEEPS * rows * problem.unit
        return work

    def prove(self, attempt: Attempt, left: Tensor, purse: Tensor) -> None:
        """Branch on the samples; one that cannot pay for all domains gets fewer, and one gets none
        where an earlier level says that more bring nothing.
        """
        going = attempt.gain[left] > LEAST_SHARE
        left, purse = left[going], purse[going]
        each = domain_price(attempt.problem)
        swept = attempt.swept[left]
        slopes = SLOPE_SWEEPS * swept if self.slopes else torch.zeros_like(swept)
        # After a sweep the least effort is worth at least that much; balls cost far more than it.
        dear = (swept / each / LEAST_DOMAINS).clamp(min=1.0)
        count = self.count * (dear if attempt.lengths is None else torch.ones_like(dear))
        most = torch.minimum((purse - slopes) / each, count).long()
        able = most >= WIDTH
        left, most, slopes, purse = left[able], most[able], slopes[able], purse[able]
        if not len(left):
            return
        sweep, lower, labels, places = attempt.sweep, attempt.lower, attempt.problem.labels, left
        if self.slopes:
            sweep, lower = _better_slopes(attempt, left)
            labels, places = labels[left], torch.arange(len(left))
            attempt.spend(left, slopes)
        # The least effort begins with a few domains, and ends there where more would not do.
        tried = most.clamp(max=LEAST_DOMAINS) if self.count == LEAST_DOMAINS else most
        go = torch.arange(len(left))
        for count in (tried, most - tried):
            rows = places[go]
            names = [attempt.names[k] for k in left[go].tolist()]
            some = (sweep, lower, rows.tolist(), labels, count[go].tolist())
            found = branched(*some, attempt.ladder.pool, attempt.ladder.forest, names)
            _note_branched(attempt, left[go], found, lower[rows], purse[go] / each)
            more = ~attempt.proved[left] & (attempt.gain[left] > LEAST_SHARE)
            go = (more & (most - tried >= WIDTH)).nonzero()[:, 0]
            if not len(go):
                return


def _note_branched(
    attempt: Attempt, left: Tensor, found: list[Decided], lower: Tensor, afford: Tensor
) -> None:
    """What branching says of some samples, and of more domains.

    Args:
        attempt: with their sweep.
        left: their places in it, `(L,)`.
        found: of each sample.
        lower: bounds on the margins that it began with, `(L, K)`.
        afford: domains that each can pay in all, `(L,)`.
    """
    spent = torch.tensor([one.count for one in found], dtype=torch.float64)
    attempt.domains += int(spent.sum())
    attempt.note(left, torch.tensor([one.proved for one in found]), "branch")
    attempt.spend(left, spent * domain_price(attempt.problem))
    deficit = -least_value(lower, attempt.problem.labels[left])
    for k, one, lack, most in zip(left.tolist(), found, deficit.tolist(), afford.tolist()):
        attempt.gain[k] = min(float(attempt.gain[k]), expected_gain(one, lack, most))


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


class Ladder:
    """The levels for one problem. A method is a part of it: see `levels_of`.

    forest: what proofs of the samples left, for the next ones.

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
        return any(rung.lengths for level in self.levels for rung in level)

    @property
    def batch(self) -> int:
        """Samples in one attempt."""
        quadratic = any(rung.name == "quadratic" for level in self.levels for rung in level)
        return QUADRATIC_BATCH if quadratic else batch_of(self.problem.graph)

    def pace(self, level: int) -> Pace:
        """How radii grow on a level, or beyond the last one."""
        return self.levels[level][0].pace if level < len(self.levels) else Pace()

    def foresees(self, level: int) -> bool:
        """Whether attempts of a level say what more of them is expected to bring."""
        return level < len(self.levels) and all(rung.foresees for rung in self.levels[level])

    def sweep_price(self) -> float:
        """Operations for the linear bounds of one sample, before they were made."""
        rows = ROW_PASSES * unstable_share(self.problem.graph)
        return SWEEP_PRICE[self.problem.norm] * rows * self.problem.unit

    def price(self, level: int) -> float:
        """Operations that a level takes for one sample, linear bounds included."""
        return self.sweep_price() + sum(rung.price(self.problem) for rung in self.levels[level])

    def least_price(self, level: int) -> float:
        """Operations without which a level is not begun: linear bounds and its first rung."""
        return self.sweep_price() + self.levels[level][0].price(self.problem)

    def begin(self, rows: Tensor, radius: Tensor, polish: str = "open") -> Attempt:
        """Linear bounds for some samples.

        Args:
            rows: which samples, `(M,)` on the CPU.
            radius: float64 `(M,)`, on the CPU.
            polish: as in `margins`.
        """
        part = self.problem.take(rows)
        lengths: dict[int, Length] | None = {} if self.balls else None
        sweep = Sweep(part.graph, part.balls(radius), 0, None, lengths).run()
        lower, _, pull = margins(sweep, part.y, polish)
        lower = lower.cpu()
        proved = least_value(lower, part.labels) > 0
        unstable = _unstable(sweep).cpu().double()
        work = 2 * SWEEP_PRICE[part.norm] * ROW_PASSES * part.unit * unstable
        clock.spend(float(work.sum()))
        return Attempt(
            part,
            self,
            rows.tolist(),
            radius,
            sweep,
            lengths,
            pull,
            lower,
            proved,
            ["crown" if good else "" for good in proved.tolist()],
            unstable,
            work,
            work.clone(),
            torch.full_like(work, math.inf),
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
    balls = BALLS if method in ("auto", "ball") and has_balls(problem) else ()
    first = [BallRung(effort, level) for level, effort in enumerate(balls)]
    if method in ("crown", "ball") or (problem.graph.curved and method == "auto"):
        return [(rung,) for rung in first]
    branches = [BranchRung(count) for count in DOMAINS]
    if first:
        return [*zip(first, branches), (branches[len(first)],)]
    # Few inputs make quadratic bounds cheap, many make them the dearest.
    quadratics = method == "auto" and has_quadratics(problem.graph, problem.norm)
    others = [QuadraticRung(steps) for steps in QUADRATIC] if quadratics else []
    placed: list[tuple[float, Rung]] = [(rung.place(problem), rung) for rung in others]
    before = min((place for place, _ in placed), default=math.inf)
    for rung in branches:
        price = rung.price(problem)
        slopes = price < before and _slopes_pay(problem, rung.count)
        placed.append((price, replace(rung, slopes=slopes)))
    return [(rung,) for _, rung in sorted(placed, key=lambda pair: pair[0])]


def _slopes_pay(problem: Problem, count: int) -> bool:
    """Whether so many domains are worth better slopes of inner bounds, where nothing but branching
    was tried before.
    """
    graph = problem.graph
    passes = ROW_PASSES * unstable_share(graph) / DOMAIN_PASSES
    dear = max(1.0, passes / LEAST_DOMAINS)
    return not graph.smooth and not graph.curved and count * dear >= SLOPES_FROM


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


def check_method(method: str) -> None:
    """One sentence for a method that is not known, or is gone."""
    if not isinstance(method, str) or method not in (*METHODS, *names.GONE_METHODS):
        raise unknown("method", method, METHODS)
    if method in names.GONE_METHODS:
        raise InputError(f"method {method!r} is gone: {names.GONE_METHODS[method]}.")


def parse_effort(effort: Number | None, time_limit: float | None) -> float:
    """The operations that a sample may take beyond linear bounds.

    Args:
        effort: seconds of one core, or None for the default.
        time_limit: seconds, or None; with a limit there is no default.
    """
    if effort is None:
        return EFFORT * clock.SECOND if time_limit is None else math.inf
    seconds = number(effort, "effort")
    if not seconds >= 0:
        raise InputError(f"effort is {effort!r}: give seconds for each sample, at least 0.")
    return seconds * clock.SECOND
