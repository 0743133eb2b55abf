"""Limits for the population: closed forms, exact fractions, and coverage by simulation."""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import mpmath
import numpy as np
import pytest
import torch

import wassail as ws
from wassail.transport import confidence as limits
from wassail.transport.curve import PopulationCurve, RiskCurve

INF = math.inf


def tail(n: int, width: Fraction) -> Fraction:
    """`P(sup F - F_N >= width)` for a continuous F, exactly (Birnbaum and Tingey)."""
    total = Fraction(0)
    for j in range(math.floor(n * (1 - width)) + 1):
        share = Fraction(j, n)
        total += math.comb(n, j) * (1 - width - share) ** (n - j) * (width + share) ** (j - 1)
    return width * total


def curve(distances: list[float], radii: list[float] | None = None, order: float = 1) -> RiskCurve:
    d = torch.tensor(distances, dtype=torch.float64)
    r = None if radii is None else torch.tensor(radii, dtype=torch.float64)
    return RiskCurve(d, r, torch.full_like(d, 1 / len(d)), order)


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 20, 60])
def test_the_quantile_is_exact_and_on_the_safe_side(n: int, confidence: float) -> None:
    width = limits.kolmogorov(n, confidence)
    alpha = 1 - Fraction(confidence)
    assert tail(n, Fraction(width)) <= alpha
    assert tail(n, Fraction(width) - Fraction(1, 10**8)) > alpha


def test_the_quantile_of_one_sample_is_the_confidence() -> None:
    assert limits.kolmogorov(1, 0.95) == pytest.approx(0.95, abs=1e-9)


@pytest.mark.slow_cases("1000000")
@pytest.mark.parametrize("n", [10**3, 10**5, 10**6])
def test_the_quantile_of_many_samples_is_just_below_the_closed_bound(n: int) -> None:
    closed = math.sqrt(math.log(20) / (2 * n))
    assert limits.kolmogorov(n, 0.95) == pytest.approx(closed - 1 / (6 * n), rel=1e-4)
    assert limits.kolmogorov(n, 0.95) < closed


def test_beyond_a_million_samples_the_closed_bound_answers() -> None:
    n = 10**7
    assert limits.kolmogorov(n, 0.95) == pytest.approx(math.sqrt(math.log(20) / (2 * n)), rel=1e-9)
    assert limits.kolmogorov(n, 0.1) == pytest.approx(math.sqrt(math.log(2) / (2 * n)), rel=1e-9)


@pytest.mark.parametrize(("width", "confidence"), [(0.05, 0.95), (0.2, 0.99), (0.5, 0.8)])
def test_samples_needed_is_the_least_number(width: float, confidence: float) -> None:
    n = ws.samples_needed(width, confidence)
    assert limits.kolmogorov(n, confidence) <= width < limits.kolmogorov(n - 1, confidence)


@pytest.mark.parametrize("n", [1, 5, 30])
def test_binomial_limits_are_exact(n: int) -> None:
    for hits in range(n + 1):
        high = Fraction(limits.proportion_at_most(hits, n, 0.95))
        low = Fraction(limits.proportion_at_least(hits, n, 0.95))
        up = sum(math.comb(n, k) * high**k * (1 - high) ** (n - k) for k in range(hits + 1))
        down = sum(math.comb(n, k) * low**k * (1 - low) ** (n - k) for k in range(hits, n + 1))
        alpha = 1 - Fraction(0.95)
        assert (high == 1) == (hits == n)
        assert (low == 0) == (hits == 0)
        assert hits == n or alpha * (1 - Fraction(1, 10**6)) <= up <= alpha
        assert hits == 0 or alpha * (1 - Fraction(1, 10**6)) <= down <= alpha


@pytest.mark.slow_cases("10000000000-*")
@pytest.mark.parametrize("alpha", [1e-2, 2.5e-7, 1e-15])
@pytest.mark.parametrize("n", [10**5, 10**8, 10**10])
def test_binomial_limits_of_many_samples(n: int, alpha: float) -> None:
    """The tail at the limit, summed in higher precision, is no more than alpha, and near it."""
    hits = 9 * n // 10
    low, high = limits.proportions(np.array([float(hits)]), n, alpha)
    for count, p in ((hits, mpmath.mpf(high[0])), (n - hits, 1 - mpmath.mpf(low[0]))):
        with mpmath.workdps(50):
            choices = mpmath.loggamma(n + 1) - mpmath.loggamma(count + 1)
            log = choices - mpmath.loggamma(n - count + 1)
            log += count * mpmath.log(p) + (n - count) * mpmath.log(1 - p)
            odds = (1 - p) / p
            rest = float(odds - float(odds))
        k = np.arange(40 * math.isqrt(n) + 100, dtype=np.longdouble)
        falls = (count - k) / (n - count + k + 1) * (np.longdouble(float(odds)) + rest)
        tail = float(mpmath.exp(log)) * float(1 + np.cumprod(np.maximum(falls, 0)).sum())
        assert alpha * 0.999 < tail <= alpha


def test_limits_on_a_mean_cover_and_are_below_hoeffdings() -> None:
    rng = np.random.default_rng(0)
    n = 200
    for draw, mean in (
        (lambda size: (rng.random(size) < 0.1).astype(float), 0.1),
        (lambda size: rng.beta(0.5, 1.5, size), 0.25),
        (lambda size: np.where(rng.random(size) < 0.02, 1.0, 0.0), 0.02),
    ):
        total = draw((1000, n)).sum(1)
        high = limits.mean_at_most(total, n, 0.05)
        low = limits.mean_at_least(total, n, 0.05)
        slack = 3 * math.sqrt(0.05 * 0.95 / 1000)
        assert (high < mean).mean() <= 0.05 + slack
        assert (low > mean).mean() <= 0.05 + slack
        assert (high < total / n + math.sqrt(math.log(20) / (2 * n)) + 1e-9).all()


def test_population_of_a_few_samples_by_hand() -> None:
    known = curve([0.0, 1.0, 2.0, 3.0], [0.0, 0.5, 2.0, 2.5])
    population = known.population(0.6)
    shift = limits.kolmogorov(4, 0.6)
    assert 0.25 < shift < 0.5
    # eps 0: an error of 1/4 on the samples, and the shift more of it; and the shift less of it.
    assert population(0)[0] == pytest.approx(0.75 - shift, abs=1e-9)
    assert population(0)[1] == 1
    # What is left: shift + 1/4 at 0, 1/4 at 0.5, 1/2 - shift at 2, of which 0.1 are bought.
    cost = 0.25 * 0.5 + 0.1 * 2.0
    assert population(cost)[0] == pytest.approx(1 - (shift + 0.25 + 0.25 + 0.1), abs=1e-9)
    # The attacker loses the one at 0 and shift - 1/4 of the one at 1.
    left = 0.5 - shift
    assert population(left)[1] == pytest.approx(1 - left, abs=1e-9)
    assert population(left + 0.25 * 2)[1] == pytest.approx(1 - left - 0.25, abs=1e-9)
    assert population.gap(0.1) == pytest.approx(population(0.1)[1] - population(0.1)[0])
    eps = population.inverse(0.3, "certified")
    assert population(eps)[0] == pytest.approx(0.3, abs=1e-9)


def test_population_at_order_inf_keeps_closed_sets() -> None:
    near = math.nextafter(1, 0)  # an exact radius is stored just below the distance
    known = curve([1.0] * 600, [near] * 600, INF)
    population = known.population()
    shift = population.shift
    assert population(near)[0] == pytest.approx(1 - shift, abs=1e-9)
    assert population(1)[0] == 0
    assert population(near)[1] == 1
    assert population(1)[1] == pytest.approx(shift, abs=1e-9)
    low, high = known.population_at(ws.Threat(2, INF, near))
    assert low == pytest.approx(0.05 ** (1 / 600), abs=1e-9) and high == 1
    low, high = known.population_at(ws.Threat(2, INF, 1.0))
    assert low == 0 and high == pytest.approx(1 - 0.05 ** (1 / 600), abs=1e-9)


def test_no_flip_known_and_nothing_certified() -> None:
    population = curve([INF] * 20, [0.0] * 20).population()
    assert population(3) == (0, 1)
    assert curve([0.0] * 20).population()(3)[0] == 0
    alone = curve([0.7]).population(0.5)
    assert alone(0.1)[1] == pytest.approx(1 - 0.1 / 0.7, abs=0.5)


def test_more_confidence_and_fewer_samples_never_help() -> None:
    values = np.random.default_rng(0).gamma(2, 1, 400).tolist()
    known = curve(values, [0.9 * v for v in values])
    at = [known.population(c)(0.2) for c in (0.5, 0.9, 0.99)]
    assert at[0][0] > at[1][0] > at[2][0] and at[0][1] < at[1][1] < at[2][1]
    assert known(0.2)[0] > at[0][0] and known(0.2)[1] < at[0][1]


@pytest.mark.parametrize("order", [1, 2])
def test_one_threat_is_sharper_than_the_band(order: float) -> None:
    rng = np.random.default_rng(1)
    values = rng.gamma(2, 0.05, 2200)
    values[rng.random(2200) < 0.05] = 0
    known = curve(values[:2000].tolist(), values[:2000].tolist(), order)
    band = known.population()(0.005)
    pilot = torch.from_numpy(values[2000:])
    sharp = known.population_at(ws.Threat(2, order, 0.005), pilot=pilot)
    assert band[0] < sharp[0] < known(0.005)[0]
    assert known(0.005)[1] < sharp[1] < band[1]


def test_few_samples_of_finite_order_get_the_band() -> None:
    known = curve([0.1 * k for k in range(1, 60)], [0.09 * k for k in range(1, 60)])
    assert known.population_at(ws.Threat(2, 2, 0.3)) == known.of_order(2).population()(0.3)


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_coverage_with_ties_and_atoms(order: float) -> None:
    rng = np.random.default_rng(2)
    levels = np.array([0.0, 0.5, 1.0, 2.0, INF])
    masses = np.array([0.1, 0.2, 0.3, 0.2, 0.2])
    eps = 0.6
    truth = RiskCurve(torch.tensor(levels), torch.tensor(levels), torch.tensor(masses), order)
    exact = truth(eps)
    missed = np.zeros(4)
    rounds = 40
    for _ in range(rounds):
        values = rng.choice(levels, 300, p=masses).tolist()
        known = curve(values, values, order)
        for k, (low, high) in enumerate(
            (known.population(0.8)(eps), known.population_at(ws.Threat(2, order, eps), 0.8))
        ):
            missed[2 * k] += low > exact[0] + 1e-12
            missed[2 * k + 1] += high < exact[1] - 1e-12
    assert (missed <= rounds * (0.2 + 3 * math.sqrt(0.16 / rounds))).all()


def test_weights_and_bad_numbers_are_refused() -> None:
    weighted = RiskCurve(
        torch.ones(2).double(), None, torch.tensor([0.25, 0.75], dtype=torch.float64), 1.0
    )
    with pytest.raises(ws.InputError, match="different weights"):
        weighted.population()
    with pytest.raises(ws.InputError, match="different weights"):
        weighted.population_at(ws.Threat(2, 1, 1.0))
    for bad in (0, 1, 1.5, "many"):
        with pytest.raises(ws.InputError, match="confidence"):
            curve([1.0]).population(bad)
    with pytest.raises(ws.InputError, match="width"):
        ws.samples_needed(0)
    with pytest.raises(ws.InputError, match="already"):
        curve([1.0]).population().population()


def test_a_population_curve_saves_itself_and_is_drawn(tmp_path) -> None:
    population = curve([0.5, 1.0, INF] * 9, [0.4, 0.9, 2.0] * 9, 2).population()
    population.save(tmp_path / "p.safetensors")
    again = PopulationCurve.load(tmp_path / "p.safetensors")
    assert again(0.3) == population(0.3)
    assert again.of_order(1)(0.3)[0] <= again(0.3)[0]
    assert "27 samples" in repr(again)
    pytest.importorskip("matplotlib")
    assert population.plot().get_xlabel() == "budget eps"


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_a_lead_is_covered_and_pairing_helps(order: float) -> None:
    rng = np.random.default_rng(3)
    missed = 0
    leads = []
    for _ in range(25):
        d = rng.gamma(2, 0.5, 400)
        better = np.where(rng.random(400) < 0.3, d * 3, d)
        leads.append(limits.lead_at_least(better, d, 0.3, order, 0.05))
        alone = -limits.error_at_most(better, 0.3, order, 0.025, 2.0)
        alone += limits.error_at_least(d, 0.3, order, 0.025)
        assert order < INF or leads[-1] > alone
    many = rng.gamma(2, 0.5, 20_000)
    fewer = torch.tensor(np.where(rng.random(20_000) < 0.3, many * 3, many))
    mu = torch.full_like(fewer, 1 / 20_000)
    truth = (
        RiskCurve(fewer, None, mu, order)(0.3)[1]
        - RiskCurve(torch.tensor(many), None, mu, order)(0.3)[1]
    )
    missed = sum(lead > truth + 0.01 for lead in leads)
    assert missed <= 25 * (0.05 + 3 * math.sqrt(0.05 * 0.95 / 25))
    if order == INF:
        assert np.mean(leads) > 0


@pytest.mark.parametrize("order", [1.0, 1e4, 1e6])
def test_what_powers_lose_is_paid_for(order: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a limit on a mean is the mean itself, the limit on the error is above it in exact
    arithmetic, up to very high orders.
    """
    monkeypatch.setattr(limits, "mean_at_most", lambda total, n, alpha: total / n)
    rng = np.random.default_rng(0)
    with localcontext() as context:
        context.prec = 60
        for _ in range(20):
            price = float(rng.uniform(0.5, 2))
            radii = price * (1 - rng.uniform(0, 1, 3) / max(order, 2.0))
            eps = price * (1 - 1 / max(order, 2.0))
            worth = [1 - (Decimal(r) / Decimal(price)) ** Decimal(order) for r in radii.tolist()]
            exact = (Decimal(eps) / Decimal(price)) ** Decimal(order) + sum(worth) / 3
            found = limits.error_at_most(radii, eps, order, 0.05, price)
            assert Decimal(found) >= min(exact, 1)
