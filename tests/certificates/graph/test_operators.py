"""The table of operators (`tests/support/operators.py`): what is claimed of each, against
sampled points and the model.
"""

import math
from functools import cache
from types import ModuleType

import pytest
import torch
from torch import Tensor

import wassail as ws
from support.operators import REFUSED, TABLE, Headed, Operator
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.lipschitz.steepest import jacobians
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import margin_bounds
from wassail.certificates.relax.jacobian import entries
from wassail.certificates.relax.ranges import intervals, ranges
from wassail.errors import InputError
from wassail.losses import cross_entropy

# torch says once that a padding of one side copies the image.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

INF = math.inf
NORMS = (INF, 2.0, 1.0)
NAMES = {operator.name: operator for operator in TABLE}
DOMAIN = (-1.0, 1.0)
DELICATE = ("divisor", "float32", "shift", "scaled", "mask", "tiny", "huge", "zero", "infinite")
# What takes longer is done for every sixth operator and the delicate ones; for the rest in the slow
# suite.
SOME = [
    pytest.param(
        name, marks=() if k % 6 == 0 or any(word in name for word in DELICATE) else pytest.mark.slow
    )
    for k, name in enumerate(NAMES)
]


@cache
def network(name: str) -> tuple[Headed, Graph]:
    model = Headed(NAMES[name]).eval()
    return model, read(model, NAMES[name].shape, smooth=True)


def near(x: Tensor, radius: float, norm: float, count: int, seed: int) -> Tensor:
    """Points of the ball around one sample, cut by the box: inside it, on its rim, at its
    corners; the sample first.
    """
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(count, x.numel(), generator=g, dtype=torch.float64)
    u[: count // 3] = u[: count // 3].sign()
    u[count // 3 : count // 2] *= (
        torch.rand(count // 2 - count // 3, x.numel(), generator=g) < 1.5 / x.numel()
    )
    u = u / torch.linalg.vector_norm(u, norm, dim=1, keepdim=True).clamp(min=1e-9)
    u[count // 2 :] *= torch.rand(count - count // 2, 1, generator=g, dtype=torch.float64)
    u[0] = 0.0
    moved = (x.flatten() + radius * (1 - 1e-12) * u).clamp(*DOMAIN)
    return moved.reshape(count, *x.shape)


def sample(name: str) -> tuple[Tensor, Tensor]:
    model, _ = network(name)
    g = torch.Generator().manual_seed(1)
    x = 2 * torch.rand(1, *NAMES[name].shape, generator=g, dtype=torch.float64) - 1
    return x, model(x).argmax(1)


def test_names_are_unique() -> None:
    assert len(NAMES) == len(TABLE)


@pytest.mark.few(51)
@pytest.mark.parametrize("name", NAMES)
def test_the_graph_is_the_model(name: str) -> None:
    model, graph = network(name)
    g = torch.Generator().manual_seed(2)
    x = 4 * torch.rand(200, *NAMES[name].shape, generator=g, dtype=torch.float64) - 2
    truth = model(x).detach()
    ours = graph.logits(x)
    # Float32 sums and values far from 0 are not known better by the model itself.
    assert torch.allclose(ours, truth, rtol=0, atol=2e-6 * float(truth.abs().max()))
    assert graph.smooth == NAMES[name].smooth


@pytest.mark.few(51)
@pytest.mark.parametrize("name", NAMES)
def test_margins_are_bounded_on_balls(name: str) -> None:
    _, graph = network(name)
    x, y = sample(name)
    rows = x.repeat(3, *[1] * (x.ndim - 1))
    radius = torch.tensor([1e-3, 0.2, 1.0], dtype=torch.float64)
    for norm in NORMS:
        bounds = margin_bounds(graph, rows, y.repeat(3), radius, norm, DOMAIN)
        assert torch.isfinite(bounds).all()
        for found, r in zip(bounds, radius.tolist()):
            z = graph.logits(near(x[0], r, norm, 300, 3))
            least = (z[:, y] - z).amin(0)
            assert (found <= least + 1e-9 * z.abs().max()).all(), f"l{norm:g} {r}"
        assert (
            bounds[0] >= (z[0, y] - z[0]) - 0.5 * (z.amax() - z.amin()) - 1e-6
        ).all()  # and they are not idle


@pytest.mark.parametrize("name", SOME)
def test_values_and_derivatives_stay_in_their_ranges(name: str) -> None:
    _, graph = network(name)
    x, _ = sample(name)
    region = Region.make(Ball(x[0], 0.5, INF, DOMAIN), graph.inputs)
    points = near(x[0], 0.5, INF, 200, 4)
    spans = ranges(graph, Balls.make(x, torch.tensor([0.5], dtype=torch.float64), INF, DOMAIN))
    for i, value in enumerate(graph.values(points)):
        if i in spans:
            slack = 1e-9 * (1e-9 + value.abs().max())
            assert (value >= spans[i][0] - slack).all() and (value <= spans[i][1] + slack).all(), (
                graph.nodes[i].place
            )
    ends = region.box[0][None], region.box[1][None]
    for i, (low, high) in intervals(graph, ends).items():
        value = graph.values(points)[i]
        slack = 1e-9 * (1e-9 + value.abs().max())
        assert (value >= low - slack).all() and (value <= high + slack).all(), graph.nodes[i].place
    low, high = entries(graph, spans)
    slopes = jacobians(graph, points.flatten(1))
    slack = 1e-9 * (1 + slopes.abs().max())
    assert (slopes >= low[0] - slack).all() and (slopes <= high[0] + slack).all()


@pytest.mark.few(13)
@pytest.mark.slow_cases("kthvalue", "max pool, ceil mode")
@pytest.mark.parametrize("name", SOME)
def test_radii_and_lipschitz_constants_against_points(name: str) -> None:
    _, graph = network(name)
    x, y = sample(name)
    norm = NORMS[list(NAMES).index(name) % 3]
    points = near(x[0], 3.0, norm, 4000, 5)
    z = graph.logits(points)
    length = torch.linalg.vector_norm((points - x).flatten(1), norm, dim=1)
    flips = length[z.argmax(1) != y]
    for method in ("crown", "branch") if graph.smooth else ("crown", "exact"):
        found = ws.radii(
            graph, x, y, norm=norm, domain=DOMAIN, method=method, tolerance=0.1, effort=0.05
        ).values
        assert float(found) <= min(flips.tolist(), default=INF) * (1 + 1e-9), method
    top = ws.lipschitz(
        graph,
        norm,
        DOMAIN,
        shape=NAMES[name].shape,
        outputs="logits",
        norm_out=INF,
        method="propagate",
    ).upper
    quotient = (z - z[0]).abs().amax(1)[1:] / length[1:].clamp(min=1e-300)
    assert float(quotient[length[1:] > 0].max()) <= top * (1 + 1e-9)


@pytest.mark.few(14)
@pytest.mark.parametrize("name", SOME)
def test_slopes_where_inputs_are_frozen(name: str) -> None:
    """A box in which every other input is one number, then all but one, then all."""
    _, graph = network(name)
    x, _ = sample(name)
    norm = NORMS[list(NAMES).index(name) % 3]
    place = torch.arange(x[0].numel()).reshape(x[0].shape)
    g = torch.Generator().manual_seed(7)
    for free in (place % 2 == 0, place == 0, place < 0):
        low, high = x[0] - 0.3 * free, x[0] + 0.3 * free
        top = ws.lipschitz(
            graph, norm, (low, high), outputs="logits", norm_out=INF, method="propagate"
        ).upper
        part = torch.rand(40, *x[0].shape, generator=g, dtype=torch.float64)
        part[:10] = part[:10].round()
        points = low + (high - low) * part
        z = graph.logits(points)
        length = torch.linalg.vector_norm((points - points[:1]).flatten(1), norm, dim=1)
        moved = length > 0
        quotient = ((z - z[:1]).abs().amax(1)[moved] / length[moved]).tolist()
        assert max(quotient, default=0.0) <= top * (1 + 1e-9) + 1e-12


@pytest.mark.few(9)
@pytest.mark.parametrize("operator", REFUSED, ids=lambda operator: operator.name)
def test_what_cannot_be_certified_is_refused(operator: Operator) -> None:
    with pytest.raises(InputError):
        read(Headed(operator).eval(), operator.shape, smooth=True)


@pytest.mark.few(6)
@pytest.mark.parametrize("name", list(NAMES)[::9])
def test_both_sides_of_the_loss_against_points(name: str) -> None:
    """Every ninth operator: no sampled loss is above the upper side, and the lower side is not
    above it either.
    """
    _, graph = network(name)
    x, y = sample(name)
    for norm, eps in ((INF, 0.1), (2.0, 0.5)):
        curve = ws.loss_curve(graph, x, y, norm, INF, domain=DOMAIN, grid=[eps], time_limit=0.1)
        lower, upper = curve(eps)
        points = near(x[0], eps, norm, 300, 6)
        sampled = float(cross_entropy(graph.logits(points), y.expand(len(points))).max())
        assert max(lower, sampled) <= upper + 1e-9 * (1 + abs(upper))


@pytest.mark.parametrize("name", ["mnist_mlp_spectral", "mnist_conv_small", "cifar_resnet20"])
def test_real_networks_are_read_with_their_normalisation(zoo: ModuleType, name: str) -> None:
    model, dataset = zoo.load(name)
    x = zoo.images(dataset, 4)[0]
    truth = model(x).detach().double()
    assert torch.allclose(
        read(model, x.shape[1:]).logits(x), truth, rtol=0, atol=1e-4 * float(truth.abs().max())
    )
