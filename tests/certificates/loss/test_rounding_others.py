"""Rounding of losses with label costs and subpopulations: each term on exact numbers, against
fractions.
"""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor

from support.rounding import rounded
from wassail.certificates.loss.others import OthersCertificate, OthersLossCurve
from wassail.certificates.loss.pairs import Pairs, worst_share
from wassail.certificates.loss.worst_others import OthersProblem

INF = float("inf")
Made = TypeVar("Made")


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def made(kind: type[Made], **fields: Any) -> Made:
    """A record with these fields only, of one sample with labels 0 and 1, the first its own."""
    found = object.__new__(kind)
    known = {"true": torch.tensor([0]), "y": torch.tensor([0, 1]), "weights": column(1.0)}
    for name, value in {**known, "subpopulation": 1.0, **fields}.items():
        object.__setattr__(found, name, value)
    return found


def exact(value: float) -> Fraction:
    return Fraction(value)


def cancelling(seed: int) -> tuple[float, float, float]:
    """A slope, a label cost, and a loss that their product nearly is."""
    rng = np.random.default_rng(seed)
    slope, cost = rng.uniform(0.5, 2, 2).tolist()
    return slope, cost, slope * cost


@pytest.mark.parametrize("way", ["down", "up"])
def test_prices_of_labels_are_charged_for_their_rounding(way: str) -> None:
    """`loss - slope * cost` near 0: the error of the product is all that is left."""
    for seed in range(20):
        slope, cost, loss = cancelling(seed)
        curve = made(OthersLossCurve, start=column(-1, loss), label_cost=cost)
        proof = made(OthersCertificate, start=column(-1, loss), label_cost=cost)
        with rounded(way):
            rest = float(curve.reduced(slope)[1])
            line = proof._line(0.0, slope)
        true = exact(loss) - exact(slope) * exact(cost)
        assert exact(rest) >= true and exact(line) >= true
        assert rest < 1e-14 and line < 1e-14


@pytest.mark.parametrize("way", ["down", "up"])
def test_slope_lines_are_charged_for_the_product_with_eps(way: str) -> None:
    """Losses of 0: the line is `slope * eps`."""
    for seed in range(20):
        slope, eps, near = cancelling(seed)
        empty = torch.zeros(2, 0, dtype=torch.float64)
        shared = {"start": column(0, -9), "label_cost": 1.0, "slope": slope, "order": INF}
        curve = made(OthersLossCurve, lift=column(0, 0), grid=empty[0], **shared)
        object.__setattr__(curve, "within", lambda eps, edge: column(99, 99))
        proof = made(OthersCertificate, start=column(0, -9), label_cost=1.0)
        with rounded(way):
            found = curve.upper(eps), proof._line(eps, slope)
        for value in found:
            assert exact(value) >= exact(slope) * exact(eps)
            assert value <= near + 1e-14


def test_what_is_left_of_eps_after_a_label_is_rounded_up() -> None:
    """`eps - cost` is a quarter of a unit above 1, rounds to 1, and the growth jumps at 1."""
    eps, cost = 1 + 2.0**-52, 3 * 2.0**-54
    assert eps - cost == 1 and exact(eps) - exact(cost) > 1
    curve = made(
        OthersLossCurve,
        start=column(0, 0),
        label_cost=cost,
        grid=column(1),
        ceiling=column(0, 5, 0, 7).reshape(2, 2),
        left=column(100).repeat(2, 2),
        rise=torch.zeros(2, 2, dtype=torch.float64),
        slope=INF,
    )
    assert curve.best(curve.within(eps, column(0, 1)))[0].tolist() == [7]
    asked: list[float] = []

    def evaluate(row: int, penalty: Any, tolerance: float) -> float:
        asked.append(penalty.lam)
        return 0.0

    problem = problem_of(column(0, 0), cost, order=INF, eps=eps, evaluate=evaluate)
    problem.dual(0.0, 0.1)
    assert asked[0] == eps and exact(asked[1]) >= exact(eps) - exact(cost)


def problem_of(clean: Tensor, cost: float, order: float = 1.0, **fields: Any) -> OthersProblem:
    """The exact problem of one sample with labels 0 and 1."""
    eps = fields.pop("eps")
    inner = SimpleNamespace(
        clean=clean.numpy(), errors=np.zeros(len(clean)), y=torch.tensor([0, 1]), **fields
    )
    return OthersProblem(inner, torch.tensor([0]), column(1), cost, 1.0, order, eps)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_small_mean_beside_a_large_multiplier_is_not_lost(way: str) -> None:
    tiny = 2.0**-60
    curve = made(OthersLossCurve, label_cost=1.0)
    object.__setattr__(curve, "peaks", lambda *_: (column(tiny, -1), column(0, 0)))
    with rounded(way):
        value, _ = curve.dual(1.0, 1.0, column(0))
    assert exact(value) >= 1 + exact(tiny) and value < 1 + 1e-14


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_small_mean_beside_a_large_quantile_is_not_lost(way: str) -> None:
    """Of two values the larger one is a unit above the smaller one."""
    mu, values, share = column(0.5, 0.5), column(1 + 2.0**-52, 1), 0.6
    with rounded(way):
        found = worst_share(mu, values, share)
    part = Fraction(1, 2) / exact(share)
    assert exact(found) >= part * exact(float(values[0])) + (1 - part)
    assert found < 1 + 1e-14


@pytest.mark.parametrize("way", ["down", "up"])
def test_exact_duals_are_charged_for_the_prices_of_labels(way: str) -> None:
    for seed in range(20):
        lam, cost, loss = cancelling(seed)

        def evaluate(row: int, penalty: Any, tolerance: float, loss: float = loss) -> float:
            return loss if row else -1.0

        problem = problem_of(column(-1, loss), cost, evaluate=evaluate, steepest=lam, eps=0.0)
        with rounded(way):
            found = problem.dual(lam, 0.1), problem.slope_line()
        true = exact(loss) - exact(lam) * exact(cost)
        assert all(exact(value) >= true and value < 1e-14 for value in found)


@pytest.mark.parametrize("way", ["down", "up"])
def test_exact_slope_lines_are_charged_for_their_sum(way: str) -> None:
    for seed in range(20):
        steep, eps, near = cancelling(seed)
        flat = problem_of(column(0, -9), 1.0, steepest=steep, eps=eps)
        tiny = problem_of(column(1, -9), 1.0, steepest=2.0**-60, eps=1.0)
        with rounded(way):
            found, beside = flat.slope_line(), tiny.slope_line()
        assert exact(found) >= exact(steep) * exact(eps) and found < near + 1e-9
        assert exact(beside) >= 1 + exact(2.0**-60) and beside < 1 + 1e-9


@pytest.mark.parametrize("way", ["down", "up"])
def test_exact_duals_are_charged_for_the_product_with_eps(way: str) -> None:
    """A loss of 0 everywhere and a multiplier from outside: the dual is their product."""
    pool = SimpleNamespace(size=1, rows=np.zeros((1, 2)))
    for seed in range(20):
        lam, eps, near = cancelling(seed)
        problem = problem_of(
            column(0, 0),
            1.0,
            eps=eps,
            pools=[pool, pool],
            evaluate=lambda *_: 0.0,
            steepest=3 * lam,
            flattest=lam,
            unbounded=False,
            late=lambda: True,
            tell=lambda share: None,
            report=lambda plan, upper, *rest: upper,
        )
        with rounded(way):
            upper: Any = problem.solve(1e-9)
        assert exact(upper) >= exact(lam) * exact(eps) and upper < near + 1e-9


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("way", ["down", "up"])
def test_no_rounding_overspends_the_budget(way: str, order: float) -> None:
    """Mixtures that spend all of eps, their cost in fractions."""
    for seed in range(40):
        rng = np.random.default_rng(seed)
        mu = rng.dirichlet(np.ones(3))
        lengths = rng.uniform(0.5, 1.5, 3)
        gains = rng.uniform(1, 2, 3)
        eps = float(rng.uniform(0.1, 0.4))
        with rounded(way):
            plans = [
                curve_plan(mu, lengths, gains, order, eps),
                exact_plan(mu, lengths, gains, order, eps),
            ]
        for plan in plans:
            spent = sum(exact(mass) * exact(length) ** int(order) for length, mass in plan)
            assert spent <= exact(eps) ** int(order)
            assert float(spent) >= eps**order * (1 - 1e-9)


def curve_plan(
    mu: np.ndarray, lengths: np.ndarray, gains: np.ndarray, order: float, eps: float
) -> list[tuple[float, float]]:
    """Lengths and masses of what a loss curve moves of three samples with a point each."""
    pairs = made(
        Pairs,
        true=torch.zeros(3, dtype=torch.int64),
        y=torch.zeros(3, dtype=torch.int64),
        weights=torch.from_numpy(mu),
        clean=column(0, 0, 0),
        value=torch.from_numpy(gains),
        root=torch.arange(3),
        distance=torch.from_numpy(lengths),
        order=order,
        label_cost=INF,
    )
    return [(float(lengths[c - 3]), mass) for _, c, mass in pairs.parts(eps) if c >= 3]


def exact_plan(
    mu: np.ndarray, lengths: np.ndarray, gains: np.ndarray, order: float, eps: float
) -> list[tuple[float, float]]:
    """The same of the exact worst case, whose pools hold the sample and its point."""
    pools = [
        SimpleNamespace(size=2, rows=np.array([[0.0, 0.0], [gain, length]]))
        for gain, length in zip(gains, lengths)
    ]
    same = torch.zeros(3, dtype=torch.int64)
    inner = SimpleNamespace(clean=np.zeros(3), y=same, pools=pools)
    problem = OthersProblem(inner, same, torch.from_numpy(mu), INF, 1.0, order, eps)  # type: ignore[arg-type]
    return [(float(lengths[row]), mass) for row, at, mass in problem.best()[0] if at == 1]
