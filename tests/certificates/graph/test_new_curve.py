"""A curve that no file of the package knows by name: certificates need nothing but its class."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Curved, Graph, Node
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.operators.normalise import RankOne
from wassail.certificates.graph.planes import Curve, Plane, Span, interval_product
from wassail.certificates.lipschitz.ladder import lipschitz
from wassail.certificates.lipschitz.steepest import jacobians
from wassail.certificates.relax.crown import margin_bounds

BOX = (-1.0, 1.0)


@dataclass(frozen=True)
class Sine(Curve):
    """`sin v`, whose values and slopes lie between -1 and 1: nothing finer is told."""

    def value(self, *v: Tensor) -> Tensor:
        return torch.sin(v[0])

    def span(self, *spans: Span) -> Span:
        one = torch.ones_like(spans[0][0])
        return -one, one

    def plane(self, centres: Sequence[Tensor], spans: Sequence[Span]) -> Plane:
        none = torch.zeros_like(centres[0])
        return RankOne(none, none, none, none, torch.maximum(-spans[0][0], spans[0][1]))

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        one = torch.ones_like(spans[0][0])[:, None]
        return (interval_product((-one, one), g),)


def network() -> Graph:
    """Three inputs, four sines, three logits."""
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Matrix:
        return Matrix(torch.randn(rows, columns, dtype=torch.float64, generator=generator))

    return Graph(
        (
            Node((), (3,), "the input"),
            Node((0,), (4,), "first", Affine(matrix(4, 3))),
            Node((1,), (4,), "sine", Curved(Sine())),
            Node((2,), (3,), "last", Affine(matrix(3, 4))),
        )
    )


@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("method", ["product", "propagate"])
def test_constants_of_a_network_with_a_new_curve(method: str, norm: float) -> None:
    """Finite on a box, and above every Jacobian there."""
    graph = network()
    found = lipschitz(graph, norm, BOX, method=method, outputs="logits", norm_out=norm)
    points = 2 * torch.rand(200, 3, generator=torch.Generator().manual_seed(1)).double() - 1
    norms = torch.linalg.matrix_norm(jacobians(graph, points), norm if norm != 2 else 2)
    assert float(norms.max()) <= found.upper
    assert method == "product" or found.upper < math.inf


def test_margins_of_a_network_with_a_new_curve() -> None:
    """Lower bounds on a ball hold at points of it."""
    graph = network()
    x = torch.zeros(1, 3, dtype=torch.float64)
    y = graph.logits(x).argmax(1)
    lower = margin_bounds(graph, x, y, 0.1, 2.0, BOX)[0]
    step = torch.randn(500, 3, generator=torch.Generator().manual_seed(2)).double()
    z = graph.logits(x + 0.1 * step / step.norm(dim=1, keepdim=True))
    assert (z[:, y] - z >= lower).all() and torch.isfinite(lower).all()
