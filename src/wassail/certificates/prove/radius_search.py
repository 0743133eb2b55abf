"""The search for the largest radius of every sample: a bracket for linear bounds, which are cheap
and say where to look next, and steps up the ladder for what is dearer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from wassail import rounding
from wassail.certificates import clock
from wassail.certificates.lipschitz.steepest import jacobians
from wassail.certificates.prove.ladder import Attempt, Ladder, Pace, least_value
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.record import EXACT, Radii
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import refusal
from wassail.certificates.relax.rows import Span
from wassail.errors import InputError, instance
from wassail.records import check_equal
from wassail.rounding import UNIT
from wassail.threat import dual
from wassail.ties import BAND

ROUNDS = 30
POWER = 3.5  # how the margin falls below its tangent, before two radii are known
HALVING_ROUND = 6  # rounds after which the bracket is halved
KEPT = 2**25  # numbers of spans kept from one radius to the next, 256 MB


# A radius that the ladder proves grows by this much at first, relative.
STEP = 0.08
BALL_STEP = 0.2  # with balls, which are dear
LONGEST_STEP = 0.5
WAY = 0.35  # of the way to the flip, where steps are a share of it
LEAST_GAIN = 0.01  # relative: branching that is expected to bring less is left out
NEAR = 0.01  # to a flip: the distance itself is tried, from a little below


class RadiusSearch:
    """The search for the largest radius of every sample: brackets `lower` (proved) and `upper`
    (no use to look beyond).
    """

    def __init__(
        self,
        problem: Problem,
        upper: Tensor | None,
        aim: tuple[float, float, Tensor] | None,
        tolerance: float,
        batch_size: int,
        report: Callable[[float], None],
    ) -> None:
        n = len(problem)
        self.problem = problem
        self.aim = aim
        self.tolerance = tolerance
        self.batch_size = batch_size
        self.report = report
        self.sweeps = self.rows = 0  # sweeps, and the coefficient vectors they substituted backward
        self.domains = 0  # bounded by branching
        self.work = torch.zeros(n, dtype=torch.float64)  # operations beyond linear bounds
        self.cut = False  # whether the clock has stopped something
        self.proved_by = [""] * n
        # Not all nodes of all samples at once.
        parts = [part.outputs(part.x).cpu() for part in self._sixty_four()]
        none = torch.zeros(0, problem.graph.outputs, dtype=torch.float64)
        self.here = torch.cat([none, *parts])
        if upper is not None:
            instance(upper, Tensor, "upper is", "the distances of known flips (Flips.distances)")
        self.flip = (
            torch.full((n,), math.inf, dtype=torch.float64)
            if upper is None
            else upper.detach().cpu().double()
        )
        if self.flip.shape != (n,) or not (self.flip >= 0).all():
            raise InputError(f"upper must hold {n} distances >= 0, one for each sample.")
        self.points: Tensor | None = None
        self.errors: Tensor | None = None
        self.lower = torch.zeros(n, dtype=torch.float64)
        self.upper = self.flip.clone()
        # The least margin at the two ends of the bracket: at 0 it is the sample's own.
        self.clean = least_value(
            self.here.gather(1, self.problem.labels[:, None]) - self.here, self.problem.labels
        )
        self.height = self.clean.clone()
        self.depth = torch.full_like(self.height, math.nan)
        self.proved_last = torch.zeros(n, dtype=torch.bool)
        self.first = self._first_guess()
        self.known: dict[int, Span] = {}  # of the samples from `start` to `stop`
        self.start = 0
        self.stop = n
        self.open = (self.height > 0) & ~problem.wrong  # of the others it is 0
        self.exact = ~self.open
        self.right = self.open.clone()  # what is classified rightly, in executed arithmetic too
        self.caution = (
            12.0 if problem.graph.curved else 3.0
        )  # a transformer's bounds reach less far
        self._noted = self.lower.clone()

    def note(self, method: str) -> None:
        """What has grown since the last time was proved by this method."""
        for i in (self.lower > self._noted).nonzero()[:, 0].tolist():
            self.proved_by[i] = method
        self._noted = self.lower.clone()

    def raise_to(self, found: Tensor) -> None:
        """Radii that were proved elsewhere, `(N,)`."""
        best = torch.maximum(self.lower, found.cpu())
        self.lower = torch.where(self.open, best, self.lower)

    def sift(self) -> str | None:
        """What rounding may do to the smallest margin at the samples; where it may be all of it,
        executed radii are 0.

        Returns whether that is a "bound" or was "seen" in the model's own logits, None for neither.
        """
        logits = self.problem.logits
        if refusal(self.problem.graph):
            if logits is None:
                return None
            seen = least_value(
                logits.double().gather(1, self.problem.labels[:, None]) - logits.double(),
                self.problem.labels,
            )
            self.errors = torch.where(self.open, (self.clean - seen).abs(), 0.0)
            return "seen"
        graph = replace(self.problem.graph, arithmetic="executed")
        self.errors = torch.zeros_like(self.clean)
        left = self.open.nonzero()[:, 0]
        self.errors[left] = math.inf  # what is not known in time stays open: a radius has its own
        for part in self._parts(left, first=True):
            some = replace(self.problem.take(part), graph=graph)
            try:
                lower = some.bounds(torch.zeros(len(part), dtype=torch.float64)).cpu()
            except clock.Late:
                self.cut |= clock.out_of_time()
                break
            least = least_value(lower, self.problem.labels[part])
            self.errors[part] = (self.clean[part] - least).clamp(min=0)
            if self.problem.graph.arithmetic == "executed":
                self.open[part] = self.right[part] = least > 0
        return "bound"

    def resume(self, start: Radii) -> None:
        """Go on from radii that are proved."""
        check_equal("arithmetic", start.arithmetic, self.problem.graph.arithmetic)
        check_equal("norm", start.norm, self.problem.norm)
        check_equal("domain", start.domain, self.problem.domain)
        count = len(self.problem)
        if len(start) != count:
            raise InputError(
                f"start holds {len(start)} radii but there are {count} samples: give those of the "
                "same samples."
            )
        self.lower = torch.where(self.open, start.values, 0.0)
        self.exact |= start.exact
        self.open &= ~start.exact & torch.isfinite(start.values)
        self.points = start.points
        if start.proved_by is not None:
            self.proved_by = list(start.proved_by)
        self._noted = self.lower.clone()

    def _first_guess(self) -> Tensor:
        """The distance at which the margins, continued as straight lines, meet 0; an
        over-estimate for most networks.
        """
        if not len(self.problem):
            return torch.zeros(0, dtype=torch.float64)
        # Not all samples at once: what is made of them takes several times their own memory.
        return torch.cat([self._guessed(part) for part in self._sixty_four()]).cpu()

    def _sixty_four(self) -> Iterator[Problem]:
        """All samples, 64 at a time."""
        rows = torch.arange(len(self.problem))
        return (self.problem.take(some) for some in torch.split(rows, 64) if len(some))

    def _guessed(self, part: Problem) -> Tensor:
        """`_first_guess` of some samples, `(m,)`."""
        y = part.y
        flat = part.x.double().flatten(1)
        try:
            clock.check()
            slopes = jacobians(self.problem.graph, flat)
        except clock.Late:  # nothing will be tried
            return torch.zeros(len(y), dtype=torch.float64, device=y.device)
        rows = slopes.take_along_dim(y[:, None, None], 1) - slopes
        length = torch.linalg.vector_norm(rows, dual(self.problem.norm), dim=2)
        z = part.outputs(part.x)
        ratio = (z.gather(1, y[:, None]) - z) / length.clamp(min=1e-300)
        found = ratio.scatter(1, y[:, None], math.inf).amin(1)
        # Where the margin is flat that may be anywhere: not beyond the domain, on R^n not beyond
        # the sample's own size.
        if self.problem.domain is None:
            size = torch.linalg.vector_norm(flat, self.problem.norm, dim=1)
            return torch.minimum(found, 10 * size.clamp(min=1))
        return torch.minimum(found, part.farthest.to(found.device))

    def run(self) -> None:
        """Rounds of one sweep for every open sample, each at a radius of its own, until the
        brackets are closed.
        """
        n = len(self.problem)
        for start in range(0, n, self._together()):
            self.start = start
            self.stop = min(start + self._together(), n)
            with clock.limited(clock.seconds_left() * (self.stop - start) / (n - start)):
                try:
                    for round_ in range(ROUNDS):
                        active = self._active()
                        self.report(1 - (len(active) + n - self.stop) / n)
                        if not len(active):
                            break
                        radius = self._next(round_)
                        for part in self._parts(active, first=round_ == 0):
                            self._try(part, radius[part])
                except clock.Late:  # the brackets are what is proved
                    self.cut = True
            self.known = {}

    def _active(self) -> Tensor:
        """The samples from `start` to `stop` whose bracket is wide, not by rounding alone."""
        mine = torch.arange(len(self.problem))
        mine = (mine >= self.start) & (mine < self.stop)
        wide = self.lower * (1 + self.tolerance) < self.upper * (1 - BAND)
        return (mine & self.open & wide & ~self.idle()).nonzero()[:, 0]

    def _together(self) -> int:
        """Samples whose spans are kept at a time: as many as memory is given for them."""
        sizes = [self.problem.graph.nodes[j].size for j in self.problem.graph.read_by_others]
        return max(KEPT // max(2 * sum(sizes), 1), self.batch_size)

    def _parts(self, active: Tensor, first: bool) -> Iterator[Tensor]:
        """The samples in batches; with a time limit the first are small, so that some are done
        whatever a batch takes.
        """
        size = 1 if first and clock.seconds_left() < math.inf else self.batch_size
        while len(active):
            yield active[:size]
            active = active[size:]
            size = min(2 * size, self.batch_size)

    def idle(self) -> Tensor:
        """Samples whose radius cannot change the certified accuracy at the aim, whatever the
        brackets become.

        The samples that are bought are those with the smallest radii, so one matters only below the
        price of the last that is bought, and that is at most the least t with `sum { mu_i lower_i^p
        : upper_i <= t } >= eps^p`.
        """
        if self.aim is None:
            return torch.zeros_like(self.open)
        eps, order, mu = self.aim
        if order == math.inf:
            return (self.lower >= eps) | (self.upper < eps)
        high, where = torch.where(self.open, self.upper, self.lower).sort()
        paid = (mu[where] * self.lower[where] ** order).cumsum(0) >= eps**order
        last = float(high[paid][0]) if paid.any() else math.inf
        return self.lower >= last

    def _next(self, round_: int) -> Tensor:
        """The next radius to try, inside the bracket: where the least margin is expected to meet 0.

        It falls along its tangent at the sample, and below it by about `b r^q`; b and q are fitted
        to the ends of the bracket.
        """
        low = self.lower
        high = self.upper
        tolerance = self.tolerance
        failed = ~torch.isnan(self.depth)
        tiny = 1e-300

        def tangent(r: Tensor) -> Tensor:
            return self.clean * (1 - r / self.first.clamp(min=tiny))

        far = torch.where(failed, high, low)
        value = torch.where(failed, self.depth, self.height)
        drop = (tangent(far) - value).clamp(min=tiny)
        near = (tangent(low) - self.height).clamp(min=tiny)
        both = failed & (low > 0)
        power = torch.where(
            both, (drop / near).log() / (high / low.clamp(min=tiny)).log().clamp(min=1e-9), POWER
        )
        power = power.nan_to_num(POWER).clamp(1, 50)
        left = low.clone()
        right = torch.where(torch.isfinite(high), high, torch.maximum(4 * low, self.first))
        for _ in range(40):
            middle = (left + right) / 2
            above = tangent(middle) > drop * (middle / far.clamp(min=tiny)) ** power
            left = torch.where(above, middle, left)
            right = torch.where(above, right, middle)
        # A hair to the other side than last time, so that the bracket closes from both.
        nudge = torch.where(self.proved_last, 1 + tolerance / 3, 1 - tolerance / 3)
        guess = torch.where(far > 0, left * nudge, self.first / self.caution)
        # Beyond the tangent's zero, which walls may move outward, it says nothing.
        stuck = (left <= low) & (low > 0)
        guess = torch.where(stuck, torch.where(failed, (low * high).sqrt(), 2 * low), guess)
        if round_ >= HALVING_ROUND:
            guess = torch.where(both, (low * high).sqrt(), guess)
        guess = torch.maximum(guess, low * (1 + tolerance))
        top = torch.where(failed, torch.maximum(high / (1 + tolerance), (low + high) / 2), high)
        return torch.minimum(guess, torch.minimum(top, torch.where(low > 0, 4 * low, math.inf)))

    def _try(self, part: Tensor, radius: Tensor) -> None:
        """One sweep: proved or not, and if not, what its own linear bounds prove on a smaller
        ball.
        """
        here = part.to(self.problem.x.device, non_blocking=True)
        some = self.problem.take(part)
        y = some.y
        kept = here - self.start
        known = {j: (low[kept], high[kept]) for j, (low, high) in self.known.items()}
        sweep = Sweep(self.problem.graph, some.balls(radius), 0, known).run()
        lower, base, a = margins(sweep, y)
        self.sweeps = self.sweeps + 1
        self.rows = self.rows + sweep.rows
        # theta_y - theta_j >= base + <a, d> on the ball tried, so on every smaller one too.
        tried = sweep.balls.radius
        # The radius is taken 1e-9 smaller, which alone is more than n units of any input.
        length = rounding.length(a, dual(self.problem.norm), 2) * (1 + a.shape[2] * UNIT)
        free = (base / length.clamp(min=1e-300)).scatter(1, y[:, None], math.inf).amin(1) * (
            1 - 1e-9
        )
        free = torch.minimum(free, tried * 0.999)
        rest = (base - length * free[:, None]).scatter(1, y[:, None], math.inf).amin(1).clamp(min=0)
        corner = torch.linalg.vector_norm(
            torch.maximum(sweep.balls.below, sweep.balls.above), self.problem.norm, dim=1
        )
        sides = sweep.proved()
        least, free, rest, corner = torch.stack([least_value(lower, y), free, rest, corner]).cpu()
        good = least > 0
        if self.problem.domain is not None:  # the ball holds the whole domain
            whole = corner <= radius * (1 - 2 * (a.shape[2] + 8) * UNIT)
            self.lower[part[good & whole]] = math.inf
            good, done = good & ~whole, good & whole
            self.open[part[done]] = False
        bad = ~(least > 0)
        rows = part[good]
        self.proved_last[part] = good
        self.lower[rows], self.height[rows] = radius[good], least[good]
        self.upper[part[bad]], self.depth[part[bad]] = radius[bad], least[bad]
        better = bad & (free > self.lower[part])
        self.lower[part[better]], self.height[part[better]] = free[better], rest[better]
        wide = bad.nonzero()[:, 0].to(self.problem.x.device, non_blocking=True)
        for j, span in sides.items():
            if j not in self.known:
                count = self.stop - self.start
                full = span[0].new_full((count, *span[0].shape[1:]), math.inf)
                self.known[j] = (-full, full)
            for old, side in zip(self.known[j], span):
                old[kept[wide]] = side[wide]

    def take(self, attempt: Attempt, rows: Tensor) -> None:
        """What an attempt of the ladder has proved of some samples `(M,)`, and what it took."""
        self.work[rows] += attempt.work
        self.domains += attempt.domains
        good = attempt.proved.nonzero()[:, 0]
        for k, i in zip(good.tolist(), rows[good].tolist()):
            self.proved_by[i] = attempt.by[k]
        radius = attempt.radius[good]
        everything = self.problem.farthest[rows[good]] * (1 + 1e-9) <= radius  # of the domain
        self.lower[rows[good]] = torch.where(everything, math.inf, radius)
        self.open[rows[good]] &= ~everything


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
        first = [self._step(i, one, self.first) for i, one in enumerate(far.tolist())]
        self.step = torch.tensor(first, dtype=torch.float64)

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
        if proved:
            self.lower[i] = radius
            self.failures[i] = 0
            self._grow(i, far)
        elif self._hopeless(i, radius, gain):
            while self.ladder.foresees(int(self.level[i])):
                self._next_level(i, far)
        elif self.step[i] > self._pace(i).least and self.single is None:
            self.ceiling[i] = radius
            self.step[i] = self.step[i] / 2
            self.failures[i] += 1
        else:
            self._next_level(i, far)

    def _grow(self, i: int, far: float) -> None:
        """The next step of a sample after a proof.

        Not to a radius that has failed at this level: half of the way there. Where that is short
        there is more effort instead.
        """
        pace = self._pace(i)
        step = float(self.step[i])
        if not self.ladder.balls:  # with balls, which are dear, a step is as long as the last one
            step = min(2 * step, LONGEST_STEP)
        self.step[i] = self._step(i, far, step)
        if pace.way or self.single is not None:
            return
        way = float(self.ceiling[i] / self.lower[i]) - 1
        if way > 2 * pace.least or self.level[i] == len(self.ladder.levels) - 1:
            self.step[i] = min(float(self.step[i]), way / 2)
            return
        self._next_level(i, far)
        new = self._pace(i)
        if not new.way:
            self.step[i] = min(way, pace.least) if new.first is None else new.first

    def _next_level(self, i: int, far: float) -> None:
        """More effort for a sample, at the same radius unless quadratic bounds come or go."""
        before = self._pace(i)
        self.level[i] += 1
        self.failures[i] = 0
        self.ceiling[i] = math.inf
        if before.way or self._pace(i).way:
            self.step[i] = self._step(i, far, self.first)

    def _pace(self, i: int) -> Pace:
        """How the radius of a sample grows on its level."""
        return self.ladder.pace(int(self.level[i]))

    def _step(self, i: int, far: float, step: float) -> float:
        """How much a radius grows by at first and after a proof, relative.

        Args:
            i: the sample.
            far: distance of its flip.
            step: where that does not depend on the flip.
        """
        lower = float(self.lower[i])
        if not self._pace(i).way:
            return step
        return WAY * (far / lower - 1) if lower > 0 and far < math.inf else 2 * step

    def _hopeless(self, i: int, radius: float, gain: float) -> bool:
        """Whether more branching is not expected to bring a sample a larger radius."""
        begun = float(self.linear[i])
        expected = begun + gain * (radius - begun)
        near = expected <= float(self.lower[i]) * (1 + LEAST_GAIN)
        return near and begun > 0 and self.ladder.foresees(int(self.level[i]))
