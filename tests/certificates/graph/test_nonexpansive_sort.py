"""Sorting moves no two points apart: where it is recognised, that is true, and bounds use it."""

import itertools
import math
from fractions import Fraction
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import wassail as ws
from support.rounding import MODES, rounded
from wassail.certificates.graph.graph import Graph
from wassail.certificates.graph.nonexpansive_sort import nonexpansive_sorts
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.ball_margins import ball_margins
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.norms import Reach, pair_products, product

INF = math.inf


class GroupSort(nn.Module):
    """Groups of neighbours along the first axis, sorted."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.size)).sort(2).values.flatten(1, 2)


class MaxMin(nn.Module):
    """The two halves compared."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


class Stacked(nn.Module):
    """The same with a new axis."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x[:, ::2], x[:, 1::2]
        return torch.stack([torch.minimum(a, b), torch.maximum(a, b)], 2).flatten(1)


class Twice(nn.Module):
    """One of the two numbers beside the smaller one: that stretches by sqrt 2."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([a, torch.minimum(a, b)], 1)


class Again(nn.Module):
    """Old values compared once more, beside the result of the first time."""

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = x.chunk(4, 1)
        return torch.cat([torch.maximum(a, b), torch.maximum(a, c), torch.minimum(b, d)], 1)


CASES: dict[str, tuple[nn.Module, tuple[int, ...], bool]] = {
    "pairs": (GroupSort(2), (8,), True),
    "groups": (GroupSort(4), (8,), True),
    "halves": (MaxMin(), (8,), True),
    "stacked": (Stacked(), (8,), True),
    "pool": (nn.MaxPool2d(2), (2, 4, 4), True),
    "overlap": (nn.MaxPool2d(3, 1), (2, 4, 4), False),
    "twice": (Twice(), (8,), False),
    "again": (Again(), (8,), False),
}


@cache
def graph_of(kind: str) -> Graph:
    part, shape, _ = CASES[kind]
    return read(nn.Sequential(part, nn.Flatten()).double(), shape)


@pytest.mark.parametrize("kind", list(CASES))
def test_what_is_called_a_contraction_is_one(kind: str) -> None:
    _, shape, known = CASES[kind]
    graph = graph_of(kind)
    found = nonexpansive_sorts(graph)
    assert (len(graph.nodes) - 1 in found) == known
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, *shape, generator=generator, dtype=torch.float64)
    y = x + 0.5 * torch.randn(x.shape, generator=generator, dtype=torch.float64)
    # Points that differ in one entry only are where a value used twice shows.
    y[::2] = torch.where(torch.rand(y[::2].shape, generator=generator) < 0.15, y[::2], x[::2])
    before, after = (graph.values(v) for v in (x, y))
    for i, claim in found.items():
        assert claim.between[-1] == i
        for norm in (1.0, 2.0, INF):
            moved, first = (
                torch.linalg.vector_norm((after[k] - before[k]).flatten(1), norm, dim=1)
                for k in (i, claim.base)
            )
            assert (moved <= first + 1e-12).all()


def test_a_value_used_twice_would_be_wrong() -> None:
    """The case that must not be claimed does stretch."""
    x = torch.tensor([[0.0, 9.0]])
    y = torch.tensor([[1.0, 9.0]])
    moved = torch.linalg.vector_norm(Twice()(y) - Twice()(x))
    assert moved > 1.4


@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_the_product_of_norms_passes_through(norm: float) -> None:
    for kind, (_, _, known) in CASES.items():
        found = product(graph_of(kind), norm, norm)
        assert (found <= 1 + 1e-9) if known else (found > 1 or kind == "overlap"), kind
        assert found >= 1 - 1e-9


def test_the_rounding_of_a_comparison_is_in_the_radius() -> None:
    """`b - (b - a)` is not a in floating point: on a ball of radius 0 the radius is that error."""
    graph = read(nn.Sequential(GroupSort(2)).double(), (2,))
    x = torch.tensor([[3.0, 1e16], [0.1, 7e15], [1.0, 2.0]], dtype=torch.float64)
    balls = Balls.make(x, torch.zeros(3, dtype=torch.float64), 2.0, None)
    reach = Reach(graph, balls).run()
    last = len(graph.nodes) - 1
    here = graph.logits(x)
    assert (here[0, 0] != 3.0) and last in nonexpansive_sorts(graph)
    for k in range(3):
        parts = [Fraction(float(a)) - Fraction(float(b)) for a, b in zip(here[k], x[k])]
        off = sum(part * part for part in parts)
        assert Fraction(float(reach.radius[last][k])) ** 2 >= off


def orthogonal(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layer = nn.Linear(a, b).double()
        nn.init.orthogonal_(layer.weight)
        layers += [layer, GroupSort(2)]
    return nn.Sequential(*layers[:-1])


def shortest(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Labels, and margin / sqrt 2: no flip of a 1-Lipschitz network is nearer."""
    with torch.no_grad():
        z = model(x)
    top = z.topk(2).values
    return z.argmax(1), (top[:, 0] - top[:, 1]) / math.sqrt(2)


def test_no_radius_of_a_sorting_network_is_below_its_margin() -> None:
    model = orthogonal((16, 220, 220, 200, 5), 0)
    with torch.no_grad():
        model[-1].bias[0] += 1.5  # margins that reach beyond many kinks
    x = torch.rand(3, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y, simple = shortest(model, x)
    found = ws.radii(model, x, y, 2, None, arithmetic="exact", upper=1.02 * simple)
    assert (found.values >= simple * (1 - 1e-8)).all()
    assert found.proved_by is not None and set(found.proved_by) <= {"products", "ball", "crown"}
    assert "products" in found.proved_by
    crown = ws.radii(model, x, y, 2, None, "crown", arithmetic="exact")
    assert (crown.values < 0.9 * simple).all()
    assert crown.proved_by == ("crown",) * 3
    threat = ws.Threat(2, INF, 1.0, None)
    wanted = simple * (1 - 1e-8)
    assert ws.verify(model, x, y, threat, arithmetic="exact", at=wanted).proved.all()
    flips = ws.nearest(model, x, y, 2, None, passes=100, warn=False).distances
    assert (found.values <= flips).all()


def test_balls_pass_through_sorting() -> None:
    """The bounds with balls see it by themselves, on every sample."""
    model = orthogonal((10, 24, 24, 4), 2)
    graph = read(model, (10,))
    x = torch.rand(4, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y, simple = shortest(model, x)
    inside = ball_margins(graph, x, y, 0.99 * simple, 2.0, None, 5)
    assert (inside.scatter(1, y[:, None], INF).amin(1) > 0).all()


@pytest.mark.few(6)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_the_norms_of_pairs(norm: float, mode: str) -> None:
    """Those of the differences of logits one by one, in any rounding mode not below the truth."""
    torch.manual_seed(3)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(4000, 3, bias=False)).double()
    graph = read(flat, (4000,))
    weight = flat[1].weight.detach()
    with rounded(mode):
        found = pair_products(graph, norm, 1)
    for j in (0, 2):
        row = [abs(Fraction(float(a)) - Fraction(float(b))) for a, b in zip(weight[1], weight[j])]
        value = Fraction(float(found[j]))
        if norm == 2:
            assert value**2 >= sum(v * v for v in row)
        else:
            assert value >= (max(row) if norm == 1 else sum(row))
    deep = read(orthogonal((6, 12, 12, 4), 4), (6,))
    pairs = pair_products(deep, norm, 0)
    for j in range(1, 4):
        one = torch.zeros(1, 4, dtype=torch.float64)
        one[0, 0], one[0, j] = 1.0, -1.0
        assert float(pairs[j]) == pytest.approx(product(deep.head(one), norm, INF), rel=1e-6)
