"""Cones above the errors of small regressions: closed forms, cells, soundness, rounding."""

import itertools
import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.exact import uniform
from support.rounding import MODES, rounded
from wassail.certificates.exact import penalised
from wassail.certificates.exact.flip_problem import RelaxedLine
from wassail.certificates.exact.penalised import Shell, highest_less_price, worthwhile
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.specified import settled
from wassail.certificates.loss import residual_cones
from wassail.certificates.loss.residual_cones import Cones
from wassail.certificates.loss.residual_curve import ResidualCurve
from wassail.certificates.loss.residuals import signed_network
from wassail.geometry import steepest

INF = math.inf
DOUBLE = torch.float64
NORMS = [1, 2, INF]


def network(seed: int, inputs: int, *widths: int, outputs: int = 1) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential()
    before = inputs
    for width in widths:
        net.append(nn.Linear(before, width)).append(nn.ReLU())
        before = width
    return net.append(nn.Linear(before, outputs)).double().eval()


@pytest.mark.parametrize("norm", NORMS)
def test_the_length_of_the_best_step(norm: float) -> None:
    """No other length of a step inside the walls is worth more, but for rounding; the part that is
    left to the walls proves it.
    """
    size, room = uniform(50, 4, seed=1) * 3, uniform(50, 4, seed=2)
    size[::7, 1], room[::5, 2] = 0.0, 0.0
    t, p = worthwhile(size, room, 1.3, norm)

    def worth(t: Tensor) -> Tensor:
        step = steepest(torch.zeros_like(size), size, norm, t, (-room, room))
        return (size * step).sum(1) - 1.3 * torch.linalg.vector_norm(step, norm, dim=1)

    best = worth(t)
    for share in torch.linspace(0, 1, 201).tolist():
        assert bool((worth(share * room.sum(1)) <= best + 1e-12).all())
    dual = {1: INF, 2: 2, INF: 1}[norm]
    assert bool((torch.linalg.vector_norm(p, dual, dim=1) <= 1.3 + 1e-12).all())
    assert bool(((p >= 0) & (p <= size)).all())
    torch.testing.assert_close((room * (size - p)).sum(1), best, rtol=0, atol=1e-12)


@pytest.mark.few(4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", NORMS)
def test_lines_are_bounded_from_below(norm: float, mode: str) -> None:
    """At points of the shell, in exact arithmetic but for the length, which is taken from above."""
    net = network(0, 3, 4)
    x = torch.full((3,), 0.4, dtype=DOUBLE)
    graph = settled(signed_network(read(net, (3,))), torch.arange(3), torch.zeros(3, dtype=DOUBLE))
    box = (torch.zeros(3, dtype=DOUBLE), torch.ones(3, dtype=DOUBLE))
    search = penalised._Penalised(graph, x, norm, box, 1.1, 0.0, 0.1)
    search.near, far = 0.2, 0.7
    search.net = search.relaxed(far)
    a = (uniform(200, 3, seed=3) - 0.5) * 6
    b = uniform(200, seed=4)
    none = torch.zeros(200, 0, dtype=DOUBLE)
    with rounded(mode):
        least = search.least(search.net, RelaxedLine(a, b, none, none, none))
    here, paid = [Fraction(v) for v in x.tolist()], Fraction(1.1)
    # where the lines are least, as well: there no rounding is hidden
    lowest = search.lowest(RelaxedLine(a, b, none, none, none), far)
    for row in range(200):
        for point in torch.cat([uniform(4, 3, seed=row), lowest[row : row + 1]]).tolist():
            moved = [Fraction(v) for v in point]
            gaps = [abs(u - v) for u, v in zip(moved, here)]
            square = sum((gap**2 for gap in gaps), Fraction(0))
            near = Fraction(math.sqrt(square)) * (1 + Fraction(1e-15))
            length = {1: sum(gaps, Fraction(0)), 2: near, INF: max(gaps)}[norm]
            if not Fraction(0.2) <= length <= Fraction(far) or not all(0 <= v <= 1 for v in moved):
                continue
            terms = (Fraction(u) * v for u, v in zip(a[row].tolist(), moved))
            value = sum(terms, Fraction(float(b[row])))
            assert Fraction(float(least[row])) <= value + paid * length


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("widths", [(6,), (5, 4)])
def test_the_supremum_is_that_of_a_grid(norm: float, widths: tuple[int, ...]) -> None:
    """Two inputs, all of the box in one shell or in many: the bracket holds what a fine grid finds
    and is closed to the tolerance.
    """
    net = network(3, 2, *widths)
    signed = signed_network(read(net, (2,)))
    axis = torch.linspace(0, 1, 401, dtype=DOUBLE)
    grid = torch.cartesian_prod(axis, axis)
    box = (torch.zeros(2, dtype=DOUBLE), torch.ones(2, dtype=DOUBLE))
    for seed in range(3):
        x = uniform(2, seed=seed)
        y = float(net(x).detach()) + 0.05
        graph = settled(signed, torch.arange(3), torch.tensor([0.0, -y, y], dtype=DOUBLE))
        error = (net(grid).detach()[:, 0] - y).abs()
        away = torch.linalg.vector_norm(grid - x, norm, dim=1)
        for price in (0.05, 0.2):
            truth = float((error - price * away).max())
            for edges in ([0.0, 3.0], [0.0, 0.1, 0.3, 3.0]):
                shells = [Shell(a, b, INF) for a, b in itertools.pairwise(edges)]
                found = highest_less_price(graph, x, norm, box, price, shells, 0.05, 1e-4)
                assert truth <= found.upper <= truth + 2e-3
                assert found.value <= found.upper <= found.value + 1.1e-4
                if found.point is not None:
                    worth = abs(float(net(found.point).detach()) - y)
                    worth -= price * float(torch.linalg.vector_norm(found.point - x, norm))
                    assert abs(worth - found.value) <= 1e-12


@pytest.mark.parametrize("norm", NORMS)
def test_the_worst_case_is_that_of_the_cells(norm: float) -> None:
    """`worst_case` goes through all cells; the curve is above it and within two per cent."""
    net = network(5, 3, 7)
    x = uniform(5, 3, seed=8)
    y = net(x).detach()[:, 0] + 0.2 * (uniform(5, seed=9) - 0.5)
    eps = [0.05, 0.2]
    curve = ws.loss_curve(net, x, y, norm, 1, "absolute", (0, 1), grid=[0.1], eps=eps)
    assert isinstance(curve, ResidualCurve) and curve.cones is not None
    for budget in eps:
        low, high = curve(budget)
        cells = ws.worst_case(net, x, y, ws.Threat(norm, 1, budget, (0, 1)), loss="absolute").bound
        assert low <= cells.upper and cells.lower <= high <= 1.02 * low
        found = curve.witness(budget)
        assert math.isclose(found.info["loss"], low, rel_tol=1e-12)
        assert found.verify(net) and found.cost <= budget * (1 + 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "loss"), [(2, "absolute"), (INF, "pinball")])
def test_no_point_is_above_the_cones(norm: float, loss: str) -> None:
    """Random points and corners of the box; in the type of the model, in which it runs."""
    outputs = 2 if loss == "pinball" else 1
    dtype = torch.float32 if norm == 2 else DOUBLE
    net = network(3, 3, 8, 6, outputs=outputs).to(dtype)
    x = uniform(4, 3, seed=6).to(dtype)
    y = net(x).detach() + 0.2 * (uniform(4, outputs, seed=7).to(dtype) - 0.5)
    curve = ws.loss_curve(
        net, x, y, norm, 1, loss, (0, 1), grid=[0.1], eps=[0.05, 0.3], quantile=0.8
    )
    assert isinstance(curve, ResidualCurve) and curve.cones is not None
    assert bool(curve.x.equal(x))
    for seed in range(100):
        points = uniform(4, 3, seed=seed).to(dtype)
        points = torch.where(uniform(4, 3, seed=seed + 500) < 0.2, points.round(), points)
        e = net(points).detach().double() - y.double()
        signed = torch.cat([0.2 * e, -0.8 * e] if loss == "pinball" else [e, -e], 1)
        d = torch.linalg.vector_norm((points - x).double(), norm, dim=1)
        for i in range(4):
            assert float(signed[i].max()) <= float(curve.cones.within(float(d[i]))[i])


def test_a_curve_without_time_knows_less() -> None:
    """Neither a search nor the growth has time: both curves are brackets of the same number."""
    net = network(5, 3, 7)
    x = uniform(3, 3, seed=8)
    y = net(x).detach()[:, 0] + 0.1
    given = (net, x, y, 2, 1, "absolute", (0, 1))
    plain = ws.loss_curve(*given, grid=[0.1, 0.2])(0.2)
    cut = ws.loss_curve(*given, grid=[0.1, 0.2], eps=[0.2], time_limit=1e-3)(0.2)
    assert cut[0] <= plain[1] and plain[0] <= cut[1]


@pytest.mark.slow
def test_cones_serve_every_order_and_are_saved(tmp_path: object) -> None:
    net = network(5, 3, 7)
    x = uniform(4, 3, seed=8)
    y = net(x).detach()[:, 0] + 0.1
    given = (net, x, y, 2, 1, "absolute", (0, 1))
    plain = ws.loss_curve(*given, grid=[0.1, 0.2])
    curve = ws.loss_curve(*given, grid=[0.1, 0.2], eps=[0.1])
    for order in (1, 2, INF):
        for eps in (0.05, 0.1, 0.5):
            low, high = curve.of_order(order)(eps)
            before = plain.of_order(order)(eps)
            assert before[0] <= low <= high <= before[1] * (1 + 1e-12)
    curve.save(f"{tmp_path}/curve.safetensors")
    assert ResidualCurve.load(f"{tmp_path}/curve.safetensors")(0.1) == curve(0.1)


@pytest.mark.parametrize("mode", MODES)
def test_cones_are_rounded_up(mode: str) -> None:
    heights, rises = uniform(40, 1, seed=3), uniform(1, seed=4)
    with rounded(mode):
        tops = Cones(heights, rises).within(1.7)
    for height, top in zip(heights[:, 0].tolist(), tops.tolist()):
        assert Fraction(top) >= Fraction(height) + Fraction(float(rises[0])) * Fraction(1.7)


@pytest.mark.slow
def test_no_feasible_distribution_is_above_a_cone() -> None:
    """f = x1 + 50 relu(x2 - 0.9) with boxes of their own: one sample goes to the corner, the other
    spends the rest. The ends of shells were once rounded to float32: 4.8e-8 too low.
    """
    net = network(0, 2, 2)
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(2))
        net[0].bias.copy_(torch.tensor([1.0, -0.9], dtype=DOUBLE))
        net[2].weight.copy_(torch.tensor([[1.0, 50.0]]))
        net[2].bias.fill_(-1.0)
    for start, norm in itertools.product((0.3, 0.35), NORMS):
        x = torch.tensor([[0.0, start], [0.1, 0.0]], dtype=DOUBLE)
        low = torch.zeros(2, 2, dtype=DOUBLE)
        high = torch.tensor([[0.0, 1.0], [5.0, 0.0]], dtype=DOUBLE)
        y = net(x).detach()[:, 0]
        eps = 0.5 * (1 - start) + 0.5 * 2.0
        curve = ws.loss_curve(net, x, y, norm, 1, "absolute", (low, high), eps=[eps])
        moved = net(torch.tensor([[0.0, 1.0], [2.1, 0.0]], dtype=DOUBLE)).detach()[:, 0]
        feasible = float((moved - y).abs().mean())
        least, most = curve(eps)
        assert least <= most and feasible <= most <= feasible + 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_products_and_shells_are_rounded_up(mode: str) -> None:
    a, b = uniform(40, seed=1).tolist(), uniform(40, seed=2).tolist()
    with rounded(mode):
        tops = [residual_cones._above(one * other) for one, other in zip(a, b)]
    for one, other, product in zip(a, b, tops):
        assert Fraction(product) >= Fraction(one) * Fraction(other)
    start, lift, slope, rise = uniform(20, seed=3), 1e-9, 1.7, 0.9
    start[::2] -= 1.5  # the sum of the cone cancels
    grid = torch.tensor([0.1, 0.3, 0.8, 2.0], dtype=DOUBLE)
    for high in (INF, 0.2):  # the cone, or the ceiling
        ceiling = torch.full((20, 5), high, dtype=DOUBLE) + uniform(20, 5, seed=4)
        growth: Any = SimpleNamespace(
            grid=grid, ceiling=ceiling, start=start, lift=lift, slope=slope
        )
        for i in range(20):
            with rounded(mode):
                shells = residual_cones._shells(growth, i, rise, 1.3)
            for shell in shells:
                cone = Fraction(float(start[i])) + Fraction(lift)
                cone += Fraction(slope) * Fraction(shell.far)
                place = int(torch.searchsorted(grid, shell.far))
                known = float(ceiling[i, place])
                top = cone if known == INF else min(cone, Fraction(known))
                assert Fraction(shell.most) >= top - Fraction(rise) * Fraction(shell.near)
            assert shells[-1].far >= 1.3


@pytest.mark.parametrize("mode", MODES)
def test_a_cone_pays_no_more_and_goes_as_far_as_the_box(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price of a weighted output is rounded down, the far end of the box up."""
    ends: list[float] = []
    prices: list[float] = []

    def shells(above: Any, i: int, rise: float, far: float) -> list[Shell]:
        ends.append(far)
        return [Shell(0.0, far, 1.0)]

    def priced(*given: Any) -> penalised.Highest:
        prices.append(given[4])
        return penalised.Highest(0.0, 0.0, None)

    monkeypatch.setattr(residual_cones, "_shells", shells)
    monkeypatch.setattr(residual_cones, "highest_less_price", priced)
    monkeypatch.setattr(residual_cones, "settled", lambda *given: None)
    for seed in range(20):
        x, weights = uniform(1, 5, seed=seed), (0.1 + uniform(2, seed=seed)).tolist()
        parts = SimpleNamespace(offsets=torch.zeros(1, 3), weights=weights, loss="pinball")
        errors: Any = SimpleNamespace(x=x, norm=2.0, residuals=parts, graph=None, domain=(0, 1))
        with rounded(mode):
            residual_cones._highest(errors, None, 0, 0.7, 0.0, 0.1)  # type: ignore[arg-type]
        far = sum(max(Fraction(v), 1 - Fraction(v)) ** 2 for v in x[0].tolist())
        assert Fraction(ends[-1]) ** 2 >= far
        for price, weight in zip(prices[-2:], weights):
            assert Fraction(price) * Fraction(weight) <= Fraction(0.7)
