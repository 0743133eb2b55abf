"""From N samples to the population they were drawn from (THEORY 8).

The samples are independent draws from one population. A *band* bounds the distribution function of
the distances everywhere at once: it may be read at as many eps and orders as one likes. A *limit*
is for one threat that was chosen before the samples were seen, and it is sharper.

Every limit here is exact or on the safe side for every N, not only for large N.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from wassail.errors import InputError
from wassail.threat import Number, number, parse_confidence

Array = npt.NDArray[np.float64]

INF = math.inf

EXACT_UP_TO = 10**6  # samples: up to here the quantile is exact, beyond it is the closed bound
SLACK = 1e-12  # what the rounding of a distribution function may amount to, and far more
FEWEST = 250  # samples from which on the attacked limit for one finite order beats the band
RATIO = 1.01  # between neighbouring prices where all prices must be refuted
FARTHEST = 1e4  # the last price, in units of eps
HALVINGS = 60


def kolmogorov(samples: int, confidence: Number) -> float:
    """How far the true distribution function may lie above the empirical one, anywhere.

    It is the quantile of the one-sided Kolmogorov statistic: exact for a continuous distribution,
    on the safe side for any other. The other direction has the same quantile. Rounded up.

    Args:
        samples: number of independent samples, at least 1.
        confidence: between 0 and 1, for example 0.95.
    """
    alpha = 1 - parse_confidence(confidence)
    if samples < 1:
        raise InputError(f"there are {samples} samples: a confidence limit needs at least one.")
    closed = math.sqrt(-math.log(min(alpha, 0.5)) / (2 * samples)) * (1 + SLACK)
    return closed if samples > EXACT_UP_TO else _quantile(samples, alpha)


@lru_cache
def _quantile(samples: int, alpha: float) -> float:
    """The `1 - alpha` quantile of the one-sided Kolmogorov statistic, rounded up."""
    from scipy.special import gammaln

    j = np.arange(samples, dtype=np.float64)
    choices = gammaln(samples + 1) - gammaln(j + 1) - gammaln(samples - j + 1)

    def tail(width: float) -> float:
        """Birnbaum and Tingey's sum of positive terms."""
        rest = 1 - width - j / samples
        k = rest > 0
        powers = (j[k] - 1) * np.log(width + j[k] / samples) + (samples - j[k]) * np.log(rest[k])
        return float(width * np.exp(choices[k] + powers).sum())

    # A logarithm is off by a part of its size, and that is the relative error of a term.
    wanted = alpha * (1 - 1e-12 - 64 * 2.0**-52 * float(gammaln(samples + 1)))
    # Halved by hand: `scipy.optimize` takes a fifth of a second to load.
    low = 1e-12
    high = 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if tail(middle) <= wanted:
            high = middle
        else:
            low = middle
    return high


def samples_needed(width: Number, confidence: Number = 0.95) -> int:
    """How many samples make sampling cost at most `width` of accuracy, for all eps and orders.

    With so many independent samples the certified accuracy of the population is at most `width`
    below that of the samples, at every eps and every order at once.

    Args:
        width: accuracy that sampling may cost, between 0 and 1; 0.05 is five points.
        confidence: of the statement about the population, between 0 and 1; default 0.95.

    >>> samples_needed(0.05)
    593
    """
    wanted = number(width, "width")
    if not 0 < wanted < 1:
        raise InputError(
            f"width is {width!r}: give a part of the accuracy between 0 and 1, for example 0.05."
        )
    high = 1
    while kolmogorov(high, confidence) > wanted:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        if kolmogorov(middle, confidence) <= wanted:
            high = middle
        else:
            low = middle
    return high


def proportion_at_least(hits: int, samples: int, confidence: Number) -> float:
    """The exact lower limit on a probability (Clopper and Pearson), rounded down.

    Args:
        hits: how often the event was seen.
        samples: in so many independent samples.
        confidence: between 0 and 1.
    """
    return 1 - proportion_at_most(samples - hits, samples, confidence)


def proportion_at_most(hits: int, samples: int, confidence: Number) -> float:
    """The exact upper limit on a probability (Clopper and Pearson), rounded up.

    Args:
        hits: how often the event was seen.
        samples: in so many independent samples.
        confidence: between 0 and 1.
    """
    alpha = 1 - parse_confidence(confidence)
    return float(_binomial(np.array([float(hits)]), samples, alpha)[0])


def proportions(hits: Array, samples: int, alpha: float) -> tuple[Array, Array]:
    """Clopper and Pearson's lower limits, rounded down, and upper limits, rounded up.

    Args:
        hits: how often each event was seen, `(T,)`.
        samples: in so many independent samples, at least 1.
        alpha: probability that a limit is wrong, for each one alone. It is no confidence: where
            many limits share one, `1 - alpha` would lose digits.
    """
    low = 1 - _binomial(samples - hits, samples, alpha)
    high = _binomial(hits, samples, alpha)
    return np.where(low > 0, np.nextafter(low, 0.0), 0.0), np.nextafter(high, 1.0)


def mean_at_most(total: Array, samples: int, alpha: float) -> Array:
    """Upper limits on the mean of a variable in [0, 1], from sums over independent samples.

    The better one of two tail bounds on the same sum, so nothing is paid for the choice: Bentkus's
    (e times a binomial tail) and Chernoff and Hoeffding's. Rounded up.

    Args:
        total: sums of the samples, `(T,)`, each limit on its own.
        samples: number of independent samples in each sum.
        alpha: probability that a limit is too low, between 0 and 1.
    """
    if samples == 0:
        return np.ones_like(total)
    # Each sample is off by a few units of 1, and their sum by less than `SLACK` of itself.
    total = np.clip(total + SLACK * samples, 0.0, samples)
    bentkus = _binomial(np.ceil(total), samples, alpha / math.e)
    return np.minimum(bentkus, _chernoff(total / samples, -math.log(alpha) / samples))


def mean_at_least(total: Array, samples: int, alpha: float) -> Array:
    """Lower limits on the mean of a variable in [0, 1]: see `mean_at_most`.

    Args:
        total: sums of the samples, `(T,)`.
        samples: number of independent samples in each sum.
        alpha: probability that a limit is too high.
    """
    return np.maximum(1 - mean_at_most(samples - total, samples, alpha) - SLACK, 0.0)


def error_at_most(
    radii: Array, eps: float, order: float, alpha: float, price: float = INF
) -> float:
    """An upper limit on the robust error of the population over one `Omega_order(eps)`.

    For every price u the error is at most `(eps/u)^p + E max(0, 1 - (d/u)^p)`. Of the radii only
    `r_i <= d_i` is used, so each may depend on all samples. The price may not: it has to be chosen
    without these samples, or the limit does not hold.

    Args:
        radii: certified radii of independent samples, `(N,)`.
        eps: budget, positive.
        order: Wasserstein order.
        alpha: probability that the limit is too low.
        price: u; at order inf there is none.
    """
    n = len(radii)
    if order == math.inf:
        return float(_binomial(np.array([float((radii < eps).sum())]), n, alpha)[0])
    slack = slack_of(order)
    mean = mean_at_most(bought(radii, price, order).sum(keepdims=True) + n * slack, n, alpha)
    return min(float((eps / price) ** order + mean[0]) * (1 + slack), 1.0)


def error_at_least(distances: Array, eps: float, order: float, alpha: float) -> float:
    """A lower limit on the robust error of the population over one `Omega_order(eps)`.

    If the error were lower, some price u would have `E max(0, 1 - (d/u)^p)` below the limit minus
    `(eps/u)^p`. All prices are refuted, each at the full level: that costs no confidence. Between
    two neighbouring prices both terms are monotone, so finitely many stand for all.

    Args:
        distances: distances of known flips of independent samples, `(N,)`, inf where there is none.
        eps: budget, positive.
        order: Wasserstein order.
        alpha: probability that the limit is too high.
    """
    n = len(distances)
    if order == math.inf:
        hits = float((distances > eps).sum())
        return 1 - float(_binomial(np.array([hits]), n, alpha)[0])
    cost, prices = _prices(eps, order)
    total = np.array([bought(distances, price, order).sum() for price in prices])
    total -= n * slack_of(order)
    return float(min((cost + mean_at_least(total, n, alpha)).min(), 1.0))


def lead_at_least(radii: Array, distances: Array, eps: float, order: float, alpha: float) -> float:
    """A lower limit on how much more accurate a first model is than a second one, on a population.

    Certified accuracy of the first minus attacked accuracy of the second, over one
    `Omega_order(eps)`. The two are compared sample by sample: only samples on which they differ
    widen the limit. The price of the first is any one of `steps_down`, each with a share of alpha,
    so it may be chosen on the same samples.

    Args:
        radii: certified radii of the first model on N independent samples, `(N,)`.
        distances: distances of known flips of the second model on the same samples, `(N,)`.
        eps: budget, positive.
        order: Wasserstein order.
        alpha: probability that the limit is too high.
    """
    half = alpha / 2
    if order == math.inf:
        holds = radii >= eps
        stands = distances > eps
        n = len(radii)
        more = _binomial(np.array([n - float((holds & ~stands).sum())]), n, half)
        less = _binomial(np.array([float((stands & ~holds).sum())]), n, half)
        return float(1 - more[0] - less[0]) - SLACK
    n = len(radii)
    half /= len(steps_down(n))
    price = own_price(radii, eps, order)
    ours = bought(radii, price, order)
    cost, prices = _prices(eps, order)
    gained = []
    lost = []
    for other in prices:
        lead = bought(distances, other, order) - ours
        gained.append(np.maximum(lead, 0).sum())
        lost.append(np.maximum(-lead, 0).sum())
    slack = 2 * slack_of(order)
    more = mean_at_least(np.array(gained) - n * slack, n, half)
    less = mean_at_most(np.array(lost) + n * slack, n, half)
    return float((cost + more - less).min() - (eps / price) ** order * (1 + slack)) - SLACK


def steps_down(samples: int) -> list[float]:
    """What a price may cost, as parts of the most that can be lost: 1/2, 1/4, ... down to a tenth
    of one sample. They depend on nothing but the number of samples.
    """
    return [0.5**k for k in range(1, math.ceil(math.log2(10 * max(samples, 1))) + 1)]


def own_price(radii: Array, eps: float, order: float) -> float:
    """The best one for these radii of the prices of `steps_down`.

    Args:
        radii: certified radii, `(N,)`.
        eps: budget.
        order: Wasserstein order.
    """
    steps = steps_down(len(radii))
    prices = [float(eps / step ** (1 / order)) for step in steps]
    spent = [step + bought(radii, u, order).mean() for step, u in zip(steps, prices)]
    return prices[int(np.argmin(spent))]


def price_of(radii: Array, eps: float, order: float) -> float:
    """The price u at which the bound on the error is least for these radii: any u is valid for
    other samples.

    Args:
        radii: of the samples that choose, `(M,)`.
        eps: budget.
        order: Wasserstein order.
    """
    far = float(10 * max(len(radii), 1)) ** (1 / order)  # costs a tenth of one sample
    known = np.sort(radii[np.isfinite(radii)]) / eps
    with np.errstate(over="ignore"):
        costs = known**order
    usable = (known > 0) & np.isfinite(costs)
    # At the k-th radius all nearer ones are bought, each for its own cost.
    nearer = np.arange(1, len(known) + 1) - np.cumsum(costs) / np.where(usable, costs, 1.0)
    error = np.where(usable, 1 / np.where(usable, costs, 1.0) + nearer / len(radii), INF)
    error_far = far**-order + float(np.maximum(1 - costs / far**order, 0).sum()) / len(radii)
    best = int(error.argmin()) if len(error) else 0
    return eps * float(known[best] if len(error) and error[best] <= error_far else far)


def slack_of(order: float) -> float:
    """What the rounding of a power of this order may amount to, in parts of 1."""
    return SLACK + 4 * order * 2.0**-52


def bought(distances: Array, price: float, order: float) -> Array:
    """What each sample is worth to a buyer at this price, `max(0, 1 - (d/u)^p)`, `(N,)`."""
    with np.errstate(over="ignore"):
        worth: Array = np.maximum(1 - (distances / price) ** order, 0.0)
    return worth


def _prices(eps: float, order: float) -> tuple[Array, Array]:
    """Prices u at the lower ends of cells that cover `[eps, inf)`, and `(eps/u)^p` at the upper.

    Prices below eps need no look: there the bound exceeds 1.
    """
    count = math.ceil(math.log(FARTHEST) / math.log(RATIO))
    ends: Array = eps * np.power(RATIO, np.arange(count + 1, dtype=np.float64))
    cost = np.append((eps / ends[1:]) ** order, 0.0)
    return cost * (1 - slack_of(order)), ends


def _binomial(hits: Array, samples: int, alpha: float) -> Array:
    """Clopper and Pearson's upper limits, rounded up; 1 where every sample is a hit."""
    from scipy.special import betainccinv

    inside = np.minimum(hits, samples - 1)
    # The function is off by parts of 1e-16 for each sample (measured: 5e-6 at 1e10 samples).
    careful = alpha * max(1 - max(1e-9, 1e-15 * samples), 0.0)
    found = betainccinv(inside + 1, samples - inside, careful) * (1 + SLACK)
    return np.where(hits >= samples, 1.0, np.minimum(found, 1.0))


def _chernoff(mean: Array, rate: float) -> Array:
    """The largest m with `kl(mean, m) <= rate`, from above."""
    low = mean.copy()
    high = np.ones_like(mean)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        with np.errstate(divide="ignore", invalid="ignore"):
            near = np.where(mean > 0, mean * np.log(mean / middle), 0.0)
            rest = np.where(mean < 1, (1 - mean) * np.log((1 - mean) / (1 - middle)), 0.0)
        refuted = near + rest > rate * (1 + 1e-9) + 1e-15
        high = np.where(refuted, middle, high)
        low = np.where(refuted, low, middle)
    return high
