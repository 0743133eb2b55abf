"""From N samples to the population they were drawn from: exact limits, no approximation (THEORY 8).

The samples are i.i.d. from a population. `d(X)` is the distance from a sample to its nearest flip, `F` its distribution
function. Every robust error is a non-decreasing functional of `F`, so a bound on `F` is a bound on the error.

Two kinds of limit are here. A *band* bounds `F` everywhere at once and may be read at as many eps and orders as one likes.
A *test* bounds the error for one threat that was chosen before the samples were seen, and is sharper.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from wassail.errors import InputError

Array = npt.NDArray[np.float64]

# The best bet falls with the square root of the number of samples: these are bets for one sample, from cautious to bold.
BETS = np.array([1.0, 2.0, 4.0, 8.0])
LARGEST_BET = 0.95  # as a share of the one that can go bankrupt
# Prices at which a test looks at the budget, in units of eps: a price of u buys every flip nearer than u.
PRICES = np.array([1.0, 1.6, 2.5, 4.0, 7.0, 14.0])
CELLS = 160  # pieces into which the range of prices is cut where all of them must be refuted
HALVINGS = 40


def kolmogorov(samples: int, confidence: float) -> float:
    """How far the true distribution function may lie above the empirical one, anywhere, with this confidence.

    The quantile of the one-sided Kolmogorov statistic, exact for a continuous distribution and on the safe side for any
    other; the other direction has the same quantile. Rounded up. 1 where the samples are too few to say anything.

    Args:
        samples: how many i.i.d. samples there are, at least 1.
        confidence: between 0 and 1, for example 0.95.
    """
    from scipy.stats import ksone  # type: ignore[import-untyped]

    alpha = 1 - checked(confidence)
    if samples < 1:
        raise InputError(f"there are {samples} samples: a confidence limit needs at least one.")
    width = float(ksone.ppf(1 - alpha, samples))
    while width < 1 and not ksone.sf(width, samples) <= alpha * (1 - 1e-9):
        width += 1e-9 + 1e-9 * width
    return min(width, 1.0)


def samples_needed(width: float, confidence: float = 0.95) -> int:
    """How many samples make the sampling cost at most `width` of accuracy, for all eps and orders at once.

    With so many i.i.d. samples the population's certified accuracy is at most `width` below that of the samples.

    Args:
        width: accuracy that sampling may cost, between 0 and 1; 0.05 is five points.
        confidence: of the statement about the population, between 0 and 1.

    >>> samples_needed(0.05)
    597
    """
    if not 0 < width < 1:
        raise InputError(f"width is {width!r}: give a part of the accuracy between 0 and 1, for example 0.05.")
    high = 1
    while kolmogorov(high, confidence) > width:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kolmogorov(middle, confidence) <= width else (middle, high)
    return high


def proportion_above(hits: int, samples: int, confidence: float) -> float:
    """The lower limit on a probability of which `hits` of `samples` were seen (Clopper and Pearson), rounded down."""
    from scipy.stats import beta

    alpha = 1 - checked(confidence)
    if hits == 0:
        return 0.0
    return max(float(beta.ppf(alpha, hits, samples - hits + 1)) * (1 - 1e-12), 0.0)


def proportion_below(hits: int, samples: int, confidence: float) -> float:
    """The upper limit on a probability of which `hits` of `samples` were seen (Clopper and Pearson), rounded up."""
    from scipy.stats import beta

    alpha = 1 - checked(confidence)
    if hits == samples:
        return 1.0
    return min(float(beta.ppf(1 - alpha, hits + 1, samples - hits)) * (1 + 1e-12), 1.0)


def error_below(distances: Array, eps: float, order: float, confidence: float) -> float:
    """An upper limit on the population's robust error over `Omega_order(eps)`, for one threat, finite order.

    distances: at most the distances of N i.i.d. samples to their nearest flips (certified radii), `(N,)`.
    By duality the error is the least of `(eps/u)^p + E (1 - (d/u)^p)_+` over all prices u. If it were tau or more, then for
    every u the mean of `Y = 1 - (1 - (d/u)^p)_+` would be at most `m_u = 1 - tau + (eps/u)^p`, and a gambler who bets on Y
    being larger would not get rich: `K = prod_i (1 + b (Y_i / m_u - 1))` has mean at most 1 for every bet b in [0, 1]. So has
    the mean of K over bets and prices fixed beforehand, and it reaches 1 / alpha with probability at most alpha (Markov).
    """
    alpha = 1 - checked(confidence)
    if eps == 0:
        return proportion_below(int((distances <= 0).sum()), len(distances), confidence)
    kept = [1 - _bought(distances, price * eps, order) for price in PRICES]
    cost = PRICES**-order

    def refuted(tau: float) -> bool:
        wealth = []
        for y, spent in zip(kept, cost):
            mean = 1 - tau + spent
            if mean < 1:  # above, the statement says nothing
                wealth.append(_wealth(y, max(mean, 1e-300)))
        missing = len(PRICES) - len(wealth)  # prices that cannot be bet on keep their stake
        total = np.logaddexp.reduce([*wealth, math.log(missing)] if missing else wealth)
        return bool(total - math.log(len(PRICES)) >= math.log(1 / alpha) + 1e-9)

    return _least(refuted)


def error_above(distances: Array, eps: float, order: float, confidence: float) -> float:
    """A lower limit on the population's robust error over `Omega_order(eps)`, for one threat, finite order.

    distances: at least the distances of N i.i.d. samples to their nearest flips (an attack's), inf where none is known.
    If the error were tau or less there would be a price u with `E (1 - (d/u)^p)_+ <= tau - (eps/u)^p`. Every price is
    refuted by a gambler of its own, so no price has to be chosen and none costs confidence: the limit is the largest tau
    at which all of them are rich. Between two neighbouring prices both sides of the inequality are monotone in u, so the
    gambler who sees the smaller gain and pays the larger mean stands for all of them.
    """
    alpha = 1 - checked(confidence)
    if eps == 0:
        return proportion_above(int((distances <= 0).sum()), len(distances), confidence)
    finite = distances[np.isfinite(distances)]
    top = max(float(finite.max()) if len(finite) else 0.0, eps) * 1e3
    goal = math.log(1 / alpha) + 1e-9

    def rich(tau: float) -> bool:
        first = eps * tau ** (-1 / order)  # below, the price alone exceeds tau
        if not first < top:
            return False
        ends = np.geomspace(first, top, CELLS + 1)
        for near, far in zip(ends, [*ends[1:], math.inf]):
            mean = tau - (eps / far) ** order if far < math.inf else tau
            if mean > 0 and _wealth(_bought(distances, near, order), mean) < goal:
                return False
        return True

    return 1 - _least(lambda kept: rich(1 - kept) if kept < 1 else True)


def checked(confidence: float) -> float:
    """The confidence as a number strictly between 0 and 1, or one sentence that says what is wrong with it."""
    value = float(confidence)
    if not 0 < value < 1:
        raise InputError(f"confidence is {confidence!r}: give a number between 0 and 1, for example 0.95.")
    return value


def _bought(distances: Array, price: float, order: float) -> Array:
    """What each sample is worth to a buyer at this price, `(1 - (d/u)^p)_+`, `(N,)`."""
    with np.errstate(over="ignore"):
        return np.maximum(1 - (distances / price) ** order, 0.0)


def _wealth(values: Array, mean: float) -> float:
    """The logarithm of the mean wealth over all bets on `values`, which are at least 0, having a mean above `mean`."""
    gain = values / mean - 1
    bets = np.minimum(BETS / math.sqrt(len(values)), LARGEST_BET)
    single = [float(np.log1p(bet * gain).sum()) for bet in bets]
    return float(np.logaddexp.reduce(single) - math.log(len(bets)))


def _least(refuted: object) -> float:
    """The least number in [0, 1] from which on a statement is refuted, to 2^-50; 1 if it never is."""
    assert callable(refuted)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if refuted(middle):
            high = middle
        else:
            low = middle
    return high
