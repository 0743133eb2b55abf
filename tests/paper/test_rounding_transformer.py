"""The constants of transformers in every rounding mode, against exact values."""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import mpmath  # comes with torch, through sympy
import pytest
import torch
from torch import Tensor

from support.exact import scattered, uniform
from support.rounding import MODES, rounded
from wassail.certificates.graph.graph import Affine, Graph, Node
from wassail.certificates.graph.maps import Matrix, Scale
from wassail.certificates.graph.region import Region
from wassail.certificates.lipschitz import steepest
from wassail.paper import attention_bounds as attention
from wassail.paper import corollary, transformer_constants

INF = math.inf
DOUBLE = torch.float64


def linear(weight: Tensor) -> Graph:
    """A network of one layer."""
    m, n = weight.shape
    return Graph((Node((), (n,), ""), Node((0,), (m,), "", Affine(Matrix(weight)))))


def logarithm(exact: Fraction) -> Any:
    """With 40 digits."""
    return mpmath.log(exact.numerator) - mpmath.log(exact.denominator)


def test_the_ascent_of_the_corollary_is_rounded_down() -> None:
    """A rank of one: the constant is a root, and half of the roots are rounded up."""
    wrong = 0
    for seed in range(12):
        weight = 1 + uniform(1, 5, seed=seed)
        square = sum(Fraction(v) ** 2 for v in weight[0].tolist())
        graph = linear(weight)
        found, _ = corollary._climb(graph, Region.make((0.0, 1.0), 5), 2, 0)
        wrong += Fraction(found / (1 - steepest.room_of(1, 5))) ** 2 > square
        assert Fraction(found) ** 2 <= square
    assert wrong


@pytest.mark.parametrize("mode", MODES)
def test_logarithms_of_a_corollary_are_rounded_up(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the base 10: of all modules one after the other, and of the network in one piece."""
    one = Affine(Scale(torch.ones(1, dtype=DOUBLE)))
    nodes = (Node((), (3,), ""), Node((0,), (3,), "", one), Node((1,), (3,), "", one))
    part = corollary._Module(0, 0, "network", (0, 1), (0, 1))
    monkeypatch.setattr(corollary, "_climb", lambda *_: (0.0, torch.zeros(3)))
    monkeypatch.setattr(corollary, "_modules", lambda _: ("", [part]))
    for k in range(20):
        log = 3 * abs(float(scattered(1, seed=k)))
        for whole in (2 * log, 0.9 * log):
            fake = SimpleNamespace(
                stretch=lambda _, end, log=log, whole=whole: (log, whole)[end - 1]
            )
            for walk in (corollary.TransformerConstants, corollary.PaperWalk):
                monkeypatch.setattr(walk, "make", lambda *_, fake=fake: fake)
            with rounded(mode):
                found = corollary.corollary(Graph(nodes), 2, (0.0, 1.0))
            with mpmath.workdps(40):
                for value, exact in (
                    (found.paper, log),
                    (found.ours, log),
                    (found.local, min(log, whole)),
                ):
                    assert value is not None
                    assert mpmath.mpf(value) >= mpmath.mpf(exact) / mpmath.log(10)
                    assert value < exact / math.log(10) + 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_a_walk_over_a_large_factor(mode: str) -> None:
    """Its logarithm has few digits after the point, step by step and token by token."""
    for k in range(20):
        factor = (1e250 if mode == "nearest" else 1e150) * (1 + float(uniform(1, seed=k)))
        scale = Scale(torch.tensor([factor], dtype=DOUBLE))
        graph = Graph((Node((), (1,), ""), Node((0,), (1,), "", Affine(scale))))
        for close in (False, True):
            walk = transformer_constants.TransformerConstants(graph, {}, {}, close)
            with rounded(mode):
                found = walk.stretch(0, 1)
            with mpmath.workdps(40):
                exact = logarithm(Fraction(factor))
                assert mpmath.mpf(found) >= exact and found < float(exact) + 1e-9


@pytest.mark.parametrize("mode", MODES)
def test_a_walk_over_matrices_whose_product_cancels(mode: str) -> None:
    """Products of entries that are not exact, and whose sum is a millionth of them."""
    left = torch.tensor([[0.7, -0.9]], dtype=DOUBLE)
    row = uniform(1, 6, seed=95)
    rest = row * (0.7 / 0.9) * (1 + 1e-7 * scattered(1, 6, seed=96))
    first = torch.cat([row, rest])
    graph = Graph(
        (
            Node((), (6,), ""),
            Node((0,), (2,), "", Affine(Matrix(first))),
            Node((1,), (1,), "", Affine(Matrix(left))),
        )
    )
    walk = transformer_constants.TransformerConstants(graph, {}, {})
    with rounded(mode):
        *_, (_, found) = walk.linear(2)
    columns = list(zip(*first.tolist()))
    square = sum(
        ((Fraction(0.7) * Fraction(a) - Fraction(0.9) * Fraction(b)) ** 2 for a, b in columns),
        Fraction(0),
    )
    with mpmath.workdps(40):
        # `found` is a logarithm to nearest: what it loses is charged in `stretch`.
        assert mpmath.mpf(found) + mpmath.mpf(2) ** -49 >= logarithm(square) / 2


@pytest.mark.parametrize("mode", MODES)
def test_a_walk_over_attention_whose_tokens_are_in_a_box(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their length is that of the farthest corner."""
    reached: list[float] = []

    def bound(n: int, a: Tensor, v: Tensor, reach: float, *_: object) -> float:
        reached.append(reach)
        return 1.0

    monkeypatch.setattr(transformer_constants, "global_bound", bound)
    monkeypatch.setattr(transformer_constants, "heads", lambda *_: 1.0)
    monkeypatch.setattr(transformer_constants, "ROOM", 0)
    n = 2
    d = 400
    one = torch.ones(1, 1, 1, dtype=DOUBLE)
    for seed in range(10):
        low = scattered(1, n, d, seed=seed)
        high = low + scattered(1, n, d, seed=seed + 10).abs()
        attention = SimpleNamespace(
            source=0,
            scores=1,
            tokens=n,
            a=torch.zeros(1, d, d),
            bias=torch.zeros(1, d),
            mask=one,
            most=torch.zeros(5, 1),
            value=one,
            out=one,
            axes=SimpleNamespace(split=lambda side: [side]),
        )
        graph = Graph((Node((), (n, d), ""),))
        walk = transformer_constants.TransformerConstants(
            graph, {0: (low, high), 1: (low, high)}, {}
        )
        with rounded(mode):
            walk.attention_bound(attention)  # type: ignore[arg-type]
        corner = torch.maximum(low.abs(), high.abs())[0].tolist()
        longest = max(sum(Fraction(v) ** 2 for v in row) for row in corner)
        assert Fraction(reached[-1]) ** 2 >= longest
        assert reached[-1] < math.sqrt(longest) * (1 + 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_singular_values_of_any_size(mode: str) -> None:
    """Squares of the entries over- or underflow: the bound is neither 0 nor not a number."""
    row = torch.tensor([[3.0, 4.0]], dtype=DOUBLE)
    for exponent in (-1060, -1000, -520, 0, 500, 1000):
        value = row * 2.0**exponent
        many = torch.stack([value, row, 0 * row])
        with rounded(mode):
            one = attention.spectral(value)
            first, second, nothing = attention.spectral(many).tolist()
        for found in (float(one), first):
            assert Fraction(5) * Fraction(2.0**exponent) <= Fraction(found)
            assert found < 5 * (1 + 1e-9) * 2.0**exponent + 2.0**-1060
        assert 5 <= second < 5 * (1 + 1e-9) and nothing == 0
    assert (
        float(attention.spectral(torch.tensor([[1e300, 1e300], [1e300, 1e300]]).double())) > 1e300
    )
    assert attention.spectral(torch.tensor([[1.0, INF]], dtype=DOUBLE)) == INF
    assert attention.spectral(torch.tensor([[1.0, math.nan]], dtype=DOUBLE)) == INF
    assert transformer_constants.log(math.nan) == INF


def test_a_walk_over_factors_that_undo_each_other() -> None:
    """A factor of 1e-250 and one of 1e250: the derivative is 1."""
    nodes = [Node((), (2,), "")]
    for factor in (1e-250, 1e250):
        scale = Scale(torch.tensor([factor, factor], dtype=DOUBLE))
        nodes.append(Node((len(nodes) - 1,), (2,), "", Affine(scale)))
    for close in (False, True):
        walk = transformer_constants.TransformerConstants(Graph(tuple(nodes)), {}, {}, close)
        assert 0 <= walk.stretch(0, 2) < 1e-9
