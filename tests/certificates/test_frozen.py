"""Inputs that cannot move, `low == high`: no bound has a direction for them, in any of its factors.

Radii and constants are those of the network as a function of the other inputs, and hold for points
that are sampled there.
"""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.rescaled import ALL, case, random_graph
from wassail.certificates.graph.graph import Graph, Smooth
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.graph.restrict import restricted
from wassail.certificates.prove.radius_search import RadiusSearch
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.executed import arithmetic_of
from wassail.certificates.relax.ranges import bounds_on

NORMS = (1.0, 2.0, math.inf)
DOUBLE = torch.float64
METHODS = ("crown", "ball", "branch", "auto")
Box = tuple[Tensor, Tensor]


def box(x: Tensor, held: list[int]) -> Box:
    """The unit box with some inputs held at their values in x `(n,)`."""
    low, high = torch.zeros_like(x), torch.ones_like(x)
    low[held], high[held] = x[held], x[held]
    return low, high


def some(n: int, seed: int) -> list[list[int]]:
    """One input, all but one, and all of n."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return [order[:1], order[: n - 1], order]


def radius(graph: Graph, x: Tensor, y: Tensor, norm: float, domain: Box, method: str) -> float:
    """The radius of one sample."""
    found = ws.radii(graph, x, y, norm, domain, method, arithmetic="exact", effort=0.1)
    return float(found.values)


def inside(x: Tensor, domain: Box, norm: float, radius: float, count: int, seed: int) -> Tensor:
    """Points of one ball cut by the box, `(count, n)`, most of them at its rim."""
    generator = torch.Generator().manual_seed(seed)
    d = torch.randn(count, len(x), dtype=DOUBLE, generator=generator)
    d[::3] *= torch.rand(d[::3].shape, generator=generator) < 0.3
    d = torch.where(domain[0] < domain[1], d, 0.0)
    size = torch.linalg.vector_norm(d, norm, dim=1, keepdim=True).clamp(min=1e-12)
    return torch.minimum(torch.maximum(x + d / size * radius, domain[0]), domain[1])


def least_margin(graph: Graph, points: Tensor, label: int) -> float:
    z = graph.logits(points.reshape(-1, *graph.nodes[0].shape))
    gap = z[:, label : label + 1] - z
    gap[:, label] = math.inf
    return float(gap.min())


SLOW = [(kind, norm) for kind in ("shallow", "dense", "residual", "smooth") for norm in NORMS]


@pytest.mark.parametrize(
    ("kind", "norm"),
    [("leaky", 2.0), *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)],
)
def test_radii_are_those_of_the_other_inputs(
    kind: str, norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # These networks come from no model: nothing is known of what is executed.
    monkeypatch.setattr(RadiusSearch, "sift", lambda search: None)
    graph = random_graph(kind, 5)
    given = case(graph, 5, norm, samples=1)
    flat, label = given.x[0].flatten(), int(given.y)
    for held in some(graph.inputs, 5):
        domain = box(flat, held)
        every = len(held) == graph.inputs
        if not every:
            less, region = restricted(graph, Region.make(domain, graph.inputs))
            free = [i for i in range(graph.inputs) if i not in held]
            part = flat[free][None]
        for method in METHODS:
            found = radius(graph, given.x, given.y, norm, domain, method)
            points = inside(flat, domain, norm, min(found, 3.0), 300, 1)
            assert least_margin(graph, points, label) > 0
            if every:
                assert found > 1
                continue
            same = radius(less, part, given.y, norm, (region.low, region.high), method)
            assert found == pytest.approx(same, rel=0.03) or min(found, same) > math.sqrt(2)


@pytest.mark.few(14)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("kind", "arithmetic"), [*((kind, "exact") for kind in ALL), ("conv", "executed")]
)
def test_margins_hold_for_points_that_leave_inputs_alone(
    kind: str, norm: float, arithmetic: str
) -> None:
    """CROWN with slope cones and l1 vertices, before and after an ascent."""
    graph = arithmetic_of(random_graph(kind, 3), arithmetic)
    given = case(graph, 3, norm)
    size = torch.tensor([0.2, 0.6], dtype=DOUBLE)
    for held in some(graph.inputs, 3):
        flat = given.x.flatten(1)
        domain = tuple(torch.stack(sides) for sides in zip(*(box(v, held) for v in flat)))
        for steps in (0, 3):
            balls = Balls.make(given.x, size, norm, domain)  # type: ignore[arg-type]
            sweep = Sweep(graph, balls, steps).run()
            lower = margins(sweep, given.y)[0]
            for i, (v, label) in enumerate(zip(flat, given.y.tolist())):
                points = inside(v, (domain[0][i], domain[1][i]), norm, float(size[i]), 200, i)
                z = graph.logits(points.reshape(-1, *graph.nodes[0].shape))
                gap = (z[:, label : label + 1] - z).amin(0)
                other = torch.arange(len(gap)) != label
                assert (lower[i] <= gap + 1e-9)[other].all()


class Steps(nn.Module):
    """A smooth neuron whose input is `x + y` bent along `x - y`."""

    def __init__(self) -> None:
        super().__init__()
        self.d, self.s = (nn.Linear(2, 1, bias=False).double() for _ in range(2))
        self.out = nn.Linear(1, 2, bias=False).double()
        with torch.no_grad():
            self.d.weight.copy_(torch.tensor([[2.0, -2.0]]))
            self.s.weight.fill_(1.0)
            self.out.weight.copy_(torch.tensor([[0.0], [1.0]]))

    def forward(self, x: Tensor) -> Tensor:
        d = self.d(x)
        bent = self.s(x) - 0.5 * d + torch.relu(d)
        return self.out(nn.functional.softplus(bent))


def test_slope_cones_know_no_direction_of_a_held_input() -> None:
    """On the ball around 0 the bent value goes up to 2, at (1, 0); along (1, 1), which the second
    input would allow, nothing bends.
    """
    graph = read(Steps(), (2,), smooth=True)
    low, high = torch.tensor([[-5.0, 0.0], [5.0, 0.0]], dtype=DOUBLE)
    x, one = torch.zeros(1, 2, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
    balls = Balls.make(x, one, 2.0, (low, high))
    sweep = Sweep(graph, balls).run()
    (read_by,) = [node.inputs[0] for node in graph.nodes if isinstance(node.op, Smooth)]
    assert float(sweep.spans[read_by][1]) >= 2
    assert sweep.cones is not None
    points = torch.stack([torch.linspace(-1, 1, 101), torch.zeros(101)], 1).double()
    found, _, across = sweep.cones.bound(read_by, torch.ones(1, 1).double(), torch.tensor([0]))
    most = float(graph.values(points)[read_by].max())
    assert most <= float(torch.minimum(found.constant + across, found.together))


@pytest.mark.parametrize("method", ["product", "propagate", "auto", "exact"])
def test_the_direction_of_a_held_input_is_in_no_factor(method: str) -> None:
    """At (1, 0) the slope is 1.7616; a bound that knew the direction (1, 1) only said 1.6929."""
    low, high = torch.tensor([[-5.0, 0.0], [5.0, 0.0]], dtype=DOUBLE)
    ball = Ball(torch.zeros(2, dtype=DOUBLE), 1.0, 2, (low, high))
    slope = 2 * torch.tensor(2.0, dtype=DOUBLE).sigmoid()
    found = ws.lipschitz(Steps(), 1, ball, method=method, nodes=20)
    assert found.lower <= float(slope) * (1 + 1e-12) <= found.upper * (1 + 1e-11)
    assert found.lower >= 0.99 * float(slope)
    assert found.witness is not None and found.witness[1] == 0


def perceptron(act: Callable[[], nn.Module], n: int, seed: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in ((n, 5), (5, 4), (4, 3)):
        layer = nn.Linear(a, b).double()
        with torch.no_grad():
            layer.weight.copy_(torch.randn(b, a, dtype=DOUBLE, generator=generator))
            layer.bias.copy_(torch.randn(b, dtype=DOUBLE, generator=generator))
        layers += [layer, act()]
    return nn.Sequential(*layers[:-1])


@pytest.mark.few(2)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_constants_are_those_of_the_other_inputs(act: type[nn.Module], norm: float) -> None:
    """The first layer without the columns of what is held, and with them in its bias."""
    n = 4
    graph = read(perceptron(act, n, 2), (n,), smooth=True)
    values = torch.rand(n, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    for held in some(n, 2):
        domain = box(values, held)
        region = Region.make(domain, n)
        if len(held) == n:
            assert ws.lipschitz(graph, norm, domain).upper == 0
            continue
        less, other = restricted(graph, region)
        points = torch.rand(50, len(other.low), dtype=DOUBLE)
        whole = values.expand(50, n).clone()
        whole[:, region.low < region.high] = points
        assert torch.allclose(graph.logits(whole), less.logits(points), rtol=1e-12)
        for method in ("product", "propagate", "sdp", "exact"):
            found = ws.lipschitz(graph, norm, domain, method=method, nodes=100)
            same = ws.lipschitz(less, norm, (other.low, other.high), method=method, nodes=100)
            assert found.upper == pytest.approx(same.upper, rel=1e-9)
            assert found.lower <= same.upper * (1 + 1e-9)
            assert found.witness is not None
            assert torch.equal(found.witness[held], values[held])


@pytest.mark.parametrize("kind", ["conv", "max pooled", "joined"])
def test_restricted_networks_have_the_same_logits(kind: str) -> None:
    graph = random_graph(kind, 1)
    flat = torch.rand(20, graph.inputs, dtype=DOUBLE, generator=torch.Generator().manual_seed(2))
    flat[:, 0] = 0.25
    low, high = torch.zeros(graph.inputs, dtype=DOUBLE), torch.ones(graph.inputs, dtype=DOUBLE)
    low[0] = high[0] = 0.25
    less, region = restricted(graph, Region.make((low, high), graph.inputs))
    shape = graph.nodes[0].shape
    assert torch.allclose(graph.logits(flat.reshape(-1, *shape)), less.logits(flat[:, 1:]))
    assert less.inputs == graph.inputs - 1 == len(region.low)
    spans = bounds_on(graph, Region.make((low, high), graph.inputs)).spans
    values = graph.values(flat.reshape(-1, *shape))
    for i, (bottom, top) in spans.items():  # of what the ReLUs read
        v = values[graph.nodes[i].inputs[0]]
        assert (v >= bottom - 1e-9).all() and (v <= top + 1e-9).all()
