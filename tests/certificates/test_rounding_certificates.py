"""Certificates and what they are made of, in every rounding mode, against exact values of small
cases.
"""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.cells import infinity_by_cells
from support.exact import perceptron, scattered, uniform
from support.rounding import MODES, long, rounded, serial
from wassail.certificates import clock
from wassail.certificates.bound import Bound
from wassail.certificates.exact import cones, infinity, multipliers
from wassail.certificates.graph import graph as graph_module
from wassail.certificates.graph import planes, tangent
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Concat, Matrix, Scale, Sum, dense_norm
from wassail.certificates.graph.matrix_norms import matrix_norm
from wassail.certificates.graph.operators import convolution, normalise, softmax
from wassail.certificates.graph.operators.convolution import Conv
from wassail.certificates.graph.operators.pooling import Average
from wassail.certificates.lipschitz import semidefinite
from wassail.certificates.loss import certify, chords, growth, recession
from wassail.certificates.loss.certificate import Certificate
from wassail.certificates.loss.certify import ClassSlopes
from wassail.certificates.loss.curve import LossCurve, total_of
from wassail.certificates.loss.labels import Labels
from wassail.certificates.loss.samples import Samples
from wassail.certificates.relax import jacobian, norms
from wassail.certificates.relax.balls import Balls
from wassail.paper import attention_bounds as attention
from wassail.paper import transformer_constants
from wassail.transport.allocation import transport_cost

INF = math.inf
DOUBLE = torch.float64


def rank_one(m: int, n: int, seed: int) -> tuple[Tensor, np.longdouble, np.longdouble]:
    """A matrix of rank 1 with entries that are exact, and the Euclidean lengths of its two
    vectors.
    """
    g = torch.Generator().manual_seed(seed)
    u, v = (torch.randint(1, 2**20, (k,), generator=g).double() * 2.0**-20 for k in (m, n))
    return u[:, None] * v, np.sqrt((long(u) ** 2).sum()), np.sqrt((long(v) ** 2).sum())


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_matrices(mode: str) -> None:
    for m, n in ((1, 1), (3, 5), (40, 3), (300, 2), (20, 1500)):
        matrix, left, right = rank_one(m, n, m + n)
        with rounded(mode):
            found = matrix_norm(matrix, 2.0, 2.0)
            sides = matrix_norm(matrix, INF, INF), matrix_norm(matrix, 1.0, 1.0)
            hard = matrix_norm(matrix, INF, 2.0)
            two = float(attention.spectral(matrix))
            entry = float(jacobian.entry_norms(matrix[None], matrix[None], 2.0, 2.0))
            flat = float(jacobian.entry_norms(matrix[None], matrix[None], INF, 1.0))
        for bound in (found, two, entry):
            assert np.longdouble(bound) >= left * right * (
                1 - np.longdouble(2) ** -60
            ) and bound < float(left * right) * (1 + 1e-8)
        assert (
            np.longdouble(sides[0]) >= long(matrix).sum(1).max()
            and np.longdouble(sides[1]) >= long(matrix).sum(0).max()
        )
        assert np.longdouble(hard) >= np.sqrt((long(matrix).sum(1) ** 2).sum()) * (
            1 - np.longdouble(2) ** -60
        )
        assert np.longdouble(flat) >= long(matrix).sum()


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_convolutions(mode: str) -> None:
    """A kernel of one pixel is a matrix, and of rank 1 here; a kernel of ones on one row adds
    up its entries.
    """
    kernel, left, right = rank_one(4, 6, 1)
    conv = Conv(kernel[:, :, None, None], (6, 3, 3), (1, 1), (0, 0), (1, 1), 1)
    with rounded(mode):
        dense = dense_norm(conv, (6, 3, 3), (4, 3, 3))
        torus = convolution._spectral(conv, (4, 3, 3))
        rows = conv.norm(INF, (6, 3, 3), (4, 3, 3))
        columns = conv.norm(1.0, (6, 3, 3), (4, 3, 3))
        two = conv.norm(2.0, (6, 3, 3), (4, 3, 3))
    for bound in (dense, torus, two):
        assert np.longdouble(bound) >= left * right * (
            1 - np.longdouble(2) ** -60
        ) and bound < float(left * right) * (1 + 1e-8)
    assert (
        np.longdouble(rows) >= long(kernel).sum(1).max()
        and np.longdouble(columns) >= long(kernel).sum(0).max()
    )
    other = Conv(uniform(4, 40, seed=3)[:, :, None, None], (40, 3, 3), (1, 1), (0, 0), (1, 1), 1)
    with rounded(mode):
        sides = [other.norm(norm, (40, 3, 3), (4, 3, 3)) for norm in (INF, 1.0)]
    sums = long(other.weight)[:, :, 0, 0]
    assert (
        np.longdouble(sides[0]) >= sums.sum(1).max()
        and np.longdouble(sides[1]) >= sums.sum(0).max()
    )


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_sums_and_concatenations(mode: str) -> None:
    values = uniform(50, seed=2).tolist()
    total = sum(map(Fraction, values))
    length = sum(Fraction(v) ** 2 for v in values)
    with rounded(mode):
        added, joined = (
            norms._combined(Graph(()), 0, map_, values, 2.0)
            for map_ in (Sum(50), Concat(1, (1,) * 50))
        )
    assert Fraction(added) >= total and Fraction(joined) ** 2 >= length


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inner", [1.0, 2.0, INF])
def test_norms_of_pairs_of_rows(inner: float, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of two rows of the last layer in the dual norm; what is before it does not
    stretch, and only in one norm.
    """
    monkeypatch.setattr(norms, "product", lambda graph, norm, other: 1.0 if other == inner else INF)
    weight = uniform(3, 400, seed=21)
    start = Node((), (400,), "the input")
    graph = Graph((start, Node((0,), (3,), "", Affine(Matrix(weight)))))
    with rounded(mode):
        found = norms.pair_products(graph, 2.0, 0).tolist()
    for row, bound in zip(weight[1:].tolist(), found[1:]):
        ways = [abs(Fraction(a) - Fraction(b)) for a, b in zip(weight[0].tolist(), row)]
        if inner == 2:
            assert Fraction(bound) ** 2 >= sum(v * v for v in ways)
        else:
            assert Fraction(bound) >= (max(ways) if inner == 1 else sum(ways))


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_sums_over_an_axis(mode: str) -> None:
    """The sum of n numbers stretches by the square root of n."""
    for n in range(2, 12):
        map_ = Average(lambda v: v.sum(1, keepdim=True), (n,))
        with rounded(mode):
            found = map_.norm(2.0, (n,), (1,))
        assert Fraction(found) ** 2 >= n and found < math.sqrt(n) * (1 + 1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_intervals_of_one_step(mode: str) -> None:
    """Affine maps, ReLUs and products of intervals: no end is inside the exact one."""
    low = scattered(3, 30, seed=3)
    high = low + scattered(3, 30, seed=4).abs()
    weight = scattered(8, 30, seed=5)
    bias = scattered(8, seed=6)
    node = Node((0,), (8,), "", Affine(Matrix(weight), bias))
    slope = torch.tensor(1 / 3, dtype=DOUBLE)
    g = scattered(3, 2, 8, seed=7)
    wide = g + scattered(3, 2, 8, seed=8).abs()
    more = high + 1
    with rounded(mode):
        bottom, top = node.span([(low, high)], 0.0)
        leaky = Relu(slope).span([(low, high)])
        product = graph_module._times((low, high), (high, more))
        ((back, forth),) = node.adjoint((g, wide), [], 0.0)
        halves = [planes.halves_of(low, high), tangent.middle_and_width((low, high))]
        outward = planes.interval_product((low, high), (high, high))
    w = long(weight)
    plus = np.maximum(w, 0)
    minus = np.minimum(w, 0)
    assert (long(bottom) <= long(low) @ plus.T + long(high) @ minus.T + long(bias)).all()
    assert (long(top) >= long(high) @ plus.T + long(low) @ minus.T + long(bias)).all()
    for side, end, sign in ((leaky[0], low, 1), (leaky[1], high, -1)):
        exact = np.where(long(end) > 0, long(end), long(end) * long(slope))
        assert (sign * long(side) <= sign * exact).all()
    for found, (a, b, c, d) in (
        (product, (low, high, high, more)),
        (outward, (low, high, high, high)),
    ):
        corners = np.stack([long(u) * long(v) for u in (a, b) for v in (c, d)])
        assert (long(found[0]) <= corners.min(0)).all() and (long(found[1]) >= corners.max(0)).all()
    assert (long(back) <= long(g) @ plus + long(wide) @ minus).all() and (
        long(forth) >= long(wide) @ plus + long(g) @ minus
    ).all()
    for middle, radius in halves:
        assert (long(middle) + long(radius) >= long(high)).all() and (
            long(middle) - long(radius) <= long(low)
        ).all()


@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_curves(mode: str) -> None:
    c = scattered(2, 20, seed=9)
    low = -scattered(2, 20, seed=10).abs()
    high = scattered(2, 20, seed=11).abs()
    with rounded(mode):
        z, m, r = planes.middle_of(c, low, high)
        bottom, top = planes.end_points(c, low, high)
        least, most = planes.mean_squares(low, high)
        away = planes.mean_squares(high, 2 * high)
        others = planes.sum_of_others((low, high))
        rates = normalise.Normalise(1e-5)._rates(high[:, :1], 2 * high[:, :1])
        unit = normalise.Normalise(1e-5).span((low, high))
        share = softmax.Softmax().span((low / 40, high / 40))
    for end in (low, high):
        assert (np.abs(long(c) + long(end) - long(z)) <= long(r)).all()
    assert (np.abs(long(z) - long(c) - long(m)) <= long(r)).all()
    assert (long(bottom) <= long(c) + long(low)).all() and (long(top) >= long(c) + long(high)).all()
    largest = np.maximum(np.abs(long(low)), np.abs(long(high)))
    assert (long(most)[:, 0] >= (largest**2).mean(1)).all() and (long(least) <= 0).all()
    assert (long(away[0])[:, 0] <= (long(high) ** 2).mean(1)).all() and (
        long(away[1])[:, 0] >= (4 * long(high) ** 2).mean(1)
    ).all()
    assert (long(others[0]) <= long(low).sum(1, keepdims=True) - long(low)).all()
    assert (long(others[1]) >= long(high).sum(1, keepdims=True) - long(high)).all()
    eps = np.longdouble(1e-5)
    first, last = (1 / np.sqrt(k * long(high)[:, :1] + eps) for k in (1, 2))
    assert (long(rates[0]) <= last).all() and (long(rates[1]) >= first).all()
    squares = np.zeros_like(largest)  # the others at 0, which lies in their range
    for end, found, sign in ((low, unit[0], 1), (high, unit[1], -1)):
        exact = long(end) / np.sqrt((long(end) ** 2 + squares) / 20 + eps)
        assert (sign * long(found) <= sign * exact).all()
    for own, rest, found, sign in ((low, high, share[0], 1), (high, low, share[1], -1)):
        a = np.exp(long(own / 40))
        b = np.exp(long(rest / 40))
        exact = a / (a + b.sum(1, keepdims=True) - b)
        assert (sign * long(found) <= sign * exact).all()


@pytest.mark.parametrize("mode", MODES)
def test_losses_from_margins(mode: str) -> None:
    lowest = scattered(60, 5, seed=12)
    y = torch.arange(60) % 5
    lowest[torch.arange(60), y] = 0.0
    lowest[:20] /= 64
    above = scattered(60, seed=13).abs()
    under = scattered(60, seed=14).abs()
    least = uniform(4, 5, seed=15)
    most = 1 + uniform(4, 5, seed=16)
    low = scattered(4, 5, 3, seed=17)
    high = low + scattered(4, 5, 3, seed=18).abs()
    with rounded(mode):
        loss = chords.loss_above(lowest, y, "cross_entropy")
        ratio = chords._quotient(above, under)
        ends = [chords._sum_of_products(least, most, low, high, side) for side in (-1.0, 1.0)]
    exact = np.log(np.exp(-long(lowest)).sum(1))
    assert (long(loss) >= exact).all()
    assert (long(ratio) * long(under) >= long(above)).all()
    top = np.where(
        long(high) > 0, long(high) * long(most)[:, :, None], long(high) * long(least)[:, :, None]
    ).sum(1)
    bottom = np.where(
        long(low) < 0, long(low) * long(most)[:, :, None], long(low) * long(least)[:, :, None]
    ).sum(1)
    assert (long(ends[1]) >= top).all() and (long(ends[0]) <= bottom).all()


def curve(
    order: float,
    ceiling: list[float],
    left: list[float],
    rise: list[float],
    start: float,
    slope: float,
) -> LossCurve:
    """A curve of one sample with one radius, 1/3: no network behind it."""
    one = torch.zeros(1, 1, dtype=DOUBLE)
    none = torch.zeros(0, dtype=torch.int64)
    tops, starts, steps = (torch.tensor([v], dtype=DOUBLE) for v in (ceiling, left, rise))
    value = torch.tensor([start], dtype=DOUBLE)
    return LossCurve(
        one,
        torch.zeros(1).long(),
        torch.ones(1, dtype=DOUBLE),
        2.0,
        order,
        "margin",
        None,
        value,
        torch.zeros(1).long(),
        torch.zeros(0, 1, dtype=DOUBLE),
        none,
        none.double(),
        none.double(),
        none,
        value,
        torch.tensor([1 / 3], dtype=DOUBLE),
        tops,
        starts,
        steps,
        slope,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [1.0, INF])
def test_curves_of_one_sample(order: float, mode: str) -> None:
    """One sample that moves by eps: the worst case is the height of its line there, however
    large what cancels in it.
    """
    for k in range(12):
        slope = 1 + float(uniform(1, seed=k))
        eps = 0.4 + float(uniform(1, seed=100 + k))
        start = -slope * eps * (1 + (k % 5 - 2) * 1e-13)  # the line is about 0 at eps
        line = Fraction(start) + Fraction(slope) * Fraction(eps)
        flat = curve(order, [INF, INF], [INF, INF], [0.0, 0.0], start, slope)
        other = curve(order, [INF, INF], [INF, start], [0.0, slope], 1e9, INF)
        with rounded(mode):
            cone = flat._grown(eps)
            own = other._grown(eps) if order == INF else INF
        assert Fraction(cone) >= line and cone < float(line) + 1e-11
        if order == INF:
            shifted = Fraction(start) + Fraction(slope) * (
                Fraction(eps) - Fraction(float(other.grid[0]))
            )
            assert Fraction(own) >= shifted


@pytest.mark.parametrize("mode", MODES)
def test_sums_of_losses(mode: str) -> None:
    mu = uniform(200, seed=19)
    values = scattered(200, seed=20)
    exact = sum(Fraction(a) * Fraction(b) for a, b in zip(mu.tolist(), values.tolist()))
    with rounded(mode):
        found = total_of(mu, values)
    assert Fraction(found) >= exact


@pytest.mark.parametrize("mode", MODES)
def test_the_lines_of_a_certificate(mode: str) -> None:
    for k in range(60):
        start = -float(uniform(1, seed=k))
        slope = float(uniform(1, seed=60 + k))
        eps = 1.0 + float(uniform(1, seed=120 + k))
        none = torch.zeros(0, dtype=DOUBLE)
        for line in (None, (slope, start)):
            bound = Bound(0.0, slope if line is None else INF, "")
            known = Certificate(
                none,
                none.long(),
                none,
                2.0,
                "margin",
                None,
                start,
                None,
                None,
                bound,
                None,
                line,
                none,
                none.long(),
                none,
                none,
                none.long(),
                none.long(),
            )
            with rounded(mode):
                top = known.upper(eps)
            assert Fraction(top) >= Fraction(start) + Fraction(slope) * Fraction(eps)


@pytest.mark.parametrize("mode", MODES)
def test_lines_of_a_ball_in_a_linear_network(mode: str) -> None:
    """Margins that are linear: the line of a ball meets them at its radius, and at the radius
    before.
    """
    weight = scattered(3, 6, seed=21)
    bias = scattered(3, seed=22)
    graph = perceptron([weight], [bias])
    x = uniform(4, 6, seed=23)
    y = torch.tensor([0, 1, 2, 0])
    before = 0.1
    radius = 1 / 3
    with rounded(mode):
        samples = Samples(graph, x, Labels("margin", y), INF, None)
        far, near, line = growth.ends_of(samples, before, radius, 0)
    gap = long(weight)[y.numpy()][:, None] - long(weight)
    here = (gap * long(x)[:, None]).sum(2) + long(bias)[y.numpy()][:, None] - long(bias)
    swing = np.abs(gap).sum(2)
    others = np.arange(3) != y.numpy()[:, None]
    for found, d in ((far, radius), (near, before), (line, radius)):
        assert (long(found) <= here - swing * np.longdouble(d))[others].all()


@pytest.mark.parametrize("mode", MODES)
def test_the_highest_margin_of_bounded_networks(mode: str) -> None:
    """A head on tanh: on all of space every entry is free in [-1, 1]."""
    weight = scattered(3, 7, seed=24)
    bias = scattered(3, seed=25)
    nodes = (
        Node((), (7,), "the input"),
        Node((0,), (7,), "", Smooth("tanh")),
        Node((1,), (3,), "", Affine(Matrix(weight), bias)),
    )
    with rounded(mode):
        top = recession.highest(Graph(nodes), [0, 1, 2])
    for k in range(3):
        gap = long(weight) - long(weight)[k]
        exact = np.abs(gap).sum(1) + long(bias) - long(bias)[k]
        others = np.arange(3) != k
        assert (long(top)[k] >= exact)[others].all() and (long(top)[k] < exact + 1e-9)[others].all()


@pytest.mark.parametrize("mode", MODES)
def test_the_distance_to_the_shadow(mode: str) -> None:
    """Softplus is at most log 2 above a ReLU; two layers of positive weights add these
    distances up.
    """
    first = uniform(6, 3, seed=26)
    second = uniform(2, 6, seed=27)
    zero = torch.zeros(6, dtype=DOUBLE)
    nodes = (
        Node((), (3,), "the input"),
        Node((0,), (6,), "", Affine(Matrix(first), zero)),
        Node((1,), (6,), "", Smooth("softplus")),
        Node((2,), (2,), "", Affine(Matrix(second), torch.tensor([0.1, 0.7], dtype=DOUBLE))),
    )
    with rounded(mode):
        found = recession.shadow(Graph(nodes))
        error = found.margin_error(0)
        drift = found.drift(0)
    gap = np.abs(long(second)[1] - long(second)[0]).sum() * np.log(np.longdouble(2))
    assert long(error)[1] >= gap and float(error[1]) < float(gap) * (1 + 1e-9)
    assert long(drift)[1] >= gap + np.abs(np.longdouble(0.7) - np.longdouble(0.1))


@pytest.mark.parametrize("mode", MODES)
def test_the_drift_to_the_shadow_where_biases_cancelled(mode: str) -> None:
    """A bias that is left over from a sum is off by a part of what was added up, not of itself:
    the sum of `size` and `-size` in a wide unit may be half a unit in the last place.
    """
    size = torch.tensor([3e6, 0.0], dtype=DOUBLE)
    weight = torch.ones(2, 1, dtype=DOUBLE)
    nodes = (
        Node((), (1,), "the input"),
        Node((0,), (1,), "", Smooth("softplus")),
        Node((1,), (2,), "", Affine(Matrix(weight), torch.zeros(2, dtype=DOUBLE), size)),
    )
    with rounded(mode):
        drift = recession.shadow(Graph(nodes)).drift(1)
    assert float(drift[0]) >= 3e6 * 2.0**-53


@pytest.mark.parametrize("mode", MODES)
def test_a_semidefinite_proof_of_a_linear_map(mode: str) -> None:
    """Without neurons `prove` asks whether `w I - C^T C >= 0`: never for a w below the largest
    singular value squared.
    """
    for seed in range(6):
        matrix, left, right = rank_one(3, 4, seed)
        truth = (left * right) ** 2
        form = multipliers.Form(
            torch.zeros(1, 0, 4, dtype=DOUBLE), torch.zeros(1, 0, 0, dtype=DOUBLE), matrix[None],
            torch.zeros(1, 3, 0, dtype=DOUBLE), False,
        )  # fmt: skip
        for shift in (-1e-9, -1e-13, -1e-15, 0.0, 1e-15, 1e-13, 1e-9):
            w = torch.tensor(
                [[float(truth) * (1 + shift) / (1 + multipliers.INFLATE)]], dtype=DOUBLE
            )
            with rounded(mode):
                value = multipliers.prove(form, w, torch.zeros(1, 0, dtype=DOUBLE))
            assert np.longdouble(float(value)) >= truth


@pytest.mark.parametrize("mode", MODES)
def test_cuts_of_the_unit_ball(mode: str) -> None:
    """Against a wall, `max { <a, u> : |u| <= 1, <w, u> >= 0 }` is the length of a without its part
    along w.

    That part is a million times longer here, so that what is left of a after it has few digits.
    """
    wall = scattered(4, seed=28)
    side = scattered(20, 4, seed=29)
    a = side - 1e6 * wall
    across = long(a) - (long(a) @ long(wall))[:, None] / (long(wall) ** 2).sum() * long(wall)
    with rounded(mode):
        found = cones._cut(
            a[None],
            torch.zeros(1, 20, dtype=DOUBLE),
            wall[None, None],
            torch.zeros(1, 1, dtype=DOUBLE),
            2.0,
        )
    truth = np.sqrt((across**2).sum(1))
    assert (long(found)[0] >= truth).all() and (long(found)[0] < truth + 1e-6).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_the_slope_at_infinity_of_a_linear_network(norm: float, mode: str) -> None:
    """Without undecided neurons the slope is the dual norm of the gap, from both sides."""
    weight = scattered(2, 9, seed=30)
    network = perceptron([weight], [torch.zeros(2, dtype=DOUBLE)]).piecewise()
    gap = np.abs(long(weight)[1] - long(weight)[0])
    truth = gap.max() if norm == 1 else gap.sum() if norm == INF else np.sqrt((gap**2).sum())
    with rounded(mode):
        both = infinity.infinity(network, norm, [0]), infinity_by_cells(network, norm, [0])
    for found in both:
        assert np.longdouble(found.lower) <= truth * (1 + np.longdouble(2) ** -60)
        assert np.longdouble(found.upper) >= truth * (1 - np.longdouble(2) ** -60)
        assert found.upper - found.lower < 1e-9 * found.upper


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_directions_to_infinity_are_no_longer_than_one(norm: float, mode: str) -> None:
    weight = [scattered(8, 6, seed=32), scattered(2, 8, seed=33)]
    network = perceptron(
        weight, [torch.zeros(8, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)]
    ).piecewise()
    gaps = cones.gaps_of(network, [(0, 1)])
    rounding = cones.Rounding.of(gaps, norm)
    u = scattered(50, 6, seed=34)
    with rounded(mode):
        short, values = cones.values_at(gaps, rounding, u, norm)
    size = [[abs(Fraction(v)) for v in row] for row in short.tolist()]
    for row in size:
        assert (
            max(row) if norm == INF else sum(row) if norm == 1 else sum(v * v for v in row)
        ) <= 1
    hidden = np.maximum(long(short) @ long(weight[0]).T, 0)
    assert (long(values)[:, 0] <= hidden @ (long(weight[1])[1] - long(weight[1])[0])).all()


def moving(order: float, n: int, seed: int) -> LossCurve:
    """A curve of n samples with three points each, of which only the lower side means anything."""
    distance = uniform(3 * n, seed=seed).sort().values
    value = uniform(3 * n, seed=seed + 1)
    zero = torch.zeros(n, dtype=DOUBLE)
    mu = uniform(n, seed=seed + 2)
    root = torch.arange(3 * n) % n
    points = torch.zeros(3 * n, 1, dtype=DOUBLE)
    flat = torch.full((n, 2), INF, dtype=DOUBLE)
    return LossCurve(
        torch.zeros(n, 1, dtype=DOUBLE),
        torch.zeros(n).long(),
        mu / mu.sum(),
        2.0,
        order,
        "margin",
        None,
        zero,
        torch.zeros(n).long(),
        points,
        root,
        value,
        distance,
        root,
        zero,
        torch.ones(1, dtype=DOUBLE),
        flat,
        flat,
        flat,
        INF,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [1.0, 2.0])
def test_the_plan_of_a_curve_stays_within_its_budget(order: float, mode: str) -> None:
    """The step that the budget cuts ends before it, and so does a plan that just fits."""
    for seed in range(10):
        one = moving(order, 5, 10 * seed)
        with rounded(mode):
            _, choice, mu = one.plan(10.0)
        whole = transport_cost(mu, (choice >= 0).double(), one.distance[choice.clamp(min=0)], order)
        for eps in (
            0.5 * whole,
            0.93 * whole,
            whole,
            *(math.nextafter(whole, 0.0) * (1 - k * 2.0**-53) for k in range(5)),
        ):
            with rounded(mode):
                _, choice, mu = one.plan(eps)
            assert (mu >= 0).all()
            assert (
                transport_cost(mu, (choice >= 0).double(), one.distance[choice.clamp(min=0)], order)
                <= eps
            )


@pytest.mark.parametrize("mode", MODES)
def test_one_sample_just_beyond_a_radius(mode: str) -> None:
    """The cone is 0 at the radius 1/3 and little more at eps: what cancels there counts, in
    both forms of the upper side.
    """
    for k in range(3):
        slope = 1 + float(uniform(1, seed=k))
        third = 1 / 3
        start = -slope * third * (1 + (k % 5 - 2) * 2.0**-52)
        eps = third * (1 + 1e-12 * k)
        for begin in (start, 1e-3 * float(uniform(1, seed=k + 50)), -slope * eps):
            line = Fraction(begin) + Fraction(slope) * Fraction(eps)
            for order in (1.0, INF):
                one = curve(order, [INF, INF], [INF, INF], [0.0, 0.0], begin, slope)
                other = replace(one, slope=INF, line=(slope, begin))
                with rounded(mode):
                    found = one._grown(eps), one.upper(eps), other.upper(eps)
                assert all(Fraction(top) >= line for top in found)


@pytest.mark.parametrize("mode", MODES)
def test_lines_between_two_radii(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Base, reach and losses given: each line holds at both of its ends."""
    n = 50
    before = 0.1
    radius = 1 / 3
    base = scattered(n, 2, seed=60)
    rho = scattered(n, 2, seed=61).abs()
    base[::2] = rho[::2] * (1 + 1e-15)
    y = torch.zeros(n).long()
    inputs = Balls.make(
        torch.zeros(n, 1, dtype=DOUBLE), torch.full((n,), radius, dtype=DOUBLE), INF, None
    )
    monkeypatch.setattr(
        growth,
        "Sweep",
        lambda *_: SimpleNamespace(run=lambda: SimpleNamespace(inputs=inputs)),
    )
    monkeypatch.setattr(
        growth, "margins", lambda *_: (base, base, torch.zeros(n, 2, 1, dtype=DOUBLE))
    )
    monkeypatch.setattr(Balls, "upper", lambda *_: rho.flatten())
    graph = perceptron([uniform(2, 1, seed=64)], [torch.zeros(2, dtype=DOUBLE)])
    samples = Samples(graph, inputs.x, Labels("margin", y), INF, None)
    with rounded(mode):
        _, near, line = growth.ends_of(samples, before, radius, 0)
    ratio = np.longdouble(radius) / np.longdouble(before)
    assert (long(near) <= long(base) - long(rho))[:, 1].all()
    assert (long(line) <= long(base) - long(rho) * ratio * (1 - np.longdouble(2) ** -60))[
        :, 1
    ].all()
    lower = scattered(n, 2, seed=62)
    higher = scattered(n, 2, seed=63).abs()
    least = lower - higher
    monkeypatch.setattr(growth, "ends_of", lambda *_: (least, lower, least))
    monkeypatch.setattr(Samples, "lowest", lambda *_: lower)
    far = torch.full((1, 2), -1e9, dtype=DOUBLE)
    monkeypatch.setattr(growth, "lowest_margins", lambda *_: far)
    monkeypatch.setattr(
        growth, "lipschitz", lambda *_, **__: Bound(0.0, 1.0, "", info={"cut": False})
    )
    with rounded(mode):
        found = growth.growth_above(samples, [before, radius], 0, 1.0, lambda share: None)
    grid, left, rise = found.grid, found.left, found.rise
    for t in (1, 2):  # from the first radius to the second, and from the tiny one to the first
        end = long(left)[:, t] + long(rise)[:, t] * (long(grid)[t] - long(grid)[t - 1])
        assert (end >= -long(least)[:, 1] - np.longdouble(2) ** -58).all()


@pytest.mark.parametrize("mode", MODES)
def test_losses_at_samples_that_the_clock_leaves_no_time_for(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a pass knows, and what the executed loss may be higher by; losses of either sign."""

    def late(*_: Any, **__: Any) -> Any:
        raise clock.Late

    for name in ("lowest_margins", "ends_of"):
        monkeypatch.setattr(growth, name, late)
    monkeypatch.setattr(Samples, "lowest", late)
    unknown = Bound(0.0, INF, "", info={"cut": True})
    monkeypatch.setattr(growth, "lipschitz", lambda *_, **__: unknown)
    known = scattered(40, seed=70)
    monkeypatch.setattr(growth, "clean_above", lambda *_: known)
    graph = perceptron([uniform(2, 1, seed=64)], [torch.zeros(2, dtype=DOUBLE)])
    x = torch.zeros(40, 1, dtype=DOUBLE)
    y = torch.zeros(40).long()
    for lift in (0.1 + uniform(5, seed=71)).tolist():
        samples = Samples(graph, x, Labels("margin", y), INF, None)
        with rounded(mode):
            above = growth.growth_above(samples, [0.1], 0, lift, lambda share: None)
        assert above.slope == INF and above.cut
        for value, found in zip(known.tolist(), above.start.tolist()):
            loss = Fraction(value) + Fraction(lift)
            assert loss <= Fraction(found) <= loss + abs(loss) / 2**50


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_a_certificate(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paper's slope is the square root of 2 times a norm; a tail adds a length to a loss; a
    mean has weights.
    """
    for k in range(40):
        low, high = sorted(scattered(2, seed=70 + k).abs().tolist())
        monkeypatch.setattr(
            certify, "lipschitz", lambda *_, low=low, high=high, **__: Bound(low, high, "")
        )
        work = SimpleNamespace(norm=2.0, graph=None, domain=None, seed=0, found={})
        with rounded(mode):
            ClassSlopes._paper(work)  # type: ignore[arg-type]
        found = work.found["paper"]
        assert (
            Fraction(found.lower) ** 2 <= 2 * Fraction(low) ** 2
            and Fraction(found.upper) ** 2 >= 2 * Fraction(high) ** 2
        )
    x = scattered(20, 30, seed=71)
    drift = scattered(2, 2, seed=72).abs()
    x[::2] *= 1e-12
    monkeypatch.setattr(certify, "highest_loss", lambda *_: torch.full((2,), INF, dtype=DOUBLE))
    work = SimpleNamespace(
        graph=SimpleNamespace(inputs=30),
        labels=[0, 1],
        loss="margin",
        domain=None,
        y=torch.arange(20) % 2,
        x=x,
        norm=1.0,
        found={"infinity": Bound(0.0, 0.7, "")},
        shadow=SimpleNamespace(drift=lambda k: drift[k]),
    )
    with rounded(mode):
        tail = ClassSlopes._tail(work)  # type: ignore[arg-type]
        work = SimpleNamespace(mu=uniform(20, seed=73))
        mean = total_of(work.mu, x[:, 0])
    assert tail is not None
    for i in range(20):
        exact = Fraction(float(drift[i % 2, 1 - i % 2])) + Fraction(tail.lam) * sum(
            abs(Fraction(v)) for v in x[i].tolist()
        )
        assert Fraction(float(tail.height[i])) >= exact
    assert Fraction(mean) >= sum(
        Fraction(a) * Fraction(b) for a, b in zip(uniform(20, seed=73).tolist(), x[:, 0].tolist())
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_highest_margin_of_bounded_networks_whose_rows_cancel(mode: str) -> None:
    """Two layers whose product is a billionth of their sizes: its coefficients have few digits,
    and so has the bias.
    """
    head = torch.tensor([[0.0, 0.0], [0.7, 0.9]], dtype=DOUBLE)
    row = scattered(1, 5, seed=80).abs()
    noise = 1e-9 * scattered(1, 5, seed=83).abs()
    first = torch.cat([row * (1 + noise), -row * (0.7 / 0.9)])
    bias = torch.tensor([1.3 * (1 + 1e-9), -1.3 * (0.7 / 0.9)], dtype=DOUBLE)
    nothing = torch.zeros(2, dtype=DOUBLE)
    for weight, shift in (
        (first, nothing),
        (-first, nothing),
        (0 * first, bias),
        (0 * first, -bias),
    ):
        nodes = (
            Node((), (5,), "the input"),
            Node((0,), (5,), "", Smooth("tanh")),
            Node((1,), (2,), "", Affine(Matrix(weight), shift)),
            Node((2,), (2,), "", Affine(Matrix(head), nothing)),
        )
        token = replace(nodes[1], op=Curved(normalise.Normalise(1e-5)))
        with rounded(mode):
            top = recession.highest(Graph(nodes), [0])
            reached = recession.highest(Graph((nodes[0], token, *nodes[2:])), [0])
        slope = long(head)[1] @ long(weight)
        start = long(head)[1] @ long(shift)
        assert long(top)[0, 1] >= np.abs(slope).sum() + start
        # A normalised token comes as near to the length sqrt(5) as one likes.
        assert (
            long(reached)[0, 1]
            >= np.sqrt((slope**2).sum()) * np.sqrt(np.longdouble(5)) * (1 - 1e-10) + start
        )


@pytest.mark.parametrize("mode", MODES)
def test_a_semidefinite_proof_with_a_weight_for_each_input(mode: str) -> None:
    """The bound is the sum of the weights, as they stand after they were made larger."""
    n = 60
    w = uniform(1, 60, seed=86)
    none = (
        torch.zeros(1, 0, n, dtype=DOUBLE),
        torch.zeros(1, 0, 0, dtype=DOUBLE),
        torch.zeros(1, 1, 0, dtype=DOUBLE),
    )
    form = multipliers.Form(
        none[0], none[1], 1e-3 * torch.ones(1, 1, n, dtype=DOUBLE), none[2], True
    )
    with rounded(mode):
        value = multipliers.prove(form, w, torch.zeros(1, 0, dtype=DOUBLE))
        larger = w * (1 + multipliers.INFLATE)
    assert np.longdouble(float(value)) >= long(larger).sum() and float(value) < INF


@pytest.mark.parametrize("mode", MODES)
def test_the_distance_to_the_shadow_of_a_wide_network(mode: str) -> None:
    first = uniform(300, 2, seed=84)
    second = uniform(2, 300, seed=85)
    nodes = (
        Node((), (2,), "the input"),
        Node((0,), (300,), "", Affine(Matrix(first))),
        Node((1,), (300,), "", Smooth("softplus")),
        Node((2,), (2,), "", Affine(Matrix(second), torch.tensor([0.1, 0.7], dtype=DOUBLE))),
    )
    with rounded(mode):
        error = recession.shadow(Graph(nodes)).margin_error(0)
    assert long(error)[1] >= np.abs(long(second)[1] - long(second)[0]).sum() * np.log(
        np.longdouble(2)
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_semidefinite_proof_of_a_tall_map(mode: str) -> None:
    """Many outputs: the squares that the form is made of are long sums."""
    for m, n in ((3, 4), (2000, 3), (5, 40)):
        matrix, left, right = rank_one(m, n, m)
        truth = (left * right) ** 2
        none = (
            torch.zeros(1, 0, n, dtype=DOUBLE),
            torch.zeros(1, 0, 0, dtype=DOUBLE),
            torch.zeros(1, m, 0, dtype=DOUBLE),
        )
        form = multipliers.Form(none[0], none[1], matrix[None], none[2], False)
        for shift in (
            0.0,
            *(
                sign * k * 2.0**-53
                for k in (1, 3, 6, 12, 25, 50, 100, 200, 400, 800)
                for sign in (-1, 1)
            ),
        ):
            w = torch.tensor(
                [[float(truth) * (1 + shift) / (1 + multipliers.INFLATE)]], dtype=DOUBLE
            )
            with rounded(mode):
                value = multipliers.prove(form, w, torch.zeros(1, 0, dtype=DOUBLE))
            assert np.longdouble(float(value)) >= truth * (1 - np.longdouble(2) ** -60), (
                m,
                n,
                shift,
            )


@pytest.mark.parametrize("mode", MODES)
def test_transformer_tokens_are_no_longer_than_their_radius(mode: str) -> None:
    for d in (2, 7, 23):
        gain = scattered(d, seed=d).abs()
        bias = scattered(d, seed=d + 1)
        graph = Graph(
            (
                Node((), (4, d), ""),
                Node((0,), (4, d), "", Curved(normalise.Normalise(1e-5))),
                Node((1,), (4, d), "", Affine(Scale(gain), bias)),
            )
        )
        with rounded(mode):
            plain = transformer_constants.radius(graph, 1)
            scaled = transformer_constants.radius(graph, 2)
        root = np.sqrt(np.longdouble(d))
        assert np.longdouble(plain) >= root
        assert np.longdouble(scaled) >= root * long(gain).max() + np.sqrt((long(bias) ** 2).sum())


@pytest.mark.parametrize("mode", MODES)
def test_transformer_derivatives_by_tokens(mode: str) -> None:
    """Products of ranges: every corner lies within centre +- radius."""
    centre = scattered(2, 3, 4, seed=90)
    radius = 1e-3 * scattered(2, 3, 4, seed=91).abs()
    row = scattered(2, 3, seed=92)
    wide = 1e-3 * scattered(2, 3, seed=93).abs()
    weight = scattered(5, 3, seed=94)
    tokens = transformer_constants._Tokens(0, centre, radius)
    node = Node((0,), (2, 5), "", Affine(Matrix(weight)))
    walk = transformer_constants.TransformerConstants(
        Graph((Node((), (2, 3), ""), node)), {}, {}, True
    )
    with rounded(mode):
        found = tokens.times(row, wide)
        mapped = walk._carry(1, [tokens])
        length = transformer_constants._Tokens(
            0, centre[:, :1], torch.zeros_like(centre[:, :1])
        ).norm()
    for a in (-1, 1):
        for b in (-1, 1):
            value = (long(centre) + a * long(radius)) * (long(row) + b * long(wide))[..., None]
            assert (np.abs(value - long(found.centre)) <= long(found.radius)).all()
    assert mapped is not None
    for sign in (-1, 1):  # the corner of the entries where a row of the product is largest
        corner = np.sign(long(weight))[:, None, :, None] * sign * long(radius)[None]
        value = (
            (long(weight)[:, None, :, None] * (long(centre)[None] + corner))
            .sum(2)
            .transpose(1, 0, 2)
        )
        assert (sign * (value - long(mapped.centre)) <= long(mapped.radius)).all()
    assert np.longdouble(length) >= np.sqrt((long(centre)[:, 0] ** 2).sum(1)).max()


@pytest.mark.parametrize("mode", MODES)
def test_transformer_matrices_that_cancel_in_their_product(mode: str) -> None:
    """Two maps in a row whose product is a millionth of the product of their sizes."""
    first = scattered(1, 6, seed=95).expand(2, 6) * (1 + 1e-7 * scattered(2, 6, seed=96))
    second = torch.tensor([[1.0, -1.0]], dtype=DOUBLE)
    graph = Graph(
        (
            Node((), (6,), ""),
            Node((0,), (2,), "", Affine(Matrix(first))),
            Node((1,), (1,), "", Affine(Matrix(second))),
        )
    )
    walk = transformer_constants.TransformerConstants(graph, {}, {})
    with rounded(mode):
        *_, (_, found) = walk.linear(2)
    exact = np.sqrt(((long(second) @ long(first)) ** 2).sum())
    assert np.exp(np.longdouble(found)) >= exact * (1 - 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_the_dual_of_one_sample_that_stays(mode: str) -> None:
    """A multiplier above the slope: the value is the multiplier and the loss at the sample,
    however small that is beside it.
    """
    for k in range(30):
        lam = 1 + float(uniform(1, seed=k))
        start = 1e-4 * float(uniform(1, seed=k + 30))
        one = curve(1.0, [INF, INF], [INF, INF], [0.0, 0.0], start, 0.25)
        edge = torch.cat([torch.zeros(1, dtype=DOUBLE), one.grid])
        with rounded(mode):
            value, _ = one.dual(1.0, lam, edge)
        assert Fraction(value) >= Fraction(lam) + Fraction(start)


@pytest.mark.parametrize("mode", MODES)
def test_the_highest_margin_of_bounded_networks_with_many_entries_behind_few_sums(
    mode: str,
) -> None:
    """Three convolutions of 16 terms each reach 4096 entries: one sum of 4096 terms, where
    gamma counts 48.
    """
    shapes = [(1, 64, 64), (1, 16, 16), (1, 4, 4), (2, 1, 1)]
    kernels = [uniform(1, 1, 4, 4, seed=k) for k in (110, 111, 112)]
    kernels[2] = torch.cat([torch.zeros_like(kernels[2]), kernels[2]])
    nodes = [Node((), shapes[0], "the input"), Node((0,), shapes[0], "", Smooth("tanh"))]
    for kernel, before, after in zip(kernels, shapes, shapes[1:]):
        nodes.append(
            Node(
                (len(nodes) - 1,),
                after,
                "",
                Affine(Conv(kernel, before, (4, 4), (0, 0), (1, 1), 1)),
            )
        )
    with rounded(mode), serial():
        top = recession.highest(Graph(tuple(nodes)), [0])
    exact = math.prod(sum(map(Fraction, kernel.flatten().tolist())) for kernel in kernels)
    assert Fraction(float(top[0, 1])) >= exact and float(top[0, 1]) < float(exact) * (1 + 1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize("mode", MODES)
def test_the_slope_at_infinity_behind_walls_that_cancel(mode: str) -> None:
    """A wall that is all rounding: `w u <= 0` allows u = 1, where the margin is 1, and `w` as
    computed forbids it.
    """
    wrong = 0
    for seed in range(30):
        first = 0.5 + uniform(3, seed=seed)
        second = 0.5 + uniform(3, seed=seed + 100)
        second[2] = (
            -(first[0] * second[0] + first[1] * second[1])
            / first[2]
            * (1 + (seed % 3 - 1) * 2.0**-53)
        )
        zero = torch.zeros(4, 4, dtype=DOUBLE)
        inner = zero.clone()
        inner[3, :3] = second
        network = Piecewise(
            torch.cat([first, zero[0, :1]])[:, None],
            inner,
            zero[0],
            torch.tensor([[0.0], [1.0]], dtype=DOUBLE),
            zero[:2],
            zero[0, :2],
            zero[0],
            torch.tensor([0, 0, 0, 1]),
        )
        truth = sum(Fraction(a) * Fraction(b) for a, b in zip(first.tolist(), second.tolist()))
        state = torch.tensor([[1, 1, 1, int(truth > 0)]], dtype=torch.int8)
        free = torch.tensor([[1, 1, 1, -1]], dtype=torch.int8)
        output = torch.tensor([0])
        half = torch.full((1, 4), 0.5, dtype=DOUBLE)
        beta = torch.tensor([[0, 0, 0, 2.0**50]], dtype=DOUBLE)
        with rounded(mode):
            search = cones.ConeSearch(network, 2.0, [0], 0)
            search.ceiling = 1.0
            low, high = search.intervals(free)
            value = search.relax(state, output, *search.intervals(state), half, beta)[0]
            solved, _ = search.solve(state[0], 0, low[0], high[0], INF)
            cone = infinity._over_cones(network, 2.0, [(state[0] == 1, (0, 1))], "cells")
            row = infinity.inequalities(network, state[0] == 1)[0][3, 0]
        wrong += float(row) > 0
        assert Fraction(float(low[0, 3])) <= truth <= Fraction(float(high[0, 3]))
        assert float(value) >= 1 and solved >= 1 and cone.upper >= 1
    assert wrong or mode == "nearest"


@pytest.mark.parametrize("mode", MODES)
def test_the_slope_at_infinity_of_a_node_without_walls(mode: str) -> None:
    weight = scattered(2, 40, seed=130)
    none = torch.zeros(1, dtype=DOUBLE)
    network = Piecewise(
        torch.ones(1, 40, dtype=DOUBLE),
        none[None],
        none,
        weight,
        torch.zeros(2, 1, dtype=DOUBLE),
        weight[:, 0],
        none,
        torch.tensor([0]),
    )
    free = torch.tensor([-1], dtype=torch.int8)
    with rounded(mode):
        search = cones.ConeSearch(network, INF, [0], 0)
        found, _ = search.solve(free, 0, none - 1, none + 1, INF)
    assert np.longdouble(found) >= np.abs(long(weight)[1] - long(weight)[0]).sum()


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_semidefinite_bounds(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Roots and products of what was proved: of one network, from another norm, and of pieces
    with and without time.
    """
    zero = torch.zeros(2, dtype=DOUBLE)
    network = perceptron(
        [scattered(2, 3, seed=190), scattered(2, 2, seed=192)], [zero, zero]
    ).piecewise()
    values = (1 + uniform(40, 3, seed=191)).tolist()
    small = SimpleNamespace(inputs=1, nodes=[SimpleNamespace(size=1)])
    large = SimpleNamespace(inputs=1, nodes=[SimpleNamespace(size=2 * semidefinite.MEMORY)])
    bounds = SimpleNamespace(
        graph=SimpleNamespace(to=lambda _: SimpleNamespace(nodes=[0] * 4)), states=dict
    )
    monkeypatch.setattr(semidefinite.clock, "late", lambda: True)
    monkeypatch.setattr(semidefinite, "_pieces", lambda *_: [(0, 1), (1, 2), (2, 3)])
    for row in values:
        monkeypatch.setattr(
            semidefinite, "prove", lambda *_, row=row: torch.tensor(row[:1], dtype=DOUBLE)
        )
        with rounded(mode):
            one = semidefinite._semidefinite(network, 2.0, 2.0)
        assert Fraction(one) ** 2 >= Fraction(row[0]) and one < math.sqrt(row[0]) * (1 + 1e-9)
        with monkeypatch.context() as patch:
            patch.setattr(semidefinite, "_semidefinite", lambda *_, row=row: row[0])
            with rounded(mode):
                other = semidefinite._from_two(network, INF, 2.0)
        assert Fraction(other) ** 2 >= 3 * Fraction(row[0]) ** 2
        for piece in (small, large):
            left = iter(row)
            monkeypatch.setattr(semidefinite, "_piece", lambda *_, piece=piece: (piece, {}))
            monkeypatch.setattr(semidefinite, "product", lambda *_, left=left: next(left))
            with rounded(mode):
                total = semidefinite.segmented(bounds, 2.0, 2.0)  # type: ignore[arg-type]
            assert Fraction(total) >= math.prod(map(Fraction, row)) and total < math.prod(row) * (
                1 + 1e-9
            )
