"""What radii are made of, in every rounding mode, against fractions."""

import math
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from support.exact import perceptron, uniform
from support.rounding import MODES, rounded
from wassail.certificates.prove import products, radius_search
from wassail.certificates.prove.problem import Problem
from wassail.certificates.prove.radius_search import RadiusSearch

INF = math.inf
DOUBLE = torch.float64


@pytest.mark.parametrize("mode", MODES)
def test_a_ball_holds_the_whole_box_only_if_it_is_as_large(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every margin is positive: the radius is infinite if the farthest corner is in the ball."""
    wrong = 0
    for n in range(2, 12):
        square = Fraction(n)
        inside = math.sqrt(n)
        while Fraction(inside) ** 2 >= square:
            inside = math.nextafter(inside, 0)
        zero = torch.zeros(1, n, dtype=DOUBLE)
        margin = torch.tensor([[0.0, 1.0]], dtype=DOUBLE)
        a = torch.zeros(1, 2, n, dtype=DOUBLE)
        for radius, holds in ((inside, False), (2.0 * n, True)):
            tried = torch.tensor([radius], dtype=DOUBLE)
            balls = SimpleNamespace(radius=tried, below=zero, above=zero + 1)
            sweep = SimpleNamespace(balls=balls, rows=0, proved=dict)
            monkeypatch.setattr(
                radius_search, "Sweep", lambda *_, sweep=sweep: SimpleNamespace(run=lambda: sweep)
            )
            found = (margin, margin, a)
            monkeypatch.setattr(radius_search, "margins", lambda *_, found=found: found)
            graph = perceptron([torch.zeros(2, n, dtype=DOUBLE)], [torch.tensor([1.0, 0.0])])
            problem = Problem.of(graph, zero, torch.tensor([0]), 2.0, (0.0, 1.0))
            search = RadiusSearch(problem, None, None, 1e-3, 1, lambda _: None)
            with rounded(mode):
                wrong += not holds and float(torch.linalg.vector_norm(balls.above)) <= radius
                search._try(torch.tensor([0]), tried)
            assert float(search.lower[0]) == (INF if holds else radius)
    assert wrong or mode == "up"


def test_radii_by_constants_pay_for_the_rounding_of_the_network(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Executed: margins lose what rounding may take in the radius, before they are divided."""
    weight = uniform(3, 4, seed=1)
    graph = perceptron([weight], [torch.zeros(3, dtype=DOUBLE)])
    x = uniform(5, 4, seed=2)
    y = graph.logits(x).argmax(1)
    lost = torch.full((5, 3), 1e-3, dtype=DOUBLE)
    found = []
    problem = Problem.of(graph, x, y, 2.0, None)
    for slack in (None, lost):
        monkeypatch.setattr(Problem, "slack", lambda *_, slack=slack: slack)
        found.append(products.product_radii(problem, torch.zeros(5).double()).tolist())
    for i, (plain, executed) in enumerate(zip(*found)):
        k = int(y[i])
        for j in range(3):
            if j != k:
                row = [Fraction(a) - Fraction(b) for a, b in zip(*weight[[k, j]].tolist())]
                margin = sum(a * Fraction(v) for a, v in zip(row, x[i].tolist()))
                square = sum(a**2 for a in row)
                assert Fraction(plain) ** 2 * square <= max(margin, 0) ** 2
                assert Fraction(executed) ** 2 * square <= max(margin - Fraction(1e-3), 0) ** 2
        assert executed > 0.5 * plain - 1e-2
