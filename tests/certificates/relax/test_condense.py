"""Networks without their stable neurons: the same function on the region, the same bounds, and
still sound.
"""

import math

import pytest
import torch
from torch import nn

from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.relax.jacobian import gradients
from wassail.certificates.relax.ranges import bounds_on, condensed


def network(kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    generator = torch.Generator().manual_seed(len(kind))
    if kind == "mlp":
        model: nn.Module = nn.Sequential(
            nn.Linear(6, 30), nn.ReLU(), nn.Linear(30, 20), nn.LeakyReLU(0.1), nn.Linear(20, 3)
        )
        shape: tuple[int, ...] = (6,)
    else:
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, 1, 1),
            nn.ReLU(),
            nn.Conv2d(4, 4, 3, 2, 1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(4, 3),
        )
        shape = (1, 4, 4)
    for parameter in model.parameters():
        parameter.data = (
            torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.5
        )
    return model.double(), shape


@pytest.mark.few(13)
@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("radius", [0.0, 0.01, 0.1])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
def test_the_same_bounds_from_fewer_neurons(kind: str, radius: float, norm: float) -> None:
    model, shape = network(kind)
    graph = read(model, shape)
    centre = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    region = Region.make(Ball(centre, radius, norm, (0.0, 1.0)), graph.inputs)
    bounds = bounds_on(graph, region)
    small = condensed(bounds)
    assert small.graph.neurons == bounds.open < graph.neurons and small.open <= bounds.open
    x = region.sample(50, torch.Generator().manual_seed(2))
    assert torch.allclose(small.graph.logits(x), graph.logits(x.reshape(-1, *shape)), atol=1e-12)
    rows = torch.tensor([[1.0, -1.0, 0.0], [0.0, 1.0, -1.0]], dtype=torch.float64)
    ours = gradients(small, rows)
    plain = gradients(bounds, rows)
    points = x.clone().requires_grad_(True)
    z = small.graph.logits(points)
    truth = torch.stack(
        [torch.autograd.grad((z @ row).sum(), points, retain_graph=True)[0] for row in rows]
    )
    low, high = ours.entries()
    assert (truth >= low[:, None]).all() and (truth <= high[:, None]).all()
    for s in (1.0, 2.0, math.inf):
        assert (ours.norm(s, (low, high)) <= plain.norm(s, plain.entries()) * (1 + 1e-9)).all()


def test_rounding_errors_are_those_of_the_whole_network() -> None:
    """Two huge paths that cancel: the condensed weight is 1, its magnitude is not, and the
    bound knows.
    """
    model = nn.Sequential(
        nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 2, bias=False)
    ).double()
    model[0].weight.data = torch.tensor([[1e9], [1e9]], dtype=torch.float64)
    model[2].weight.data = torch.tensor([[1e-9, 0.0], [1e9, 1.0 - 1e9]], dtype=torch.float64)
    graph = read(model, (1,))
    bounds = bounds_on(graph, Region.make((1.0, 2.0), 1))
    small = condensed(bounds)
    assert small.graph.neurons == 0
    found = gradients(small, torch.tensor([[0.0, 1.0]], dtype=torch.float64))
    low, high = found.entries()
    assert float(low) < 1e9 < float(high) and float(high - low) > 1e18 * 2.0**-52


def test_nothing_to_gain_changes_nothing() -> None:
    model, shape = network("mlp")
    bounds = bounds_on(graph := read(model, shape), Region.make(None, graph.inputs))
    assert condensed(bounds) is bounds
