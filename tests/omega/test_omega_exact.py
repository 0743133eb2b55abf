"""Exact sums, costs and duals: against other solvers and other arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from wassail.omega.exact import (
    distance_above,
    error_peaks,
    float_above,
    price_above,
    price_below,
    shares_of,
    worst_mean,
)
from wassail.transport.curve import RiskCurve


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [1.0, 0.8, 0.3, 0.01])
def test_the_worst_mean_is_a_linear_program(seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    weights = rng.uniform(0, 1, 7) * (rng.uniform(0, 1, 7) < 0.8) + 1e-3
    values = rng.normal(size=7).round(1)  # with ties
    mu = shares_of(weights.tolist())
    assert sum(mu) == 1
    limits = [(0, float(weight) / share) for weight in mu]
    found = linprog(-values, A_eq=np.ones((1, 7)), b_eq=[1], bounds=limits)
    exact = worst_mean([Fraction(v) for v in values], mu, Fraction(share))
    assert float(exact) == pytest.approx(-found.fun, abs=1e-9)


@pytest.mark.parametrize("norm", [1, 2, math.inf])
def test_a_distance_is_never_rounded_down(norm: float) -> None:
    rng = np.random.default_rng(0)
    for scale in (1.0, 1e-6, 1e-30):
        a, b = (
            (rng.uniform(0, scale, 50) ** 3).astype(np.float32).astype(np.float64) for _ in range(2)
        )
        gaps = [abs(Fraction(float(x)) - Fraction(float(y))) for x, y in zip(a, b)]
        found = Fraction(distance_above(a, b, norm))
        if norm == 2:
            assert (
                found**2 >= sum(gap**2 for gap in gaps) >= (found * (1 - Fraction(1, 10**13))) ** 2
            )
        else:
            exact = sum(gaps) if norm == 1 else max(gaps)
            assert exact <= found <= exact * (1 + Fraction(1, 10**14))
    assert distance_above(a, a, norm) == 0


def test_a_distance_that_float64_holds_is_exact_at_linf() -> None:
    point, sample = np.array([0.625, 0.1]), np.array([0.5, 0.1])
    assert distance_above(point, sample, math.inf) == 0.125


def test_prices_enclose_the_power() -> None:
    for order in (1.0, 1.5, 2.0, 7.25, 300.0):
        for ratio in (1e-3, 0.7, 1.0, 1.3):
            low, high = price_below(ratio, 1.0, order), price_above(ratio, 1.0, order)
            assert high is not None
            if order == int(order):
                assert low <= Fraction(ratio) ** int(order) <= high
            assert low <= high <= low * (1 + Fraction(1, 10**9)) or high < Fraction(1, 10**299)
    assert price_above(1e300, 1e-300, 2.0) is None
    assert price_above(math.inf, 1.0, 1.0) is None
    assert float_above(Fraction(1, 3)) >= Fraction(1, 3)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("cost", [math.inf, 0.3])
@pytest.mark.parametrize("share", [1.0, 0.7])
def test_the_dual_gives_what_the_curve_gives(order: float, cost: float, share: float) -> None:
    generator = torch.Generator().manual_seed(3)
    radii = torch.rand(30, generator=generator, dtype=torch.float64)
    radii[:4] = torch.tensor([0.0, 0.0, math.inf, math.inf])
    weights = torch.rand(30, generator=generator, dtype=torch.float64) + 0.1
    mu = weights / weights.sum()
    curve = RiskCurve(radii, radii, mu, order, label_cost=cost, subpopulation=share)
    exact = shares_of(weights.tolist())
    for eps in (0.05, 0.2, 0.5):
        certified = curve(eps)[0]
        tried = [0.0] if order == math.inf else [(eps / r) ** order for r in radii.tolist() if r]
        tried += [(eps / cost) ** order] if order < math.inf else []
        best = max(
            1 - Fraction(lam) - worst_mean(peaks, exact, Fraction(share))
            for lam in tried
            for peaks in [error_peaks(radii.tolist(), lam, eps, order, cost)]
        )
        assert float(best) == pytest.approx(max(certified, 0), abs=1e-9) or best < 0 == certified
