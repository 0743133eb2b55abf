"""Labels that change and subpopulations, against the full transport program (THEORY 12)."""

import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import wassail as ws
from wassail.transport.curve import RiskCurve

INF = math.inf


def program(
    distances: np.ndarray, mu: np.ndarray, eps: float, order: float, kappa: float, alpha: float
) -> float:
    """The worst error by linear programming over all plans: from each sample to itself, to its
    nearest flip, to itself with another label, and to its flip with another label.
    """
    n = len(distances)
    costs = np.stack([np.zeros(n), distances, np.full(n, kappa), distances + kappa], 1)
    wrong = np.stack([distances == 0, np.ones(n), distances > 0, np.zeros(n)], 1).astype(float)
    price = costs.flatten() ** order
    allowed = np.isfinite(price)
    use = np.where(allowed, price, 0.0)
    shares = np.kron(np.eye(n), np.ones(4))  # the mass of each sample in the subpopulation
    answer = linprog(
        -wrong.flatten(),
        A_ub=np.concatenate([use[None] / eps**order, shares]),
        b_ub=np.concatenate([[1.0], mu / alpha]),
        A_eq=np.ones((1, 4 * n)),
        b_eq=[1.0],
        bounds=[(0, None if ok else 0) for ok in allowed],
        method="highs",
    )
    assert answer.status == 0
    return float(-answer.fun)


def case(seed: int) -> tuple[np.ndarray, np.ndarray, float, float, float, float]:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 9))
    distances = rng.uniform(0.05, 2.0, n)
    distances[rng.random(n) < 0.2] = 0.0
    distances[rng.random(n) < 0.2] = INF
    mu = np.full(n, 1 / n) if seed % 2 else rng.dirichlet(np.ones(n))
    order = (1.0, 2.0, 1.7)[seed % 3]
    kappa = (INF, float(rng.uniform(0.1, 1.5)))[seed % 2]
    alpha = (1.0, float(rng.uniform(0.2, 1.0)))[seed // 2 % 2]
    return distances, mu, float(rng.uniform(0.05, 1.2)), order, kappa, alpha


def curve_of(
    distances: np.ndarray, mu: np.ndarray, order: float, kappa: float, alpha: float
) -> RiskCurve:
    known = torch.tensor(distances)
    return RiskCurve(
        known, known.clone(), torch.tensor(mu), order, label_cost=kappa, subpopulation=alpha
    )


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_curves_are_the_worst_of_all_plans(start: int) -> None:
    for seed in range(start, start + 100):
        distances, mu, eps, order, kappa, alpha = case(seed)
        worst = program(distances, mu, eps, order, kappa, alpha)
        certified, attacked = curve_of(distances, mu, order, kappa, alpha)(eps)
        assert math.isclose(1 - attacked, worst, abs_tol=1e-8), seed
        assert certified <= attacked and attacked - certified < 1e-9, seed


def test_a_subpopulation_at_eps_zero_is_its_worst_part() -> None:
    """Three of ten are wrong: of any half at most three in five, of a fifth all."""
    distances = torch.tensor([0.0] * 3 + [1.0] * 7, dtype=torch.float64)
    mu = torch.full((10,), 0.1, dtype=torch.float64)
    for share, left in ((1.0, 0.7), (0.5, 0.4), (0.3, 0.0), (0.2, 0.0)):
        curve = RiskCurve(distances, distances, mu, 1.0, subpopulation=share)
        certified, attacked = curve(0)
        assert math.isclose(attacked, left, abs_tol=1e-12)
        assert math.isclose(certified, left, abs_tol=1e-12)


@pytest.mark.few(1)
@pytest.mark.slow_cases("0.6-1.0", "1.0-2.0")
@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_bends_inverse_and_area_agree_with_the_curve(order: float, share: float) -> None:
    rng = np.random.default_rng(3)
    distances = torch.tensor(rng.uniform(0.1, 1.0, 12))
    radii = 0.7 * distances
    mu = torch.full((12,), 1 / 12, dtype=torch.float64)
    curve = RiskCurve(distances, radii, mu, order, label_cost=0.8, subpopulation=share)
    for side, place in (("attacked", 1), ("certified", 0)):
        eps, accuracy = curve.breakpoints(side)
        assert (eps[1:] > eps[:-1]).all() and (accuracy[1:] <= accuracy[:-1]).all()
        for e, a in zip(eps.tolist(), accuracy.tolist()):
            if order < INF:
                assert math.isclose(curve(e)[place], a, abs_tol=1e-9)
        for level in (0.9, 0.5, 0.2, 0.0):
            at = curve.inverse(level, side)
            # Below it the accuracy is above the level, from it on at most the level.
            assert curve(at * (1 - 1e-6))[place] >= level - 1e-9
            assert curve(at * (1 + 1e-6))[place] <= level + 1e-9
    grid = torch.linspace(0, 0.9, 20001, dtype=torch.float64)
    gaps = [curve.gap(float(e)) for e in grid]
    total = float(torch.trapezoid(torch.tensor(gaps, dtype=torch.float64), grid))
    assert math.isclose(curve.area(0.9), total, rel_tol=1e-3)


def test_the_certified_side_is_never_rounded_up() -> None:
    """Against fractions: order 1, all masses and radii as they are stored."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        n = 7
        radii = torch.tensor(rng.uniform(0.01, 1.0, n)).sort().values
        mu = torch.full((n,), 1 / n, dtype=torch.float64)
        alpha = float(rng.uniform(0.2, 1.0))
        eps = float(rng.uniform(0.01, 1.0))
        curve = RiskCurve(radii, radii, mu, 1.0, subpopulation=alpha)
        left = Fraction(eps)
        error = Fraction(0)
        for r, m in zip(radii.tolist(), mu.tolist()):
            mass = min(Fraction(m) / Fraction(alpha), 1 - error, left / Fraction(r))
            error += mass
            left -= mass * Fraction(r)
        whole = sum(Fraction(m) for m in mu.tolist())
        # The masses sum to 1 but for rounding: what is certified is for masses over their sum.
        assert Fraction(curve(eps)[0]) <= max(1 - error / max(whole, 1), 0) + Fraction(1, 10**15)


def test_people_and_labels_are_worse_than_neither() -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:30], y[:30], passes=30)
    radii = ws.radii(model, x[:30], y[:30], method="crown", tolerance=0.2, upper=flips.distances)
    plain = ws.risk_curve(flips, radii)
    noisy = ws.risk_curve(flips, radii, label_cost=0.02)
    other = ws.risk_curve(flips, radii, label_cost="0.02", subpopulation="4/5")
    for eps in (0.001, 0.01, 0.05):
        for side in (0, 1):
            assert other(eps)[side] <= noisy(eps)[side] <= plain(eps)[side]
        assert other(eps)[0] <= other(eps)[1]
    assert "a changed label costs 0.02" in repr(other) and "80 % or more" in repr(other)
    whole = plain.population(0.9)
    part = other.population(0.9)
    assert part(0.01)[0] <= whole(0.01)[0] and part(0.01)[1] <= whole(0.01)[1]
    assert part.of_order(2).subpopulation == 0.8


@pytest.mark.slow
def test_limits_for_the_population_cover() -> None:
    """Distances of a known distribution, uniform on [0, 1]: the true curve is known in closed form
    at order 1, where the budget of the whole buys all below t with `t^2 / 2 = alpha eps`.
    """
    alpha, eps, kappa = 0.7, 0.05, 0.9
    true = 1 - math.sqrt(2 * alpha * eps) / alpha
    rng = np.random.default_rng(0)
    missed = np.zeros(2)
    repeats = 400
    threat = ws.Threat(INF, 1, eps)
    for _ in range(repeats):
        d = torch.tensor(rng.uniform(0, 1, 300))
        mu = torch.full((300,), 1 / 300, dtype=torch.float64)
        curve = RiskCurve(d, d, mu, 1.0, label_cost=kappa, subpopulation=alpha)
        for k, (low, high) in enumerate((curve.population()(eps), curve.population_at(threat))):
            assert low <= high
            missed[k] += (low > true) + (high < true)
    # Two sides of 5 % each, and three standard errors.
    assert (missed / repeats <= 0.10 + 3 * math.sqrt(0.1 * 0.9 / repeats)).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label_cost": 0}, "label_cost is 0"),
        ({"label_cost": -1}, "label_cost is -1"),
        ({"label_cost": "cheap"}, "not a number"),
        ({"subpopulation": 0}, "subpopulation is 0"),
        ({"subpopulation": 1.5}, "subpopulation is 1.5"),
    ],
)
def test_one_sentence_says_what_is_wrong(changes: dict[str, Any], words: str) -> None:
    x = torch.zeros(1, 2)
    y = torch.tensor([0])
    flips = ws.Flips.from_points(lambda v: v, x + torch.tensor([1.0, 0.0]), y, x, "inf", None)
    with pytest.raises(ws.InputError, match=words):
        ws.risk_curve(flips, **changes)


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("kappa", [INF, 0.05])
def test_the_distribution_attains_the_curve(order: float, share: float, kappa: float) -> None:
    """It is in the set, as recomputed from its tensors, and as bad as the curve says."""
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:40], y[:40], passes=30)
    also: dict[str, Any] = {"label_cost": kappa, "subpopulation": share}
    curve = ws.risk_curve(flips, order=order, **also)
    for eps in (0.005, 0.03, 0.2):
        found = ws.allocate(flips, eps, order, **also)
        assert found.cost <= eps
        assert math.isclose(found.accuracy, curve(eps)[1], abs_tol=1e-9)
        assert bool(found.verify(model)), found.verify(model).problems
        points, mass = found.atoms()
        assert len(points) == 80 and math.isclose(float(mass.sum()), 1.0, abs_tol=1e-9)
        assert (found.mass <= found.mu / share * (1 + 1e-12)).all()
        moved = (found.labels != y[:40]) & (found.weights > 0)
        assert bool(moved.any()) == (kappa == 0.05 and eps > 0.005 and order != INF) or order == INF
    with pytest.raises(ws.InputError, match="plain threat"):
        ws.wda(model, x[:2], y[:2], ws.Threat(INF, 1, 0.1, label_cost=0.1))


def test_a_distribution_that_lies_is_found_out() -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:20], y[:20], passes=30)
    found = ws.allocate(flips, 0.02, 1, label_cost=0.04, subpopulation=0.5)
    assert found.density is not None and found.changed is not None
    crowd = replace(
        found, density=torch.full_like(found.density, 1.0).index_fill(0, torch.tensor([0]), 2.5)
    )
    assert any("densities outside" in text for text in crowd.verify(model).problems)
    assert any("has mass" in text for text in crowd.verify(model).problems)
    cheap = replace(found, changed=(y[:20] + 1) % 10, weights=torch.ones(20, dtype=torch.float64))
    assert any("above eps" in text for text in cheap.verify(model).problems)
    with pytest.raises(ws.InputError, match="bootstrap"):
        found.interval()


def test_a_distribution_is_saved_with_its_labels(tmp_path: Path) -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:5], y[:5], passes=10)
    found = ws.allocate(flips, 0.1, 1, label_cost=0.2, subpopulation=0.7)
    found.save(tmp_path / "d.safetensors")
    kept = ws.Distribution.load(tmp_path / "d.safetensors")
    assert kept.threat == found.threat and kept.accuracy == found.accuracy
    assert torch.equal(kept.labels, found.labels) and torch.equal(kept.mass, found.mass)
    assert "a changed label costs 0.2" in str(kept.threat)
