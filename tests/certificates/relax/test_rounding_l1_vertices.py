"""Bounds by the vertices of an l1 ball: every part pays for its own rounding, in every rounding
mode, against fractions.

A part is given numbers, which are exact as they stand.
"""

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from support.exact import normal, perceptron, uniform
from support.rounding import MODES, fractions, rounded, serial
from wassail.certificates.graph.graph import Graph, Node, Relu
from wassail.certificates.relax import l1_vertices
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.l1_vertices import (
    Found,
    Turn,
    VertexCones,
    VertexValues,
    above,
    turns_of,
)
from wassail.certificates.relax.lines import Precision, Shape, Values
from wassail.certificates.relax.rows import row_dot
from wassail.certificates.relax.slope_cones import Pulled

SINGLE = torch.float32
DOUBLE = torch.float64
ONE = torch.zeros(1, dtype=torch.int64)


def given(n: int, radius: float = 1 / 3, **more: Any) -> VertexCones:
    """Without a sweep: samples of n inputs and no walls."""
    found = object.__new__(VertexCones)
    x = torch.zeros(1, n, dtype=DOUBLE)
    balls = Balls.make(x, torch.full((1,), radius, dtype=DOUBLE), 1.0, None)
    found.graph = Graph((Node((), (n,), "the input"),))
    found.balls = found.inputs = balls
    found.turns = {}
    found.other = None
    found.counts = []
    found.walls = torch.zeros(1, 2 * n, dtype=DOUBLE)
    for name, value in more.items():
        setattr(found, name, value)
    return found


# --- values at vertices -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_above_a_zone(sparse: bool, mode: str) -> None:
    values = 1 + uniform(20, 10, seed=1)
    zone = (1 + uniform(20, seed=2)) / 3
    with rounded(mode):
        part = above(values, zone, sparse)
        found = part.values if part.row is None else part.values.reshape(values.shape)
    for row, start, over in zip(*map(fractions, (values, zone, found))):
        assert all(size >= value - start for value, size in zip(row, over))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
def test_sums_of_many_functions(sparse: bool, mode: str) -> None:
    count = 4000
    values = 1 + uniform(count, 2, seed=3)
    weight = 1 + uniform(1, count, seed=4)
    with rounded(mode):
        part = above(values, torch.zeros(count, dtype=DOUBLE), sparse)
        found = VertexValues.make([part], 2, values).sums(weight)
    known = part.values.reshape(values.shape)
    for size, column in zip(found[0].tolist(), fractions(known.T.contiguous())):
        exact = sum(a * b for a, b in zip(column, fractions(weight)[0]))
        assert Fraction(size) >= exact


@pytest.mark.parametrize("mode", MODES)
def test_values_of_rows(mode: str) -> None:
    """What rounding takes from the value at a vertex is fixed besides."""
    rows = 50
    found = given(3, turns={2: SimpleNamespace(samples=[turn(1, 3)])})
    a = normal(rows, 3, seed=5)
    sign = torch.where(uniform(rows, seed=6) > 0.5, 1.0, -1.0).double()
    bent = sign[:, None] * (1 + uniform(rows, 1, seed=7))
    zero = torch.zeros(rows, dtype=DOUBLE)
    with rounded(mode):
        values, fixed, _ = found._values(Pulled(zero, zero, a, {2: bent}), sign, 0)
    radius = Fraction(1 / 3)
    added = fractions(found.turns[2].samples[0].vertices.values)[0]
    start = Fraction(float(found.turns[2].samples[0].start))
    parts = (a * sign[:, None], bent[:, 0].abs(), values, fixed)
    for row, weight, known, paid in zip(*map(fractions, parts)):
        for k, value in enumerate((*row, *(-v for v in row))):
            exact = value * radius + weight * (added[k] + start)
            assert known[k] + paid >= exact


def turn(count: int, n: int) -> Turn:
    """Neurons that bend at every vertex, and start to at the sample."""
    values = (1 + uniform(count, 2 * n, seed=8)) / 7
    far = torch.full((count,), 1e9, dtype=DOUBLE)
    start = (1 + uniform(count, seed=9)) / 7
    return Turn(torch.arange(count), far, start, far, VertexValues(count, values, None, None))


@pytest.mark.parametrize("mode", MODES)
def test_starts_of_many_neurons(mode: str) -> None:
    """Added up one after the other; and shifts and spreads that cancel."""
    count = 8000
    found = given(1, turns={2: SimpleNamespace(samples=[turn(count, 1)])})
    bent = 1 + uniform(1, count, seed=10)
    one = torch.ones(1, dtype=DOUBLE)
    none = 0 * one
    with rounded(mode), serial():
        fixed = found._values(Pulled(none, none, none[:, None], {2: bent}), one, 0)[1]
    start = found.turns[2].samples[0].start
    exact = sum(a * b for a, b in zip(fractions(bent)[0], fractions(start)))
    assert Fraction(float(fixed)) >= exact
    for seed in range(20):
        shift = 1e6 * normal(1, seed=seed)
        spread = shift.abs() * (1 + 1e-6 * uniform(1, seed=seed + 20))
        with rounded(mode):
            fixed = found._values(Pulled(shift, spread, none[:, None], {}), one, 0)[1]
        assert Fraction(float(fixed)) >= sum(Fraction(float(v)) for v in (shift, spread))


def filled(best: list[Fraction], share: list[Fraction]) -> Fraction:
    """The knapsack: the largest values first, shares of 1 in all."""
    left = Fraction(1)
    total = Fraction(0)
    for value, room in sorted(zip(best, share), reverse=True):
        taken = min(room, left)
        total += taken * value
        left -= taken
    return total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("few", [True, False])
def test_knapsacks_over_many_corners(few: bool, mode: str) -> None:
    """By prices, where few vertices are filled, and else by sorting."""
    n = 4096
    share = torch.full((1, n), 0.01 if few else 1e-3, dtype=DOUBLE)
    found = given(n, shares=share, counts=[100 if few else 1000])
    values = torch.zeros(1, 2 * n, dtype=DOUBLE)
    values[0, : n // 4] = uniform(n // 4, seed=11)  # one of each group of four
    values[0, :1000] += 1
    values[0, 500:1000] *= -1
    values[0, n:] = -values[0, :n]
    with rounded(mode):
        top = found._filled(values, 0)
    best = fractions(values[0, :n].abs())
    assert Fraction(float(top)) >= filled(best, fractions(share)[0])


# --- layers ------------------------------------------------------------------------------------


@pytest.fixture
def every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers, too, and nothing but vertices."""
    monkeypatch.setattr(l1_vertices, "LEAST_ENTRIES", 0)
    monkeypatch.setattr(l1_vertices, "BOTH_UP_TO_NEURONS", 0)


@pytest.mark.usefixtures("every_layer")
@pytest.mark.parametrize("mode", MODES)
def test_shares_of_corners_behind_a_wall(mode: str) -> None:
    """What the box leaves of the radius; nothing where it is one point."""
    n = 50
    graph = perceptron(
        [normal(3, n, seed=12), normal(2, 3, seed=13)], [torch.zeros(k).double() for k in (3, 2)]
    )
    x = uniform(1, n, seed=14)
    high = x + uniform(1, n, seed=15)
    radius = torch.full((1,), 0.7, dtype=DOUBLE)
    with rounded(mode):
        balls = Balls.make(x, radius, 1.0, (x, high))
        cones = Sweep(graph, balls).run().cones
    assert isinstance(cones, VertexCones)
    parts = (balls.above, cones.shares)
    for room, share in zip(*(fractions(v)[0] for v in parts)):
        assert share >= min(room / Fraction(0.7), 1)
    frozen = Sweep(graph, Balls.make(x, radius, 1.0, (x, x))).run()
    assert all(float(side.abs().max()) < 1e-9 for side in frozen.spans[len(graph.nodes) - 1])


@pytest.mark.parametrize("mode", MODES)
def test_spans_and_zones_of_a_layer(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given what rows add: the span on the side where a neuron changes, where it starts to bend,
    and how far it is beyond that at a vertex.
    """
    rows = 100
    c = -uniform(1, rows, seed=16) / 3
    fixed = uniform(rows, seed=17) / 7
    values = (-c[0] - fixed).abs()[:, None] * (1 + 1e-9 * normal(rows, 2, seed=18))
    top = uniform(rows, seed=19) / 3
    found = given(1, turns={2: None})
    found.graph = Graph((Node((), (1,), "the input"), Node((0,), (rows,), "")))
    found.values = Values(found.graph, {1: c}, {})
    monkeypatch.setattr(VertexCones, "pull_units", lambda *rest: None)
    monkeypatch.setattr(VertexCones, "_values", lambda *rest: (values, fixed, None))
    monkeypatch.setattr(VertexCones, "_filled", lambda *rest: top)
    low = torch.full((1, rows), -9.0, dtype=DOUBLE)
    high = -low
    with rounded(mode):
        start, beyond = found._narrowed_sample(1, 0, torch.arange(rows), low, high)
    parts = (c[0].abs(), fixed, values, top, high[0], start, beyond.values)
    for size, own, at, most, end, begin, over in zip(*map(fractions, parts)):
        assert end >= most + own
        assert begin >= own - size
        for value, bent in zip(at, over):
            assert begin + bent >= own + value - size


@pytest.mark.parametrize("mode", MODES)
def test_bounds_of_rows_pay_for_their_sums(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 100
    fixed = normal(rows, seed=20)
    top = fixed.abs() * (1 + 1e-3 * normal(rows, seed=21))
    more = fixed.abs() * (1 + 1e-3 * normal(rows, seed=22))
    found = given(1, kind=Precision(DOUBLE, 8))
    pulled = Pulled(fixed, fixed, torch.zeros(rows, 1, dtype=DOUBLE), {})
    monkeypatch.setattr(VertexCones, "_pulled", lambda *rest: pulled)
    monkeypatch.setattr(VertexCones, "_values", lambda *rest: (None, fixed, more))
    monkeypatch.setattr(VertexCones, "_filled", lambda *rest: top)
    with rounded(mode):
        bound, _, _ = found.bound(1, torch.zeros(rows, 1, dtype=DOUBLE), ONE)
    parts = (fixed, top, more, bound.constant, bound.together)
    for a, b, c, constant, together in zip(*map(fractions, parts)):
        assert constant >= a + c and together >= a + b


# --- one activation ----------------------------------------------------------------------------


def shape_of(n: int, slope: float) -> Shape:
    """Undecided neurons of both signs, `(1, n)`."""
    op = Relu(torch.tensor(slope, dtype=DOUBLE))
    c = normal(1, n, seed=23)
    low = -c.abs() - uniform(1, n, seed=24) - 0.1
    high = c.abs() + uniform(1, n, seed=25) + 0.1
    return Shape(Node((0,), (n,), "", op), c, low, high)


def found_of(shape: Shape, inside: bool) -> Found:
    """Of all neurons, or of none."""
    n = shape.c.shape[1]
    place = torch.arange(n if inside else 0)
    none = VertexValues(len(place), torch.zeros(len(place), 2, dtype=DOUBLE), None, None)
    start = torch.zeros(len(place), dtype=DOUBLE)
    return Found(torch.full_like(shape.c, inside, dtype=torch.bool), (place,), [start], [none])


def paid(shape: Shape, error: Tensor, inside: bool, dtype: torch.dtype, w: Tensor) -> Tensor:
    """What a row with these coefficients pays for neurons."""
    kind = Precision(dtype, 8)
    found = turns_of(shape, error, found_of(shape, inside), kind)  # type: ignore[arg-type]
    return row_dot(w, found.far)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [True, False])
def test_neurons_pay_for_the_errors_of_their_inputs(inside: bool, mode: str) -> None:
    """Times the slope at the sample."""
    n = 1000
    shape = shape_of(n, 0.25)
    error = 1e3 * (1 + uniform(1, n, seed=26))
    w = 1 + uniform(1, n, seed=27)
    slope = torch.where(shape.c > 0, 1.0, 0.25)
    with rounded(mode):
        total = paid(shape, error, inside, DOUBLE, w)
    exact = sum(a * b * c for a, b, c in zip(*(fractions(v)[0] for v in (w, error, slope))))
    assert Fraction(float(total)) >= exact


@pytest.mark.parametrize("mode", MODES)
def test_neurons_pay_for_slopes_in_float32(mode: str) -> None:
    """The slope below 0 is rounded: that times the span, in a sum over all of them."""
    n = 2000
    shape = shape_of(n, 0.3)
    w = (1 + uniform(1, n, seed=28)).float()
    with rounded(mode):
        total = paid(shape, 0 * shape.c, True, SINGLE, w)
        slope = torch.tensor(0.3, dtype=DOUBLE).float()
    off = abs(Fraction(0.3) - Fraction(float(slope)))
    most = torch.maximum(-shape.low, shape.high) * (shape.c < 0)
    exact = sum(a * b * off for a, b in zip(*(fractions(v)[0] for v in (w, most))))
    assert Fraction(float(total)) >= exact


@pytest.mark.parametrize("mode", MODES)
def test_neurons_pay_for_their_value_at_the_sample(mode: str) -> None:
    """And bend no further than the box lets them."""
    n = 200
    shape = shape_of(n, 0.3)
    kind = Precision(DOUBLE, 8)
    with rounded(mode):
        found = turns_of(shape, 0 * shape.c, found_of(shape, True), kind)  # type: ignore[arg-type]
        here = shape.here
    box = found.samples[0].box
    parts = (shape.c[0], shape.low[0], shape.high[0], here[0], found.far[0], box)
    for c, low, high, value, far, most in zip(*map(fractions, parts)):
        assert abs((c if c > 0 else Fraction(0.3) * c) - value) <= far
        assert most >= (-low if c > 0 else high) - abs(c)


def test_layers_keep_the_errors_of_their_inputs() -> None:
    """For vertices, and for the lengths beside them."""
    n = 20
    shape = shape_of(n, 0.0)
    seen: list[Tensor] = []
    found = given(n, kind=Precision(DOUBLE, 8), _found={1: found_of(shape, True)})
    other = SimpleNamespace(add=lambda i, shape, error: seen.append(error))
    found.other = other  # type: ignore[assignment]
    error = torch.full_like(shape.c, 1e-3)
    found.add(1, shape, error)
    assert torch.equal(seen[0], error)
    assert (found.turns[1].far >= error * (shape.c > 0)).all()
