"""Parts of a sweep that only some networks need, each held to what it promises: curves, copies,
slopes of their own, sums in any order.
"""

import math
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, fractions, rounded
from wassail.certificates.graph.activations import ACTIVATIONS, Activation
from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Matrix, Sum
from wassail.certificates.graph.operators.normalise import RankOne
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.planes import Curve, Plane
from wassail.certificates.graph.planes import Span as Range
from wassail.certificates.graph.reader import read
from wassail.certificates.graph.region import Ball, Region
from wassail.certificates.relax import crown
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.executed import arithmetic_of
from wassail.certificates.relax.lines import Arithmetic, InputExtent, Shape, Spread
from wassail.certificates.relax.ranges import bounds_on, condensed, upper_on

INF = math.inf
SINGLE = torch.float32
DOUBLE = torch.float64
ONE = torch.zeros(1).long()


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def start(*shape: int) -> Node:
    return Node((), shape, "the input")


def ball(x: Tensor, radius: float, norm: float = INF) -> Balls:
    return Balls.make(x, torch.full((len(x),), radius, dtype=DOUBLE), norm, None)


def in_a_row(values: Tensor) -> Tensor:
    """The sum, one term after the other: the longest chain of roundings."""
    return values.cumsum(-1)[..., -1]


@pytest.mark.parametrize("mode", MODES)
def test_lines_pay_for_long_sums(mode: str) -> None:
    """Three thousand neurons whose lines are hit: `<w, far>` in any order is at least the sum."""
    width = 3000
    high = 1 + uniform(1, width, seed=1)
    c = torch.zeros_like(high)
    node = Node((0,), (width,), "", Relu(torch.tensor(0.0, dtype=DOUBLE)))
    shape = Shape(node, c, -high, high)
    kind = Arithmetic(SimpleNamespace(nodes=(node,)), DOUBLE)  # type: ignore[arg-type]
    half = torch.full_like(high, 0.5)
    found = shape.lines(half, half, torch.zeros_like(high), kind)
    with rounded(mode):
        total = in_a_row(found.off) + in_a_row(found.far)
    # At both ends `relu(d) - d / 2` is half of the width.
    assert Fraction(float(total)) >= sum(fractions(high)[0]) / 2


class Straight(Activation):
    """The identity, which says nothing of rounding: the line touches at an end."""

    def value(self, v: Tensor) -> Tensor:
        return v

    def derivative(self, v: Tensor) -> Tensor:
        return torch.ones_like(v)

    def touch(self, slope: Tensor, low: Tensor, high: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        return (high if above else low), torch.zeros_like(low)

    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def _where(self, slope: Tensor, above: bool) -> Tensor:
        raise NotImplementedError

    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


class Steep(Straight):
    """The same with a slack that is all there is: its touching point is off by 1."""

    def touch(self, slope: Tensor, low: Tensor, high: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        return (high - 1 if above else low + 1), torch.ones_like(low)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Straight, Steep])
def test_shifts_pay_for_their_sums_and_pass_on_the_slack(
    kind: type[Activation], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`d <= d / 2 + s`: s is half of the larger end, a difference of two larger numbers."""
    monkeypatch.setitem(ACTIVATIONS, "straight", kind("straight", 0.0, -INF, INF))
    c = 1 + uniform(1, 200, seed=2)
    end = 8 + uniform(1, 200, seed=3)  # of the value itself
    monkeypatch.setattr(Shape, "ends", (c - 8, end))
    shape = Shape(Node((0,), (200,), "", Smooth("straight")), c, -end, end)
    slope = torch.full_like(c, 0.5)
    with rounded(mode):
        above = shape.shift(slope, True)
    for here, top, found in zip(*(fractions(v)[0] for v in (c, end, above))):
        assert found >= (top - here) / 2


def test_slopes_of_their_own_keep_the_error_of_the_sweep() -> None:
    """With the slopes that a sweep takes anyway the bounds are the same up to rounding, and the
    error of the input is in them.
    """
    nodes = (
        start(3),
        Node((0,), (6,), "", Affine(Matrix(uniform(6, 3, seed=4) - 0.5))),
        Node((1,), (6,), "", Relu(torch.tensor(0.0, dtype=DOUBLE))),
        Node((2,), (2,), "", Affine(Matrix(uniform(2, 6, seed=5)))),
    )
    sweep = Sweep(Graph(nodes), ball(torch.zeros(1, 3, dtype=DOUBLE), 1.0)).run()
    bend = sweep.bends[2]
    assert bend.crossing.all()
    slopes = sweep.slopes(2)
    line = sweep.exact.lines[2]
    assert torch.equal(slopes.up, line.mid + line.rad)
    below = slopes.down * slopes.c - slopes.drop
    assert torch.allclose(below, line.off - line.far, rtol=1e-9, atol=1e-12)
    exact = slopes.down * bend.shape.c - bend.shape.here
    assert (exact - below >= bend.error).all()


@pytest.mark.parametrize("mode", MODES)
def test_copied_entries_pay_for_their_value(mode: str) -> None:
    """`x + b` is rounded: what is known of it from a substitution has to say so."""
    bias = uniform(40, seed=6)
    x = uniform(1, 40, seed=7) * 1e3
    graph = Graph((start(40), Node((0,), (40,), "", Affine(Sum(1), bias))))
    with rounded(mode):
        sweep = Sweep(graph, ball(x, 2.0**-80)).run()
        eye = torch.eye(40, dtype=DOUBLE)
        constant, _, _ = sweep.substitute(sweep.exact, 1, eye, torch.zeros(40).long(), True)
    for k in range(40):
        exact = Fraction(float(x[0, k])) + Fraction(float(bias[k]))
        off = exact - Fraction(float(sweep.centre[1][0, k]))
        assert Fraction(float(constant[k])) >= off and Fraction(float(constant[40 + k])) >= -off


@pytest.mark.parametrize("mode", MODES)
def test_what_is_executed_without_rounding_is_still_rounded_in_the_graph(mode: str) -> None:
    """A clamp is exact; the graph computes `c - relu(c - x)`."""
    model = nn.Sequential(nn.Hardtanh(-1 / 3, 1e9), nn.Linear(30, 2)).double().eval()
    graph = arithmetic_of(read(model, (30,)), "executed")
    x = uniform(1, 30, seed=8) * 1e-3
    with rounded(mode):
        sweep = Sweep(graph, ball(x, 0.0)).run()
    node = graph.nodes[1]
    assert isinstance(node.op, Affine) and node.bias is not None and not sweep.executed[1].any()
    low, high = sweep.spans[1]
    sign = 1 if float(node.op.map.forward(torch.ones(1, 30, dtype=DOUBLE))[0, 0]) > 0 else -1
    bias = fractions(node.bias.expand(30))
    for k in range(30):
        exact = sign * Fraction(float(x[0, k])) + bias[k]
        centre = Fraction(float(sweep.centre[1][0, k]))
        bottom, top = (Fraction(float(side[0, k])) for side in (low, high))
        assert centre + bottom <= exact <= centre + top


def test_coefficients_of_a_relu_on_the_input_are_rounded() -> None:
    """In float32, through a slope that has no layer before it."""
    slope = float(torch.tensor(0.1, dtype=SINGLE))
    nodes = (
        start(1),
        Node((0,), (1,), "", Relu(torch.tensor(slope, dtype=DOUBLE))),
        Node((1,), (1,), "", Affine(Matrix(torch.ones(1, 1, dtype=DOUBLE)))),
    )
    sweep = Sweep(Graph(nodes), ball(torch.full((1, 1), -10.0, dtype=DOUBLE), 5.0)).run()
    w = (1 + uniform(200, 1, seed=9)).to(SINGLE)
    constant, a, _ = sweep.substitute(sweep.fast, 1, w, torch.zeros(200).long(), False)
    for row, more, tilt in zip(w[:, 0].tolist(), constant.tolist(), a[:, 0].tolist()):
        for d in (-5, 5):
            assert Fraction(row) * Fraction(slope) * d <= Fraction(more) + Fraction(tilt) * d


def test_coefficients_of_a_product_are_rounded() -> None:
    """`x x` where the coefficients of x are rounded by half a unit of float32 each."""
    x = torch.full((1, 1), 1 + 0.99 * 2.0**-24, dtype=DOUBLE)
    radius = 2.0**-25
    graph = Graph((start(1), Node((0, 0), (1,), "", Curved(Product("k,k->k")))))
    sweep = Sweep(graph, ball(x, radius)).run()
    w = torch.ones(1, 1, dtype=SINGLE)
    constant, a, _ = sweep.substitute(sweep.fast, 1, w, ONE, False)
    c = Fraction(float(x))
    d = Fraction(radius)
    value = (c + d) ** 2 - Fraction(float(sweep.centre[1]))
    assert Fraction(float(constant)) + Fraction(float(a)) * d >= value


@pytest.mark.parametrize("mode", MODES)
def test_planes_pay_for_long_sums(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three thousand products around 0: each is at most the product of two half widths."""
    width = 3000
    radius = 1 / 3
    x = torch.zeros(1, width, dtype=DOUBLE)
    graph = Graph((start(width), Node((0, 0), (width,), "", Curved(Product("k,k->k")))))
    sweep = SimpleNamespace(
        centre={0: x}, spans={0: ball(x, radius).box}, users=[[1, 1], []], spreads={},
        graph=graph,
        exact=Arithmetic(graph, DOUBLE), fast=Arithmetic(graph, SINGLE),
        _total=lambda j: torch.ones(1, dtype=DOUBLE), _sink=lambda *rest: None,
        _moved=lambda kind, j: torch.zeros_like(x),
    )  # fmt: skip
    far = torch.full((1, width), 1e9, dtype=DOUBLE)
    monkeypatch.setattr(InputExtent, "length", lambda *_: far)
    Sweep._curve(sweep, 1, graph.nodes[1], Product("k,k->k"))  # type: ignore[arg-type]
    with rounded(mode):
        total = in_a_row(sweep.exact.planes[1].far)
    assert Fraction(float(total)) >= width * Fraction(radius) ** 2


class Added(Curve):
    """`sum_k unit_k v_k` for every entry, with its plane; `ends` are the ends of its range."""

    keeps_gain: ClassVar[bool] = False
    lengthwise: ClassVar[bool] = False

    def __init__(self, unit: Tensor, value: Tensor, ends: Range) -> None:
        self.unit = unit
        self.given = value
        self.ends = ends

    def value(self, *v: Tensor) -> Tensor:
        return self.given

    def span(self, *spans: Range) -> Range:
        return self.ends

    def plane(self, centres: Any, spans: Any) -> Plane:
        none = torch.zeros_like(self.unit)
        return RankOne(none, torch.ones_like(none), self.unit, none, none)

    def plane_on(self, centres: Any, spans: Any, extent: Any) -> Plane:
        return self.plane(centres, spans)

    def adjoint(self, g: Range, spans: Any) -> tuple[Range, ...]:
        raise AssertionError("spans need no derivative")


def of_a_curve(curve: Added, radius: float) -> Range:
    """The span that a sweep gives such a curve."""
    n = curve.unit.shape[1]
    graph = Graph((start(n), Node((0,), (n,), "", Curved(curve))))
    return Sweep(graph, ball(torch.zeros(1, n, dtype=DOUBLE), radius)).run().spans[1]


@pytest.mark.parametrize("mode", MODES)
def test_spans_of_a_curve_by_its_range(mode: str) -> None:
    """From given ends and a given value: the difference is rounded."""
    n = 50
    value = uniform(1, n, seed=10)
    curve = Added(torch.ones(1, n, dtype=DOUBLE), value, (-2 - 0 * value, 2 + 0 * value))
    with rounded(mode):
        low, high = of_a_curve(curve, 1.0)
    for v, bottom, top in zip(*(fractions(side)[0] for side in (value, low, high))):
        assert bottom <= -2 - v and top >= 2 - v


@pytest.mark.parametrize("mode", MODES)
def test_spans_of_a_curve_by_its_plane(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else is known. A sum of 400, one term after the other."""
    n = 400
    unit = 1 + uniform(1, n, seed=11)
    curve = Added(unit, 0 * unit, (unit - INF, unit + INF))

    def reach(self: RankOne, *sizes: Tensor) -> Tensor:
        return in_a_row(self.unit * sizes[0])[:, None].expand_as(self.unit)

    monkeypatch.setattr(RankOne, "reach", reach)
    with rounded(mode):
        low, high = of_a_curve(curve, 1 / 3)
    exact = sum(fractions(unit)[0]) * Fraction(1 / 3)
    assert Fraction(float(high[0, 0])) >= exact and Fraction(float(low[0, 0])) <= -exact


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("spread", [0.0, INF])
def test_lengths_of_rows(spread: float, mode: str) -> None:
    """By a linear function that is constant, and by the span alone."""
    n = 300
    low = -1 - uniform(1, n, seed=12)
    high = -low
    rest = 1 + uniform(1, n, seed=13)
    zero = torch.zeros(1, n, dtype=DOUBLE)
    sweep = SimpleNamespace(
        graph=SimpleNamespace(nodes=(start(n),)),
        spreads={0: Spread(zero[..., None], zero, rest / 8 + spread)},
        spans={0: (low, high)},
        inputs=ball(torch.zeros(1, 1, dtype=DOUBLE), 1.0),
    )
    with rounded(mode):
        found = float(InputExtent(sweep, Node((0,), (n,), "")).length(0, (0,)))  # type: ignore[arg-type]
    sides = fractions(rest / 8 if spread == 0 else high)[0]
    assert Fraction(found) ** 2 >= sum(v * v for v in sides)


def test_screening_pays_for_long_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 equal terms in float32, one after the other: they are rounded the same way."""

    def slow(rows: Tensor, values: Tensor) -> Tensor:
        total = np.add.accumulate((rows * values).flatten(1).numpy(), 1)[:, -1]
        return torch.from_numpy(total).double()  # torch would add them up in float64

    monkeypatch.setattr(crown, "row_dot", slow)
    n = 4096
    graph = Graph((start(n),))
    for size in (0.1, 1 / 3, 0.7, 1.3, 1.7):
        high = torch.full((1, n), size, dtype=SINGLE).double()
        sweep = SimpleNamespace(
            graph=graph, fast=Arithmetic(graph, SINGLE), halves={}, spans={0: (-high, high)}
        )
        zero = torch.zeros(1, dtype=DOUBLE)
        weight = {0: torch.ones(1, n, dtype=SINGLE)}
        low, top = Sweep._meet(sweep, weight, ONE, zero, zero)  # type: ignore[arg-type]
        exact = n * Fraction(float(high[0, 0]))
        assert Fraction(float(top)) >= exact and Fraction(float(low)) <= -exact


@pytest.mark.parametrize("mode", MODES)
def test_a_condensed_network_pays_for_the_sums_it_is_made_of(mode: str) -> None:
    """Thirty thousand active neurons are one coefficient, whose value is known."""
    width = 30000
    first = 1 + uniform(width, 1, seed=14)
    second = uniform(1, width, seed=15)
    bias = -(second @ first)[0]
    nodes = (
        start(1),
        Node((0,), (width,), "", Affine(Matrix(first))),
        Node((1,), (width,), "", Relu(torch.tensor(0.0, dtype=DOUBLE))),
        Node((2,), (1,), "", Affine(Matrix(second), bias)),
    )
    region = Region.make(Ball(torch.ones(1, dtype=DOUBLE), 2.0**-40, INF), 1)
    with rounded(mode):
        small = condensed(bounds_on(Graph(nodes), region))
        rows = torch.tensor([[1.0], [-1.0]], dtype=DOUBLE)
        top, bottom = upper_on(small.graph, region, rows).tolist()
    assert small.graph.neurons == 0
    slope = sum(a * b for a, b in zip((v[0] for v in fractions(first)), fractions(second)[0]))
    for step in (-(2.0**-40), 0.0, 2.0**-40):
        value = slope * (1 + Fraction(step)) + Fraction(float(bias))
        assert Fraction(top) >= value and Fraction(bottom) >= -value
