"""Groups whose weights change, with labels that change and subpopulations, against the full
transport program (THEORY 12).
"""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

import wassail as ws
from support.rounding import rounded
from wassail.transport.curve import RiskCurve

INF = math.inf


def program(curve: RiskCurve, eps: float) -> float:
    """The worst error by linear programming over all weights of the groups and all plans: from
    each sample to itself, to its nearest flip, to itself with another label, and to its flip with
    another label.
    """
    assert curve.groups is not None
    distances, mu = curve.distances.numpy(), curve.mu.numpy()
    kappa, order = curve.label_cost, curve.order
    n, groups = len(mu), len(curve.groups.names)
    own = np.eye(groups)[list(curve.groups.places)]  # (n, G)
    within = mu / (own @ (own.T @ mu))
    costs = np.stack([np.zeros(n), distances, np.full(n, kappa), distances + kappa], 1).flatten()
    wrong = np.stack([distances == 0, np.ones(n), distances > 0, np.zeros(n)], 1).astype(float)
    price = (costs / eps) ** order if order < INF else np.where(costs <= eps, 0.0, INF)
    allowed = np.isfinite(price)
    each = np.kron(np.eye(n), np.ones(4))
    capped = np.concatenate([each, -own * within[:, None] / curve.subpopulation], 1)
    spent = np.concatenate([np.where(allowed, price, 0.0), np.zeros(groups)])
    filled = np.concatenate([own.T @ each, -np.eye(groups)], 1)
    whole = np.concatenate([np.zeros(4 * n), np.ones(groups)])
    answer = linprog(
        np.concatenate([-wrong.flatten(), np.zeros(groups)]),
        A_ub=np.concatenate([spent[None], capped]),
        b_ub=np.append(1.0, np.zeros(n)),
        A_eq=np.concatenate([filled, whole[None]]),
        b_eq=np.append(np.zeros(groups), 1.0),
        bounds=[
            *[(0, None if ok else 0) for ok in allowed],
            *zip(curve.groups.low, curve.groups.high),
        ],
        method="highs",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    assert answer.status == 0, answer.message
    return float(-answer.fun)


def case(seed: int) -> tuple[RiskCurve, float]:
    """A curve with groups, in half of the cases with labels that change, in half with
    subpopulations.
    """
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 11))
    distances = rng.uniform(0.05, 2.0, n).round(seed % 4 + 1)  # some are equal
    distances[rng.random(n) < 0.2] = 0.0
    distances[rng.random(n) < 0.2] = INF
    mu = np.full(n, 1 / n) if seed % 2 else rng.dirichlet(np.ones(n))
    ids = rng.integers(0, int(rng.integers(1, 5)), n)
    count = len(set(ids.tolist()))
    weights = rng.dirichlet(np.ones(count))
    low = weights * rng.uniform(0, 1, count)
    high = weights + (1 - weights) * rng.uniform(0, 1, count)
    known = torch.tensor(distances)
    curve = RiskCurve(
        known,
        known.clone(),
        torch.tensor(mu),
        (1.0, 2.0, 1.7, INF)[seed % 4],
        label_cost=(INF, float(rng.uniform(0.1, 1.5)))[seed // 2 % 2],
        subpopulation=(1.0, float(rng.uniform(0.2, 1.0)))[seed // 4 % 2],
        groups=ws.Groups(ids, low, high),
    )
    return curve, float(rng.uniform(0.05, 1.2))


def check(seed: int) -> None:
    curve, eps = case(seed)
    worst = program(curve, eps)
    certified, attacked = curve(eps)
    assert math.isclose(1 - attacked, worst, abs_tol=2e-8), seed
    assert certified <= attacked and attacked - certified < 1e-9, seed


@pytest.mark.parametrize("start", range(0, 120, 40))
def test_curves_are_the_worst_of_all_weights_and_plans(start: int) -> None:
    for seed in range(start, start + 40):
        check(seed)


@pytest.mark.slow
def test_a_thousand_curves_are_the_worst_of_all_weights_and_plans() -> None:
    for seed in range(1000, 2000):
        check(seed)


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(24))
def test_bends_inverse_and_area_agree_with_the_curve(seed: int) -> None:
    curve, _ = case(seed)
    for side, place in (("attacked", 1), ("certified", 0)):
        eps, accuracy = curve.breakpoints(side)
        assert (eps[1:] > eps[:-1]).all() and (accuracy[1:] <= accuracy[:-1]).all()
        knots = [*eps.tolist(), 2 * float(eps[-1]) + 1]
        at = [*accuracy.tolist(), float(accuracy[-1])]
        for k, (left, right) in enumerate(pairwise(knots)):
            middle = (left + right) / 2
            if curve.order == INF:
                expected = at[k]
            else:
                p = curve.order
                part = (middle**p - left**p) / (right**p - left**p)
                expected = at[k] + part * (at[k + 1] - at[k])
                assert math.isclose(curve(left)[place], at[k], abs_tol=1e-9)
            assert math.isclose(curve(middle)[place], expected, abs_tol=1e-9), (seed, side, k)
        for level in (0.9, 0.5, 0.2, 0.0):
            found = curve.inverse(level, side)
            if found < INF:
                assert curve(found * (1 + 1e-6))[place] <= level + 1e-8
            if 0 < found < INF:
                assert curve(found * (1 - 1e-6))[place] >= level - 1e-8
    end = 1.5
    grid = torch.linspace(0, end, 1501, dtype=torch.float64)
    total = torch.trapezoid(curve._attacked.accuracies(grid), grid)
    assert math.isclose(curve._attacked.area(end), float(total), abs_tol=2e-3)


def test_one_group_is_no_group() -> None:
    for seed in range(12):
        curve, eps = case(seed)
        one = replace(curve, groups=ws.Groups([0] * len(curve.mu)))
        none = replace(curve, groups=None)
        for value in (0.0, eps, 3 * eps):
            assert np.allclose(one(value), none(value), rtol=0, atol=1e-12)


def test_groups_at_eps_zero_are_the_worst_weights() -> None:
    """Errors 0, 1/2 and 1: the worst group takes all that it may, then the next one."""
    distances = torch.tensor([1.0, 1, 0, 1, 0, 0], dtype=torch.float64)
    mu = torch.full((6,), 1 / 6, dtype=torch.float64)
    groups = ws.Groups(["a", "a", "b", "b", "c", "c"], 0.1, {"a": 0.8, "b": 0.7, "c": 0.4})
    certified, attacked = RiskCurve(distances, distances, mu, 1.0, groups=groups)(0)
    assert math.isclose(attacked, 1 - (0.4 + 0.5 * 0.5), abs_tol=1e-12)
    assert attacked - 1e-12 <= certified <= attacked


def exact_error(radii: list[float], alpha: Fraction, multiplier: Fraction) -> Fraction:
    """What one group gives to the dual at a multiplier, with equal masses, in fractions."""
    left = Fraction(1)
    error = Fraction(0)
    for r in sorted(radii):
        mass = min(Fraction(1, len(radii)) / alpha, left)
        left -= mass
        error += mass * max(1 - multiplier * Fraction(r), Fraction(0))
    return error


@pytest.mark.parametrize("way", ["down", "up"])
def test_the_certified_side_is_never_rounded_up(way: str) -> None:
    """One group, order 1, in fractions: the best multiplier is the inverse of a radius."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        radii = rng.uniform(0.01, 1.0, 7).tolist()
        alpha = float(rng.uniform(0.2, 1.0))
        eps = float(rng.uniform(0.01, 0.6))
        known = torch.tensor(radii, dtype=torch.float64)
        mu = torch.full((7,), 1 / 7, dtype=torch.float64)
        groups = ws.Groups([3] * 7, 0.2)
        with rounded(way):
            curve = RiskCurve(known, known, mu, 1.0, subpopulation=alpha, groups=groups)
            proved = curve._certified.proved(eps)
        prices = [Fraction(0), *(1 / Fraction(r) for r in radii)]
        best = min(p * Fraction(eps) + exact_error(radii, Fraction(alpha), p) for p in prices)
        assert Fraction(proved) <= max(1 - best, Fraction(0))
        assert proved >= float(1 - best) - 1e-12


@pytest.mark.parametrize("way", ["down", "up"])
def test_the_certified_side_is_never_rounded_up_at_eps_zero(way: str) -> None:
    """Of seven samples with equal masses some are wrong: their share over alpha, in fractions."""
    for wrong in range(1, 7):
        for alpha in (0.3, 0.7, 0.9, 1.0):
            known = torch.tensor([0.0] * wrong + [1.0] * (7 - wrong), dtype=torch.float64)
            mu = torch.full((7,), 1 / 7, dtype=torch.float64)
            groups = ws.Groups([3] * 7, 0.2)
            with rounded(way):
                curve = RiskCurve(known, known, mu, INF, subpopulation=alpha, groups=groups)
                proved = curve._certified.proved(0.0)
            left = max(1 - Fraction(wrong, 7) / Fraction(alpha), Fraction(0))
            assert Fraction(proved) <= left and proved >= float(left) - 1e-12


@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_bends_of_the_certified_side_are_never_rounded_up(way: str, order: int) -> None:
    """One group: at the eps of each bend the accuracy is no more than the knapsack's, in
    fractions.
    """
    for seed in range(12):
        rng = np.random.default_rng(seed)
        radii = np.sort(rng.uniform(0.01, 1.0, 7)).tolist()
        known = torch.tensor(radii, dtype=torch.float64)
        mu = torch.full((7,), 1 / 7, dtype=torch.float64)
        groups = ws.Groups([3] * 7, 0.2)
        with rounded(way):
            curve = RiskCurve(known, known, mu, float(order), subpopulation=0.7, groups=groups)
            knots, accuracies = curve._certified.breakpoints()
        for eps, accuracy in zip(knots.tolist(), accuracies.tolist()):
            left, budget, error = Fraction(1), Fraction(eps) ** order, Fraction(0)
            for r in radii:
                mass = min(Fraction(1, 7) / Fraction(0.7), left, budget / Fraction(r) ** order)
                left -= mass
                budget -= mass * Fraction(r) ** order
                error += mass
            assert Fraction(accuracy) <= 1 - error
            assert accuracy >= float(1 - error) - 1e-12


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
@pytest.mark.parametrize("share", [1.0, 0.6])
@pytest.mark.parametrize("kappa", [INF, 0.05])
def test_the_distribution_attains_the_curve(order: float, share: float, kappa: float) -> None:
    """Label shift: it is in the set, as recomputed from its tensors, and as bad as the curve."""
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:40], y[:40], passes=30)
    also: dict[str, Any] = {
        "label_cost": kappa,
        "subpopulation": share,
        "groups": ws.Groups(y[:40], 0.02, 0.3),
    }
    curve = ws.risk_curve(flips, order=order, **also)
    for eps in (0.005, 0.03, 0.2):
        found = ws.allocate(flips, eps, order, **also)
        assert found.cost <= eps
        assert math.isclose(found.accuracy, curve(eps)[1], abs_tol=1e-9)
        assert bool(found.verify(model)), found.verify(model).problems
        assert math.isclose(float(found.atoms()[1].sum()), 1.0, abs_tol=1e-9)
    assert found.threat.groups == also["groups"]
    assert "10 groups" in str(found.threat)


def test_a_distribution_that_lies_is_found_out(tmp_path: Path) -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = ws.zoo.data("digits")
    flips = ws.nearest(model, x[:20], y[:20], passes=30)
    found = ws.allocate(flips, 0.02, 1, groups=ws.Groups(y[:20], 0.05, 0.2), subpopulation=0.5)
    assert found.density is not None and found.verify(model)
    even = 1 / len(set(y[:20].tolist()))
    shifted = replace(found, threat=replace(found.threat, groups=ws.Groups(y[:20], even, even)))
    assert any("outside their ranges" in text for text in shifted.verify(model).problems)
    crowded = found.density.clone()
    twins = (y[:20] == y[0]).nonzero().flatten()[:2]
    crowded[twins] = torch.tensor([float(crowded[twins].sum()), 0.0], dtype=torch.float64)
    whole = replace(found.threat, subpopulation=1.0)
    lie = replace(found, density=crowded, threat=whole)
    assert any("what their group allows" in text for text in lie.verify(model).problems)
    found.save(tmp_path / "d.safetensors")
    kept = ws.Distribution.load(tmp_path / "d.safetensors")
    assert kept.threat == found.threat and kept.accuracy == found.accuracy
    curve = ws.risk_curve(flips, groups=found.threat.groups)
    curve.save(tmp_path / "c.safetensors")
    assert RiskCurve.load(tmp_path / "c.safetensors")(0.01) == curve(0.01)


@pytest.mark.parametrize("order", [1.0, INF])
def test_limits_for_the_population_cover(order: float) -> None:
    """Two groups of known distributions, uniform on [0, 1] and on [0, 2]; the true curve is that
    of many quantiles.
    """
    eps, count, repeats = 0.08, 20000, 150
    even = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    ids = [0] * count + [1] * count
    mu = torch.full((2 * count,), 0.5 / count, dtype=torch.float64)
    also = {"label_cost": 0.9, "subpopulation": 0.7}
    groups = ws.Groups(ids, 0.2, 0.7)
    many = torch.cat([even, 2 * even])
    true = RiskCurve(many, None, mu, order, groups=groups, **also)(eps)[1]
    rng = np.random.default_rng(0)
    missed = np.zeros(2)
    threat = ws.Threat(INF, order, eps)
    sample = ws.Groups([0] * 150 + [1] * 100, 0.2, 0.7)
    for _ in range(repeats):
        d = torch.tensor(np.concatenate([rng.uniform(0, 1, 150), rng.uniform(0, 2, 100)]))
        mu = torch.full((250,), 1 / 250, dtype=torch.float64)
        curve = RiskCurve(d, d, mu, order, groups=sample, **also)
        for k, (low, high) in enumerate((curve.population()(eps), curve.population_at(threat))):
            assert low <= high
            missed[k] += (low > true) + (high < true)
    assert (missed / repeats <= 0.10 + 3 * math.sqrt(0.1 * 0.9 / repeats)).all()


def test_a_label_of_exactly_the_budget_may_change() -> None:
    """At order inf a radius of eps protects, but not from a label that costs eps."""
    d = torch.tensor([1.0, 2.0], dtype=torch.float64)
    mu = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for groups in (None, ws.Groups([0, 1])):
        curve = RiskCurve(d, d, mu, INF, label_cost=0.5, groups=groups)
        assert curve(0.5) == (0.0, 0.0) and curve(0.499)[0] > 0.999
        many = RiskCurve(
            d.repeat(200),
            d.repeat(200),
            mu.repeat(200) / 200,
            INF,
            label_cost=0.5,
            groups=groups and ws.Groups([0, 1] * 200),
        )
        assert many.population_at(ws.Threat(INF, INF, 0.5))[0] == 0
        assert many.population_at(ws.Threat(INF, INF, 0.499))[0] > 0.9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (([0, 0, 1], [0.6, 0.6]), "sum to 1.2, above 1"),
        (([0, 0, 1], 0, [0.3, 0.3]), "sum to 0.6, below 1"),
        (([0, 0, 1], {2: 0.1}), "group 2 has no samples"),
        (([0, 0, 1], [0.1, 0.1, 0.1]), "3 numbers, but the samples are of 2 groups"),
        (([0, 0, 1], 0.5, 0.2), "its lower end first"),
        (([0, 0, 1], -0.5), "within"),
        (([0.5, 0, 1],), "a group is called 0.5"),
        ((7,), "must be a list"),
        ((["a", "b"], "many"), "not a number"),
    ],
)
def test_one_sentence_says_what_is_wrong(given: tuple[object, ...], words: str) -> None:
    with pytest.raises(ws.InputError, match=words):
        ws.Groups(*given)


def test_groups_must_be_of_the_samples() -> None:
    model = ws.zoo.load("digits-mlp")
    x, y = (side[:3] for side in ws.zoo.data("digits"))
    flips = ws.nearest(model, x, y, passes=10)
    with pytest.raises(ws.InputError, match="2 entries for 3 samples"):
        ws.risk_curve(flips, groups=ws.Groups([0, 1]))
    with pytest.raises(ws.InputError, match="give ws"):
        ws.risk_curve(flips, groups=[0, 1, 1])  # type: ignore[arg-type]
    with pytest.raises(ws.InputError, match="weight mu 0 only"):
        ws.risk_curve(flips, mu=torch.tensor([1.0, 1.0, 0.0]), groups=ws.Groups([0, 0, 1]))(0.1)
    with pytest.raises(ws.InputError, match="plain threat"):
        ws.wda(model, x, y, ws.Threat(INF, 1, 0.1, groups=ws.Groups([0, 1, 1])))
