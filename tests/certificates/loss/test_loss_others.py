"""Losses with labels that change and people that are missing, against linear programs."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor, nn

import wassail as ws
from support.rounding import rounded
from wassail.certificates.loss.others import OthersLossCurve, worst_masses, worst_share
from wassail.losses import LIPSCHITZ

INF = math.inf


def linear(seed: int, inputs: int = 3, classes: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Linear(inputs, classes).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(classes, inputs, generator=generator))
        model.bias.copy_(torch.randn(classes, generator=generator))
    x = torch.randn(8, inputs, generator=generator, dtype=torch.float64)
    return model, x, torch.randint(0, classes, (8,), generator=generator)


def linear_worst_case(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    eps: float,
    norm: float,
    loss: str,
    kappa: float,
    alpha: float,
) -> float:
    """Order 1, R^n, two classes: `min lam eps + t + sum_i mu_i s_i / alpha` with `s_i >= 0`,
    `s_i >= loss_i(y') - lam kappa_i(y') - t` and lam at least the slope, as a linear program.
    """
    value = LIPSCHITZ[loss]
    w = (model.weight[1] - model.weight[0]).detach()
    slope = float(torch.linalg.vector_norm(w, {1.0: INF, 2.0: 2.0, INF: 1.0}[norm]))
    n = len(x)
    rows, sides = [], []
    with torch.no_grad():
        z = model(x)
    for label in (0, 1):
        losses = value(z, torch.full_like(y, label)).tolist()
        for i, height in enumerate(losses):
            price = 0.0 if label == int(y[i]) else kappa
            if price < INF:
                rows.append([-price, -1.0, *(-1.0 if k == i else 0.0 for k in range(n))])
                sides.append(-height)
    answer = linprog(
        [eps, 1.0, *[1 / (n * alpha)] * n],
        A_ub=rows,
        b_ub=sides,
        bounds=[(slope, None), (None, None), *[(0, None)] * n],
        method="highs",
    )
    assert answer.status == 0
    return float(answer.fun)


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
def test_a_linear_model_is_exact(norm: float, loss: str) -> None:
    for seed, (kappa, alpha) in enumerate(((INF, 0.6), (0.5, 1.0), (0.4, 0.7), (2.0, 0.3))):
        model, x, y = linear(seed)
        also: dict[str, Any] = {"label_cost": kappa, "subpopulation": alpha}
        curve = ws.loss_curve(model, x, y, norm, 1, loss, None, **also)
        proof = ws.certify(model, x, y, norm, loss, slopes=["infinity", "margin"], **also)
        for eps in (0.05, 0.8):
            true = linear_worst_case(model, x, y, eps, norm, loss, kappa, alpha)
            found = [curve(eps), proof.bounds(eps)]
            if loss == "margin":  # by cells, which is slow for cross entropy
                exact = ws.worst_case(model, x, y, ws.Threat(norm, 1, eps, None, **also), loss)
                found.append((exact.bound.lower, exact.bound.upper))
                assert exact.bound.lower >= true - 1e-5 * max(1.0, abs(true))
            for low, high in found:
                assert math.isclose(high, true, rel_tol=1e-6), (seed, eps)
                assert true - 2e-3 * abs(true) - 1e-3 <= low <= true + 1e-8
            assert proof.witness(eps).verify(model)


def network(seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    return model, torch.rand(6, 2, dtype=torch.float64), torch.randint(0, 3, (6,))


def program(curve: OthersLossCurve, eps: float) -> float:
    """The best distribution on the candidates of a curve, by linear programming."""
    _, losses, costs = (side.numpy() for side in curve.candidates)
    n, count = losses.shape
    price = (costs / eps) ** curve.order if curve.order < INF else np.where(costs <= eps, 0, INF)
    allowed = np.isfinite(price) & np.isfinite(losses)
    each = np.kron(np.eye(n), np.ones(count))
    answer = linprog(
        -np.where(allowed, losses, 0.0).flatten(),
        A_ub=np.concatenate([np.where(allowed, price, 0.0).reshape(1, -1), each]),
        b_ub=np.append(1.0, curve.weights.numpy() / curve.subpopulation),
        A_eq=np.ones((1, n * count)),
        b_eq=[1.0],
        bounds=[(0, None if ok else 0) for ok in allowed.flatten()],
        method="highs",
    )
    assert answer.status == 0
    return float(-answer.fun)


@pytest.mark.few(1)
@pytest.mark.parametrize("seed", range(3))
def test_the_lower_side_is_the_best_distribution(seed: int) -> None:
    model, x, y = network(seed)
    for kappa, alpha in ((INF, 0.6), (0.2, 1.0), (0.1, 0.7)):
        also: dict[str, Any] = {"label_cost": kappa, "subpopulation": alpha}
        first = ws.loss_curve(model, x, y, "inf", 1, **also)
        for order in (1.0, 1.5, INF):
            curve = first.of_order(order)
            assert isinstance(curve, OthersLossCurve)
            for eps in (0.02, 0.1, 0.5):
                low, high = curve(eps)
                assert math.isclose(low, program(curve, eps), abs_tol=1e-7), (order, eps)
                assert low <= high
                found = curve.witness(eps)
                assert found.verify(model), found.verify(model).problems
                assert math.isclose(found.info["loss"], low, rel_tol=1e-12)
                with torch.no_grad():
                    losses = LIPSCHITZ["cross_entropy"](model(found.points), found.labels)
                assert math.isclose(float((found.mass * losses).sum()), low, rel_tol=1e-9)


@pytest.mark.slow
def test_the_upper_side_is_above_sampled_distributions() -> None:
    """A dense grid of points with every label, all of them in the program: none is worse."""
    model, x, y = network(5)
    side = torch.linspace(0, 1, 41, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    for kappa, alpha in ((INF, 0.6), (0.1, 1.0), (0.15, 0.5)):
        curve = ws.loss_curve(model, x, y, "inf", 1, label_cost=kappa, subpopulation=alpha)
        for order in (1.0, 2.0, INF):
            for eps in (0.05, 0.2):
                high = curve.of_order(order)(eps)[1]
                worst = sampled(model, points, x, y, order, eps, kappa, alpha)
                assert worst <= high + 1e-9
                assert high <= 1.6 * worst + 0.1  # it says something


def sampled(
    model: nn.Module,
    points: Tensor,
    x: Tensor,
    y: Tensor,
    order: float,
    eps: float,
    kappa: float,
    alpha: float,
) -> float:
    """The worst distribution on some points with every label, by its own linear program."""
    with torch.no_grad():
        z = model(points)
    losses, costs = [], []
    for i in range(len(x)):
        away = (points - x[i]).abs().amax(1)
        for label in range(z.shape[1]):
            price = 0.0 if label == int(y[i]) else kappa
            losses.append(LIPSCHITZ["cross_entropy"](z, torch.full((len(z),), label)))
            costs.append(away + price)
    value = torch.stack(losses).reshape(len(x), -1).numpy()
    cost = torch.stack(costs).reshape(len(x), -1).numpy()
    price_ = (cost / eps) ** order if order < INF else np.where(cost <= eps, 0.0, INF)
    best = INF
    for lam in [0.0, *np.geomspace(1e-3, 1e3, 400)] if order < INF else [1.0]:
        with np.errstate(invalid="ignore"):
            psi = np.where(np.isfinite(price_), value - lam * price_, -INF).max(1)
        tail = np.sort(psi)[::-1]
        mass = np.minimum(np.full(len(x), 1 / (len(x) * alpha)), 1.0)
        mass = np.minimum(mass, np.clip(1 - np.concatenate([[0], np.cumsum(mass)[:-1]]), 0, None))
        best = min(best, (lam if order < INF else 0.0) + float(mass @ tail))
    return best - 0.02 * abs(best)  # the grid of multipliers is above the minimum


def test_the_mean_of_the_worst_share_is_rounded_up() -> None:
    mu = torch.full((5,), 0.2, dtype=torch.float64)
    values = torch.tensor([1.0, 5.0, 3.0, -2.0, 4.0], dtype=torch.float64)
    assert worst_masses(mu, values, 0.5).tolist() == pytest.approx([0, 0.4, 0.2, 0, 0.4])
    assert worst_share(mu, values, 0.5) == pytest.approx(0.4 * 5 + 0.4 * 4 + 0.2 * 3, rel=1e-12)
    assert worst_share(mu, values, 0.5) >= 0.4 * 5 + 0.4 * 4 + 0.2 * 3
    assert worst_share(mu, values, 1.0) == pytest.approx(2.2, rel=1e-12)
    assert worst_share(mu, torch.where(values == 5, INF, values), 0.1) == INF


@pytest.mark.parametrize("way", ["down", "up"])
def test_the_mean_of_the_worst_share_is_rounded_outward(way: str) -> None:
    """Against fractions, with weights and values as they are stored, near 0 by cancellation."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        values = rng.normal(0, 1, 9)
        values[-1] -= values.mean() * 9
        share = float(rng.uniform(0.2, 0.99))
        mu = torch.full((9,), 1 / 9, dtype=torch.float64)
        with rounded(way):
            found = worst_share(mu, torch.tensor(values), share)
        left, exact = Fraction(1), Fraction(0)
        for value in sorted(values.tolist(), reverse=True):
            mass = min(Fraction(float(mu[0])) / Fraction(share), left)
            left -= mass
            exact += mass * Fraction(value)
        assert Fraction(found) >= exact
        assert found <= float(exact) + 1e-12


def test_neither_is_the_plain_curve(tmp_path: Path) -> None:
    model, x, y = network(1)
    plain = ws.loss_curve(model, x, y)
    others = ws.loss_curve(model, x, y, label_cost=1e6, subpopulation=1)
    for eps in (0.0, 0.05, 0.3):
        assert others(eps)[0] == pytest.approx(plain(eps)[0], rel=1e-6)
        assert others(eps)[1] == pytest.approx(plain(eps)[1], rel=1e-6)
    half = ws.loss_curve(model, x, y, subpopulation=0.5)
    worst = plain.clean.sort(descending=True).values[:3].mean()
    assert half(0)[0] == pytest.approx(float(worst), rel=1e-12)
    assert half.empirical == pytest.approx(plain.empirical, rel=1e-12)
    half.save(tmp_path / "c.safetensors")
    assert OthersLossCurve.load(tmp_path / "c.safetensors")(0.1) == half(0.1)
    with pytest.raises(ws.InputError, match="not known"):
        half.population()
    certificate = ws.certify(model, x, y, "inf", domain=(0, 1), slopes=["margin"])
    with pytest.raises(ws.InputError, match="no certificate"):
        ws.loss_curve(model, x, y, certificate=certificate, subpopulation=0.5)
    with pytest.raises(ws.InputError, match="label_cost is 0"):
        ws.loss_curve(model, x, y, label_cost=0)


@pytest.mark.slow
def test_a_small_network_is_closed_by_its_cells() -> None:
    """Both sides meet, and lie between those of the curve."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    x, y = torch.rand(4, 2, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    cases = ((1, INF, 0.6), (1, 0.2, 0.7), (2, INF, 0.7), (INF, 0.1, 0.7))
    for order, kappa, alpha in cases:
        also: dict[str, Any] = {"label_cost": kappa, "subpopulation": alpha}
        curve = ws.loss_curve(model, x, y, "inf", order, "margin", **also)
        for eps in (0.05, 0.3):
            found = ws.worst_case(model, x, y, ws.Threat("inf", order, eps, **also))
            assert found.bound.upper - found.bound.lower <= 1e-5
            assert found.cost <= eps * (1 + 1e-12)
            assert float(found.masses.sum()) == pytest.approx(1.0, abs=1e-9)
            there = torch.zeros(4, dtype=torch.float64).index_add(0, found.root, found.masses)
            assert (there <= 1 / (4 * alpha) * (1 + 1e-9)).all()
            low, high = curve(eps)
            assert low <= found.bound.upper + 1e-9 and found.bound.lower <= high + 1e-9


def test_a_flat_network_has_labels_that_change() -> None:
    """All logits are constant, in numbers: at order 1 the budget buys the dearest labels."""
    flat = nn.Linear(2, 2).double()
    with torch.no_grad():
        flat.weight.zero_()
        flat.bias.copy_(torch.tensor([1.0, 0.0]))
    x, y = torch.rand(5, 2, dtype=torch.float64), torch.zeros(5, dtype=torch.int64)
    threat = ws.Threat("inf", 1, 0.1, label_cost=0.4)
    found = ws.worst_case(flat, x, y, threat)
    # A quarter of all labels changes from a margin of -1 to 1.
    assert found.bound.lower == pytest.approx(-0.5, abs=1e-9)
    assert found.bound.upper == pytest.approx(-0.5, abs=1e-6)
    curve = ws.loss_curve(flat, x, y, loss="margin", label_cost=0.4)
    assert curve(0.1) == pytest.approx((-0.5, -0.5), abs=1e-6)
    assert curve(0.0) == pytest.approx((-1.0, -1.0), abs=1e-9)
    proof = ws.certify(flat, x, y, "inf", "margin", label_cost=0.4, slopes=["margin"])
    assert proof.bounds(0.1) == pytest.approx((-0.5, -0.5), abs=1e-6)
    with pytest.raises(ws.InputError, match="orders 1 and inf"):
        ws.worst_case(flat, x, y, ws.Threat("inf", 2, 0.1, label_cost=0.1))
