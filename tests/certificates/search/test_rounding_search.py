"""Splits of the input, in every rounding mode, against fractions."""

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from support.exact import scattered, uniform
from support.rounding import MODES, rounded
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.region import Region
from wassail.certificates.search import boxes, input_boxes

INF = math.inf
DOUBLE = torch.float64


def first_pieces(region: Region, mode: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The pieces that a search over a region begins with."""
    n = len(region.low)
    seen: dict[str, Tensor] = {}

    def bounded(self: Any, low: Tensor, high: Tensor, face: Tensor, parent: Tensor) -> Any:
        seen.update(low=low, high=high, face=face)
        none = torch.zeros_like(face)
        return input_boxes.InputBoxes(low, high, face, parent, parent, none)

    monkeypatch.setattr(input_boxes.InputSearch, "_bounded", bounded)
    weight = torch.ones(1, n, dtype=DOUBLE)
    graph = Graph((Node((), (n,), ""), Node((0,), (1,), "", Affine(Matrix(weight)))))
    with rounded(mode):
        input_boxes.InputSearch(graph, region, 2.0, 2.0, lambda x: x[:, 0], lambda x: x)
    return seen


@pytest.mark.parametrize("best", [INF, 7.0, math.nan])
def test_a_bound_that_is_no_number_proves_nothing(
    best: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = Graph((Node((), (1,), ""), Node((0,), (1,), "", Affine(Matrix(torch.eye(1).double())))))
    box = Region.make((0.0, 1.0), 1)
    nothing = torch.full((), math.nan, dtype=DOUBLE)
    monkeypatch.setattr(input_boxes, "entry_norms", lambda *args: nothing)
    search = input_boxes.InputSearch(
        graph, box, 2.0, 2.0, lambda x: x[:, 0] * math.nan, lambda x: x, best=best, most=50
    )
    search.sift()
    search.proceed()
    assert search.lower == 0.0
    assert len(search.open) and search.upper == (INF if math.isnan(best) else best)


@pytest.mark.parametrize("mode", MODES)
def test_the_first_pieces_cover_a_region(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A box up to where the rays start, and directions up to the walls."""
    far = torch.full((3,), INF, dtype=DOUBLE)
    for seed in range(20):
        for scale in (1e-30, 1.0, 1e6):
            centre = scale * scattered(3, seed=seed)
            low = -far
            high = far.clone()
            low[0] = float(centre[0]) - 3 * float(uniform(1, seed=seed + 20))
            high[1] = float(centre[1]) + 3 * float(uniform(1, seed=seed + 40))
            seen = first_pieces(Region(low, high, centre), mode, monkeypatch)
            rays = (seen["face"] == 2).nonzero().flatten()
            start = Fraction(float(seen["low"][rays[1], 2]))
            assert float(seen["high"][rays[0], 2]) == -float(start)
            middle = [Fraction(v) for v in centre.tolist()]
            for i, c in enumerate(middle):
                bottom = float(seen["low"][0, i])
                top = float(seen["high"][0, i])
                assert Fraction(bottom) <= c - start or bottom == float(low[i])
                assert Fraction(top) >= c + start or top == float(high[i])
            for ray in rays.tolist():
                least = (Fraction(float(low[0])) - middle[0]) / start
                most = (Fraction(float(high[1])) - middle[1]) / start
                assert Fraction(float(seen["low"][ray, 0])) <= least
                assert Fraction(float(seen["high"][ray, 1])) >= most


def a_search(region: Region, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A search whose pieces are not bounded."""
    first_pieces(region, "nearest", monkeypatch)
    n = len(region.low)
    weight = torch.ones(1, n, dtype=DOUBLE)
    graph = Graph((Node((), (n,), ""), Node((0,), (1,), "", Affine(Matrix(weight)))))
    return input_boxes.InputSearch(graph, region, 2.0, 2.0, lambda x: x[:, 0], lambda x: x)


@pytest.mark.parametrize("mode", MODES)
def test_rays_that_are_cut_end_in_a_box(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    far = torch.full((2,), INF, dtype=DOUBLE)
    for seed in range(20):
        for scale in (1e-3, 1e6):
            centre = scale * scattered(2, seed=seed)
            search = a_search(Region(-far, far, centre), monkeypatch)
            near = 1 + float(uniform(1, seed=seed + 20))
            u = (uniform(2, seed=seed + 40) - 0.5).sort().values.tolist()
            low = torch.tensor([[near, u[0]]], dtype=DOUBLE)
            high = torch.tensor([[2 * near, u[1]]], dtype=DOUBLE)
            with rounded(mode):
                least, most = search._shell(low, high, torch.tensor([0]))
            c = [Fraction(v) for v in centre.tolist()]
            for t in (Fraction(near), Fraction(2 * near)):
                for side in u:
                    point = (c[0] + t, c[1] + t * Fraction(side))
                    for value, a, b in zip(point, least[0].tolist(), most[0].tolist()):
                        assert Fraction(a) <= value <= Fraction(b)


def test_pieces_that_touch_a_ball_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its radius is the distance of their corner, rounded up."""
    far = torch.full((2,), INF, dtype=DOUBLE)
    wrong = 0
    for seed in range(100):
        corner = scattered(2, seed=seed).abs()
        square = sum(Fraction(v) ** 2 for v in corner.tolist())
        radius = math.hypot(*corner.tolist())
        while Fraction(radius) ** 2 < square:
            radius = math.nextafter(radius, INF)
        zero = torch.zeros(2, dtype=DOUBLE)
        search = a_search(Region(-far, far, zero, radius, 2.0), monkeypatch)
        with rounded("up"):
            wrong += float(torch.linalg.vector_norm(corner)) > radius
            assert search._meets(corner[None], 2 * corner[None], torch.tensor([-1])).all()
    assert wrong


@pytest.mark.parametrize("mode", MODES)
def test_boxes_around_their_middle(mode: str) -> None:
    low = scattered(40, 3, seed=1)
    high = low + scattered(40, 3, seed=2).abs()
    with rounded(mode):
        found = boxes.box_balls(low, high)
    for x, below, above, a, b in zip(
        *(v.flatten().tolist() for v in (found.x, found.below, found.above, low, high))
    ):
        assert Fraction(x) - Fraction(below) <= Fraction(a)
        assert Fraction(x) + Fraction(above) >= Fraction(b)
