"""How much accuracy a budget can take from a randomised classifier (docs/theory.md, smoothing).

A classifier that is right at `x` with probability p under noise `N(0, sigma^2 I)` is right at a
distance t with probability at least `Phi(Phi^-1(p) - t / sigma)`. An adversary shares the budget
among the samples. The probabilities are only known to lie in a region: each in an interval, their
mean above a limit. What is returned is a lower bound on the accuracy for the worst probabilities of
the region and the worst distances, by weak duality: it holds for every pair of multipliers.

With u = Phi^-1(p), tau = t / sigma and multipliers lam (of the budget) and nu (of the mean):

    accuracy >= nu M - lam eps^p
                + mean_i min_{u, tau} Phi(u - tau) + lam (sigma tau)^p - nu Phi(u)

For fixed tau the minimum over p is convex: `u = (log nu + tau^2 / 2) / tau`, clipped to the
interval. For nu = 1 and no intervals it is the bound of Kumar, Levine and Feizi (2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

FARTHEST = 20.0  # distances in units of sigma: beyond, everything is lost
COARSE = 250  # cells of distances while multipliers are sought
FINE = 4000  # cells of the bound itself
CUTS = 40  # cutting planes: multipliers that are tried
STEEPEST = 50.0  # largest multiplier of the mean
CURVATURE = 0.2420  # above the largest |Phi''|, which is phi(1)
SLACK = 1e-12  # above the rounding of Phi, Phi^-1 and a mean
NEAREST = 1e-150  # budgets in units of sigma: smaller ones count as this one
WIDEST = 1e6  # and beyond this one nothing is left but Kumar's bound, which is 0
DEAREST = 1e300  # cost of a distance in units of the budget: no overflow
HIGH = 4.0  # orders above: the grid of distances is coarse for their costs
TINY = 1e-6  # budgets in units of sigma for which no multipliers are sought


@dataclass(frozen=True, eq=False)
class Region:
    """What is known of the probabilities.

    low, high: limits of each group of equal samples, `(J,)`; weight: their shares of all samples,
    `(J,)`; mean: lower limit on the mean.
    """

    low: Array
    high: Array
    weight: Array
    mean: float


def grouped(low: Array, high: Array, mean: float) -> Region:
    """The region of N samples; those with the same limits are one group.

    low: lower limits, `(N,)`; high: upper limits, `(N,)`; mean: lower limit on the mean.
    """
    pairs, counts = np.unique(np.stack([low, high], 1), axis=0, return_counts=True)
    return Region(pairs[:, 0], pairs[:, 1], counts / len(low), mean)


def shifted(low: Array, shift: float, mean: float) -> Region:
    """The region of a population: the mass `shift` of the samples with the largest limits has 0.

    low: lower limits of N samples, `(N,)`; shift: share that is taken from the top, 0 to 1; mean:
    lower limit on the mean of the population.
    """
    values, counts = np.unique(low, return_counts=True)
    ends = np.minimum(np.cumsum(counts) / len(low), 1 - shift)
    weight = np.append(np.diff(ends, prepend=0.0), shift)
    return Region(np.append(values, 0.0), np.ones(len(weight)), weight, mean)


def kumar(mean: float, eps: float, sigma: float) -> float:
    """The single curve of Kumar, Levine and Feizi (2022): at least so much stays right.

    mean: lower limit on the mean probability; eps: budget of order 1 or higher; sigma: standard
    deviation of the noise.
    """
    return max(mean - math.erf(eps / (2 * math.sqrt(2) * sigma)) - SLACK, 0.0)


def least_accuracy(region: Region, eps: float, order: float, sigma: float) -> float:
    """The least accuracy of the randomised classifier over `Omega_order(eps)`, rounded down.

    Args:
        region: what is known of the probabilities.
        eps: budget, >= 0.
        order: Wasserstein order, 1 to inf.
        sigma: standard deviation of the noise.
    """
    known = kumar(region.mean, eps, sigma)
    size = eps / sigma
    if size > WIDEST:
        return known
    if order == math.inf or eps == 0:
        return max(known, _at_one_distance(region, size))
    if order > HIGH:  # a ball lies in those of smaller orders, where the grid is finer for it
        rung = max(HIGH, math.sqrt(order))
        known = max(known, least_accuracy(region, eps, rung, sigma))
    size = max(size, NEAREST)
    coarse = _Dual(region, size, order, COARSE)
    fine = _Dual(region, size, order, FINE)
    tried = _multipliers(coarse)
    return max(known, *(fine.bound(price, slope) for price, slope in tried), 0.0)


def _at_one_distance(region: Region, tau: float) -> float:
    """The least mean when every sample moves by the same distance tau (order inf)."""
    low = _quantile(region.low)
    high = _quantile(region.high)
    best = 0.0
    for slope in (0.0, *np.geomspace(1e-3, STEEPEST, 200), 1.0):
        u = _worst(float(slope), np.array([tau]), low, high)[:, 0]
        value = _phi(u - tau) - slope * _phi(u)
        slack = SLACK * (1 + slope)
        best = max(best, float(region.weight @ value + slope * region.mean - slack))
    return best


class _Dual:
    """The bound for one pair of multipliers; distances and budget in units of sigma."""

    def __init__(self, region: Region, eps: float, order: float, cells: int) -> None:
        self.region = region
        self.eps = eps
        self.order = order
        self.low = _quantile(region.low)
        self.high = _quantile(region.high)
        self.tau = FARTHEST * np.linspace(0.0, 1.0, cells + 1) ** 2  # finer near the sample
        self.cost = self._cost()
        self.gap = self._below_the_chord()
        self.bend = CURVATURE * np.diff(self.tau) ** 2 / 8

    def bound(self, price: float, slope: float) -> float:
        """The bound for the price of the whole budget and the multiplier of the mean."""
        free, _ = self._free(slope)
        paid = price * self.cost
        value = free + paid
        # Between two distances the function is above its chord but for two remainders. It is also
        # above what is left at the farther one, at the price of the nearer one.
        with np.errstate(invalid="ignore"):
            chord = np.minimum(value[:, :-1], value[:, 1:]) - price * self.gap - self.bend
        cell = np.fmax(chord, free[:, 1:] + paid[:-1])
        beyond = price * self.cost[-1] - slope * _phi(self.high)
        least = np.minimum(cell.min(1), beyond)
        weight = self.region.weight
        slack = SLACK * (1 + price + slope)
        return float(weight @ least) + slope * self.region.mean - price - slack

    def sketch(self, price: float, slope: float) -> tuple[float, Array]:
        """The dual on the grid alone, which is concave, and a direction of ascent."""
        free, right = self._free(slope)
        value = free + price * self.cost
        weight = self.region.weight
        at = value.argmin(1)
        rows = np.arange(len(at))
        ascent = np.array([weight @ self.cost[at] - 1, self.region.mean - weight @ right[rows, at]])
        return float(weight @ value[rows, at]) + slope * self.region.mean - price, ascent

    def _free(self, slope: float) -> tuple[Array, Array]:
        """What is left at each distance in the worst case, less the worth of the probability; and
        that probability. `(J, T)` each.
        """
        u = _worst(slope, self.tau, self.low, self.high)
        right = _phi(u)
        return _phi(u - self.tau) - slope * right, right

    def _cost(self) -> Array:
        """What each distance costs, in units of the budget; rounded down.

        A power multiplies the rounding of its base by the order.
        """
        with np.errstate(over="ignore", under="ignore"):
            cost: Array = np.minimum((self.tau / self.eps) ** self.order, DEAREST)
        return cost * max(1 - 2.0**-50 * (1 + self.order), 0.0)

    def _below_the_chord(self) -> Array:
        """How far `cost` may lie below its chord in each cell, by its second derivative."""
        start = self.tau[:-1]
        end = self.tau[1:]
        p = self.order
        if p == 1:
            return np.full_like(start, SLACK)
        where = end if p >= 2 else start
        with np.errstate(all="ignore"):
            power = (where / self.eps) ** (p - 2) * (1 + 2.0**-50 * (1 + p))
            bend = p * (p - 1) * power * ((end - start) / self.eps) ** 2 / 8
        gap: Array = np.where(np.isnan(bend), math.inf, bend) * (1 + SLACK) + SLACK
        return gap


def _multipliers(dual: _Dual) -> list[tuple[float, float]]:
    """Good multipliers by cutting planes: the bound is concave in both.

    The best pair found, and two that need no search: the intervals alone, and Kumar's.
    """
    from scipy.optimize import linprog

    curve = math.exp(-(dual.eps**2) / 8) / math.sqrt(2 * math.pi) * dual.eps
    start = [(curve / dual.order, 1.0), (curve / dual.order, 0.0), (0.5, 1.0)]
    cuts: list[list[float]] = []
    limits: list[float] = []
    best = (-math.inf, start[0])
    if dual.eps < TINY:
        return start[:2]
    points = list(start)
    for _ in range(CUTS):
        point = points.pop(0) if points else None
        if point is None:
            found = linprog(
                [0.0, 0.0, -1.0],
                A_ub=np.array(cuts),
                b_ub=np.array(limits),
                bounds=[(0, 1), (0, STEEPEST), (None, None)],
            )
            if found.status != 0 or found.x[2] < best[0] + 1e-5:
                break
            point = (float(found.x[0]), float(found.x[1]))
        value, ascent = dual.sketch(*point)
        best = max(best, (value, point))
        scale = max(1.0, float(np.abs(ascent).max()))
        cuts.append([-ascent[0] / scale, -ascent[1] / scale, 1.0 / scale])
        limits.append((value - float(ascent @ np.array(point))) / scale)
    return [best[1], *start[:2]]


def _worst(slope: float, tau: Array, low: Array, high: Array) -> Array:
    """Where `Phi(u - tau) - slope Phi(u)` is least between low and high, `(J, T)`."""
    with np.errstate(all="ignore"):
        free = (np.log(slope) + tau**2 / 2) / tau
    still = math.inf if slope > 1 else -math.inf
    free = np.where(tau > 0, free, still)
    return np.clip(free[None], low[:, None], high[:, None])


def _phi(u: Array) -> Array:
    """The normal distribution function."""
    from scipy.special import ndtr

    return np.asarray(ndtr(u), dtype=np.float64)


def _quantile(p: Array) -> Array:
    """Its inverse: -inf at 0 and inf at 1."""
    from scipy.special import ndtri

    return np.asarray(ndtri(p), dtype=np.float64)
