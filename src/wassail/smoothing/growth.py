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


def grouped(low: Array, high: Array, weight: Array, mean: float) -> Region:
    """The region of N samples; those with the same limits are one group.

    Args:
        low: lower limits, `(N,)`.
        high: upper limits, `(N,)`.
        weight: shares, `(N,)`.
        mean: lower limit on the mean.
    """
    pairs, place = np.unique(np.stack([low, high], 1), axis=0, return_inverse=True)
    shares = np.bincount(place.reshape(-1), weights=weight, minlength=len(pairs)).astype(float)
    return Region(pairs[:, 0], pairs[:, 1], shares, mean)


def kumar(mean: float, eps: float, sigma: float) -> float:
    """The single curve of Kumar, Levine and Feizi (2022): at least so much stays right.

    Args:
        mean: lower limit on the mean probability.
        eps: budget of order 1 or higher.
        sigma: standard deviation of the noise.
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
    if order == math.inf:
        return max(known, _at_one_distance(region, eps / sigma))
    if eps == 0:
        return max(known, _at_one_distance(region, 0.0))
    coarse = _Dual(region, eps / sigma, order, COARSE)
    fine = _Dual(region, eps / sigma, order, FINE)
    tried = _multipliers(coarse)
    return max(known, *(fine(price, slope)[0] for price, slope in tried), 0.0)


def _at_one_distance(region: Region, tau: float) -> float:
    """The least mean when every sample moves by the same distance tau (order inf)."""
    low = _quantile(region.low)
    high = _quantile(region.high)
    best = 0.0
    for slope in (0.0, *np.geomspace(1e-3, STEEPEST, 200), 1.0):
        u = _worst(float(slope), np.array([tau]), low, high)[:, 0]
        value = _phi(u - tau) - slope * _phi(u)
        best = max(best, float(region.weight @ value) + slope * region.mean - 2 * SLACK)
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
        self.cost = (self.tau / eps) ** order  # in units of the budget
        self.gap = self._below_the_chord()
        self.bend = CURVATURE * np.diff(self.tau) ** 2 / 8

    def __call__(self, price: float, slope: float) -> tuple[float, Array]:
        """The bound, and a direction of ascent, for the price of the whole budget and the
        multiplier of the mean.
        """
        u = _worst(slope, self.tau, self.low, self.high)
        right = _phi(u)
        value = _phi(u - self.tau) + price * self.cost - slope * right
        # Between two distances the function is above its chord but for two remainders.
        cell = np.minimum(value[:, :-1], value[:, 1:]) - price * self.gap - self.bend
        beyond = price * self.cost[-1] - slope * _phi(self.high)
        least = np.minimum(cell.min(1), beyond)
        weight = self.region.weight
        slack = SLACK * (1 + price + slope)
        bound = float(weight @ least) + slope * self.region.mean - price - slack
        at = value.argmin(1)
        rows = np.arange(len(at))
        ascent = np.array([weight @ self.cost[at] - 1, self.region.mean - weight @ right[rows, at]])
        return bound, ascent

    def _below_the_chord(self) -> Array:
        """How far `cost` may lie below its chord in each cell: by its second derivative, and
        never more than its rise.
        """
        start = self.tau[:-1]
        end = self.tau[1:]
        rise = self.cost[1:] - self.cost[:-1]
        p = self.order
        if p == 1:
            return np.full_like(rise, SLACK)
        where = end if p >= 2 else start
        with np.errstate(divide="ignore"):
            second = p * (p - 1) * where ** (p - 2) / self.eps**p
        gap: Array = np.minimum(second * (end - start) ** 2 / 8, rise) * (1 + SLACK) + SLACK
        return gap


def _multipliers(dual: _Dual) -> list[tuple[float, float]]:
    """Good multipliers by cutting planes: the bound is concave in both.

    The best pair found, and two that need no search: the intervals alone, and Kumar's.
    """
    from scipy.optimize import linprog

    curve = math.exp(-(dual.eps**2) / 8) / math.sqrt(2 * math.pi) * dual.eps
    start = [(curve, 1.0), (curve, 0.0), (0.5, 1.0)]
    cuts: list[list[float]] = []
    limits: list[float] = []
    best = (-math.inf, start[0])
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
        value, ascent = dual(*point)
        best = max(best, (value, point))
        cuts.append([-ascent[0], -ascent[1], 1.0])
        limits.append(value - float(ascent @ np.array(point)))
    return [best[1], *start[:2]]


def _worst(slope: float, tau: Array, low: Array, high: Array) -> Array:
    """Where `Phi(u - tau) - slope Phi(u)` is least between low and high, `(J, T)`."""
    with np.errstate(divide="ignore", invalid="ignore"):
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
