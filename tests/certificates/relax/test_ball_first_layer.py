"""The first layer and the ball together: never below what a point of the ball attains."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, fractions, rounded, serial
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.ball_quadratic_terms import FirstLayer, restricted_norm
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.norms import map_norm

DOUBLE = torch.float64


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed)) - 0.5


def entry_of(
    weight: Tensor, radius: float, x: Tensor, domain: object = None, rounding: float = 0.0
) -> FirstLayer:
    m, n = weight.shape
    nodes = (Node((), (n,), ""), Node((0,), (m,), "", Affine(Matrix(weight))))
    graph = Graph(nodes, rounding=rounding)
    size = torch.full((len(x),), radius, dtype=DOUBLE)
    balls = Balls.make(x, size, 2.0, domain)  # type: ignore[arg-type]
    free = torch.ones(len(x), m, dtype=torch.bool)
    norm = torch.full((len(x),), float(torch.linalg.matrix_norm(weight, 2)) * (1 + 1e-12))
    return FirstLayer(graph, [1], free, balls, norm.double())


def climbed(
    entry: FirstLayer, a: Tensor, lam: Tensor, weight: Tensor, x: Tensor, box: bool
) -> Tensor:
    """A point of the ball, and of the box, where the value is high, `(R, n)`."""
    r = entry.balls.radius[:, None]
    d = a * r / a.norm(dim=1, keepdim=True)
    for _ in range(300):
        pull = a + lam[:, None] * (d @ weight.T @ weight)
        d = d + 0.1 * pull
        for _ in range(20):
            d = d * (r / d.norm(dim=1, keepdim=True)).clamp(max=1)
            d = (x + d).clamp(0, 1) - x if box else d
    return d * (1 - 1e-12)


@pytest.mark.parametrize("box", [False, True])
def test_above_every_point_and_below_the_norms(box: bool) -> None:
    weight = uniform(7, 12, seed=1)
    x = (uniform(6, 12, seed=2) + 0.5).round() if box else uniform(6, 12, seed=2)
    entry = entry_of(weight, 0.3, x, (0.0, 1.0) if box else None)
    owner = torch.arange(6)
    a = uniform(6, 12, seed=3)
    plain = a.norm(dim=1) * 0.3
    for size in (1e-6, 0.01, 0.3, 3.0, 1e4):
        lam = torch.full((6,), size, dtype=DOUBLE)
        found = entry.bound(a, lam, owner)
        d = climbed(entry, a, lam, weight, x, box)
        value = (a * d).sum(1) + lam / 2 * (d @ weight.T).square().sum(1)
        assert (found >= value).all()
        most = plain + lam / 2 * entry.square * 0.09
        assert (found <= 1.02 * most).all()
        if size == 0.3 and not box:  # the direction of a is not the one that is stretched most
            assert (found < 0.99 * most).all() and (found <= 1.02 * value).all()


def test_entries_that_do_not_count_and_convolutions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(75, 2))
    graph = read(model.double(), (2, 5, 5))
    x = uniform(3, 50, seed=5).reshape(3, 2, 5, 5)
    radius = torch.full((3,), 0.4, dtype=DOUBLE)
    balls = Balls.make(x, radius, 2.0, None)
    order = torch.arange(50).reshape(2, 5, 5).permute(1, 2, 0).reshape(-1)
    free = uniform(3, 3, 5, 5, seed=6) > 0
    op = graph.nodes[1].op
    assert isinstance(op, Affine)
    norm = torch.full((3,), op.map.norm(2.0, (2, 5, 5), (3, 5, 5)), dtype=DOUBLE)
    entry = FirstLayer(graph, [1], free, balls.reordered(order), norm)
    a = uniform(3, 50, seed=7)
    lam = torch.full((3,), 0.5, dtype=DOUBLE)
    found = entry.bound(a[:, order], lam, torch.arange(3))
    for seed in range(20):
        d = uniform(3, 50, seed=20 + seed) + a * seed / 4
        d = d * (0.4 / d.norm(dim=1, keepdim=True)) * (1 - 1e-12)
        image = op.map.forward(d.reshape(3, 2, 5, 5)) * free
        value = (a * d).sum(1) + lam / 2 * image.flatten(1).square().sum(1)
        assert (found >= value).all()


@pytest.mark.parametrize("mode", MODES)
def test_rounding_is_paid_for(mode: str) -> None:
    """All directions are stretched alike, so that the bound is attained but for rounding."""
    n = 16
    scale = 1 + 1 / 3
    for seed in range(10):
        a = uniform(1, n, seed=seed)
        size = 1e-9 if seed % 2 else 0.05
        lam = torch.full((1,), size, dtype=DOUBLE)
        with rounded(mode):
            entry = entry_of(scale * torch.eye(n, dtype=DOUBLE), 1 / 3, torch.zeros(1, n))
            found = entry.bound(a, lam, torch.zeros(1).long())
        # The point along a: its length is at most that of the radius.
        exact = fractions(a)[0]
        square = sum(v * v for v in exact)
        length = Fraction(math.sqrt(float(square))) * (1 + Fraction(1, 2**50))
        share = Fraction(1 / 3) / length
        d = [v * share for v in exact]
        assert sum(v * v for v in d) <= Fraction(1 / 3) ** 2
        image = Fraction(scale) ** 2 * sum(v * v for v in d)
        value = sum(v * w for v, w in zip(exact, d)) + Fraction(size) / 2 * image
        assert Fraction(float(found)) >= value
        assert float(found) <= float(value) * (1 + 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_rounding_of_norms_is_paid_for(mode: str) -> None:
    """The square of a norm, and the norms of magnitudes of one map after the other."""
    for seed in range(10):
        weight = uniform(4, 3, seed=seed)
        norm = 1 + uniform(1, seed=seed + 10)
        nodes = (Node((), (3,), ""), Node((0,), (4,), "", Affine(Matrix(weight))))
        with rounded(mode):
            balls = Balls.make(torch.zeros(1, 3), torch.ones(1), 2.0, None)
            entry = FirstLayer(Graph(nodes), [1], torch.ones(1, 4) > 0, balls, norm)
        one, most = (Fraction(map_norm(Matrix(weight), s, (3,), (4,))) for s in (1.0, math.inf))
        assert Fraction(float(entry.square)) >= Fraction(float(norm)) ** 2
        assert Fraction(entry.rough) >= one * most


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("off", [0.0, 1e-6])
def test_rounding_of_maps_is_paid_for(off: float, mode: str) -> None:
    """There and back again; off: by how much the weights may be wrong, here all one way."""
    weight = 1 + uniform(1, 400, seed=20)
    x = 1 + uniform(1, 400, seed=21)
    with rounded(mode):
        entry = entry_of(weight, 1.0, torch.zeros(1, 400), rounding=off)
        found = entry._return(entry._image(x, torch.zeros(1).long()))
    rows, point = fractions(weight)[0], fractions(x)[0]
    image = sum(a * b for a, b in zip(rows, point)) * (1 + Fraction(off)) ** 2
    apart = [Fraction(float(v)) - a * image for v, a in zip(found[0], rows)]
    rate = Fraction(entry.unit) * Fraction(entry.rough)
    assert sum(v * v for v in apart) <= rate**2 * sum(v * v for v in point)


@pytest.mark.parametrize("mode", MODES)
def test_rounding_of_claims_is_paid_for(mode: str) -> None:
    """Given the multiplier and the point: a long sum, and the square of the radius alone."""
    zero = torch.zeros(1, dtype=DOUBLE)
    owner = torch.zeros(1).long()
    a = 1 + uniform(1, 4000, seed=22)
    with rounded(mode), serial():
        entry = entry_of(0 * a, 1e-9, torch.zeros(1, 4000))
        found = entry.claimed(a, zero, zero + 1, a, owner)
    exact = sum(v * v for v in fractions(a)[0]) + Fraction(1e-9) ** 2
    assert Fraction(float(found)) >= exact / 2
    for seed in range(20):
        mu, r = (1 + uniform(2, seed=seed)).tolist()
        with rounded(mode):
            entry = entry_of(0 * a[:, :1], r, torch.zeros(1, 1))
            found = entry.claimed(zero[None], zero, zero + mu, zero[None], owner)
        assert Fraction(float(found)) >= Fraction(mu) * Fraction(r) ** 2 / 2


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_the_rows_and_columns_that_move(mode: str) -> None:
    weight = uniform(5, 9, seed=8)
    rows = uniform(4, 5, seed=9) > 0
    columns = uniform(4, 9, seed=10) > 0
    with rounded(mode):
        found = restricted_norm(weight, rows, columns, 4)
    for k in range(4):
        part = weight * rows[k][:, None] * columns[k]
        top = float(torch.linalg.matrix_norm(part, 2))
        assert top <= float(found[k]) <= top * (1 + 1e-9) + 1e-9
    # Of rank one: the norm is known, as the length of a row times that of a column.
    u = 1 + uniform(30, seed=11)
    v = torch.ones(40, dtype=DOUBLE)
    with rounded(mode):
        one = restricted_norm(u[:, None] * v, None, None, 1)
    square = sum(f * f for f in fractions(u)) * 40
    assert Fraction(float(one)) ** 2 >= square
