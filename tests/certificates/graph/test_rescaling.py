"""Layers multiplied by powers of two, up to the ends of floating point, with product 1: the
function is the same.

So no radius of the rescaled network may exceed the nearest flip of the original, and none may be
lost.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.rescaled import ALL, NORMS, PIECEWISE, case, random_graph, rescaled
from wassail.certificates.graph.equilibrate import equilibrated
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu, _times
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.prove.radii import radii
from wassail.certificates.relax.crown import margin_bounds
from wassail.losses import cross_entropy, margin

INF = math.inf
LOSSES = {"cross_entropy": cross_entropy, "margin": margin}
EXPONENTS = (120, 500)  # the ends of float32 and of float64


def layers(
    *parts: tuple[list[list[float]], list[float]], dtype: torch.dtype = torch.float32
) -> nn.Sequential:
    """Linear layers with these weights and biases, and a ReLU between them."""
    found: list[nn.Module] = []
    for weight, bias in parts:
        layer = nn.Linear(len(weight[0]), len(weight)).to(dtype)
        layer.weight.data, layer.bias.data = (
            torch.tensor(weight, dtype=dtype),
            torch.tensor(bias, dtype=dtype),
        )
        found += [layer, nn.ReLU()]
    return nn.Sequential(*found[:-1])


def far_apart() -> nn.Sequential:
    """It flips from 0.6 on; every layer underflows after another in float32."""
    return layers(
        ([[1e36], [-1e36]], [0, 1e36]),
        ([[1e-25, 0]], [0]),
        ([[1e-25]], [-0.5e-14]),
        ([[0], [1e14]], [0.1, 0]),
    )


@pytest.mark.few(4)
@pytest.mark.slow_cases("1.0-*", "2.0-[!c]*", "inf-branch")
@pytest.mark.parametrize("method", ["crown", "ball", "branch", "exact", "auto"])
@pytest.mark.parametrize("norm", NORMS)
def test_coefficients_that_underflow_prove_nothing(norm: float, method: str) -> None:
    x = torch.tensor([[0.2]])
    y = torch.tensor([0])
    found = float(
        ws.radii(far_apart(), x, y, norm=norm, domain=(0, 1), method=method, tolerance=0.01).values
    )
    assert 0.39 < found <= 0.4 + 1e-6
    threat = ws.Threat(norm=norm, order=INF, eps=0.6, domain=(0, 1))
    assert not ws.verify(far_apart(), x, y, threat, method=method).proved.any()


def as_graph(model: nn.Sequential) -> Graph:
    """The network as it is, not equilibrated."""
    nodes = [Node((), (1,), "the input")]
    for part in model:
        last = len(nodes) - 1
        if isinstance(part, nn.Linear):
            bias = part.bias.detach().double()
            nodes.append(
                Node((last,), (len(bias),), "", Affine(Matrix(part.weight.detach().double()), bias))
            )
        else:
            nodes.append(
                Node((last,), nodes[last].shape, "", Relu(torch.tensor(0.0, dtype=torch.float64)))
            )
    return Graph(tuple(nodes))


@pytest.mark.slow_cases("1.0-*", "2.0-ball", "2.0-exact", "inf-branch")
@pytest.mark.parametrize(
    ("norm", "method"),
    [
        *itertools.product(NORMS, ["crown", "ball", "exact", "auto"]),
        (INF, "branch"),
    ],
)
def test_nor_do_they_without_equilibration(norm: float, method: str) -> None:
    x = torch.tensor([[0.2]])
    y = torch.tensor([0])
    found = float(
        radii(
            as_graph(far_apart()), x, y, norm=norm, domain=(0, 1), method=method, tolerance=0.01
        ).values
    )
    assert found <= 0.4 + 1e-6


def network(seed: int) -> tuple[str, float, int]:
    """The kind of network, norm and largest exponent of a seed: all combinations in turn."""
    names = list(PIECEWISE)
    turn, kind = divmod(seed, len(names))
    return names[kind], NORMS[turn % 3], EXPONENTS[turn // 3 % 2]


def spread(graph: Graph, seed: int, most: int) -> tuple[Graph, Graph]:
    """The network rescaled, and equilibrated after that."""
    raw = rescaled(graph, seed, most)
    shape = graph.nodes[0].shape
    points = torch.rand(
        6, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    even = equilibrated(raw, points)
    for other in (raw, even):
        assert torch.allclose(other.logits(points), graph.logits(points), rtol=1e-12, atol=1e-12)
    return raw, even


@pytest.mark.slow_cases("100", "150", "200", "250", "300", "350", "400", "450", "50")
@pytest.mark.parametrize("start", range(0, 500, 50))
def test_five_hundred_rescaled_networks_prove_nothing_at_a_flip(start: int) -> None:
    """At a radius just above the nearest flip nothing is proved; at half of it as much as for
    the original.
    """
    flips = 0
    for seed in range(start, start + 50):
        name, norm, most = network(seed)
        graph = random_graph(name, seed)
        given = case(graph, seed, norm)
        raw, even = spread(graph, seed, most)
        known = torch.isfinite(given.flips)
        flips += int(known.sum())
        beyond = torch.where(known, given.flips * (1 + 1e-6), 0.0)
        inside = torch.where(known, given.flips / 2, 0.1)
        radius = torch.cat([beyond, inside])
        x, y = given.x.repeat(2, *[1] * (given.x.ndim - 1)), given.y.repeat(2)
        bounds = [
            least(margin_bounds(g, x, y, radius, norm, (0.0, 1.0)), y) for g in (graph, raw, even)
        ]
        for found in bounds:
            assert not (found[: len(known)][known] > 0).any(), f"{name}, seed {seed}"
        original, _, again = (b[len(known) :] for b in bounds)
        clean = least(given_margins(graph, given.x, given.y), given.y)
        assert (again >= original - 0.01 * (clean - original)).all(), f"{name}, seed {seed}"
    assert flips >= 60  # of 100 samples


def least(margins: Tensor, y: Tensor) -> Tensor:
    """The least margin over a rival."""
    return margins.scatter(1, y[:, None], INF).amin(1)


def given_margins(graph: Graph, x: Tensor, y: Tensor) -> Tensor:
    z = graph.logits(x)
    return z.gather(1, y[:, None]) - z


def radii_of(seed: int, method: str) -> int:
    """Compare the radii of one network with its flips and with those of the rescaled one; how
    many had a flip.
    """
    name, norm, most = network(seed)
    graph = random_graph(name, seed)
    given = case(graph, seed, norm)
    even = spread(graph, seed, most)[1]
    own, again = (
        radii(
            g, given.x, given.y, norm=norm, domain=(0.0, 1.0), method=method, arithmetic="exact"
        ).values
        for g in (graph, even)
    )
    assert (torch.maximum(own, again) <= given.flips * (1 + 1e-9)).all(), f"{name}, seed {seed}"
    assert (again >= 0.99 * own).all(), f"{name}, seed {seed}"
    return int(torch.isfinite(given.flips).sum())


METHODS = ("crown", "ball", "branch", "exact", "auto")


@pytest.mark.few(1)
@pytest.mark.slow_cases("branch", "ball")
@pytest.mark.parametrize("method", METHODS)
def test_radii_of_rescaled_networks(method: str) -> None:
    assert sum(radii_of(seed, method) for seed in range(METHODS.index(method), 40, 14)) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 500, 20))
def test_radii_of_five_hundred_rescaled_networks(start: int) -> None:
    assert (
        sum(
            radii_of(seed, METHODS[seed % 5 if seed % 25 < 10 else 0])
            for seed in range(start, start + 20)
        )
        >= 20
    )


@pytest.mark.few(4)
@pytest.mark.parametrize("loss", ["cross_entropy", "margin"])
@pytest.mark.parametrize("name", ["dense", "conv", "smooth"])
def test_both_sides_of_the_loss_of_rescaled_networks(name: str, loss: str) -> None:
    """The upper side of the rescaled network is above sampled losses, and both sides are those
    of the original.
    """
    seed = list(ALL).index(name)
    graph = random_graph(name, seed)
    norm = NORMS[seed % 3]
    eps = 0.3
    given = case(graph, seed, norm)
    raw, even = spread(graph, seed, 120)
    lower, upper = ws.loss_curve(
        graph, given.x, given.y, norm, INF, loss, grid=[eps], time_limit=0.2
    )(eps)
    points = near_box(given.x, eps, norm, seed)
    worst = LOSSES[loss](
        graph.logits(points.flatten(0, 1)), given.y.repeat_interleave(points.shape[1])
    )
    sampled = float(worst.reshape(len(given.y), -1).amax(1).mean())
    for other in (raw, even):
        found = ws.loss_curve(other, given.x, given.y, norm, INF, loss, grid=[eps], time_limit=0.2)(
            eps
        )
        assert found[0] <= upper * (1 + 1e-9) + 1e-9
        assert found[1] >= max(sampled, lower) - 1e-9
    assert found[1] <= upper + 0.01 * abs(upper)


def near_box(x: Tensor, radius: float, norm: float, seed: int) -> Tensor:
    """Points `(N, M, *shape)` of the balls in the unit box."""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(len(x), 200, x[0].numel(), generator=g, dtype=torch.float64)
    u = radius * u / torch.linalg.vector_norm(u, norm, dim=2, keepdim=True)
    return (x.flatten(1)[:, None] + u).clamp(0, 1).reshape(len(x), 200, *x.shape[1:])


def test_a_product_of_ranges_pays_for_its_underflow() -> None:
    tiny = (torch.tensor([1e-200], dtype=torch.float64),) * 2
    low, high = _times(tiny, tiny)
    assert float(low) < 0 < float(high)
