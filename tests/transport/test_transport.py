import math
import time
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from scipy.optimize import linprog
from torch import nn

import wassail as ws
from wassail.certificates.bound import Bound
from wassail.errors import InputError
from wassail.evaluation.intervals import Comparison
from wassail.testing import LinearClassifier, samples
from wassail.transport.allocation import transport_cost
from wassail.transport.curve import RiskCurve
from wassail.transport.distribution import Verification
from wassail.writing import rounded_down, rounded_up

INF = math.inf
distance_lists = st.lists(
    st.one_of(st.just(0.0), st.just(INF), st.sampled_from([0.5, 1.0]), st.floats(0.01, 10)),
    min_size=1,
    max_size=12,
)


def flips_1d(distances: list[float], order_of_norm: float = INF) -> ws.Flips:
    """Samples on a line, flipped exactly at the given distances: theta = (0, x - 1), label 0,
    flip at x = 1.
    """
    d = torch.tensor(distances, dtype=torch.float64)
    x = torch.where(torch.isfinite(d), 1 - d, -100.0)[:, None]
    points = torch.where(torch.isfinite(d)[:, None], torch.ones_like(x), x)
    y = torch.zeros(len(d), dtype=torch.int64)

    def model(v: torch.Tensor) -> torch.Tensor:
        return torch.cat(
            [torch.zeros_like(v), (v - 1) + 1e-6], 1
        )  # a hair inside, so that x = 1 is strictly wrong

    return ws.Flips.from_points(model, x, y, points, order_of_norm, None, pull_in=False)


def lp_error(d: np.ndarray, mu: np.ndarray, eps: float, order: float) -> float:
    """The knapsack as a linear program, by another solver."""
    finite = np.isfinite(d)
    if not finite.any():
        return 0.0
    cost = mu[finite] * d[finite] ** order
    scale = max(eps**order, 1e-300)
    answer = linprog(
        -mu[finite],
        A_ub=[cost / scale],
        b_ub=[1.0],
        bounds=[(0, 1)] * int(finite.sum()),
        method="highs",
    )
    return float(-answer.fun)


@given(
    distance_lists,
    st.floats(0.01, 20),
    st.sampled_from([1.0, 1.5, 2.0, 3.0]),
    st.integers(0, 10**6),
)
@settings(max_examples=80, deadline=None)
def test_knapsack_equals_a_linear_program(
    distances: list[float], eps: float, order: float, seed: int
) -> None:
    d = torch.tensor(distances, dtype=torch.float64)
    mu = (
        torch.rand(len(d), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        + 0.01
    )
    mu = mu / mu.sum()
    weights = ws.knapsack(d, eps, order, mu)
    assert weights.dtype == torch.float64 and ((weights >= 0) & (weights <= 1)).all()
    assert transport_cost(mu, weights, d, order) <= eps
    assert float((mu * weights).sum()) == pytest.approx(
        lp_error(d.numpy(), mu.numpy(), eps, order), abs=1e-8
    )


@given(distance_lists, st.floats(0.01, 20), st.sampled_from([1.0, 2.0, 7.0, INF]))
@settings(max_examples=80, deadline=None)
def test_curve_agrees_with_allocation_and_inverts(
    distances: list[float], eps: float, order: float
) -> None:
    flips = flips_1d(distances)
    curve = ws.risk_curve(flips, order=order)
    certified, attacked = curve(eps)
    adversary = ws.allocate(flips, eps, order)
    assert certified == 0
    assert attacked == pytest.approx(adversary.accuracy, abs=1e-9)
    assert adversary.cost <= eps
    for level in (0.0, 0.25, attacked, 1.0):
        at = curve.inverse(level)
        if math.isinf(at):
            assert curve(1e9)[1] > level - 1e-9
        else:
            assert curve(at)[1] <= level + 1e-9
            if at > 1e-9:
                assert curve(at * (1 - 1e-6))[1] >= level - 1e-9
    bends, values = curve.breakpoints()
    for b, v in zip(bends.tolist(), values.tolist()):
        assert curve(b)[1] == pytest.approx(v, abs=1e-9)


def test_known_curve() -> None:
    """Distances 0, 1, 2, inf; order 1: costs 0, 1/4, 2/4; order 2: 0, 1/4, 4/4; order inf:
    steps at 1 and 2.
    """
    flips = flips_1d([0.0, 1.0, 2.0, INF])
    one, two, top = (ws.risk_curve(flips, order=p) for p in (1, 2, "inf"))
    assert [one(e)[1] for e in (0, 0.125, 0.25, 0.5, 0.75, 9)] == pytest.approx(
        [0.75, 0.625, 0.5, 0.375, 0.25, 0.25]
    )
    assert [two(e)[1] for e in (0, 0.5, math.sqrt(0.75), math.sqrt(1.25))] == pytest.approx(
        [0.75, 0.5, 0.375, 0.25]
    )
    assert [top(e)[1] for e in (0, 0.999, 1, 1.999, 2, 50)] == pytest.approx(
        [0.75, 0.75, 0.5, 0.5, 0.25, 0.25]
    )
    assert (
        one.inverse(0.5) == pytest.approx(0.25)
        and top.inverse(0.5) == 1
        and one.inverse(0.2) == INF
    )
    assert one.inverse(0.8) == 0


def test_certified_side() -> None:
    flips = flips_1d([0.0, 1.0, 2.0, INF])
    radii = torch.tensor([0.0, 0.5, 1.5, 3.0])  # below the distances, as radii are
    top = ws.risk_curve(flips, radii, order="inf")
    # a radius of exactly eps protects, a flip at exactly eps counts; a wrong sample is never
    # certified
    assert [top(e)[0] for e in (0, 0.5, 0.51, 1.5, 3, 3.1)] == [0.75, 0.75, 0.5, 0.5, 0.25, 0.0]
    for order in (1, 2, "inf"):
        curve = ws.risk_curve(flips, radii, order)
        for eps in np.linspace(0, 4, 41):
            certified, attacked = curve(float(eps))
            assert certified <= attacked + 1e-12
    assert ws.risk_curve(flips, radii, 1)(0.125)[0] == pytest.approx(0.5)
    with pytest.raises(ws.InputError, match="radii must hold 4"):
        ws.risk_curve(flips, radii[:3])


def exact_certified(radii: torch.Tensor, mu: torch.Tensor, eps: float, order: float) -> Fraction:
    """The knapsack over radii in rational arithmetic, for orders 1, 2, 3 and inf: no rounding
    at all.
    """
    pairs = sorted(
        (Fraction(r), Fraction(m)) for r, m in zip(radii.tolist(), mu.tolist()) if r < INF
    )
    total = sum(map(Fraction, mu.tolist()), Fraction(0))
    e = Fraction(eps)
    if order == INF:
        lost = sum((m for r, m in pairs if r < e or r == e == 0), Fraction(0))
        return 1 - lost / total
    left = e ** int(order)
    lost = Fraction(0)
    p = int(order)
    for r, m in pairs:
        share = min(m, left / r**p) if r else m
        lost = lost + share
        left = left - share * r**p
    return 1 - lost / total


@given(
    distance_lists,
    st.floats(0, 20),
    st.sampled_from([1.0, 2.0, 3.0, INF]),
    st.integers(0, 10**6),
    st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_certified_accuracy_is_never_above_the_truth(
    radii: list[float], eps: float, order: float, seed: int, equal: bool
) -> None:
    r = torch.tensor(radii, dtype=torch.float64)
    mu = (
        torch.rand(len(r), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        + 0.01
    )
    flips = flips_1d(radii)
    r = torch.minimum(r, flips.distances)
    curve = ws.risk_curve(flips, r, order, None if equal else mu)
    for budget in (
        eps,
        0.0,
        *r[torch.isfinite(r)].tolist(),
        *curve.breakpoints("certified")[0].tolist(),
    ):
        truth, (certified, attacked) = exact_certified(r, curve.mu, budget, order), curve(budget)
        assert Fraction(certified) <= truth and certified <= attacked
        assert certified == pytest.approx(min(float(truth), attacked), abs=1e-11)
    for budget, accuracy in zip(*(side.tolist() for side in curve.breakpoints("certified"))):
        assert Fraction(accuracy) <= exact_certified(r, curve.mu, budget, order)
    for level in (0.0, 0.3, 0.5, 0.9):
        at = curve.inverse(level, "certified")
        if 0 < at < INF:
            assert exact_certified(r, curve.mu, at, order) >= Fraction(level)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_certified_breakpoints_are_rounded_down(order: int) -> None:
    """The eps of a bend is at most the cost of the samples up to it, `(sum_i mu_i
    r_i^p)^(1/p)`, in rational arithmetic.
    """
    generator = torch.Generator().manual_seed(order)
    for n in (5, 60, 300):
        r = torch.rand(n, dtype=torch.float64, generator=generator) + 0.01
        curve = ws.RiskCurve(r, r, torch.full((n,), 1 / n, dtype=torch.float64), float(order))
        bends = curve.breakpoints("certified")[0].tolist()
        cost = Fraction(0)
        assert bends[0] == 0 and len(bends) == n + 1
        for bend, radius, mass in zip(bends[1:], r.sort().values.tolist(), curve.mu.tolist()):
            cost += Fraction(mass) * Fraction(radius) ** order
            assert (
                Fraction(bend) ** order
                <= cost
                <= (Fraction(bend) * (1 + Fraction(1, 10**10))) ** order
            )


def test_certified_rounding_is_strict_where_floats_tie() -> None:
    """A budget too small to see still costs an ulp; all correct at eps 0 is 1 exactly; counts
    are exact to an ulp.
    """
    flips = flips_1d([1.0, 1.0, 1.0])
    curve = ws.risk_curve(flips, torch.ones(3), 2)
    assert (
        curve(0) == (1, 1)
        and curve(1e-200)[0] < 1
        and curve(1e-200)[0] == pytest.approx(1, abs=1e-15)
    )
    top = ws.risk_curve(
        flips_1d([1.0] * 55 + [0.0] * 45), torch.tensor([0.5] * 55 + [0.0] * 45), "inf"
    )
    assert Fraction(top(0.5)[0]) <= Fraction(55, 100) and top(0.5)[0] == pytest.approx(
        0.55, abs=1e-15
    )


def test_a_radius_above_a_flip_is_an_error_that_names_both() -> None:
    flips = flips_1d([0.0, 1.0, 2.0, INF])
    radii = torch.tensor([0.0, 0.5, 2.25, 3.0], dtype=torch.float64)
    with pytest.raises(
        ws.InputError,
        match=r"sample 2 has a certified radius 2\.25 above the distance 2\.0 .*trust neither",
    ):
        ws.risk_curve(flips, radii)
    with pytest.raises(ws.InputError, match=r"sample 0 has a certified radius 0\.125"):
        ws.risk_curve(
            flips, radii.index_fill(0, torch.tensor([0, 2]), 0.125)
        )  # a wrong sample has no radius
    with pytest.raises(ws.InputError, match="sample 2"):
        ws.risk_curve(flips, torch.tensor([0.0, 0.5, 2 + 1e-12, 3.0], dtype=torch.float64))
    rounded = torch.tensor(
        [0.0, 1.0, math.nextafter(2.0, 3), INF], dtype=torch.float64
    )  # what a distance may be off by
    curve = ws.risk_curve(flips, rounded)
    assert curve.radii is not None and curve.radii.tolist() == flips.distances.tolist()


def test_radii_must_be_for_the_same_norm_domain_and_samples() -> None:
    flips = flips_1d([0.0, 1.0])
    zero = torch.zeros(2)
    assert ws.risk_curve(flips, SimpleNamespace(values=zero, norm=INF, domain=None))(0.1)[0] == 0
    for change, words in (
        ({"norm": 2.0}, "norm"),
        ({"domain": (0.0, 1.0)}, "domain"),
        ({"values": torch.zeros(3)}, "radii"),
    ):
        with pytest.raises(ws.InputError, match=words):
            ws.risk_curve(
                flips, SimpleNamespace(**{"values": zero, "norm": INF, "domain": None, **change})
            )


def test_gap_and_area_in_closed_form() -> None:
    """One sample, radius 1 below a flip at 2: accuracy 1 - min(1, (eps/r)^p) on either side."""
    flips = flips_1d([2.0])
    radii = torch.tensor([1.0])
    for p in (1, 2, 3, 7):
        curve = ws.risk_curve(flips, radii, p)
        assert curve.gap(0.5) == pytest.approx(0.5**p - 0.25**p) and curve.gap(0) == 0 == curve.gap(
            2
        )
        assert curve.largest_gap() == pytest.approx((1 - 0.5**p, 1))
        # int_0^r 1 - (e/r)^p = r p / (p + 1)
        assert curve.area(2) == pytest.approx(p / (p + 1)) == curve.area(5)
        assert curve.area(0.5) == pytest.approx(0.5 ** (p + 1) / (p + 1) * (1 - 0.5**p))
    top = ws.risk_curve(flips, radii, INF)
    assert top.gap(1) == 0 and top.gap(1.5) == 1 and top.gap(2) == 0
    gap, eps = top.largest_gap()
    assert (
        gap == 1
        and eps == math.nextafter(1, 2)
        and top.area(1.5) == pytest.approx(0.5)
        and top.area(9) == pytest.approx(1)
    )
    alone = ws.risk_curve(flips, order=1)
    assert alone.largest_gap() == (1, 0) and alone.area(2) == pytest.approx(1)


@given(distance_lists, st.sampled_from([1.0, 2.0, 5.0, INF]), st.integers(0, 10**6))
@settings(max_examples=25, deadline=None)
def test_gap_and_area_against_a_fine_grid(distances: list[float], order: float, seed: int) -> None:
    flips = flips_1d(distances)
    shrink = torch.rand(
        len(flips), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    radii = torch.where(torch.isfinite(flips.distances), shrink * flips.distances, shrink)
    curve = ws.risk_curve(flips, radii, order)
    grid = np.linspace(0, 12, 401)
    gaps = np.array([curve.gap(float(eps)) for eps in grid])
    largest, where = curve.largest_gap()
    assert largest == pytest.approx(curve.gap(where)) and largest >= gaps.max() - 1e-9
    assert curve.area(12) == pytest.approx(
        float(((gaps[1:] + gaps[:-1]) / 2).sum() * 0.03), abs=0.07
    )
    assert all(
        word in repr(curve) for word in ("certified", "attacked", "largest gap")
    ) and "\n" not in repr(curve)


def test_ties_share_and_the_order_of_samples_does_not_matter() -> None:
    d = torch.tensor([1.0, 2.0, 1.0, 1.0, 0.0], dtype=torch.float64)
    weights = ws.knapsack(d, 0.3, 1)
    assert weights.tolist() == pytest.approx([0.5, 0, 0.5, 0.5, 1])
    order = torch.tensor([3, 1, 4, 0, 2])
    assert torch.equal(ws.knapsack(d[order], 0.3, 1), weights[order])


@pytest.mark.parametrize("order", [1, 2, 50, 400])
def test_large_orders_neither_overflow_nor_underflow(order: int) -> None:
    d = torch.tensor([1e-4, 0.02, 0.05, 30.0], dtype=torch.float64)
    weights = ws.knapsack(d, 0.03, order)
    assert torch.isfinite(weights).all() and weights[0] == 1 and weights[3] < 2e-3
    assert transport_cost(torch.full((4,), 0.25), weights, d, order) <= 0.03
    curve = ws.RiskCurve(d, None, torch.full((4,), 0.25, dtype=torch.float64), float(order))
    assert curve(0.03)[1] == pytest.approx(1 - float(weights.sum()) / 4, abs=1e-9)
    assert curve(0)[1] == 1


def test_a_million_samples_in_a_second() -> None:
    d = torch.rand(10**6, dtype=torch.float64)
    seconds = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.process_time()
        weights = ws.knapsack(d, 0.1, 2)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 1
    assert transport_cost(torch.full_like(d, 1e-6), weights, d, 2) <= 0.1
    assert (weights > 0).sum() > 10**5


def test_empty_zero_and_infinite() -> None:
    assert ws.knapsack(torch.zeros(0), 1, 1).shape == (0,)
    assert ws.knapsack(torch.tensor([0.0, 0.0]), 1, 1).tolist() == [1, 1]
    assert ws.knapsack(torch.tensor([INF, INF]), 1, 2).tolist() == [0, 0]
    assert ws.knapsack(torch.tensor([INF, 0.0]), 1, INF).tolist() == [0, 1]
    empty = flips_1d([])
    assert (
        len(empty) == 0
        and math.isnan(ws.allocate(empty, 1, 1).accuracy)
        and math.isnan(ws.risk_curve(empty)(1)[1])
    )


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (lambda d: ws.knapsack(d, 0, 1), "eps is 0"),
        (lambda d: ws.knapsack(d, "x", 1), "eps 'x'"),
        (lambda d: ws.knapsack(d, 1, 0.5), "order"),
        (lambda d: ws.knapsack(d * math.nan, 1, 1), "distances"),
        (lambda d: ws.knapsack(-d, 1, 1), "distances"),
        (lambda d: ws.knapsack(d, 1, 1, mu=torch.ones(3)), "mu must hold 2"),
        (lambda d: ws.knapsack(d, 1, 1, mu=torch.tensor([1.0, -1.0])), "mu must hold 2"),
        (lambda d: ws.knapsack(d, 1, 1, mu=torch.zeros(2)), "mu must hold 2"),
    ],
)
def test_bad_input(bad, words: str) -> None:
    with pytest.raises(ws.InputError, match=words) as error:
        bad(torch.tensor([1.0, 2.0]))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
@pytest.mark.parametrize("order", [1.0, 2.0])
def test_exact_optimal_transport_confirms_the_budget(norm: float, order: float) -> None:
    """W_p between the data and the 2N atoms by linear programming over all couplings that keep
    the label.
    """
    model = LinearClassifier.random(3, 4)
    x, _ = samples(8, (4,), 3)
    y = model(x).argmax(1)
    exact = model.distances(x, y, norm, (0, 1))
    eps = float(exact[torch.isfinite(exact)].mean()) / 2
    for make in (ws.wda, ws.wda_pp):
        adversary = make(model, x, y, ws.Threat(norm, order, eps))
        points, masses = adversary.atoms()
        cost = torch.cdist(x, points, p=norm) ** order
        cost = torch.where(y[:, None] == torch.cat([y, y])[None], cost, 1e6)
        n, m = cost.shape
        rows = np.kron(np.eye(n), np.ones((1, m)))
        columns = np.kron(np.ones((1, n)), np.eye(m))
        answer = linprog(
            cost.flatten().numpy(),
            A_eq=np.vstack([rows, columns]),
            b_eq=np.concatenate([np.full(n, 1 / n), masses.numpy()]),
            method="highs",
        )
        assert answer.status == 0
        assert (
            answer.fun ** (1 / order) <= adversary.cost + 1e-9
        )  # moving each sample to its own point is one coupling
        assert adversary.cost <= eps


def test_verify_catches_every_lie() -> None:
    model = LinearClassifier.random(3, 4)
    x, _ = samples(12, (4,), 3)
    y = model(x).argmax(1)
    good = ws.wda_pp(model, x, y, ws.Threat(INF, 1, 0.1))
    assert good.verify(model) and good.verify(model, batch_size=5)

    def lie(**change: Any) -> Verification:
        from dataclasses import replace

        return replace(good, **change).verify(model)

    moved = int((good.weights > 0).nonzero()[0])
    points = good.points.clone()
    points[moved] = x[moved]
    assert any("points predicted" in p for p in lie(points=points).problems)
    assert any("distances" in p for p in lie(distances=good.distances * 0.5).problems)
    assert any("weights" in p for p in lie(weights=good.weights * 3).problems)
    assert any("cost" in p for p in lie(weights=torch.ones_like(good.weights)).problems)
    assert any(
        "samples predicted" in p
        for p in lie(clean_predicted=(good.clean_predicted + 1) % 3).problems
    )
    outside = good.points.clone()
    outside[moved, 0] = 1.5
    assert any("box" in p for p in lie(points=outside).problems)


@pytest.mark.parametrize("order", [1.0, 2.0, INF])
def test_verify_counts_the_budget_to_the_last_digit(order: float) -> None:
    """A distribution that costs one unit in the last place more than eps is outside the ball it
    claims.
    """
    from dataclasses import replace

    model = LinearClassifier.random(3, 4)
    x, _ = samples(12, (4,), 3)
    good = ws.wda_pp(model, x, model(x).argmax(1), ws.Threat(INF, order, 0.1))
    spent = good.verify(model).cost
    assert spent == good.cost > 0
    exactly = replace(good, threat=replace(good.threat, eps=spent))
    assert exactly.verify(model)
    less = replace(good, threat=replace(good.threat, eps=math.nextafter(spent, 0.0)))
    assert less.verify(model).problems == (f"cost {spent:.9g} above eps {less.threat.eps:.9g}",)


def test_what_the_flips_spent_and_what_all_points_cost() -> None:
    model = LinearClassifier.random(3, 4)
    x, _ = samples(30, (4,), 3)
    y = model(x).argmax(1)
    for order in (1.0, 2.0, INF):
        adversary = ws.wda(model, x, y, ws.Threat(INF, order, 0.05))
        flipped = adversary.predicted != y
        assert 0 < int(flipped.sum()) < len(y)
        part = torch.where(flipped, adversary.weights, 0.0)
        price = ws.transport.transport_cost(adversary.mu, part, adversary.distances, order)
        assert adversary.spent == price / 0.05 and price <= adversary.cost
        assert order == INF or price < 0.99 * adversary.cost  # points that moved in vain
        bought = ws.allocate(adversary.flips, 0.05, order)
        assert bought.spent == bought.cost / 0.05  # an allocation moves nothing in vain


def test_flips_from_anyones_points_and_merge() -> None:
    model = LinearClassifier.random(3, 4)
    x, _ = samples(20, (4,), 3)
    y = model(x).argmax(1)
    generator = torch.Generator().manual_seed(0)
    many = [torch.rand(x.shape, dtype=torch.float64, generator=generator) for _ in range(3)]
    pools = [
        ws.Flips.from_points(model, x, y, points, 2, method=f"draw {i}")
        for i, points in enumerate(many)
    ]
    merged = pools[0].merge(*pools[1:])
    assert torch.equal(merged.distances, torch.stack([p.distances for p in pools]).min(0).values)
    assert (
        torch.equal(
            merged.forwards, 6 + torch.stack([pool.success.long() for pool in pools]).sum(0)
        )
        and (merged.backwards == 0).all()
        and (merged.checks == 3).all()
    )
    for i, name in enumerate(merged.provenance):
        if merged.success[i]:
            source = pools[int(name[-1])]
            assert source.distances[i] == merged.distances[i] and torch.equal(
                source.points[i], merged.points[i]
            )
    for pool in pools:
        assert (merged.distances <= pool.distances).all()
        for order in (1, 2, INF):
            assert (
                ws.allocate(merged, 0.3, order).accuracy
                <= ws.allocate(pool, 0.3, order).accuracy + 1e-12
            )
    assert ws.allocate(merged, 0.3, 1).verify(model)
    assert not ws.Flips.from_points(model, x, y, x, 2).success.any(), (
        "an unmoved point of a correct sample is no flip"
    )
    with pytest.warns(ws.ModelWarning, match="lie up to 50 outside"):
        outside = ws.Flips.from_points(model, x, y, x + 50, 2, (0, 1))
    assert not outside.success.any(), "points outside the box are no flips"
    with pytest.raises(ws.InputError, match="norm"):
        merged.merge(ws.Flips.from_points(model, x, y, x, INF))
    with pytest.raises(ws.InputError, match="shape"):
        ws.Flips.from_points(model, x, y, x[:3], 2)


def test_save_and_load(tmp_path) -> None:
    model = LinearClassifier.random(3, 4)
    x, _ = samples(9, (4,), 3)
    y = model(x).argmax(1)
    adversary = ws.wda(model, x, y, ws.Threat(INF, 1, "8/255"))
    adversary.save(tmp_path / "a.safetensors")
    again = ws.Distribution.load(tmp_path / "a.safetensors")
    assert (
        again.threat == adversary.threat
        and again.accuracy == adversary.accuracy
        and again.cost == adversary.cost
    )
    assert (
        torch.equal(again.points, adversary.points)
        and again.info["seed"] == 0
        and again.verify(model)
    )
    flips = adversary.flips
    flips.save(tmp_path / "f.safetensors")
    loaded = ws.Flips.load(tmp_path / "f.safetensors")
    assert (
        torch.equal(loaded.distances, flips.distances)
        and loaded.methods == flips.methods
        and loaded.domain == (0, 1)
    )
    curve = ws.risk_curve(flips, torch.zeros(9), 2)
    curve.save(tmp_path / "c.safetensors")
    assert ws.RiskCurve.load(tmp_path / "c.safetensors")(0.1) == curve(0.1)
    with pytest.raises(ws.InputError, match="holds Flips"):
        ws.Distribution.load(tmp_path / "f.safetensors")
    (tmp_path / "junk").write_bytes(b"junk")
    for name in ("junk", "missing"):
        with pytest.raises(ws.InputError, match="cannot read"):
            ws.Flips.load(tmp_path / name)


def test_bootstrap_interval_reruns_the_knapsack() -> None:
    generator = torch.Generator().manual_seed(0)
    d = (torch.rand(300, generator=generator) + 0.01).tolist()
    adversary = ws.allocate(flips_1d(d), 0.1, 1)
    low, high = adversary.interval(resamples=400)
    assert low < adversary.accuracy < high and (low, high) == adversary.interval(resamples=400)
    assert adversary.interval(level=0.5, resamples=400)[0] > low
    # Direct bootstrap of the same statistic, written out.
    draws = []
    for _ in range(400):
        pick = torch.randint(300, (300,), generator=generator)
        draws.append(1 - float(ws.knapsack(torch.tensor(d)[pick], 0.1, 1).mean()))
    expected = np.quantile(draws, [0.025, 0.975])
    assert np.allclose([low, high], expected, atol=0.02)
    fixed_budget_width = float((1 - adversary.weights).std()) / math.sqrt(300) * 2 * 1.96
    assert abs((high - low) - fixed_budget_width) > 0.005, (
        "weights must be re-allocated, not just averaged"
    )


def test_weights_of_samples_count_everywhere() -> None:
    flips = flips_1d([1.0, 1.0, 3.0])
    doubled = flips_1d([1.0, 1.0, 1.0, 3.0])
    mu = torch.tensor([2.0, 1.0, 1.0])
    for order in (1, 2, INF):
        for eps in (0.2, 1.0, 3.0):
            a = ws.allocate(flips, eps, order, mu)
            b = ws.allocate(doubled, eps, order)
            assert a.accuracy == pytest.approx(b.accuracy) and a.cost == pytest.approx(b.cost)
            assert ws.risk_curve(flips, order=order, mu=mu)(eps)[1] == pytest.approx(a.accuracy)
    assert flips.clean_accuracy(mu) == 1


def far_flips(norm: float, n: int = 30):
    """A network, and flips of it at a random corner of the box: far beyond the boundary."""
    torch.manual_seed(3)
    layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.rand(n, 8)
    with torch.no_grad():
        layers[2].bias -= model(x).mean(0)  # so that no class takes all
    y = model(x).argmax(1)
    points = torch.rand(n, 8, generator=torch.Generator().manual_seed(1)).round()
    return model, x, y, points


def test_points_that_left_the_box_by_rounding_are_flips() -> None:
    model, x, y, points = far_flips(2)
    known = ws.Flips.from_points(model, x, y, points, 2)
    assert known.success.any()
    stray = points + 1e-7 * (2 * points - 1)
    assert ((stray < 0) | (stray > 1)).any(1).all()
    with pytest.warns(ws.ModelWarning, match="30 of 30 points left the box by rounding") as told:
        found = ws.Flips.from_points(model, x, y, stray, 2)
    assert len(told) == 1
    assert torch.equal(found.distances, known.distances)
    assert torch.equal(found.points, known.points)


@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_shortened_points_stand_at_the_boundary(norm: float) -> None:
    model, x, y, points = far_flips(norm)
    known = ws.Flips.from_points(model, x, y, points, norm)
    short = known.shorten(model, passes=12, batch_size=7)
    assert torch.equal(short.success, known.success)
    assert (short.distances <= known.distances).all()
    moved = known.success & (known.distances > 0)
    assert short.distances[moved].mean() < 0.8 * known.distances[moved].mean()
    assert (short.forwards - known.forwards)[moved].tolist() == [13] * int(moved.sum())
    assert ws.allocate(short, 0.3, 1).verify(model)
    # A step of the bisection nearer and the model is right again, or the boundary was there.
    inside = x + 0.99 * (short.points - x)
    if norm == 2:
        assert (model(inside)[moved].argmax(1) == y[moved]).float().mean() > 0.9
    with pytest.raises(ws.InputError, match="passes is 0"):
        known.shorten(model, passes=0)


def test_what_is_no_number_is_no_proof() -> None:
    """NaN in a flip, a radius or a weight is refused or a problem: it compares with nothing."""
    model, x = nn.Linear(4, 3), 0.2 + 0.6 * torch.rand(6, 4)
    y = model(x).argmax(1)
    flips = ws.nearest(model, x, y, "inf", passes=20)
    nan = replace(flips, distances=torch.full_like(flips.distances, math.nan))
    with pytest.raises(InputError, match="no number >= 0"):
        ws.risk_curve(nan, torch.full((6,), 0.01))
    with pytest.raises(InputError, match="radii of a curve"):
        RiskCurve(
            flips.distances,
            torch.full((6,), math.nan).double(),
            torch.full((6,), 1 / 6).double(),
            1.0,
        )
    worst = ws.allocate(flips, eps=0.05, order=1)
    assert worst.verify(model)
    for name in ("weights", "mu"):
        broken = getattr(worst, name).clone()
        broken[0] = math.nan
        assert not replace(worst, **{name: broken}).verify(model)
    shifted = worst.mu.clone()
    shifted[:2] = torch.tensor([-shifted[0], 3 * shifted[0]])
    assert not replace(worst, mu=shifted).verify(model)


def test_what_is_printed_as_proved_is_proved() -> None:
    """A certified budget is rounded down and an attacked one up, in every sentence."""
    known = torch.full((4,), 0.0246912, dtype=torch.float64)
    curve = RiskCurve(known, known / 2, torch.full((4,), 0.25).double(), math.inf)
    assert "up to eps 0.01234," in repr(curve) and "from eps 0.0247 on" in repr(curve)
    assert repr(Bound(1.2345678099, 1.23456784, "x")) == "Bound([1.2345678, 1.2345679], by x)"
    assert rounded_down(0.1 + 0.2, 3) == "0.3" and rounded_up(0.1 + 0.2, 3) == "0.301"
    assert rounded_up(math.inf) == "inf" and rounded_down(-1.2345678, 3) == "-1.24"
    better = Comparison(
        0.1, (0.0, 0.2), 0.01, 10, ws.Threat("inf", 1, 0.1), (0.5, 0.4), (0.00006, 1.0)
    )
    assert "by 0.00 points or more" in better.ordering
