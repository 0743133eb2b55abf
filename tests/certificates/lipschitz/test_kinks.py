"""Lower sides are slopes that a network has on the domain: none is taken on a kink, where the
Jacobian of a program may belong to no piece that meets the domain.
"""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import wassail as ws
from support.networks import Net
from wassail.certificates.exact.cells import enumerate_cells
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Region
from wassail.certificates.lipschitz.kinks import off_kinks, on_kinks
from wassail.geometry import operator_norm

NORMS = (1.0, 2.0, math.inf)
BOX = (0.0, 1.0)
DOUBLE = torch.float64


def linear(weight: list[list[float]], bias: list[float] | None = None) -> nn.Linear:
    layer = nn.Linear(len(weight[0]), len(weight), bias=bias is not None).double()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight, dtype=DOUBLE))
        if bias is not None:
            layer.bias.copy_(torch.tensor(bias, dtype=DOUBLE))
    return layer


def cornered(
    seed: int, *sizes: int, share: float = 0.0, act: type[nn.Module] = nn.ReLU
) -> nn.Sequential:
    """A random network of which a share of the neurons has a bias: the others are on their kinks
    at the corner 0.
    """
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(pairwise(sizes)):
        weight = torch.randn(b, a, dtype=DOUBLE, generator=generator) * (2 / a) ** 0.5
        bias = torch.randn(b, dtype=DOUBLE, generator=generator)
        bias[torch.rand(b, generator=generator) >= share] = 0.0
        layers += [linear(weight.tolist(), bias.tolist()), nn.ReLU() if i % 2 == 0 else act()]
    return nn.Sequential(*layers[:-1]).eval()


@pytest.mark.parametrize("method", ["product", "propagate", "sdp", "exact", "auto"])
def test_a_neuron_that_is_active_but_for_a_corner(method: str) -> None:
    """One neuron of six has no bias and weights above 0: at the corner 0 torch takes it for
    inactive, a slope of 2.5742. On the box the largest is 2.5334577583.
    """
    first = linear(
        [
            [-1.0104, 0.3369],
            [-1.1446, -1.4689],
            [1.1373, 0.3235],
            [-0.6908, -0.9527],
            [-1.6690, 0.0],
            [0.6720, 0.9528],
        ],
        [-0.3227, 0.4084, 0.5936, 0.6345, 1.5727, 0.0],
    )
    row = [0.9635228, 0.8012592, -0.6420189, 0.7188206, -0.3672406, 0.0349511]
    model = nn.Sequential(first, nn.ReLU(), linear([row]))
    found = ws.lipschitz(model, 2, BOX, outputs="logits", norm_out="inf", method=method)
    assert found.lower <= 2.533457759 <= found.upper * (1 + 1e-9)
    if method in ("exact", "auto"):
        assert found.exact


@pytest.mark.few(3)
@pytest.mark.slow_cases("sizes2-2-0.0-2.0", "sizes2-2-0.0-1.0")
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("sizes", "seed", "share"),
    [((3, 5, 3), 35, 0.6), ((3, 4, 4, 2), 1, 0.0), ((2, 4, 3, 3, 2), 2, 0.0)],
)
def test_networks_without_biases_on_an_image_box(
    sizes: tuple[int, ...], seed: int, share: float, norm: float
) -> None:
    """Against a list of all pieces that meet the box; no method contradicts itself."""
    graph = read(cornered(seed, *sizes, share=share), sizes[:1])
    network = graph.piecewise()
    masks = enumerate_cells(network, Region.make(BOX, sizes[0])).masks
    truth = float(operator_norm(network.jacobian(masks), norm, math.inf).max())
    for method in ("propagate", "exact", "auto"):
        found = ws.lipschitz(graph, norm, BOX, outputs="logits", norm_out="inf", method=method)
        assert found.lower <= truth * (1 + 1e-9) and truth <= found.upper * (1 + 1e-9)
        if method == "exact":  # relative to 0, where a network is constant, nothing is closed
            assert found.exact if truth > 0 else found.upper <= 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_many_networks_without_biases(first: int) -> None:
    for seed in range(first, first + 10):
        sizes = ((3, 5, 3), (2, 6, 3), (3, 4, 4, 2), (2, 4, 3, 3, 2))[seed % 4]
        share = (0.6, 0.0)[seed // 4 % 2]
        test_networks_without_biases_on_an_image_box(sizes, seed, share, NORMS[seed % 3])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("act", [nn.Tanh, nn.Hardswish])
def test_smooth_networks_without_biases(act: type[nn.Module], norm: float) -> None:
    model = cornered(1, 2, 4, 3, 3, act=act)
    found = ws.lipschitz(model, norm, BOX, method="exact", nodes=20)
    cheap = ws.lipschitz(model, norm, BOX, method="propagate")
    assert found.lower <= cheap.upper and found.upper <= cheap.upper


@pytest.mark.parametrize(
    ("seed", "share", "norm"), [(35, 0.6, 2.0), (35, 0.6, math.inf), (2, 0.0, 1.0)]
)
def test_radii_by_constants_of_networks_without_biases(
    seed: int, share: float, norm: float
) -> None:
    """A black image, with neurons on their kinks, among the samples."""
    model = cornered(seed, 3, 5, 3, share=share)
    x = torch.rand(4, 3, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))
    x[0] = 0.0
    y = model(x).argmax(1)
    found = ws.radii(model, x, y, norm, BOX, "auto").values
    flips = ws.nearest(model, x, y, norm, BOX, passes=60).distances
    assert (found <= flips).all()


def test_points_on_kinks() -> None:
    """`3 v - 2 relu(v) + 2 relu(-v)` is v: at 0 torch says 3."""
    model = nn.Sequential(
        linear([[1.0], [-1.0], [0.0]], [0.0, 0.0, 0.0]),
        Net(lambda m, v: torch.cat([v, torch.relu(v)], 1)),
        linear([[3.0, 0.0, 0.0, -2.0, 2.0, 1.0]]),
    )
    graph = read(model, (1,))
    x = torch.tensor([[0.0], [1e-3], [2.0**-60], [-1.0]], dtype=DOUBLE)
    # The third neuron is 0 everywhere: it has no sides.
    assert on_kinks(graph, x).tolist() == [True, False, False, False]
    assert on_kinks(read(linear([[1.0]]), (1,)), x).tolist() == [False] * 4
    region = Region.make((-1.0, 1.0), 1)
    moved, good = off_kinks(graph, region, x, torch.Generator().manual_seed(0))
    assert good.all() and moved[0] != 0 and torch.equal(moved[1:], x[1:])
    found = ws.lipschitz(graph, 2, (-1.0, 1.0), outputs="logits", method="exact")
    assert found.exact and found.upper == pytest.approx(1.0)


@pytest.mark.parametrize("scale", [2.0**-20, 1.0, 2.0**20])
def test_a_kink_up_to_rounding(scale: float) -> None:
    """`0.1 + 0.2 - 0.3` is not 0 in float64: the neuron is at its kink, at every scale."""
    layer = linear([[scale, scale, -scale]])
    graph = read(nn.Sequential(layer, nn.ReLU(), linear([[1.0]])), (3,))
    x = torch.tensor([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3 - 1e-9]], dtype=DOUBLE)
    assert bool(layer(x).detach()[0] != 0)
    assert on_kinks(graph, x).tolist() == [True, False]


def test_both_kinks_of_hardswish() -> None:
    graph = read(nn.Sequential(linear([[1.0]]), nn.Hardswish(), linear([[1.0]])), (1,), smooth=True)
    x = torch.tensor([[-3.0], [3.0], [0.0], [2.9]], dtype=DOUBLE)
    assert on_kinks(graph, x).tolist() == [True, True, False, False]
    # From 3 on it is the identity: no point of the box has a slope of 3/2.
    found = ws.lipschitz(graph, 2, (3.0, 4.0), outputs="logits", method="product")
    assert found.lower == pytest.approx(1.0)


def test_a_neuron_without_sides_leaves_the_slope_as_it_is() -> None:
    """`relu(0 x)` is on its kink everywhere, and beside it the slope is 1."""
    model = Net(
        lambda m, x: m.out(torch.cat([torch.relu(m.none(x)), x], 1)),
        none=linear([[0.0, 0.0]]),
        out=linear([[5.0, 1.0, 0.0]]),
    )
    found = ws.lipschitz(model, 2, BOX, outputs="logits", shape=(2,))
    assert found.lower == pytest.approx(1.0, rel=1e-9) and found.exact


@pytest.mark.parametrize("act", [nn.ReLU, nn.Tanh])
def test_a_deep_network_is_not_on_a_kink_everywhere(act: type[nn.Module]) -> None:
    """Twenty layers: the magnitudes of all of them multiplied would hide every neuron's side."""
    model = cornered(0, *[12] * 20, 3, share=0.5, act=act)
    graph = read(model, (12,), smooth=True)
    x = torch.rand(16, 12, dtype=DOUBLE, generator=torch.Generator().manual_seed(0))
    assert not on_kinks(graph, x).any()
    assert ws.lipschitz(graph, 2, BOX, method="product").lower > 0
