"""Stairs above the errors of small ReLU regressions, made of distances (THEORY 11).

Tolerances and radii are inverse to growth: where no point within r of a sample has an error of t or
more, the loss is below t up to r, and a point near that radius where it is t shows how tight that
is. Between two such radii, `r_k < d <= r_{k+1}`, the loss is at most `min(t_{k+1}, t_k + L (d -
r_k))`: the box is convex, so the segment to a point at distance d meets the ball of radius r_k.

The dual says which tolerances matter. At a multiplier lam a sample is worth `sup_d G(d) - lam d^p`,
and at least what its evaluated points say. So from one step the next is the highest one at which no
point of the interval between is worth more than that and a share of the loss: few steps are taken
where the sample does not matter, and many only where the bound is tight.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.graph.specified import settled
from wassail.certificates.loss.growth import Growth
from wassail.certificates.loss.points import Points
from wassail.certificates.loss.samples import Samples
from wassail.records import Record
from wassail.rounding import UNIT
from wassail.threat import box_at

LOSSES = ("absolute", "pinball")  # those that are the largest weighted error itself
# What the steps may leave open, relative to the loss that is known, coarse ones first; and the part
# of the growth by the slope of the outputs that counts as known before points of high loss are.
SHARES = ((0.04, 0.5), (0.012, 0.02))
NEURONS = 300  # ReLUs up to which distances are affordable
PRECISION = 2e-3  # relative, of a distance
QUERY = clock.SECOND  # operations that one distance may take
EFFORT = 30 * clock.SECOND  # operations that all distances of a sample may take
FURTHER = 1.3  # ratio of two errors, or two radii, that a proof without an exact distance aims at
ROUNDS = 60  # of the equation of the next step, and of the search for a multiplier


@dataclass(frozen=True)
class Target:
    """A place of the curve that is to be closed.

    Args:
        order: Wasserstein order p.
        eps: budget.
        lam: multiplier, in units of the budget; of no meaning at order inf.
        share: of loss, what the steps may leave open.
    """

    order: float
    eps: float
    lam: float
    share: float

    def price(self, distance: float) -> float:
        """What a move costs, in units of loss."""
        if self.order == math.inf:
            return 0.0 if distance <= self.eps else math.inf
        return float(self.lam * (distance / self.eps) ** self.order)

    def reach(self, price: float) -> float:
        """How far that price goes."""
        if self.order == math.inf:
            return self.eps * (1 + 1e-9) if price > 0 else 0.0
        return float(self.eps * (max(price, 0.0) / self.lam) ** (1 / self.order))


@dataclass
class Stair:
    """The steps of one sample `(tolerance, radius)`, and its points `(loss, distance)`.

    Args:
        steps: the first is the loss at the sample.
        most: the loss is nowhere higher.
        points: the first is the sample.
    """

    steps: list[tuple[float, float]]
    most: float
    points: list[tuple[float, float]]
    witnesses: list[Tensor] = field(default_factory=list)

    def goal(self, target: Target) -> float:
        """What the sample may be worth."""
        return max(value - target.price(d) for value, d in self.points) + target.share

    def next(self, place: int, targets: Sequence[Target], slope: float) -> float:
        """The highest next step that leaves no more open than it may."""
        height, radius = self.steps[place]
        found = math.inf
        for target in targets:
            goal = self.goal(target)
            top = goal + target.price(radius)
            for _ in range(ROUNDS):
                # The line of the outputs' slope reaches the next height no nearer than this.
                ahead = radius + max(top - height, 0.0) / slope
                before, top = top, goal + target.price(ahead)
                if top > self.most or top <= before * (1 + 1e-6):
                    break
            found = min(found, top)
        # The search may be stopped before a point is found: the stairs rise in any case.
        return max(found, height + min(target.share for target in targets) / 2)

    def wanted(self, place: int, top: float, targets: Sequence[Target]) -> float:
        """A radius that is enough for the step after the next one to be a large one."""
        radius = self.steps[place][1]
        grown = (top - self.steps[0][0]) * (FURTHER - 1)
        far = [t.reach(top + max(grown, t.share) - self.goal(t)) for t in targets]
        near = min(2 * radius, max(target.eps for target in targets))
        return max(*far, near, FURTHER * radius)


@dataclass(frozen=True, eq=False)
class Stairs(Record):
    """Bounds on the loss of each sample by its own radii.

    Args:
        radii: from 0 on, `(N, K)`; the last one is repeated.
        heights: the loss is at most this within the radius of the same place, and the last one of
            all within the domain, `(N, K + 1)`.
    """

    radii: Tensor
    heights: Tensor

    def within(self, eps: float, slope: float) -> Tensor:
        """The highest loss within eps of each sample, rounded up, `(N,)`.

        Args:
            eps: radius above 0.
            slope: of the loss everywhere.
        """
        there = torch.full_like(self.radii[:, :1], eps)
        # A height holds up to its radius, and there, too.
        k = torch.searchsorted(self.radii, there)
        left, radius = (side.gather(1, k - 1) for side in (self.heights, self.radii))
        line = left + slope * (eps - radius)
        line = line + 8 * UNIT * (left.abs() + line.abs())
        return torch.minimum(self.heights.gather(1, k), line)[:, 0]


def stairs_above(
    samples: Samples,
    found: Points,
    above: Growth,
    mu: Tensor,
    order: float,
    budgets: Sequence[float],
    report: Callable[[float], None],
) -> Stairs | None:
    """The stairs of all samples, whose points are added to those found; None where distances are
    not affordable or say nothing of the loss.

    Args:
        samples: those of a regression.
        found: their points.
        above: other bounds on their growth.
        mu: sample weights.
        order: Wasserstein order p.
        budgets: where the curve is to be closed.
        report: is given the share done.
    """
    if not budgets or not closable(samples, above):
        return None
    starts, ends = above.start.tolist(), above.ceiling[:, -1].tolist()
    stairs = [
        Stair([(start, 0.0)], end, points)
        for start, end, points in zip(starts, ends, points_of(found))
    ]
    left = [EFFORT] * len(stairs)
    for turn, (share, part) in enumerate(SHARES):
        targets = [
            target_of([s.points for s in stairs], mu, order, eps, share, part * above.slope * eps)
            for eps in budgets
        ]
        for i, stair in enumerate(stairs):
            with clock.limited(None, left[i]):
                with suppress(clock.Late):
                    _climb(samples, i, stair, targets, above.slope)
                left[i] = clock.work_left()
            report((turn + (i + 1) / len(stairs)) / len(SHARES))
    _add(found, stairs)
    return _of_lists(stairs, above.lift)


def closable(samples: Samples, above: Growth) -> bool:
    """Whether exact searches are affordable and say something of the loss."""
    small = not samples.graph.smooth and samples.graph.neurons <= NEURONS
    fit = samples.residuals.loss in LOSSES and small and samples.bounded
    return fit and 0 < above.slope < math.inf and above.lift < math.inf


def points_of(found: Points) -> list[list[tuple[float, float]]]:
    """Of each sample `(loss, distance)`: its own, then those of its points."""
    points = [[(clean, 0.0)] for clean in found.clean.tolist()]
    _, root, value, distance, _ = found.columns()
    for i, loss, away in zip(root.tolist(), value.tolist(), distance.tolist()):
        points[i].append((loss, away))
    return points


def raised(tolerance: float, lift: float) -> float:
    """What an executed loss may be where the exact one is below a tolerance, rounded up."""
    return (tolerance + lift) * (1 + 2 * UNIT)


def _of_lists(stairs: list[Stair], lift: float) -> Stairs:
    """Stairs of the same number of steps."""
    count = max(len(stair.steps) for stair in stairs)
    steps = [s.steps + s.steps[-1:] * (count - len(s.steps)) for s in stairs]
    radii = [[radius for _, radius in some] for some in steps]
    heights = [
        [*(raised(top, lift) for top, _ in some), raised(s.most, lift)]
        for s, some in zip(stairs, steps)
    ]
    sizes, tops = (torch.tensor(v, dtype=torch.float64) for v in (radii, heights))
    # What is proved of an error is true of a larger one, whose own search may have been cut.
    return Stairs(sizes.cummax(1).values, tops)


def target_of(
    points: list[list[tuple[float, float]]],
    mu: Tensor,
    order: float,
    eps: float,
    share: float,
    least: float,
) -> Target:
    """A budget, and the multiplier that is best for the points, by golden sections. The share is
    one of the loss, which counts as no less than the least.
    """
    count = max(len(own) for own in points)
    table = [own + own[:1] * (count - len(own)) for own in points]
    value, distance = torch.tensor(table, dtype=torch.float64).unbind(2)
    if order == math.inf:
        near = torch.where(distance <= eps, value, -math.inf).amax(1)
        return Target(order, eps, 0.0, share * max(float((mu * near).sum()), least))
    price = (distance / eps) ** order

    def dual(lam: float) -> float:
        return lam + float((mu * (value - lam * price).amax(1)).sum())

    low, high = -40.0, 20.0
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(ROUNDS):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if dual(2.0**left) < dual(2.0**right) else (left, high)
    lam = 2.0 ** ((low + high) / 2)
    return Target(order, eps, lam, share * max(dual(lam), least))


def _climb(samples: Samples, i: int, stair: Stair, targets: Sequence[Target], slope: float) -> None:
    """Put in the steps of sample i that are missing, from the lowest on."""
    place = 0
    while not clock.late():
        top = stair.next(place, targets, slope)
        if top >= stair.most:
            return
        known = bisect.bisect_right(stair.steps, (top, math.inf)) - 1
        if known > place:
            place = known
            continue
        _step(samples, i, stair, place, top, stair.wanted(place, top, targets))
        place = min(place + 1, len(stair.steps) - 1)


def _step(samples: Samples, i: int, stair: Stair, place: int, top: float, want: float) -> None:
    """One step: a proof at the radius that is wanted, or the distance where an error is nearer."""
    residuals, rows = samples.residuals, torch.tensor([i])
    offsets = allowed(residuals.y[i], top, residuals.weights)
    graph = settled(samples.graph, torch.arange(len(offsets)), offsets)
    where = (samples.x[rows], torch.zeros(1, dtype=torch.int64), samples.norm)
    radius, upper = stair.steps[place][1], math.inf
    for within in (want, None):
        with clock.limited(None, QUERY):
            found = nearest_flip(
                graph,
                *where,
                box_at(samples.domain, rows),
                lower=torch.tensor([radius], dtype=torch.float64),
                upper=torch.tensor([upper], dtype=torch.float64),
                within=within,
                tolerance=PRECISION,
            )
        radius, upper = max(radius, float(found.lower[0])), float(found.upper[0])
        if upper == math.inf or radius >= want:
            break
    if upper < math.inf:
        stair.points.append((top, upper))
        stair.witnesses.append(found.points[0])
    if radius == math.inf:
        stair.most = top
    else:
        stair.steps.insert(place + 1, (top, radius))


def allowed(y: Tensor, tolerance: float, weights: tuple[float, float]) -> Tensor:
    """What is added to the outputs `(0, f, -f)` of a sample so that all are below 0 only where its
    loss is below the tolerance, `(2K + 1,)`.

    Args:
        y: targets, `(K,)`.
        tolerance: of the loss.
        weights: of errors that are too high and too low.
    """
    high, low = (tolerance / weight for weight in weights)
    found = torch.cat([torch.zeros_like(y[:1]), -y - high, y - low])
    # One unit each for the quotient and for the sum, of magnitudes that may cancel.
    found[1:] += 4 * UNIT * torch.cat([y.abs() + high, y.abs() + low])
    return found


def _add(found: Points, stairs: list[Stair]) -> None:
    """The points at the steps."""
    x = found.x.double()
    for place in range(max(len(stair.witnesses) for stair in stairs)):
        points = x.clone()
        for i, stair in enumerate(stairs):
            if place < len(stair.witnesses):
                points[i] = stair.witnesses[place].to(points)
        found.add(points, None)
