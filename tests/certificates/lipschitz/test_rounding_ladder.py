"""Lipschitz constants and what they are made of, in every rounding mode, against exact values."""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.exact import uniform
from support.rounding import MODES, rounded, serial
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.region import Region
from wassail.certificates.lipschitz import ladder, steepest

INF = math.inf
DOUBLE = torch.float64


def linear(weight: Tensor) -> Graph:
    """A network of one layer."""
    m, n = weight.shape
    return Graph((Node((), (n,), ""), Node((0,), (m,), "", Affine(Matrix(weight)))))


@pytest.mark.parametrize("mode", MODES)
def test_jacobians_of_a_wide_layer_are_added_up_from_both_sides(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One output and very many inputs: the constant for l-inf is the sum of the weights."""
    n = 60_000
    weight = 1 + uniform(1, n, seed=1)
    exact = sum(map(Fraction, weight[0].tolist()))
    far = torch.full((1,), INF, dtype=DOUBLE)
    found = SimpleNamespace(entries=lambda _: (weight, weight), norm=lambda *_: far)
    monkeypatch.setattr(ladder, "gradients", lambda *_: found)
    bounds = SimpleNamespace(graph=SimpleNamespace(outputs=1))
    with rounded(mode), serial():
        upper = ladder.propagated(bounds, INF, INF)  # type: ignore[arg-type]
        lower = float(weight.sum(-1)) * (1 - steepest.room_of(1, n))
    assert exact <= Fraction(upper) < exact * (1 + Fraction(1, 10**9))
    assert exact * (1 - Fraction(1, 10**9)) < Fraction(lower) <= exact


@pytest.mark.parametrize("mode", MODES)
def test_constants_from_below(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of weights that are all positive, at points of a search, an ascent and a ladder."""
    seen: dict[str, Any] = {}

    def search(*given: Any, **_: Any) -> Any:
        seen["value"] = given[4]
        return SimpleNamespace(proceed=lambda *_: None, lower=0.0, upper=INF, witness=None, nodes=0)

    monkeypatch.setattr(ladder, "InputSearch", search)
    wrong = 0
    for seed in range(8):
        n = 300
        weight = 1 + uniform(1, n, seed=seed)
        exact = sum(map(Fraction, weight[0].tolist()))
        graph = linear(weight)
        region = Region.make((0.0, 1.0), n)
        climber = ladder.Ladder(graph, region, INF, INF)
        climber._search()
        with rounded(mode):
            jacobian = steepest.jacobians(graph, torch.zeros(1, n, dtype=DOUBLE))
            plain = float(steepest.jacobian_norms(jacobian, INF, INF))
            climber._keep(torch.zeros(2, n, dtype=DOUBLE))
            value = float(seen["value"](torch.zeros(1, n, dtype=DOUBLE))[0])
        wrong += Fraction(plain) > exact
        for lower in (climber.lower, value):
            assert exact * (1 - Fraction(1, 10**9)) < Fraction(lower) <= exact
    assert wrong or mode == "down"
