"""Biases that cancel where layers are folded: what is left is off by a part of what was added
up, not of itself.
"""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor, nn

from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.reader import read
from wassail.certificates.prove.radii import radii

HIGH = 1.5  # where the second class loses
WEIGHT = 1e-6
SHIFT = 0.1


class _Centred(nn.Module):
    """`(x - mean) / 3`, as inputs are scaled."""

    def __init__(self, mean: float) -> None:
        super().__init__()
        self.mean = mean

    def forward(self, x: Tensor) -> Tensor:
        return (x - self.mean) / 3


def _head() -> nn.Linear:
    """Margins `HIGH - h` of the second class over the first, twice."""
    head = nn.Linear(1, 2)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[1.0], [-1.0]]))
        head.bias.copy_(torch.tensor([0.0, 2 * HIGH]))
    return head


def _normed(mean: float) -> tuple[nn.Module, Decimal]:
    """A batch norm that takes the bias of the layer before it away; and where its class
    changes, from 0 on.
    """
    model = (
        nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, eps=2.0**-40), nn.ReLU(), _head())
        .double()
        .eval()
    )
    first = model[0]
    norm = model[1]
    assert (
        isinstance(first, nn.Linear)
        and isinstance(norm, nn.BatchNorm1d)
        and norm.running_mean is not None
    )
    assert norm.running_var is not None
    with torch.no_grad():
        first.weight.fill_(WEIGHT)
        first.bias.fill_(mean)
        norm.running_mean.fill_(mean)
        norm.running_var.fill_(0)
        norm.bias.fill_(SHIFT)
    return model, (Decimal(HIGH) - Decimal(SHIFT)) / (Decimal(2) ** 20 * Decimal(WEIGHT))


def _scaled(mean: float) -> tuple[nn.Module, Decimal]:
    """An input scaling that the bias of the layer after it takes away; and where its class
    changes, from 0 on.
    """
    model = nn.Sequential(_Centred(mean), nn.Linear(1, 1), nn.ReLU(), _head()).double().eval()
    first = model[1]
    bias = mean / 3 + SHIFT
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        first.weight.fill_(1.0)
        first.bias.fill_(bias)
    return model, (Decimal(HIGH) - Decimal(bias)) * 3 + Decimal(mean)


@pytest.mark.few(2)
@pytest.mark.parametrize("make", [_normed, _scaled])
@pytest.mark.parametrize("mean", [1e6 / 3, 54321.987, -314159.26])
def test_radii_where_biases_cancel(make: object, mean: float) -> None:
    assert callable(make)
    x = torch.zeros(1, 1, dtype=torch.float64)
    y = torch.tensor([1])
    with localcontext() as context:
        context.prec = 60
        model, distance = make(mean)
        graph = read(model, (1,))
        for method in ("exact", "crown", "auto"):
            found = radii(graph, x, y, math.inf, None, method, arithmetic="exact", tolerance=1e-9)
            assert 0 < Decimal(float(found.values[0])) <= distance, method


def test_magnitudes_of_biases_go_where_the_biases_go() -> None:
    """Through folds, moves and heads: never below the bias, and of its shape."""
    torch.manual_seed(0)
    body = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 3)
    )
    model = nn.Sequential(_Centred(0.5), body, nn.BatchNorm1d(3)).eval()
    graph = read(model, (2, 3, 3))
    rows = torch.eye(3, dtype=torch.float64)[1:] - torch.eye(3, dtype=torch.float64)[:2]

    def check(some: Graph) -> int:
        sizes = [(node.bias, node.bias_most) for node in some.nodes if node.bias is not None]
        for bias, most in sizes:
            assert (
                most is None
                or (most.expand(torch.broadcast_shapes(most.shape, bias.shape)) >= bias.abs()).all()
            )
        return sum(most is not None for _, most in sizes)

    assert check(graph) == check(graph.head(rows)) == 2
    assert graph.head(rows).nodes[-1].bias_size.shape == (2,)
