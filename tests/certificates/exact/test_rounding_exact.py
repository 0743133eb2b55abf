"""Exact searches and what they are made of, in every rounding mode, against fractions."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.exact import scattered, uniform
from support.rounding import MODES, rounded, serial
from wassail.certificates.exact import cells, constants, paths, polytope
from wassail.certificates.exact.multipliers import Reduced
from wassail.certificates.graph.dense import Piecewise
from wassail.certificates.graph.region import Region

INF = math.inf
DOUBLE = torch.float64


def dot(a: Tensor, b: Tensor) -> Fraction:
    """The exact product of two vectors."""
    return sum(
        (Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist())), start=Fraction(0)
    )


def one_neuron(weight: Tensor, bias: float) -> Piecewise:
    """`relu(<weight, x> + bias)`."""
    n = len(weight)
    return Piecewise(
        weight[None],
        torch.zeros(1, 1, dtype=DOUBLE),
        torch.tensor([bias], dtype=DOUBLE),
        torch.zeros(1, n, dtype=DOUBLE),
        torch.ones(1, 1, dtype=DOUBLE),
        torch.zeros(1, dtype=DOUBLE),
        torch.zeros(1, dtype=DOUBLE),
        torch.tensor([0]),
    )


def linear(weight: Tensor) -> Piecewise:
    """A map `(K, n)` beside one neuron that is 0."""
    outputs, n = weight.shape
    zero = torch.zeros(1, dtype=DOUBLE)
    return Piecewise(
        zero.expand(1, n),
        zero[None],
        zero,
        weight,
        zero.expand(outputs, 1),
        zero.expand(outputs),
        zero,
        torch.tensor([0]),
    )


# --- cells -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["down", "up"])
def test_cells_take_coefficients_that_cancel_for_zero(mode: str) -> None:
    """`b (a x) - a (b x)` is 0, and its rounding is no neuron."""
    noise = 0
    for seed in range(10):
        a, b = (0.5 + uniform(2, seed=seed)).tolist()
        network = Piecewise(
            torch.tensor([[a], [b], [0.0]], dtype=DOUBLE),
            torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [b, -a, 0.0]], dtype=DOUBLE),
            torch.zeros(3, dtype=DOUBLE),
            torch.zeros(1, 1, dtype=DOUBLE),
            torch.ones(1, 3, dtype=DOUBLE),
            torch.zeros(1, dtype=DOUBLE),
            torch.zeros(3, dtype=DOUBLE),
            torch.tensor([0, 0, 1]),
        )
        mask = np.array([True, True, True])
        with rounded(mode):
            computed = network.affine(torch.from_numpy(mask)[None])[0]
            weight, _ = cells._affine_forms(network)(mask)
        noise += float(computed[0, 2, 0]) != 0
        assert weight[2, 0] == 0
    assert noise


def test_points_of_cells_are_on_the_side_that_their_mask_says() -> None:
    """A wall through the first point, which rounding puts on one side of it."""
    for seed in range(40):
        weight = scattered(3, seed=seed)
        centre = 0.4 + 0.2 * uniform(3, seed=seed + 40)
        length = float(torch.linalg.vector_norm(weight))
        unit = torch.from_numpy(weight.numpy() / length)
        bias = -float(unit @ centre)
        network = one_neuron(weight, bias * length)
        found = cells.enumerate_cells(network, Region.make((centre - 0.4, centre + 0.4), 3))
        for mask, point in zip(found.masks[:, 0].tolist(), found.points):
            assert (dot(weight, point) + Fraction(bias * length) > 0) == mask


def test_points_are_clear_of_walls_and_balls() -> None:
    """Beyond them by less than rounding is not clear."""
    n = 6
    rows = np.ones((1, n))
    wrong = 0
    for seed in range(60):
        point = scattered(n, seed=seed).numpy()
        exact = sum(map(Fraction, point.tolist()))
        limit = float(exact)
        limit = math.nextafter(limit, -INF) if Fraction(limit) > exact else limit
        whole = Region.make(None, n)
        with rounded("down"):
            wrong += bool((np.array([limit]) - rows @ point > 0).all())
            assert not cells._clear(rows, np.array([limit]), whole, point)
        square = sum(Fraction(v) ** 2 for v in point.tolist())
        radius = float(np.linalg.norm(point))
        while Fraction(radius) ** 2 > square:
            radius = math.nextafter(radius, 0)
        far = torch.full((n,), INF, dtype=DOUBLE)
        ball = Region(-far, far, torch.zeros(n, dtype=DOUBLE), radius, 2.0)
        none = np.zeros((0, n)), np.zeros(0)
        with rounded("down"):
            assert not cells._clear(*none, ball, point)
    assert wrong


# --- paths and constants -----------------------------------------------------------------------


def test_points_are_strictly_inside_a_cell() -> None:
    """A neuron that is 0, or whose sign is rounding, has no side."""
    wrong = 0
    for seed in range(60):
        weight = scattered(6, seed=seed)
        point = scattered(1, 6, seed=seed + 60)
        network = one_neuron(weight, -float(weight @ point[0]))
        exact = dot(weight, point[0]) + Fraction(float(network.c[0]))
        for mode in MODES:
            with rounded(mode):
                v = network.preactivations(point)
                strict = paths.strict(network, point, v)
            wrong += (float(v) > 0) != (exact > 0)
            assert not strict or (float(v) > 0) == (exact > 0)
    assert wrong


@pytest.mark.parametrize("mode", MODES)
def test_preactivations_of_a_layer_with_large_biases(mode: str) -> None:
    n = 5
    a = uniform(1, 30, n, seed=1)
    c = 1e3 * scattered(1, 30, seed=2)
    none = torch.zeros(1, 1, n, dtype=DOUBLE)
    reduced = Reduced(
        a,
        torch.zeros(1, 30, 30, dtype=DOUBLE),
        c,
        none,
        torch.zeros(1, 1, 30, dtype=DOUBLE),
        torch.ones(1, 30, dtype=torch.bool),
    )
    network = Piecewise(
        a[0],
        reduced.B[0],
        c[0],
        none[0],
        reduced.D[0],
        torch.zeros(1, dtype=DOUBLE),
        torch.zeros(30, dtype=DOUBLE),
        torch.zeros(30, dtype=torch.int64),
    )
    region = Region.make((0.0, 1 / 3), n)
    with rounded(mode):
        low, high = paths.preactivations(reduced, network, region)
    for row, bias, least, most in zip(a[0], c[0].tolist(), low[0].tolist(), high[0].tolist()):
        top = sum(map(Fraction, row.tolist())) * Fraction(1 / 3) + Fraction(bias)
        assert Fraction(least) <= Fraction(bias) and top <= Fraction(most)


def search_of(weight: Tensor, norm_in: float, norm_out: float) -> Any:
    region = Region.make((0.0, 1.0), weight.shape[1])
    generator = torch.Generator().manual_seed(0)
    return constants._Search(linear(weight), region, norm_in, norm_out, generator)


@pytest.mark.parametrize("mode", MODES)
def test_constants_of_a_linear_map_from_both_sides(mode: str) -> None:
    """One output: the constant for l-inf is the sum of the weights, which are positive."""
    wrong = 0
    for seed in range(6):
        n = 200
        weight = 1 + uniform(1, n, seed=seed)
        exact = sum(map(Fraction, weight[0].tolist()))
        near = exact * (1 + Fraction(1, 10**9))
        with rounded(mode), serial():
            search = search_of(weight, INF, INF)
            entries = float(search.entries(weight[None])[0])
            node = constants._Node(np.zeros(1, dtype=np.int8), 0, INF)
            closed = search.closed(node)
            search.visit(torch.full((1, n), 0.5, dtype=DOUBLE))
            plain = float(search.norms(torch.zeros(1, 1, dtype=torch.bool))[0])
        for upper in (search.ceiling, entries, closed):
            assert exact <= Fraction(upper) < near
        assert exact * (1 - Fraction(1, 10**9)) < Fraction(search.lower) <= exact
        wrong += Fraction(plain) != exact
        square = 1 + float(uniform(1, seed=seed + 6))
        with rounded(mode):
            root = float(search.norm(torch.tensor([square], dtype=DOUBLE))[0])
        assert Fraction(root) ** 2 >= Fraction(search.how.factor) ** 2 * Fraction(square)
    assert wrong


@pytest.mark.parametrize("mode", MODES)
def test_constants_with_stretched_inputs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is proved is for inputs divided by weights, whose sum is the price."""
    n = 60
    search = search_of(1 + uniform(1, n, seed=1), INF, 2.0)
    proved = 1 + uniform(5, seed=2)
    omega = uniform(5, n, seed=3)
    monkeypatch.setattr(search, "form", lambda *_: None)
    monkeypatch.setattr(constants, "tighten", lambda _, w, t, *__: (proved, w, t, t))
    monkeypatch.setattr(constants, "balance", lambda *_: omega)
    with rounded(mode), serial():
        found = search.tighten(None, None, omega, omega, omega, 1, 0.1)[0]
    for value, row, bound in zip(proved.tolist(), omega.tolist(), found.tolist()):
        assert Fraction(bound) >= Fraction(value) * sum(map(Fraction, row))


def test_constants_are_complete_when_the_sides_meet() -> None:
    """But for what rounding adds to the upper one."""
    layers = [(scattered(6, 2, seed=1), uniform(6, seed=2)), (scattered(2, 6, seed=3), uniform(2))]
    found = constants.branch(
        Piecewise.from_layers(layers), Region.make((0.0, 1.0), 2), 2.0, 2.0, seed=0, nodes=500
    )
    assert found.complete and found.lower < found.upper < found.lower * (1 + 1e-8)


# --- polytopes ---------------------------------------------------------------------------------


def test_cells_without_an_inside_are_empty() -> None:
    """Two sides that face each other on one plane, and three that leave a point: the proof is
    right to rounding only.
    """
    found = 0
    for seed in range(30):
        row = scattered(4, seed=seed).numpy()
        row = row / np.linalg.norm(row)
        shift = float(uniform(1, seed=seed + 30))
        sides = np.array([True, True])
        pair = polytope._Polytope(np.stack([row, -row]), np.array([shift, -shift]), sides, 4, INF)
        for mode in MODES:
            for weight in (1.0, 1 / 3):
                with rounded(mode):
                    assert pair.empty(np.array([weight, weight]))
        # A third row that is minus the sum of two others: drift and value are rounding.
        a, b = scattered(2, 4, seed=seed + 60).numpy()
        rows = np.stack([a, b, -(a + b)])
        lengths = np.linalg.norm(rows, axis=1)
        h = np.append(scattered(2, seed=seed + 90).numpy(), 0.0)
        h[2] = -(h[0] + h[1])
        three = polytope._Polytope(
            rows / lengths[:, None], h / lengths, np.ones(3, dtype=bool), 4, INF
        )
        for mode in MODES:
            with rounded(mode):
                drift = np.linalg.norm(three.g.T @ lengths)
                value = float(three.h @ lengths)
                assert three.empty(lengths)
            found += bool(drift > 0 and value < 0)
    assert found


@pytest.mark.parametrize("mode", MODES)
def test_a_polyhedron_with_a_point_is_not_proved_empty(mode: str) -> None:
    """Planes `+-k w` through a point, the limits exact: what is needed of their multipliers is 0,
    and rounding makes it positive or negative.
    """
    for seed in range(40):
        w, point, centre = uniform(3, 5, seed=seed)
        w, point = (torch.round(v * 2**10) / 2**10 for v in (w, point))
        height = float(dot(w, point))
        rows = np.stack([w.numpy(), -3 * w.numpy()])
        limits = np.array([height, -3 * height])
        with rounded(mode):
            for far in (1.0, INF):
                assert not cells._proved_empty(
                    rows, limits, centre.numpy(), np.array([3.0, 1.0]), far, 1e-30
                )


def test_a_residual_that_rounding_hides_leaves_points_far_away() -> None:
    """`u + 2^-53 u - u <= -1` holds from 2^53 on; the rows add up to 0 in float64."""
    rows = np.array([[1.0], [2.0**-53], [-1.0]])
    limits = np.array([-1.0, 0.0, 0.0])
    ones = np.ones(3)
    assert (ones @ rows == 0).all()
    found = [cells._proved_empty(rows, limits, np.zeros(1), ones, far, 1e-9) for far in (1.0, 1e20)]
    assert found == [True, False]
    # On the line: a ball of radius 1e-15 times the distance would be seen.
    assert cells._proved_empty(rows, limits, np.zeros(1), ones, INF, 1e-9)
    assert not cells._proved_empty(rows, limits, np.zeros(1), ones, INF, 1e-17)


@pytest.mark.parametrize("mode", MODES)
def test_the_farthest_corner_of_a_box_is_no_nearer_than_it_is(mode: str) -> None:
    """A cell that lies beyond it is proved empty."""
    for seed in range(20):
        n = 1 + seed % 5
        low = scattered(n, seed=seed)
        high = low + uniform(n, seed=seed + 20)
        centre = torch.maximum(low, torch.minimum(high, low + uniform(n, seed=seed + 40)))
        region = Region(low, high, centre, INF, 2.0)
        with rounded(mode):
            far = cells._farthest(region)
        sides = [
            max(Fraction(b) - Fraction(c), Fraction(c) - Fraction(a))
            for a, b, c in zip(low.tolist(), high.tolist(), centre.tolist())
        ]
        square = sum(side**2 for side in sides)
        assert square <= Fraction(far) ** 2 < square * (1 + Fraction(1, 10**9))
