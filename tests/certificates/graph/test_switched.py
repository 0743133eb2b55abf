"""Softplus with the jump that torch's has at its threshold: values, bounds, radii, refusals."""

import math

import mpmath  # comes with torch, through sympy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wassail as ws
from support.rounding import MODES, rounded
from wassail.certificates.graph.graph import Graph, Smooth
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.switched import switched
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.norms import Reach, pair_products, product
from wassail.certificates.search.intervals import Intervals
from wassail.certificates.search.margins import branched

THRESHOLDS = (20.0, 3.0, 0.5, 0.0, -0.5, -4.0)
INF = math.inf


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Step(nn.Module):
    """One neuron that meets the switch on [0, 1], at 1/2; the classes change in the middle of the
    jump.
    """

    def __init__(self, beta: float, threshold: float) -> None:
        super().__init__()
        self.act = nn.Softplus(beta, threshold)
        self.one = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.at = threshold / beta
        self.jump = math.log1p(math.exp(-threshold)) / beta

    def forward(self, x: Tensor) -> Tensor:
        v = self.at + 1e4 * self.jump * (self.one * x - 0.5)
        h = (self.act(v) - self.at - 0.5 * self.jump) / self.jump
        return torch.cat([h, -h], 1)


@pytest.mark.few(2)
@pytest.mark.slow_cases("0.01--1.0-2.0")
@pytest.mark.parametrize(
    ("beta", "threshold", "norm"),
    [(1e-4, 20.0, INF), (1.0, 20.0, 2.0), (-1.0, 20.0, INF), (3.0, 2.0, INF), (0.01, -1.0, 2.0)],
)
def test_a_radius_ends_where_the_model_jumps(beta: float, threshold: float, norm: float) -> None:
    """Without the jump 1.5e-4 was claimed, where the model flips at 5e-5."""
    model = Step(beta, threshold)
    x = f64(0.5001)[:, None]
    y = model(x).argmax(1)
    t = torch.linspace(0.499, 0.501, 20001, dtype=torch.float64)[:, None]
    flip = float((t - x).abs()[model(t).argmax(1) != y].min())
    assert flip < 6e-5
    found = float(ws.radii(model, x, y, norm, (0, 1)).values)
    assert 0.9 * flip <= found <= flip
    beyond = ws.Threat(norm, INF, 1.001 * flip, (0, 1))
    assert not bool(ws.verify(model, x, y, beyond, method="crown").proved)


@pytest.mark.parametrize("threshold", THRESHOLDS)
def test_values_ranges_and_lines_hold_for_torch(threshold: float) -> None:
    f = Smooth("softplus", threshold, True).function
    g = torch.Generator().manual_seed(3)
    middle = threshold + 3 * torch.randn(200, generator=g, dtype=torch.float64)
    half = 2.0 ** (8 * torch.rand(200, generator=g, dtype=torch.float64) - 6)
    low = torch.cat([middle - half, f64(threshold, threshold - 1.0)])
    high = torch.cat([middle + half, f64(threshold, threshold)])
    v = low + torch.linspace(0, 1, 400, dtype=torch.float64)[:, None] * (high - low)
    v = v.clamp(low, high)
    truth = F.softplus(v, 1.0, threshold)
    assert torch.allclose(f.value(v), truth, rtol=1e-14, atol=1e-14)
    least, most = f.span(low, high)
    assert (least <= truth).all() and (truth <= most).all()
    slopes = [*f.slopes(low, high), *(torch.full_like(low, s) for s in (-1.0, 0.0, 0.5, 1.0, 2.0))]
    jump = math.log1p(math.exp(-threshold))
    for slope in slopes:
        gap = truth - slope * v
        for above in (True, False):
            at, slack = f.touch(slope, low, high, above)
            side = f.value(at) - slope * at
            if above:
                assert (gap <= side + slack).all()
            else:
                assert (gap >= side - slack).all()
            assert (slack <= jump * (1 + 1e-4) + 1e-9 * (1 + high.abs())).all()


@pytest.mark.parametrize("mode", MODES)
def test_lines_at_a_point_pay_for_rounding(mode: str) -> None:
    """Below the threshold, and above it with the jump."""
    f = switched("softplus", 1.0, True)
    v = torch.cat([torch.linspace(-3, 3, 301, dtype=torch.float64), f64(1.0)])
    one = torch.ones_like(v)
    with rounded(mode):
        sides = [f.touch(0.3 * one, v, v, above) for above in (True, False)]
        heights = [f.value(at) for at, _ in sides]
        spans = f.span(v, v)
    with mpmath.workdps(40):
        for k, point in enumerate(v.tolist()):
            smooth = mpmath.log1p(mpmath.exp(mpmath.mpf(point)))
            truth = mpmath.mpf(point) if point > 1 else smooth
            above = mpmath.mpf(float(heights[0][k])) + mpmath.mpf(float(sides[0][1][k]))
            below = mpmath.mpf(float(heights[1][k])) - mpmath.mpf(float(sides[1][1][k]))
            assert below <= truth <= smooth <= above
            assert mpmath.mpf(float(spans[0][k])) <= truth <= mpmath.mpf(float(spans[1][k]))


@pytest.mark.parametrize("mode", MODES)
def test_the_jump_is_rounded_up(mode: str) -> None:
    """On an interval: that at the threshold, or at its lower end beyond it."""
    for threshold in (-300.0, -1.0, -0.1, 0.0, 0.1, 0.7, 1.0, 20.0, 40.0):
        f = switched("softplus", threshold, True)
        low = threshold + f64(-1.0, 0.0, 0.3, 2.0)
        with rounded(mode):
            found = f.jump(low, low + 1.5)
        assert f.jump(f64(threshold - 2), f64(threshold - 1)) == 0
        with mpmath.workdps(60):
            for start, most in zip(low.clamp(min=threshold).tolist(), found.tolist()):
                truth = mpmath.log1p(mpmath.exp(-mpmath.mpf(start)))
                room = mpmath.mpf(1e-4) if start == threshold else mpmath.mpf(1e-12)
                assert truth <= most <= truth * (1 + room) + mpmath.mpf(10) ** -14


def test_torch_compares_a_rounded_product() -> None:
    """So that it takes the identity, or does not, for inputs just on the other side."""
    g = torch.Generator().manual_seed(0)
    sides = torch.zeros(2, dtype=torch.int64)
    for a, b in torch.rand(100, 2, generator=g, dtype=torch.float64).tolist():
        beta = 1 + a / 100
        threshold = 1 + 0.9 * b
        f = switched("softplus", threshold, True)
        x = torch.tensor(threshold / beta, dtype=torch.float32)
        x = x + torch.arange(-6, 7) * torch.finfo(torch.float32).eps
        straight = F.softplus(x, beta, threshold) == x
        v = beta * x.double()
        early = straight & (v <= threshold)
        late = ~straight & (v > threshold)
        assert (f.jump(v, v)[early] > 0.1).all()
        assert f.jumps(v, v)[early | late].all()
        sides += torch.stack([early.sum(), late.sum()])
    assert (sides > 0).all()


def network(seed: int, offset: float = 0.0) -> nn.Sequential:
    """Two layers with jumps of their own, which inputs in [-1, 1] meet; float64."""
    g = torch.Generator().manual_seed(seed)
    first, second = (float(v) for v in torch.rand(2, generator=g) * 3 + 0.5)
    beta = (1.0, -1.5, 0.4)[seed % 3]
    last = nn.Linear(5, 3)
    model = nn.Sequential(
        nn.Linear(3, 6),
        nn.Softplus(1.0, first),
        nn.Linear(6, 5),
        nn.Softplus(beta, second),
        last,
    ).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64))
        last.bias += offset
    return model


def around(x: Tensor, radius: float, norm: float) -> Tensor:
    """Points of a ball in [-1, 1]^n: at corners, on the rim, inside."""
    g = torch.Generator().manual_seed(5)
    u = torch.randn(6000, x.numel(), generator=g, dtype=torch.float64)
    u[:1500] = u[:1500].sign()
    u = u / torch.linalg.vector_norm(u, norm, dim=1, keepdim=True)
    u[3000:] *= torch.rand(3000, 1, generator=g, dtype=torch.float64)
    return (x + (1 - 1e-9) * radius * u).clamp(-1, 1)


@pytest.mark.slow_cases("1.0", "2.0")
@pytest.mark.parametrize("norm", [INF, 2.0, 1.0])
def test_margins_hold_across_jumps(norm: float) -> None:
    """And what branching proves does, which cuts neurons of two thresholds."""
    above = proved = 0
    for seed in range(6):
        model = network(seed, (0.0, 1e4)[seed % 2]).requires_grad_(False)
        graph = read(model, (3,), smooth=True)
        x = torch.rand(1, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = model(x).argmax(1)
        for radius in (0.02, 0.1, 0.5):
            sweep = Sweep(graph, Balls.make(x, f64(radius), norm, (-1.0, 1.0))).run()
            lower = margins(sweep, y)[0]
            least = lower[0]
            logits = model(around(x[0], radius, norm))
            seen = (logits[:, y] - logits).amin(0)
            assert (least <= seen + 1e-9).all()
            above += int((least > 0).sum())
            if any(j != int(y) and not least[j] > 0 for j in range(3)):
                good = branched(sweep, lower, [0], y, [60])[0].proved
                proved += good
                assert not good or (logits.argmax(1) == y).all()
    assert above > 5 and proved > 0


def test_branching_tells_thresholds_apart() -> None:
    """A neuron that is cut has the lines of its own function."""
    graph = read(network(0), (3,), smooth=True)
    x = torch.zeros(1, 3, dtype=torch.float64)
    sweep = Sweep(graph, Balls.make(x, f64(0.5), INF, None)).run()
    cut = Intervals(sweep, torch.tensor([0]))
    column = torch.arange(cut.count)
    for function, mask in cut.which(column).items():
        for i, part in cut.parts.items():
            assert bool(mask[part].all()) == (graph.nodes[i].op == function)
    assert len(cut.names) == 2


def test_lengths_of_deviations_hold_across_the_jump() -> None:
    """From just below the switch to just above it an entry moves by the jump at least."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Softplus(1.0, 0.0), nn.Linear(2, 2)).double()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight.copy_(torch.eye(2))
            layer.bias.zero_()
    graph = read(model, (2,), smooth=True)
    x = f64(-1e-9, -1e-9)[None]
    balls = Balls.make(x, f64(1e-8), 2.0, None)
    moved = graph.logits(x + 5e-9) - graph.logits(x)
    assert float(moved.abs().min()) > 0.69
    reach = Reach(graph, balls).run()
    last = len(graph.nodes) - 1
    assert float(reach.radius[last]) >= float(moved.norm())
    low, high = reach.ranges[last]
    assert (low <= graph.logits(x + 5e-9)).all() and (graph.logits(x + 5e-9) <= high).all()


def seen(model: nn.Module) -> Graph:
    return read(model, (3,), smooth=True)


def test_a_lipschitz_constant_is_refused_where_the_jump_may_be_met() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(), nn.Linear(4, 2)).double()
    for domain in (None, (-1e3, 1e3)):
        with pytest.raises(ws.InputError, match="jumps where beta x passes its threshold 20") as e:
            ws.lipschitz(model, 2, domain, shape=(3,), method="propagate")
        assert str(e.value).count(". ") == 0 and str(e.value).endswith(".")
    near = ws.lipschitz(model, 2, (-1, 1), shape=(3,), method="propagate")
    assert 0 < near.upper < INF
    flat = nn.Sequential(model[0], nn.Softplus(1.0, 40.0), model[2])
    far = ws.lipschitz(flat, 2, None, shape=(3,), method="propagate")
    assert far.upper < INF
    # In float32 the jump is below a rounding.
    single = ws.lipschitz(model.float(), 2, None, shape=(3,), method="propagate")
    assert single.upper == pytest.approx(far.upper, rel=1e-4)


def test_products_of_norms_are_infinite_with_a_jump() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Softplus(1.0, 5.0), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model[2].weight[1] = model[2].weight[0]  # two logits that differ by a constant
    graph = seen(model)
    assert product(graph, 2.0, 2.0) == INF
    assert (pair_products(graph, 2.0, 0) == INF).all()
    assert product(seen(model.float()), 2.0, 2.0) == INF  # exp(-5) is more than a rounding there


def test_a_loss_curve_in_a_box_holds_with_a_jump() -> None:
    model = network(1).requires_grad_(False)
    x = torch.zeros(1, 3, dtype=torch.float64)
    y = model(x).argmax(1)
    curve = ws.loss_curve(model, x, y, INF, INF, domain=(-1, 1), grid=[0.05, 0.2], time_limit=1.0)
    u = 2 * torch.rand(3000, 3, generator=torch.Generator().manual_seed(0)).double() - 1
    for eps in (0.05, 0.2):
        loss = F.cross_entropy(model(eps * u), y.expand(3000), reduction="none")
        assert float(loss.max()) <= curve(eps)[1]
