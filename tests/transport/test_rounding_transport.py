"""Certified sides of curves and limits for a population, in every rounding mode, against fractions
and forty digits.
"""

import dataclasses
import math
from fractions import Fraction
from typing import Any

import mpmath  # comes with torch, through sympy
import numpy as np
import pytest
import torch

from support.exact import uniform
from support.rounding import MODES, rounded, serial
from wassail.threat import Threat
from wassail.transport import confidence, curve
from wassail.transport.curve import RiskCurve, below
from wassail.transport.side import Side, _sum_up, floor_of, stretch_of

INF = math.inf
DOUBLE = torch.float64


def side_of(radii: torch.Tensor, order: float, seed: int = 0) -> Side:
    """The certified side of samples of different weights."""
    mu = uniform(len(radii), seed=seed + 1000) + 0.1
    return Side(radii, mu / mu.sum(), order, certified=True)


def exact(side: Side) -> list[tuple[Fraction, Fraction]]:
    """Radius and mass of its samples."""
    return list(zip(map(Fraction, side.d.tolist()), map(Fraction, side.mu.tolist())))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_bends_of_the_certified_side_are_rounded_down(order: int, mode: str) -> None:
    """What k samples cost, and the accuracy that is left then."""
    for seed in range(4):
        with rounded(mode), serial():
            side = side_of(uniform(300, seed=seed), order, seed)
            eps, accuracy = side.breakpoints()
        spent = Fraction(0)
        mass = Fraction(0)
        total = sum(mu for _, mu in exact(side))
        for (d, mu), at, left in zip(exact(side), eps[1:].tolist(), accuracy[1:].tolist()):
            spent += mu * d**order
            mass += mu
            assert Fraction(at) ** order <= spent <= Fraction(at * (1 + 1e-9)) ** order
            assert left == 0 or Fraction(left) <= 1 - mass / total


def most(side: Side, eps: float, order: int) -> Fraction:
    """The mass that a budget buys, by weak duality at the radius where it runs out."""
    k = int(torch.searchsorted(side.paid, eps, right=True))
    unit = Fraction(float(side.d[k]))
    bought = sum(mu * (1 - (d / unit) ** order) for d, mu in exact(side)[:k])
    return (Fraction(eps) / unit) ** order + bought


@pytest.mark.parametrize("mode", MODES)
def test_the_mass_that_a_budget_buys_is_rounded_up(mode: str) -> None:
    """Sums of many samples, powers of a high order, and a price that underflows."""
    for seed in range(3):
        with rounded(mode), serial():
            side = side_of(0.5 + uniform(2000, seed=seed), 1, seed)
            eps = 0.8 * float(side.paid[-1])
            found = side._most(eps)
        assert most(side, eps, 1) <= Fraction(found) < most(side, eps, 1) * (1 + Fraction(1, 10**9))
    for k in range(20):
        order = 500
        with rounded(mode):
            side = side_of(1 + uniform(2, seed=k), order, k)
            eps = float(side.paid[0]) * (1 - 1e-4 * (k + 1))
            found = side._most(eps)
        truth = most(side, eps, order)
        assert truth <= Fraction(found) < truth * (1 + Fraction(1, 10**9))
    side = side_of(torch.ones(2, dtype=DOUBLE), 100)
    assert Fraction(side._most(1e-5)) >= Fraction(1e-5) ** 100 and side.proved(1e-5) < 1


@pytest.mark.parametrize("mode", MODES)
def test_the_budget_that_a_certified_level_withstands_is_rounded_down(mode: str) -> None:
    for order in (1, 2, 100):
        for seed in range(6):
            radii = torch.cat([1 + uniform(5, seed=seed), torch.tensor([1e3]).double()])
            if seed % 2:
                radii = 1 + uniform(1, seed=seed)
            with rounded(mode):
                side = side_of(radii, order, seed)
            parts = exact(side)
            total = sum(mu for _, mu in parts)
            for k in range(len(parts)):
                spent = sum(mu * d**order for d, mu in parts[:k])
                mass = sum(mu for _, mu in parts[:k])
                d, mu = parts[k]
                for share in (Fraction(1, 10**6), Fraction(1, 3), Fraction(9, 10)):
                    level = float(1 - (mass + share * mu) / total)
                    with rounded(mode):
                        found = side.inverse(level)
                    need = total * (1 - Fraction(level)) - mass
                    truth = spent + d**order * need
                    assert Fraction(found) ** order <= truth
                    assert Fraction(found * (1 + 1e-5)) ** order >= truth


def test_the_level_of_very_many_samples() -> None:
    """Half of the samples are enough for half of the accuracy, however their masses are added."""
    n = 400_000
    radii = torch.arange(1, n + 1, dtype=DOUBLE)
    with rounded("down"):
        side = Side(radii, torch.full((n,), 1 / n, dtype=DOUBLE), INF, certified=True)
        found = side.inverse(0.5)
    assert float(side.mass[n // 2]) < 0.5 - 1e-12
    assert found <= n // 2


def test_sums_and_quotients_are_rounded_to_one_side() -> None:
    for seed in range(50):
        values = uniform(7, seed=seed).tolist()
        total = sum(map(Fraction, values))
        found = _sum_up(values)
        assert math.nextafter(found, 0) < total <= Fraction(found)
        share = Fraction(seed + 1, 997)
        assert Fraction(floor_of(share)) <= share < Fraction(math.nextafter(floor_of(share), 1))


def curve_of(distances: list[float], radii: list[float], order: float) -> RiskCurve:
    n = len(distances)
    mu = torch.full((n,), 1 / n, dtype=DOUBLE)
    return RiskCurve(
        torch.tensor(distances, dtype=DOUBLE), torch.tensor(radii, dtype=DOUBLE), mu, order
    )


def test_the_largest_gap_lies_right_after_a_radius() -> None:
    """A radius of exactly eps still protects."""
    gap, eps = curve_of([2.0], [1.0], INF).largest_gap()
    assert gap == 1 and 1 < eps < 2


def test_the_certified_accuracy_of_a_population_is_rounded_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = curve_of([2.0, 3.0], [1.0, 1.5], INF)
    for error in (1e-17, 0.1, 0.3, 0.7):
        monkeypatch.setattr(curve.limits, "error_at_most", lambda *_, error=error: error)
        certified, _ = known.population_at(Threat(2, INF, 0.5, None))
        assert Fraction(certified) <= 1 - Fraction(error)
        assert certified > 1 - error - 1e-9


SHARES = (0.5, 0.3, 1e-6, 1e-40, 1e-300)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [2, 3, 7])
def test_budgets_of_subpopulations_are_rounded_to_the_safe_side(
    order: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alpha^(1/p) eps` from above in what is proved, and back from below, however small alpha."""
    asked: list[float] = []

    def most(side: Side, eps: float) -> float:
        asked.append(eps)
        return 0.0

    monkeypatch.setattr(Side, "_most", most)
    budgets = (1 + uniform(8, seed=order)).tolist()
    for share in SHARES:
        with rounded(mode):
            side = Side(torch.ones(2).double(), torch.full((2,), 0.5).double(), order, True, share)
            back = side._unstretched(torch.tensor(budgets, dtype=DOUBLE)).tolist()
        for eps, unstretched in zip(budgets, back):
            with rounded(mode):
                side.proved(eps)
            truth = Fraction(share) * Fraction(eps) ** order
            assert truth <= Fraction(asked[-1]) ** order < truth * (1 + Fraction(1, 10**9))
            least = Fraction(share) * Fraction(unstretched) ** order
            truth = Fraction(eps) ** order
            assert truth * (1 - Fraction(1, 10**9)) < least <= truth
    assert stretch_of(1.0, order) == stretch_of(0.5, INF) == (1, 0)


@pytest.mark.parametrize("mode", MODES)
def test_populations_pay_for_the_rounding_of_a_subpopulation(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacked side with no more than `alpha^(1/p) eps`, the certified one with no less."""
    asked: dict[str, Any] = {}
    error = 0.0

    def limit(side: str) -> Any:
        def given(_: Any, eps: float, *rest: Any) -> float:
            asked[side] = eps
            return error

        return given

    monkeypatch.setattr(curve.limits, "error_at_most", limit("most"))
    monkeypatch.setattr(curve.limits, "error_at_least", limit("least"))
    monkeypatch.setattr(curve.limits, "FEWEST", 1)
    order = 3
    for k, eps in enumerate((1 + uniform(20, seed=9)).tolist()):
        share = SHARES[k % 4]
        error = share * (k + 1) / 43
        known = curve_of([2.0, 3.0], [1.0, 1.5], order)
        known = dataclasses.replace(known, subpopulation=share)
        with rounded(mode):
            certified, _ = known.population_at(
                Threat(2, order, eps, None), pilot=torch.ones(9, dtype=DOUBLE)
            )
        truth = Fraction(share) * Fraction(eps) ** order
        assert Fraction(asked["least"]) ** order <= truth <= Fraction(asked["most"]) ** order
        for side in asked.values():
            assert abs(Fraction(side) ** order / truth - 1) < Fraction(1, 10**9)
        assert 1 - Fraction(1, 10**9) < (Fraction(certified) + Fraction(error) / Fraction(share))
        assert Fraction(certified) <= 1 - Fraction(error) / Fraction(share)


def test_masses_that_are_moved_to_one_end_add_up_to_one() -> None:
    """The nearest samples have their whole share, rounded up; the last one what is left."""
    for n in (3, 7, 10, 49, 1000):
        values = torch.arange(n, dtype=DOUBLE)
        for shift in (0.0, 0.1, 1 / 3):
            _, mass = curve._shifted(values, shift, nearest=False)
            total = Fraction(0)
            for k, part in enumerate(mass.tolist()):
                total += Fraction(part)
                assert total >= min(Fraction(shift) + Fraction(k, n), 1 - Fraction(1, 2**52))
            assert total <= 1


def test_radii_above_a_distance_by_rounding_only_are_cut() -> None:
    distance = torch.tensor([1.0], dtype=DOUBLE)
    radius = distance * (1 + 50 * 2.0**-52)
    assert below(radius, distance, 100) == distance


def kolmogorov(width: float, samples: int) -> Any:
    """The probability that the statistic is larger, with forty digits (Birnbaum and Tingey)."""
    total = mpmath.mpf(0)
    d = mpmath.mpf(width)
    term = mpmath.mpf(1)  # binomial coefficients, one from the other
    for j in range(int((1 - width) * samples) + 1):
        rest = 1 - d - mpmath.mpf(j) / samples
        if rest > 0:
            total += term * (d + mpmath.mpf(j) / samples) ** (j - 1) * rest ** (samples - j)
        term = term * (samples - j) / (j + 1)
    return d * total


@pytest.mark.parametrize("mode", MODES)
def test_bands_are_wide_enough(mode: str) -> None:
    for samples in (10**6 + 1, 3 * 10**7):
        for level in (0.9, 0.95, 0.999):
            with rounded(mode):
                width = confidence.kolmogorov(samples, level)
            with mpmath.workdps(40):
                least = mpmath.sqrt(-mpmath.log(1 - mpmath.mpf(level)) / (2 * samples))
                assert mpmath.mpf(width) >= least
    for samples in (1, 2, 4000):
        for alpha in (0.05, 0.3) if samples < 100 else (0.05,):
            with rounded(mode):
                width = confidence._quantile.__wrapped__(samples, alpha)
            with mpmath.workdps(40):
                assert kolmogorov(width, samples) <= mpmath.mpf(alpha)
                assert kolmogorov(width - 1e-6, samples) > mpmath.mpf(alpha)


def test_limits_on_a_mean_allow_for_the_rounding_of_the_sum() -> None:
    """A thousand, but for rounding, of two thousand numbers."""
    from scipy.special import betainccinv

    alpha = 0.05
    n = 2000
    found = float(confidence.mean_at_most(np.array([1000 - 1e-10]), n, alpha)[0])
    hits = math.ceil(1000 + 1e-10)
    assert found >= betainccinv(hits + 1, n - hits, alpha / math.e)


@pytest.mark.parametrize("mode", MODES)
def test_limits_are_rounded_to_the_safe_side(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    radii = 1 + uniform(40, seed=1).numpy()
    for k in range(20):
        m = 1e-6 * float(uniform(1, seed=k))
        price = 1 + float(uniform(1, seed=k + 20))
        given = np.array([m])
        with monkeypatch.context() as patch:
            patch.setattr(confidence, "mean_at_most", lambda *_, given=given: given)
            with rounded(mode):
                least = float(confidence.mean_at_least(np.zeros(1), 10, 0.05)[0])
                error = confidence.error_at_most(radii, 0.1, 2, 0.05, price)
        assert Fraction(least) <= 1 - Fraction(m)
        assert Fraction(error) >= (Fraction(0.1) / Fraction(price)) ** 2 + Fraction(m)
        with monkeypatch.context() as patch:
            limits = iter([np.array([m]), np.array([m / 3])] * 2)
            patch.setattr(confidence, "_binomial", lambda *_, limits=limits: next(limits))
            with rounded(mode):
                lead = confidence.lead_at_least(radii, radii, 0.1, INF, 0.05)
        assert Fraction(lead) <= 1 - Fraction(m) - Fraction(m / 3)
        with monkeypatch.context() as patch:
            patch.setattr(confidence, "mean_at_most", lambda *_, m=m: np.array([m]))
            patch.setattr(confidence, "mean_at_least", lambda *_: np.array([1.0]))
            patch.setattr(confidence, "own_price", lambda *_, price=price: price)
            patch.setattr(
                confidence, "_prices", lambda *_, k=k: (np.array([0.1 * k]), np.array([1.0]))
            )
            with rounded(mode):
                lead = confidence.lead_at_least(radii, radii, 0.1, 2, 0.05)
        paid = (Fraction(0.1) / Fraction(price)) ** 2
        assert Fraction(lead) <= Fraction(0.1 * k) + 1 - Fraction(m) - paid


@pytest.mark.parametrize("mode", MODES)
def test_prices_between_two_neighbours_cost_no_more_than_at_the_upper_one(mode: str) -> None:
    with rounded(mode):
        cost, ends = confidence._prices(0.3, 2)
    for paid, upper in zip(cost[:-1].tolist(), ends[1:].tolist()):
        truth = (Fraction(0.3) / Fraction(upper)) ** 2
        assert truth * (1 - Fraction(1, 10**9)) < Fraction(paid) <= truth


@pytest.mark.parametrize("mode", MODES)
def test_binomial_limits_of_one_sample(mode: str) -> None:
    """Without a hit the limit is `1 - alpha`."""
    for k in range(1, 18):
        for alpha in (10.0**-k, 3.0 * 10.0**-k / 7):
            with rounded(mode):
                found = float(confidence._binomial(np.zeros(1), 1, alpha)[0])
            assert Fraction(found) >= 1 - Fraction(alpha)


def test_binomial_limits_of_very_many_samples() -> None:
    """The distribution function is off by parts of 1e-16 for each sample: 3e-8 for 1e9 of them."""
    samples = 10**9
    alpha = 0.05
    limits = confidence._binomial(np.arange(30.0), samples, alpha).tolist()
    with mpmath.workdps(40):
        for hits, limit in enumerate(limits):
            m = mpmath.mpf(limit)
            term = mpmath.exp(samples * mpmath.log1p(-m))  # of no hit, then of one more at a time
            below = term
            for j in range(hits):
                term *= (samples - j) * m / ((j + 1) * (1 - m))
                below += term
            assert alpha * (1 - mpmath.mpf(1e-5)) < below <= alpha


@pytest.mark.parametrize("mode", MODES)
def test_tail_bounds_for_very_many_samples(mode: str) -> None:
    """A rate so small that the divergence is all rounding."""
    for k in range(20):
        mean = 0.1 + 0.8 * float(uniform(1, seed=k))
        rate = 3 / 10**13
        with rounded(mode):
            found = float(confidence._chernoff(np.array([mean]), rate)[0])
        with mpmath.workdps(40):
            q = mpmath.mpf(mean)
            m = mpmath.mpf(found)
            divergence = q * mpmath.log(q / m) + (1 - q) * mpmath.log((1 - q) / (1 - m))
            assert m == 1 or (m > q and divergence >= mpmath.mpf(rate))


def test_lower_limits_of_proportions_are_rounded_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are differences of 1 and an upper limit."""
    limit = 0.3 * uniform(100, seed=60).numpy()
    monkeypatch.setattr(confidence, "_binomial", lambda *rest: limit)
    low, _ = confidence.proportions(np.zeros(100), 10, 0.1)
    for bound, other in zip(low.tolist(), limit.tolist()):
        assert Fraction(bound) <= 1 - Fraction(other)


def test_a_label_that_costs_exactly_eps_may_change() -> None:
    """No input is wrong anywhere near: at order inf the label alone decides, at its price."""
    far = torch.tensor([2.0, 3.0], dtype=torch.float64)
    mu = torch.full((2,), 0.5, dtype=torch.float64)
    curve = RiskCurve(far, far, mu, math.inf, label_cost=0.5)
    assert curve(0.5) == (0.0, 0.0)
    assert curve(0.499) == (1.0, 1.0)
    # The certified side alone, as limits for the population take it.
    assert curve._certified is not None and curve._certified.proved(0.5) == 0
