"""Certified radii: for each sample a distance within which nothing flips, proved (THEORY 6)."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from wassail import names
from wassail.certificates import clock
from wassail.certificates.graph.graph import Graph
from wassail.certificates.prove.exact import EXACT_UP_TO_UNSTABLE, ExactSearch, is_small
from wassail.certificates.prove.ladder import BallRung, BranchRung, Ladder, QuadraticRung, batch_of
from wassail.certificates.prove.linear_search import RadiusSearch
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.products import product_radii
from wassail.certificates.prove.record import Radii
from wassail.certificates.search.workers import Workers, crew
from wassail.errors import InputError, instance, unknown
from wassail.network import Model, versions
from wassail.progress import Progress, progress_bar
from wassail.specification import Labels
from wassail.threat import (
    Domain,
    Number,
    number,
    parse_domain,
    parse_eps,
    parse_norm,
    parse_order,
    parse_seconds,
    whole,
)
from wassail.transport.allocation import sample_weights

STEP = 0.08  # a radius grows by this much at first, relative
LEAST_STEP = 0.02  # from here on a failure asks for more effort instead of a smaller step
LONGEST_STEP = 0.5
LEAST_GAIN = 0.01  # relative: branching that is expected to bring less is left out
# With balls: a proof takes seconds, so that the next effort comes earlier.
BALL_STEP = 0.2
LEAST_BALL_STEP = 0.05
# Quadratic bounds take a sample much farther than the least branching does, so that radii grow by a
# share of the way to the flip, and the next effort comes once that is short.
WAY = 0.35
SHORT_WAY = 0.1
# Better slopes of inner bounds let radii grow by a step at once.
SLOPES_STEP = 0.06
LEAST_SLOPES_STEP = 0.03
# An executed radius is taken to be the distance itself where a flip is known at most this much
# farther away (see `Radii`). It is tried for from a little below.
EXACT = 1e-3
NEAR = 0.01
METHODS = tuple(names.RADIUS_METHODS)
TOLERANCE = 0.01  # a radius is searched until it is known to this relative precision
SIFT = 4  # part of the time that the rounding errors at the samples take at most
EFFORT = 2.0  # seconds of one core that a sample may take beyond linear bounds
PROVED_AGAIN = 1 - 1e-9  # of a radius by products, so that another batch's rounding proves it, too


def radii(  # noqa: PLR0913
    model: Model | Graph,
    x: Tensor,
    y: Labels,
    norm: Number = "inf",
    domain: Domain = (0.0, 1.0),
    method: str = "auto",
    *,
    arithmetic: str = "auto",
    upper: Tensor | None = None,
    start: Radii | None = None,
    eps: Number | None = None,
    order: Number | None = None,
    mu: Tensor | None = None,
    tolerance: Number = TOLERANCE,
    effort: Number | None = None,
    time_limit: float | None = None,
    batch_size: int | None = None,
    workers: Workers = None,
    progress: Progress = False,
) -> Radii:
    """For each sample the largest radius proved: no point of the domain that near to it is
    classified other than y.

    A radius is only ever rounded down; misclassified samples and ties have 0. eps and order steer:
    samples whose radius cannot change the certified accuracy over `Omega_order(eps)` any more are
    left as they are.

    Linear bounds are those of CROWN (Zhang et al. 2018), branching that of beta-CROWN (Wang et al.
    2021) and GenBaB (Shi et al. 2025).

    Args:
        model: callable from a batch `(n, *shape)` to logits `(n, K)`, or a graph that was read.
        x: samples, float tensor `(N, *shape)`, inside the domain.
        y: true labels, integer tensor `(N,)`, or a `Specification`.
        norm: ground norm r, 1, 2 or inf; default "inf".
        domain: box `(low, high)`, or None for all of R^n; default (0, 1). Tensors are boxes of each
            feature, or of each feature of each sample: see `Threat`.
        method: "auto" (the default), the whole ladder as far as the effort goes: linear bounds and
            products of norms, the exact distance on small ReLU networks, balls at l2, quadratic
            bounds and branching. Or a part of it: "crown" (linear bounds), "ball" (then bounds that
            know how far all neurons of a layer move at once, l2), "branch" (then branch and bound
            on neurons, ReLU or smooth), "exact" (the distance itself, for small ReLU networks;
            larger ones are branched). `Radii.proved_by` tells which rung proved what.
        arithmetic: "executed": for the network as it runs in its own floating-point type, all
            margins proved above a bound on its rounding errors; "exact": for the exact function, of
            which the network that runs is a rounded copy; "auto" (the default): executed where the
            network is covered (piecewise linear, float32 or float64), else exact.
        upper: distances of known flips (`Flips.distances`), `(N,)`; no radius is sought beyond
            them; default None.
        start: `Radii` of the same samples, from which the search goes on; default None.
        eps: budget that steers; default None.
        order: Wasserstein order that steers; default None.
        mu: sample weights, tensor `(N,)`; default None, 1/N each.
        tolerance: relative precision of the search by linear bounds; default 0.01.
        effort: what a sample may take beyond linear bounds, in seconds of one core, roughly; it is
            counted in operations, so that nothing depends on the clock; default None, 2, and no
            limit with a time limit. More effort never gives a smaller radius.
        time_limit: seconds for all samples; what is proved by then is kept, and `info["cut"]` says
            whether the clock stopped something; default None.
        batch_size: int, samples bounded at once; default None, 16, and 64 on small networks.
        workers: processes that share the search for ONE sample under "exact" and "branch", a number
            or a pool of `certificates.search.workers`: for a few hard samples; many are faster side
            by side (`evaluate` with a runner); default None.
        progress: bool, or a callable that is given the share done; default False, no bar.

    Returns:
        `Radii`: values, and which of them are exact.
    """
    r = parse_norm(norm)
    box = parse_domain(domain, own=True)
    began = clock.now()
    check_method(method)
    precision = _precision(tolerance)
    if batch_size is not None:
        whole(batch_size, "batch_size")
    if start is not None:
        instance(start, Radii, "start is", "the radii to go on with, as ws.radii returns them")
    budget = None if time_limit is None else parse_seconds(time_limit)
    each = parse_effort(effort, budget)
    goal = _goal(eps, order)
    problem = Problem.of(model, x, y, r, box, arithmetic)
    aim = None if goal is None else (*goal, sample_weights(mu, len(problem)))
    limit = None if budget is None else budget - (clock.now() - began)
    with (
        progress_bar(progress, "certified radii") as report,
        crew(workers) as pool,
        clock.limited(limit),
    ):
        size = batch_size or batch_of(problem.graph)
        search = RadiusSearch(problem, upper, aim, precision, size, report)
        search.settle()
        with clock.timed(clock.seconds_left() / SIFT):
            seen = search.sift()
        if start is not None:
            search.resume(start)
        ladder = Ladder(problem, method, pool=pool)
        _run(search, ladder, method, start is not None, each)
    info = _info(search, clock.now() - began, each, seen)
    known = (search.lower, search.exact, method, r, problem.domain, search.points)
    arithmetic = problem.graph.arithmetic
    return Radii(*known, info, arithmetic, search.errors, tuple(search.proved_by))


def _info(search: RadiusSearch, seconds: float, effort: float, seen: str | None) -> dict[str, Any]:
    """What a search took, and its settings; seen: what `search.sift` returned."""
    aim = search.aim
    return {
        "seconds": seconds,
        "sweeps": search.sweeps,
        "rows": search.rows,
        "tolerance": search.tolerance,
        "effort": effort / clock.SECOND,
        "cut": search.cut,
        "domains": search.domains,
        "versions": versions(),
        **({"eps": aim[0], "order": aim[1]} if aim else {}),
        **({} if seen is None else {"errors": seen}),
    }


def _precision(tolerance: Number) -> float:
    """The relative precision of a search."""
    precision = number(tolerance, "tolerance")
    if precision <= 0:
        raise InputError(f"tolerance is {tolerance!r}: give a positive number, for example 0.01.")
    return precision


def _goal(eps: Number | None, order: Number | None) -> tuple[float, float] | None:
    """The budget and the order that steer, None for neither."""
    if (eps is None) != (order is None):
        raise InputError("eps and order steer together: give both or neither.")
    return None if eps is None or order is None else (parse_eps(eps), parse_order(order))


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


def _run(search: RadiusSearch, ladder: Ladder, method: str, resumed: bool, effort: float) -> None:
    """Linear bounds and products for all samples, then the ladder where something is left."""
    problem = search.problem
    if not resumed or method == "crown":
        parts = 1 if method == "crown" else 2  # more comes after it
        with clock.limited(clock.seconds_left() / parts):
            search.run()
    search.note("crown")
    search.upper = search.flip.clone()  # what was too far for linear bounds may not be for the rest
    if method in ("auto", "ball"):
        search.raise_to(product_radii(problem, search.lower) * PROVED_AGAIN)
        search.note("products")
    if method in ("auto", "exact") and is_small(problem.graph):
        _exactly(search, ladder, method, effort)
        search.note("exact")
    if method != "crown":
        _climb(search, ladder, effort)


def _exactly(search: RadiusSearch, ladder: Ladder, method: str, effort: float) -> None:
    """The exact distances, under "auto" of the samples whose search is likely to end."""
    rows = (search.open & ~search.idle() & ~search.exact).nonzero()[:, 0]
    share = math.inf
    with clock.limited(clock.seconds_left() / 2), suppress(clock.Late):
        if method == "auto":
            share = effort
            far = torch.where(search.lower > 0, 2 * search.lower, search.first)
            far = torch.minimum(search.flip, far)
            parts = [torch.zeros(0, dtype=torch.float64)]
            for part in torch.split(rows, ladder.batch) if len(rows) else ():
                parts.append(ladder.begin(part, far[part], "none").unstable)
            rows = rows[torch.cat(parts) <= EXACT_UP_TO_UNSTABLE]
        ExactSearch(search, ladder.pool).run(rows, torch.full((len(rows),), share))


def _climb(search: RadiusSearch, ladder: Ladder, effort: float) -> None:
    """Larger radii by the ladder, the cheapest level of all samples first.

    A sample stops when its next attempt costs more than what is left of its effort, or when it has
    failed at every level.
    """
    far = search.flip
    goal = search.aim[0] if search.aim and search.aim[1] == math.inf else None
    growth = Growth(ladder, search.lower, far, goal)
    begin = torch.minimum(search.first, far) / 4
    count = len(ladder.levels)
    least = [ladder.least_price(k) for k in range(count)]
    prices = torch.tensor([*least, math.inf], dtype=torch.float64)
    first = 0
    with suppress(clock.Late):
        while True:
            radius = growth.radius(far, begin)
            able = search.open & ~search.exact & ~search.idle() & growth.open(far, radius)
            able &= (search.work + prices[growth.level] <= effort) & search.right
            left = able.nonzero()[:, 0]
            first = first or len(left)
            search.report(1 - len(left) / max(first, 1))
            if not len(left):
                return
            level = int(growth.level[left].min())
            same = left[growth.level[left] == level]
            for rows in torch.split(same, ladder.batch):
                clock.look()
                _attempt(search, ladder, growth, rows, radius[rows], level, effort)
    search.cut |= clock.out_of_time()


def _attempt(
    search: RadiusSearch,
    ladder: Ladder,
    growth: Growth,
    rows: Tensor,
    radius: Tensor,
    level: int,
    effort: float,
) -> None:
    """One attempt on some samples, and what it says of their radii."""
    attempt = ladder.begin(rows, radius, "open")
    search.sweeps += 1
    ladder.climb(attempt, level, effort - search.work[rows])
    search.work[rows] += attempt.work
    search.domains += attempt.domains
    for k, i in enumerate(rows.tolist()):
        proved = bool(attempt.proved[k])
        gain = float(attempt.gain[k])
        growth.told(i, float(radius[k]), proved, float(search.flip[i]), gain)
        if proved:
            search.proved_by[i] = attempt.by[k]
            everything = search.covers(i, float(radius[k]))
            search.lower[i] = math.inf if everything else radius[k]
            search.open[i] &= not everything


class Growth:
    """The next radius and level of every sample, on the CPU.

    A sample grows by a step after a proof. A failure halves the step, and from the least step on
    asks for the next level, at the same radius, where branching goes on from the leaves that are
    open. What a sample does depends on its own verdicts only.

    Args:
        ladder: what proves.
        lower: radii that are proved, float64 `(N,)`.
        far: distances of known flips, float64 `(N,)`, inf where none is known.
        single: the only radius that is asked for, or None.
    """

    def __init__(
        self, ladder: Ladder, lower: Tensor, far: Tensor, single: float | None = None
    ) -> None:
        n = len(lower)
        self.ladder = ladder
        self.single = single
        self.lower = lower.clone()
        self.linear = lower.clone()  # what linear bounds prove
        self.level = torch.zeros(n, dtype=torch.int64)
        self.ceiling = torch.full((n,), math.inf, dtype=torch.float64)  # failed at this level
        self.failures = torch.zeros(n, dtype=torch.int64)  # in a row
        self.first = BALL_STEP if ladder.balls else STEP
        self.step = self._first_step(self.level, self.lower, far, self.first)

    def radius(self, far: Tensor, start: Tensor) -> Tensor:
        """The radius to try next, `(N,)`.

        Args:
            far: distances of known flips.
            start: where to begin for samples without a radius.
        """
        if self.single is not None:
            return torch.full_like(self.lower, self.single)
        far = far * (1 - 1e-6)
        grown = self.lower * (1 + self.step)
        radius = torch.where(self.lower > 0, grown, start)
        radius = torch.where(radius < far, radius, (self.lower + far) / 2)
        last = self.lower >= far * (1 - NEAR)
        return torch.where(last, far * (1 - EXACT / 2), radius)

    def open(self, far: Tensor, radius: Tensor) -> Tensor:
        """Which samples have something left to try, bool `(N,)`."""
        far = far * (1 - 1e-6)
        below = (self.lower < far * (1 - EXACT)) & (radius < far) & (far > 0)
        if self.single is not None:
            below = below & (self.lower < self.single)
        return below & torch.isfinite(self.lower) & (self.level < len(self.ladder.levels))

    def told(self, i: int, radius: float, proved: bool, far: float, gain: float = math.inf) -> None:
        """What an attempt found for one sample.

        Args:
            i: the sample.
            radius: that was tried.
            proved: whether it is.
            far: distance of its known flip.
            gain: as in `Attempt`.
        """
        least = self._least_step(int(self.level[i]))
        if proved:
            self.lower[i] = radius
            self.failures[i] = 0
            self._grow(i, least, far)
        elif self._hopeless(i, radius, gain):
            while self._branches(int(self.level[i])):
                self._next_level(i, torch.tensor(far, dtype=torch.float64))
        elif self.step[i] > least and self.single is None:
            self.ceiling[i] = radius
            self.step[i] = self.step[i] / 2
            self.failures[i] += 1
        else:
            self._next_level(i, torch.tensor(far, dtype=torch.float64))

    def _grow(self, i: int, least: float, far: float) -> None:
        """The next step of a sample after a proof.

        Not to a radius that has failed at this level: half of the way there. Where that is short
        there is more effort instead.
        """
        step = float(self.step[i])
        if not self.ladder.balls:  # with balls, which are dear, a step is as long as the last one
            step = min(2 * step, LONGEST_STEP)
        flip = torch.tensor(far, dtype=torch.float64)
        self.step[i] = self._first_step(self.level[i], self.lower[i], flip, step)
        if self._has(int(self.level[i]), QuadraticRung) or self.single is not None:
            return
        way = float(self.ceiling[i] / self.lower[i]) - 1
        if way > 2 * least or self.level[i] == len(self.ladder.levels) - 1:
            self.step[i] = min(float(self.step[i]), way / 2)
        else:
            self._next_level(i, flip)
            if self._has(int(self.level[i]), QuadraticRung):
                return
            slopes = self._has(int(self.level[i]), BranchRung, slopes=True)
            self.step[i] = SLOPES_STEP if slopes else min(way, least)

    def _next_level(self, i: int, far: Tensor) -> None:
        """More effort for a sample, at the same radius unless quadratic bounds come or go."""
        before = self._has(int(self.level[i]), QuadraticRung)
        self.level[i] += 1
        self.failures[i] = 0
        self.ceiling[i] = math.inf
        if before or self._has(int(self.level[i]), QuadraticRung):
            self.step[i] = self._first_step(self.level[i], self.lower[i], far, self.first)

    def _first_step(self, level: Tensor, lower: Tensor, far: Tensor, step: float) -> Tensor:
        """How much radii grow by at first and after a proof, relative.

        Args:
            level: of the samples.
            lower: their radii.
            far: distances of their flips.
            step: where that does not depend on the flip.
        """
        kinds = [self._has(k, QuadraticRung) for k in range(len(self.ladder.levels) + 1)]
        quadratic = torch.tensor(kinds)[level]
        way = WAY * (far / lower.clamp(min=1e-300) - 1)
        way = torch.where((lower > 0) & far.isfinite(), way, 2 * step)
        return torch.where(quadratic, way, torch.full_like(lower, step))

    def _least_step(self, level: int) -> float:
        """From here on a failure asks for more effort."""
        if self._has(level, QuadraticRung):
            return SHORT_WAY
        if self._has(level, BallRung):
            return LEAST_BALL_STEP
        return LEAST_SLOPES_STEP if self._has(level, BranchRung, slopes=True) else LEAST_STEP

    def _hopeless(self, i: int, radius: float, gain: float) -> bool:
        """Whether more branching is not expected to bring a sample a larger radius."""
        begun = float(self.linear[i])
        expected = begun + gain * (radius - begun)
        near = expected <= float(self.lower[i]) * (1 + LEAST_GAIN)
        return near and begun > 0 and self._branches(int(self.level[i]))

    def _branches(self, level: int) -> bool:
        """Whether a level has rungs of branching only."""
        if level >= len(self.ladder.levels):
            return False
        return all(isinstance(rung, BranchRung) for rung in self.ladder.levels[level])

    def _has(self, level: int, kind: type, slopes: bool = False) -> bool:
        """Whether a level has a rung of a kind, with better slopes if that is asked."""
        if level >= len(self.ladder.levels):
            return False
        some = [rung for rung in self.ladder.levels[level] if isinstance(rung, kind)]
        return any(not slopes or getattr(rung, "slopes", False) for rung in some)
