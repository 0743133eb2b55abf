"""Stairs above the errors of small regressions: closed forms, soundness, rounding, tightness."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.exact import scattered, uniform
from support.rounding import MODES, rounded
from wassail.certificates.loss import residual_stairs
from wassail.certificates.loss.residual_curve import ResidualCurve
from wassail.certificates.loss.residual_stairs import Stair, Stairs, Target, allowed, raised

INF = math.inf
DOUBLE = torch.float64


class Tent(nn.Module):
    """Steep up to 0.2, flat up to 0.6, less steep from there on; one input."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1, 3, dtype=DOUBLE)
        self.last = nn.Linear(3, 1, dtype=DOUBLE)
        self.first.weight.data = torch.tensor([[1.0], [1.0], [1.0]], dtype=DOUBLE)
        self.first.bias.data = torch.tensor([0.1, -0.2, -0.6], dtype=DOUBLE)
        self.last.weight.data = torch.tensor([[3.0, -3.0, 1.0]], dtype=DOUBLE)
        self.last.bias.data = torch.zeros(1, dtype=DOUBLE)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.relu(self.first(x)))
        return found


def tent_growth(d: Tensor) -> Tensor:
    """Of a sample at 0 whose target is met."""
    return 3 * d.clamp(max=0.2) + (d - 0.6).clamp(min=0)


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), INF])
def test_a_tent_is_closed(order: float) -> None:
    """One sample at 0: the worst case is the envelope of its growth, read off a fine grid."""
    eps = [0.1]
    x = torch.zeros(1, 1, dtype=DOUBLE)
    net = Tent().eval()
    y = net(x).detach()[:, 0]
    curve = ws.loss_curve(net, x, y, 2, order, "absolute", (0, 1), grid=[1.0], eps=eps)
    d = torch.linspace(0, 1, 20001, dtype=DOUBLE)
    for budget in eps:
        if order == INF:
            truth = float(tent_growth(torch.tensor(budget, dtype=DOUBLE)))
        else:
            lams = torch.logspace(-6, 3, 4000, dtype=DOUBLE)[:, None]
            worth = (tent_growth(d) - lams * (d / budget) ** order).amax(1)
            truth = float((lams[:, 0] + worth).min())
        low, high = curve(budget)
        assert low <= truth * (1 + 2e-3) and high >= truth * (1 - 2e-3)
        assert high <= 1.02 * low


def regression(
    seed: int, count: int = 4, outputs: int = 1, dtype: torch.dtype = DOUBLE
) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU())
    net = net.append(nn.Linear(6, outputs)).to(dtype).eval()
    x = torch.rand(count, 3, dtype=dtype)
    return net, x, net(x).detach() + 0.2 * torch.randn(count, outputs, dtype=dtype)


@pytest.mark.parametrize(("norm", "loss"), [(2, "absolute"), (INF, "pinball")])
def test_no_point_is_above_the_stairs(norm: float, loss: str) -> None:
    """Random points and corners of the box; in the type of the model, in which it runs."""
    outputs = 2 if loss == "pinball" else 1
    dtype = torch.float32 if norm == 2 else DOUBLE
    net, x, y = regression(3, 4, outputs, dtype)
    curve = ws.loss_curve(
        net, x, y, norm, INF, loss, (0, 1), grid=[0.1], eps=[0.05, 0.3], quantile=0.8
    )
    assert isinstance(curve, ResidualCurve) and curve.stairs is not None
    for seed in range(100):
        points = uniform(4, 3, seed=seed).to(dtype)
        points = torch.where(uniform(4, 3, seed=seed + 500) < 0.2, points.round(), points)
        near = (0.05 + uniform(4, 1, seed=seed + 900)).to(dtype)
        points = x + (points - x) * near.clamp(max=1)
        e = net(points).detach().double() - y.double()
        signed = torch.cat([0.2 * e, -0.8 * e] if loss == "pinball" else [e, -e], 1)
        d = torch.linalg.vector_norm((points - x).double(), norm, dim=1)
        for i in range(4):
            most = curve.stairs.within(float(d[i]), curve.slope)[i]
            assert float(signed[i].max()) <= float(most)


@pytest.mark.slow
def test_small_networks_are_closed(tmp_path: object) -> None:
    """To two per cent where linear bounds on balls leave more, and saved with the curve."""
    net, x, y = regression(5)
    given = (net, x, y, INF, 2, "absolute", (0, 1))
    curve = ws.loss_curve(*given, grid=[0.3], eps=[0.15])
    low, high = curve(0.15)
    assert low <= high <= 1.02 * low
    before = ws.loss_curve(*given, grid=[0.15, 0.3])(0.15)
    assert high < before[1] and low >= before[0]
    curve.save(f"{tmp_path}/curve.safetensors")
    assert ResidualCurve.load(f"{tmp_path}/curve.safetensors")(0.15) == (low, high)


@pytest.mark.parametrize("mode", MODES)
def test_tolerances_are_rounded_down(mode: str) -> None:
    """Targets that cancel them, and weights that are no powers of 2."""
    y = scattered(60, 1, seed=1)
    tolerances = torch.cat([y[:30, 0].abs(), uniform(30, seed=2)])
    weights = (0.3, 0.7)
    for own, tolerance in zip(y, tolerances.tolist()):
        with rounded(mode):
            _, high, low = allowed(own, tolerance, weights).tolist()
        target, top = Fraction(float(own)), Fraction(tolerance)
        # Errors below these are allowed.
        assert Fraction(weights[0]) * (-Fraction(high) - target) <= top
        assert Fraction(weights[1]) * (target - Fraction(low)) <= top


@pytest.mark.parametrize("mode", MODES)
def test_heights_and_lines_are_rounded_up(mode: str) -> None:
    heights, lifts = uniform(40, seed=3), uniform(40, seed=4) * 1e-3
    radii = torch.stack([torch.zeros(40), uniform(40, seed=5)], 1).double()
    table = torch.stack([heights, heights + 1, heights + 1e9], 1)
    eps, slope = 1.7, 1 / 3
    with rounded(mode):
        tops = [raised(a, b) for a, b in zip(heights.tolist(), lifts.tolist())]
        line = Stairs(radii, table).within(eps, slope)
    for i, top in enumerate(tops):
        assert Fraction(top) >= Fraction(float(heights[i])) + Fraction(float(lifts[i]))
        far = Fraction(eps) - Fraction(float(radii[i, 1]))
        assert Fraction(float(line[i])) >= Fraction(float(table[i, 1])) + Fraction(slope) * far


def test_the_lift_is_charged() -> None:
    """On steps and at the end of the stairs; a search that was cut knows what a lower step does."""
    stairs = [Stair([(1.0, 0.0), (2.0, 0.5), (2.5, 0.3)], 3.0, [(1.0, 0.0)])]
    found = residual_stairs._of_lists(stairs, 0.25)
    assert bool((found.heights >= torch.tensor([1.25, 2.25, 2.75, 3.25])).all())
    assert found.radii.tolist() == [[0.0, 0.5, 0.5]]


def test_the_next_step_leaves_a_share_open() -> None:
    """At the highest next step no point of the interval is worth more than the goal."""
    target = Target(2, 0.5, 1.3, 0.1)
    stair = Stair([(1.0, 0.0), (1.5, 0.4)], 100.0, [(1.0, 0.0), (1.4, 0.39)])
    top = stair.next(1, [target], 8.0)
    d = torch.linspace(0.4, 3, 10001, dtype=DOUBLE)
    worth = (1.5 + 8 * (d - 0.4)).clamp(max=top) - target.lam * (d / target.eps) ** 2
    assert stair.goal(target) * 0.99 <= float(worth.max()) <= stair.goal(target) * 1.0001


def test_other_losses_have_none() -> None:
    net = nn.Linear(1, 1, dtype=DOUBLE)
    x = torch.full((1, 1), 0.5, dtype=DOUBLE)
    curve = ws.loss_curve(net, x, x[:, 0], INF, 1, "huber", (0, 1), grid=[0.1], eps=[0.1])
    assert isinstance(curve, ResidualCurve) and curve.stairs is None
