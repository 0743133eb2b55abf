"""Certificates and what they are made of, in every rounding mode, against exact values of small cases."""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_rounding_linear import perceptron, uniform
from test_rounding_parts import scattered
from torch import Tensor

from support.rounding import MODES, long, rounded
from wassail.certificates import attention, curves, infinity, jacobian, multipliers, norms, recession, slopes, tangents
from wassail.certificates.bound import Bound
from wassail.certificates.certify import Certificate
from wassail.certificates.loss_curve import LossCurve, _ends, _total
from wassail.certificates.structure import Concat, Conv, Graph, Matrix, Node, Sum

INF = math.inf
DOUBLE = torch.float64


def rank_one(m: int, n: int, seed: int) -> tuple[Tensor, np.longdouble, np.longdouble]:
    """A matrix of rank 1 with entries that are exact, and the Euclidean lengths of its two vectors."""
    g = torch.Generator().manual_seed(seed)
    u, v = (torch.randint(1, 2**20, (k,), generator=g).double() * 2.0**-20 for k in (m, n))
    return u[:, None] * v, np.sqrt((long(u) ** 2).sum()), np.sqrt((long(v) ** 2).sum())


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_matrices(mode: str) -> None:
    for m, n in ((1, 1), (3, 5), (40, 3), (300, 2), (20, 1500)):
        matrix, left, right = rank_one(m, n, m + n)
        with rounded(mode):
            found = norms.matrix_norm(matrix, 2.0, 2.0)
            sides = norms.matrix_norm(matrix, INF, INF), norms.matrix_norm(matrix, 1.0, 1.0)
            hard = norms.matrix_norm(matrix, INF, 2.0)
            two = float(attention.spectral(matrix))
            entry = float(jacobian.entry_norms(matrix[None], matrix[None], 2.0, 2.0))
            flat = float(jacobian.entry_norms(matrix[None], matrix[None], INF, 1.0))
        for bound in (found, two, entry):
            assert np.longdouble(bound) >= left * right * (1 - np.longdouble(2) ** -60) and bound < float(left * right) * (
                1 + 1e-8
            )
        assert np.longdouble(sides[0]) >= long(matrix).sum(1).max() and np.longdouble(sides[1]) >= long(matrix).sum(0).max()
        assert np.longdouble(hard) >= np.sqrt((long(matrix).sum(1) ** 2).sum()) * (1 - np.longdouble(2) ** -60)
        assert np.longdouble(flat) >= long(matrix).sum()


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_convolutions(mode: str) -> None:
    """A kernel of one pixel is a matrix, and of rank 1 here; a kernel of ones on one row adds up its entries."""
    kernel, left, right = rank_one(4, 6, 1)
    conv = Conv(kernel[:, :, None, None], (6, 3, 3), (1, 1), (0, 0), (1, 1), 1)
    with rounded(mode):
        dense = norms._dense(conv, (6, 3, 3), (4, 3, 3))
        torus = norms._spectral(conv, (4, 3, 3))
        rows = norms._map_norm(conv, INF, (6, 3, 3), (4, 3, 3))
        columns = norms._map_norm(conv, 1.0, (6, 3, 3), (4, 3, 3))
        two = norms._map_norm(conv, 2.0, (6, 3, 3), (4, 3, 3))
    for bound in (dense, torus, two):
        assert np.longdouble(bound) >= left * right * (1 - np.longdouble(2) ** -60) and bound < float(left * right) * (1 + 1e-8)
    assert np.longdouble(rows) >= long(kernel).sum(1).max() and np.longdouble(columns) >= long(kernel).sum(0).max()


@pytest.mark.parametrize("mode", MODES)
def test_norms_of_sums_and_concatenations(mode: str) -> None:
    values = uniform(50, seed=2).tolist()
    total, length = sum(map(Fraction, values)), sum(Fraction(v) ** 2 for v in values)
    with rounded(mode):
        added, joined = (
            norms._combined(SimpleNamespace(nodes=[SimpleNamespace(map=map_)]), 0, values, 2.0)  # type: ignore[arg-type]
            for map_ in (Sum(50), Concat(1, (1,) * 50))
        )
    assert Fraction(added) >= total and Fraction(joined) ** 2 >= length


@pytest.mark.parametrize("mode", MODES)
def test_intervals_of_one_step(mode: str) -> None:
    """Affine maps, ReLUs and products of intervals: no end is inside the exact one."""
    low = scattered(3, 30, seed=3)
    high = low + scattered(3, 30, seed=4).abs()
    weight, bias = scattered(8, 30, seed=5), scattered(8, seed=6)
    node = Node((0,), (8,), "", Matrix(weight), bias)
    slope = torch.tensor(1 / 3, dtype=DOUBLE)
    g = scattered(3, 2, 8, seed=7)
    wide, more = g + scattered(3, 2, 8, seed=8).abs(), high + 1
    with rounded(mode):
        bottom, top = jacobian._affine(node, node.map, [(low, high)], 0.0)  # type: ignore[arg-type]
        leaky = jacobian._relu((low, high), slope)
        product = jacobian._times((low, high), (high, more))
        ((back, forth),) = jacobian._pulled(node, node.map, (g, wide), 0.0)  # type: ignore[arg-type]
        halves = [curves._halves(low, high), tangents._halves((low, high))]
        outward = curves._times((low, high), (high, high))
    w = long(weight)
    plus, minus = np.maximum(w, 0), np.minimum(w, 0)
    assert (long(bottom) <= long(low) @ plus.T + long(high) @ minus.T + long(bias)).all()
    assert (long(top) >= long(high) @ plus.T + long(low) @ minus.T + long(bias)).all()
    for side, end, sign in ((leaky[0], low, 1), (leaky[1], high, -1)):
        exact = np.where(long(end) > 0, long(end), long(end) * long(slope))
        assert (sign * long(side) <= sign * exact).all()
    for found, (a, b, c, d) in ((product, (low, high, high, more)), (outward, (low, high, high, high))):
        corners = np.stack([long(u) * long(v) for u in (a, b) for v in (c, d)])
        assert (long(found[0]) <= corners.min(0)).all() and (long(found[1]) >= corners.max(0)).all()
    assert (long(back) <= long(g) @ plus + long(wide) @ minus).all() and (
        long(forth) >= long(wide) @ plus + long(g) @ minus
    ).all()
    for middle, radius in halves:
        assert (long(middle) + long(radius) >= long(high)).all() and (long(middle) - long(radius) <= long(low)).all()


@pytest.mark.parametrize("mode", MODES)
def test_pieces_of_curves(mode: str) -> None:
    c, low, high = scattered(2, 20, seed=9), -scattered(2, 20, seed=10).abs(), scattered(2, 20, seed=11).abs()
    with rounded(mode):
        z, m, r = curves._middle(c, low, high)
        bottom, top = curves._ends(c, low, high)
        least, most = curves._mean_squares(low, high)
        away = curves._mean_squares(high, 2 * high)
        others = curves._sum_of_others((low, high))
        rates = curves.Normalise(1e-5)._rates(high[:, :1], 2 * high[:, :1])
        unit = curves.Normalise(1e-5).span((low, high))
        share = curves.Softmax().span((low / 40, high / 40))
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
        a, b = np.exp(long(own / 40)), np.exp(long(rest / 40))
        exact = a / (a + b.sum(1, keepdims=True) - b)
        assert (sign * long(found) <= sign * exact).all()


@pytest.mark.parametrize("mode", MODES)
def test_losses_from_margins(mode: str) -> None:
    lowest, y = scattered(60, 5, seed=12), torch.arange(60) % 5
    lowest[torch.arange(60), y] = 0.0
    lowest[:20] /= 64
    above, under = scattered(60, seed=13).abs(), scattered(60, seed=14).abs()
    least, most = uniform(4, 5, seed=15), 1 + uniform(4, 5, seed=16)
    low = scattered(4, 5, 3, seed=17)
    high = low + scattered(4, 5, 3, seed=18).abs()
    with rounded(mode):
        loss = slopes.loss_above(lowest, y, "cross_entropy")
        ratio = slopes._quotient(above, under)
        ends = [slopes._sum_of_products(least, most, low, high, side) for side in (-1.0, 1.0)]
    exact = np.log(np.exp(-long(lowest)).sum(1))
    assert (long(loss) >= exact).all()
    assert (long(ratio) * long(under) >= long(above)).all()
    top = np.where(long(high) > 0, long(high) * long(most)[:, :, None], long(high) * long(least)[:, :, None]).sum(1)
    bottom = np.where(long(low) < 0, long(low) * long(most)[:, :, None], long(low) * long(least)[:, :, None]).sum(1)
    assert (long(ends[1]) >= top).all() and (long(ends[0]) <= bottom).all()


def curve(order: float, ceiling: list[float], left: list[float], rise: list[float], start: float, slope: float) -> LossCurve:
    """A curve of one sample with one radius, 1/3: no network behind it."""
    one, none = torch.zeros(1, 1, dtype=DOUBLE), torch.zeros(0, dtype=torch.int64)
    row = [torch.tensor([v], dtype=DOUBLE) for v in (ceiling, left, rise)]
    value = torch.tensor([start], dtype=DOUBLE)
    return LossCurve(
        one, torch.zeros(1).long(), torch.ones(1, dtype=DOUBLE), 2.0, order, "margin", None, value, torch.zeros(1).long(),
        torch.zeros(0, 1, dtype=DOUBLE), none, none.double(), none.double(), none, value, torch.tensor([1 / 3], dtype=DOUBLE),
        *row, slope,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [1.0, INF])
def test_curves_of_one_sample(order: float, mode: str) -> None:
    """One sample that moves by eps: the worst case is the height of its line there, however large what cancels in it."""
    for k in range(12):
        slope, eps = 1 + float(uniform(1, seed=k)), 0.4 + float(uniform(1, seed=100 + k))
        start = -slope * eps * (1 + (k % 5 - 2) * 1e-13)  # the line is about 0 at eps
        line = Fraction(start) + Fraction(slope) * Fraction(eps)
        flat = curve(order, [INF, INF], [INF, INF], [0.0, 0.0], start, slope)
        other = curve(order, [INF, INF], [INF, start], [0.0, slope], 1e9, INF)
        with rounded(mode):
            cone, own = flat._grown(eps), other._grown(eps) if order == INF else INF
        assert Fraction(cone) >= line and cone < float(line) + 1e-11
        if order == INF:
            shifted = Fraction(start) + Fraction(slope) * (Fraction(eps) - Fraction(float(other.grid[0])))
            assert Fraction(own) >= shifted


@pytest.mark.parametrize("mode", MODES)
def test_sums_of_losses(mode: str) -> None:
    mu, values = uniform(200, seed=19), scattered(200, seed=20)
    exact = sum(Fraction(a) * Fraction(b) for a, b in zip(mu.tolist(), values.tolist()))
    with rounded(mode):
        found = _total(mu, values)
    assert Fraction(found) >= exact


@pytest.mark.parametrize("mode", MODES)
def test_the_lines_of_a_certificate(mode: str) -> None:
    for k in range(60):
        start, slope, eps = -float(uniform(1, seed=k)), float(uniform(1, seed=60 + k)), 1.0 + float(uniform(1, seed=120 + k))
        none = torch.zeros(0, dtype=DOUBLE)
        for line in (None, (slope, start)):
            bound = Bound(0.0, slope if line is None else INF, "")
            known = Certificate(
                none, none.long(), none, 2.0, "margin", None, start, None, None, bound, None, line, none, none.long(), none,
                none, none.long(), none.long(),
            )  # fmt: skip
            with rounded(mode):
                top = known.upper(eps)
            assert Fraction(top) >= Fraction(start) + Fraction(slope) * Fraction(eps)


@pytest.mark.parametrize("mode", MODES)
def test_lines_of_a_ball_in_a_linear_network(mode: str) -> None:
    """Margins that are linear: the line of a ball meets them at its radius, and at the radius before."""
    weight, bias = scattered(3, 6, seed=21), scattered(3, seed=22)
    graph = perceptron([weight], [bias])
    x, y = uniform(4, 6, seed=23), torch.tensor([0, 1, 2, 0])
    before, radius = 0.1, 1 / 3
    with rounded(mode):
        far, near, line = _ends(graph, x, y, before, radius, INF, None, 0)
    gap = long(weight)[y.numpy()][:, None] - long(weight)
    here = (gap * long(x)[:, None]).sum(2) + long(bias)[y.numpy()][:, None] - long(bias)
    swing = np.abs(gap).sum(2)
    others = np.arange(3) != y.numpy()[:, None]
    for found, d in ((far, radius), (near, before), (line, radius)):
        assert (long(found) <= here - swing * np.longdouble(d))[others].all()


@pytest.mark.parametrize("mode", MODES)
def test_the_highest_margin_of_bounded_networks(mode: str) -> None:
    """A head on tanh: on all of space every entry is free in [-1, 1]."""
    weight, bias = scattered(3, 7, seed=24), scattered(3, seed=25)
    nodes = (
        Node((), (7,), "the input"), Node((0,), (7,), "", activation="tanh"), Node((1,), (3,), "", Matrix(weight), bias),
    )  # fmt: skip
    with rounded(mode):
        top = recession.highest(Graph(nodes), [0, 1, 2])
    for k in range(3):
        gap = long(weight) - long(weight)[k]
        exact = np.abs(gap).sum(1) + long(bias) - long(bias)[k]
        others = np.arange(3) != k
        assert (long(top)[k] >= exact)[others].all() and (long(top)[k] < exact + 1e-9)[others].all()


@pytest.mark.parametrize("mode", MODES)
def test_the_distance_to_the_shadow(mode: str) -> None:
    """Softplus is at most log 2 above a ReLU; two layers of positive weights add these distances up."""
    first, second = uniform(6, 3, seed=26), uniform(2, 6, seed=27)
    zero = torch.zeros(6, dtype=DOUBLE)
    nodes = (
        Node((), (3,), "the input"), Node((0,), (6,), "", Matrix(first), zero), Node((1,), (6,), "", activation="softplus"),
        Node((2,), (2,), "", Matrix(second), torch.tensor([0.1, 0.7], dtype=DOUBLE)),
    )  # fmt: skip
    with rounded(mode):
        found = recession.shadow(Graph(nodes))
        error, drift = found.margin_error(0), found.drift(0)
    gap = np.abs(long(second)[1] - long(second)[0]).sum() * np.log(np.longdouble(2))
    assert long(error)[1] >= gap and float(error[1]) < float(gap) * (1 + 1e-9)
    assert long(drift)[1] >= gap + np.abs(np.longdouble(0.7) - np.longdouble(0.1))


@pytest.mark.parametrize("mode", MODES)
def test_a_semidefinite_proof_of_a_linear_map(mode: str) -> None:
    """Without neurons `prove` asks whether `w I - C^T C >= 0`: never for a w below the largest singular value squared."""
    for seed in range(6):
        matrix, left, right = rank_one(3, 4, seed)
        truth = (left * right) ** 2
        form = multipliers.Form(
            torch.zeros(1, 0, 4, dtype=DOUBLE), torch.zeros(1, 0, 0, dtype=DOUBLE), matrix[None],
            torch.zeros(1, 3, 0, dtype=DOUBLE), False,
        )  # fmt: skip
        for shift in (-1e-9, -1e-13, -1e-15, 0.0, 1e-15, 1e-13, 1e-9):
            w = torch.tensor([[float(truth) * (1 + shift) / (1 + multipliers.INFLATE)]], dtype=DOUBLE)
            with rounded(mode):
                value = multipliers.prove(form, w, torch.zeros(1, 0, dtype=DOUBLE))
            assert np.longdouble(float(value)) >= truth


@pytest.mark.parametrize("mode", MODES)
def test_cuts_of_the_unit_ball(mode: str) -> None:
    """Against a wall, `max { <a, u> : |u| <= 1, <w, u> >= 0 }` is the length of a without its part along w.

    That part is a million times longer here, so that what is left of a after it has few digits.
    """
    wall, side = scattered(4, seed=28), scattered(20, 4, seed=29)
    a = side - 1e6 * wall
    across = long(a) - (long(a) @ long(wall))[:, None] / (long(wall) ** 2).sum() * long(wall)
    with rounded(mode):
        found = infinity._cut(a[None], torch.zeros(1, 20, dtype=DOUBLE), wall[None, None], torch.zeros(1, 1, dtype=DOUBLE), 2.0)
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
        found = infinity.infinity(network, norm, [0])
    assert np.longdouble(found.lower) <= truth * (1 + np.longdouble(2) ** -60) and np.longdouble(found.upper) >= truth * (
        1 - np.longdouble(2) ** -60
    )
    assert found.upper - found.lower < 1e-9 * found.upper
