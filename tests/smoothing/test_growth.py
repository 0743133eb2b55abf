"""The least accuracy of a randomised classifier: against allocations on a fine grid, against
the single curve of Kumar et al., and in closed form.
"""

import itertools
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from wassail.smoothing.growth import Array, grouped, kumar, least_accuracy, shifted

SIGMA = 0.25


def probabilities(seed: int, n: int = 40) -> Array:
    rng = np.random.default_rng(seed)
    p = rng.beta(*[(3, 1), (1, 1), (0.3, 0.2)][seed % 3], n)
    return np.clip(p, 1e-9, 1 - 1e-9)


def known(p: Array) -> float:
    return float(p.mean())


def on_a_grid(p: Array, eps: float, order: float) -> float:
    """The best dual value on a grid of prices and distances: at most the true least accuracy
    plus what the grid of distances misses, here below 1e-5.
    """
    tau = np.linspace(0, 14, 2801)
    kept = ndtr(ndtri(p)[:, None] - tau)
    prices = np.geomspace(1e-3, 10, 300) / eps**order
    return max(
        float((kept + lam * (SIGMA * tau) ** order).min(1).mean() - lam * eps**order)
        for lam in prices
    )


def taken(p: Array, eps: float, order: float, seed: int) -> float:
    """The accuracy under one allocation of the budget."""
    share = np.random.default_rng(seed).exponential(size=len(p)) ** 3
    distance = eps * (share / share.mean()) ** (1 / order)
    return float(ndtr(ndtri(p) - distance / SIGMA).mean())


@pytest.mark.few(6)
@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_known_probabilities(seed: int, order: float) -> None:
    p = probabilities(seed)
    region = grouped(p, p, known(p))
    last = 1.0
    for eps in (1e-3, 0.05, 0.2, 0.5):
        least = least_accuracy(region, eps, order, SIGMA)
        assert least <= min(taken(p, eps, order, k) for k in range(20)) + 1e-12
        assert least >= on_a_grid(p, eps, order) - 2e-3
        assert least >= kumar(known(p), eps, SIGMA)
        assert least <= last
        last = least


def test_the_single_curve_is_beaten_where_probabilities_differ() -> None:
    p = np.array([0.999, 0.999, 0.5, 0.01])
    region = grouped(p, p, known(p))
    assert least_accuracy(region, 0.1, 1.0, SIGMA) > kumar(known(p), 0.1, SIGMA) + 0.03


@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_the_worst_of_an_interval(order: float) -> None:
    """Limits and a mean: no probabilities of the region do worse."""
    rng = np.random.default_rng(5)
    p = probabilities(4)
    low = np.clip(p - 0.1, 0, 1)
    high = np.clip(p + 0.1, 0, 1)
    region = grouped(low, high, known(p) - 0.01)
    for eps in (0.02, 0.2):
        least = least_accuracy(region, eps, order, SIGMA)
        for k in range(200):
            there = low + (high - low) * rng.random(len(p))
            if there.mean() < region.mean:
                continue
            q = np.clip(there, 1e-12, 1 - 1e-12)
            if order == math.inf:
                got = float(ndtr(ndtri(q) - eps / SIGMA).mean())
            else:
                got = taken(q, eps, order, k)
            assert least <= got + 1e-12


def test_one_sample_in_closed_form() -> None:
    """Order inf: everything moves by eps; one sample whose curve is convex there: all orders."""
    p = np.array([0.4])
    region = grouped(p, p, 0.4)
    for eps in (0.1, 0.3):
        true = float(ndtr(ndtri(0.4) - eps / SIGMA))
        assert least_accuracy(region, eps, math.inf, SIGMA) == pytest.approx(true, abs=1e-9)
        assert least_accuracy(region, eps, 1.0, SIGMA) == pytest.approx(true, abs=1e-4)
        assert least_accuracy(region, eps, 1.0, SIGMA) <= true


def test_without_a_budget_the_mean_is_left() -> None:
    p = probabilities(0)
    region = grouped(p, p, known(p))
    assert least_accuracy(region, 0.0, 1.0, SIGMA) == pytest.approx(known(p), abs=1e-9)


@pytest.mark.parametrize("order", [1.0, 1.0000001, 2.0, 1e3, 1e9, math.inf])
@pytest.mark.parametrize("p", [[0.0, 1.0], [0.5, 0.9, 1.0]])
def test_no_size_of_anything_breaks_the_bound(p: list[float], order: float) -> None:
    """Budgets, orders and sigmas at the ends of the floating-point numbers."""
    sure = np.array(p)
    region = grouped(sure, sure, known(sure))
    for eps, sigma in [(5e-324, 1e300), (1e-15, 0.25), (1e-9, 1e300), (1e200, 0.25), (1.0, 1e-300)]:
        assert 0 <= least_accuracy(region, eps, order, sigma) <= known(sure)


def test_higher_orders_leave_more() -> None:
    """A ball of a higher order is inside that of a lower one; the orders go to order inf."""
    p = np.array([0.3, 0.8, 0.99, 0.999, 0.6])
    region = grouped(p, p, known(p))
    for eps in (1e-4, 0.05, 0.3):
        found = [
            least_accuracy(region, eps, order, SIGMA) for order in (1.0, 1.5, 2.0, 10.0, 1e3, 1e6)
        ]
        last = least_accuracy(region, eps, math.inf, SIGMA)
        for lower, higher in itertools.pairwise(found):
            assert higher >= lower - 2e-5  # the multipliers are not exactly the best
        assert last - 2e-3 <= found[-1] <= last + 1e-9


def test_the_shares_of_many_samples_are_no_more_than_one() -> None:
    low = np.full(300_000, 0.5)
    region = grouped(low, np.ones_like(low), 0.5)
    assert abs(float(region.weight.sum()) - 1) < 1e-15
    region = shifted(low, 0.1, 0.5)
    assert region.weight.tolist() == [0.9, 0.1] and region.low.tolist() == [0.5, 0.0]


def test_higher_orders_are_never_worse() -> None:
    """Their balls are smaller."""
    low = np.array([0.2, 0.7, 0.9, 0.97])
    region = grouped(low, np.minimum(low + 0.1, 1.0), 0.72)
    found = [least_accuracy(region, 0.1, p, 0.25) for p in (1, 2, 3, 8, 40, 300, math.inf)]
    assert found == sorted(found) and found[0] < found[-1]
    assert all(type(value) is float for value in found)
