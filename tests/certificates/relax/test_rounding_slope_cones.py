"""Bounds that know how far a layer bends: every part pays for its own rounding, in every rounding
mode, against fractions.

A part is given numbers, which are exact as they stand.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import mpmath  # comes with torch, through sympy
import pytest
import torch
from torch import Tensor, nn

from support.exact import normal, perceptron, uniform
from support.rounding import MODES, fractions, rounded, serial
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Matrix, Pick
from wassail.certificates.graph.reader import read
from wassail.certificates.relax import slope_cone_layer, slope_cones
from wassail.certificates.relax.balls import Balls
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.lines import Arithmetic, Precision, Shape
from wassail.certificates.relax.norms import Gram, map_norm
from wassail.certificates.relax.rows import row_dot
from wassail.certificates.relax.slope_cone_layer import Bent, Layer, Lengths, Pulled
from wassail.certificates.relax.slope_cones import Bounded, Seen, SlopeCones

INF = math.inf
SINGLE = torch.float32
DOUBLE = torch.float64
ONE = torch.zeros(1, dtype=torch.int64)
NONE = torch.zeros(1, dtype=DOUBLE)


def shape_of(n: int, name: str = "relu", slope: float = 0.3) -> Shape:
    """Undecided neurons of both signs, `(1, n)`."""
    op = Relu(torch.tensor(slope, dtype=DOUBLE)) if name == "relu" else Smooth(name)
    c = normal(1, n, seed=1)
    low = -c.abs() - uniform(1, n, seed=2) - 0.1
    high = c.abs() + uniform(1, n, seed=3) + 0.1
    return Shape(Node((0,), (n,), "", op), c, low, high)


def squares(values: Any) -> Fraction:
    return sum((v * v for v in values), Fraction(0))


# --- one activation ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_bends_and_their_roots(name: str, mode: str) -> None:
    """Every slope of a slope cone is as near to the middle as it says, and no root is too small."""
    shape = shape_of(200, name)
    kind = Precision(DOUBLE, 8)
    with rounded(mode):
        mid, bend = shape.cone(kind)
        every = shape.c == shape.c
        bent = Bent.make(shape, torch.zeros_like(mid), every, kind)  # type: ignore[arg-type]
        roots = (bent.root, slope_cone_layer.flattened_root(shape, kind))  # type: ignore[arg-type]
        if isinstance(shape.node.op, Smooth):
            ends = shape.node.op.function.derivative_range(*shape.ends)
    for root in roots:
        for size, square in zip(fractions(root)[0], fractions(bend)[0]):
            assert size * size >= square > 0
    if name == "relu":
        slope = Fraction(0.3)
        parts = (shape.c, shape.low, shape.high, mid, bend)
        for c, low, high, middle, off in zip(*(fractions(v)[0] for v in parts)):
            own = Fraction(1) if c > 0 else slope
            chord = (slope * (c + low) - c) / low if c > 0 else (c + high - slope * c) / high
            assert abs(own - middle) <= off and abs(chord - middle) <= off
    else:
        for steep in ends:
            for value, middle, off in zip(*(fractions(v)[0] for v in (steep, mid, bend))):
                assert abs(value - middle) <= off


@pytest.mark.parametrize("mode", MODES)
def test_lengths_by_spans(mode: str) -> None:
    shape = shape_of(2000)
    with rounded(mode):
        kind = Precision(DOUBLE, 8)
        bent = Bent.make(shape, 0 * shape.c, shape.c == shape.c, kind)  # type: ignore[arg-type]
    most = torch.maximum(-shape.low, shape.high)
    exact = squares(a * b for a, b in zip(fractions(most)[0], fractions(bent.root)[0]))
    assert Fraction(float(bent.box)) ** 2 >= exact


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inside", [True, False])
def test_neurons_pay_for_the_errors_of_their_inputs(inside: bool, mode: str) -> None:
    """Times the slope, and for a sum over all of them; inside the ball or not."""
    n = 1000
    shape = shape_of(n)
    open_ = torch.full_like(shape.c, inside, dtype=torch.bool)
    for dtype in (SINGLE, DOUBLE) if mode == "nearest" else (DOUBLE,):
        kind = Precision(dtype, 8)
        error = 1e3 * (1 + uniform(1, n, seed=4))
        w = (1 + uniform(1, n, seed=5)).to(dtype)
        with rounded(mode):
            bent = Bent.make(shape, error, open_, kind)  # type: ignore[arg-type]
            paid = row_dot(w, bent.far)
        parts = (w, bent.mid.abs(), error)
        each = zip(*(fractions(v)[0] for v in parts))
        assert Fraction(float(paid)) >= sum(a * b * c for a, b, c in each)


@pytest.mark.parametrize("mode", MODES)
def test_smooth_neurons_pay_for_their_value_at_the_sample(mode: str) -> None:
    shape = shape_of(200, "tanh")
    kind = Precision(DOUBLE, 8)
    with rounded(mode):
        bent = Bent.make(shape, 0 * shape.c, shape.c == shape.c, kind)  # type: ignore[arg-type]
        here = shape.here
    with mpmath.workdps(40):
        for c, value, far in zip(*(v[0].tolist() for v in (shape.c, here, bent.far))):
            assert abs(mpmath.tanh(mpmath.mpf(c)) - value) <= far


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", ["box", "ball", "both"])
def test_what_a_layer_adds(case: str, mode: str) -> None:
    """The worst deviation of a box, of a ball, and of both."""
    n = 400
    size = 1 + uniform(1, n, seed=6)
    room = (1 + uniform(1, n, seed=7)) * {"box": 1.0, "ball": 1e6, "both": 0.05}[case]
    eps = torch.full((1, 1), {"box": 1e6, "ball": 1.0, "both": 1.0}[case], dtype=DOUBLE)
    bent = SimpleNamespace(down=room, up=room, columns=None)
    layer = Layer(bent, eps, torch.ones(1) > 0, {}, NONE)  # type: ignore[arg-type]
    with rounded(mode), serial():
        fixed, rate = (Fraction(float(v)) for v in layer.reach(size, ONE))
    sizes = fractions(size)[0]
    rooms = fractions(room)[0]
    if case == "box":
        assert fixed >= sum(a * b for a, b in zip(sizes, rooms))
    elif case == "ball":
        assert rate**2 >= squares(sizes)
    else:
        for level in (0.01, 0.03, 0.1):
            moved = [min(a * Fraction(level), b) for a, b in zip(sizes, rooms)]
            gain = sum(a * b for a, b in zip(sizes, moved)) - fixed
            assert gain <= 0 or gain**2 <= rate**2 * squares(moved)


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_off_by_less_than_their_losses(mode: str) -> None:
    """A sum of thousands of products, taken in the type of the rows."""
    n = 8192
    first = 1 + uniform(n, 1, seed=8)
    second = 1 + uniform(1, n, seed=9)
    graph = perceptron([first, second], [torch.zeros(n).double(), torch.zeros(1).double()], 1.0)
    lost = slope_cone_layer.losses_of(graph, 2.0**-53)
    with rounded(mode):
        row = torch.mv(first.T, second[0])
    exact = sum(a * b for a, b in zip(fractions(first[:, 0]), fractions(second[0])))
    assert Fraction(lost[3]) >= abs(exact - Fraction(float(row)))


# --- the layers of a sweep ---------------------------------------------------------------------


def given(norm: float, radius: float = 1 / 3, n: int = 3, **more: Any) -> SlopeCones:
    """Without a sweep."""
    found = object.__new__(SlopeCones)
    balls = Balls.make(
        torch.zeros(1, n, dtype=DOUBLE), torch.full((1,), radius, dtype=DOUBLE), norm, None
    )
    found.layers = {}
    found.balls = found.inputs = balls
    found.moved = {}
    for name, value in more.items():
        setattr(found, name, value)
    return found


def known_lengths(found: SlopeCones) -> Lengths:
    return Lengths.nothing(torch.zeros(1, 1) > 0, found.inputs)


@pytest.mark.parametrize("mode", MODES)
def test_bounds_apart_pay_for_their_sum(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    n = 100
    constant = normal(n, seed=10)
    across = -constant * (1 + 2.0**-20 * uniform(n, seed=11)) + uniform(n, seed=12)
    together = torch.full_like(constant, INF)
    found = given(2.0)
    balls: Any = SimpleNamespace(upper=lambda a, owner: across)
    monkeypatch.setattr(SlopeCones, "upper", lambda *rest: Bounded(constant, together))
    pulled = Pulled(constant, constant, constant[:, None], {})
    with rounded(mode):
        top = found._top(pulled, ONE, 1.0, {}, Seen(balls, ONE))
    for bound, a, b in zip(*map(fractions, (top, constant, across))):
        assert bound >= a + b


@pytest.mark.parametrize("mode", MODES)
def test_lengths_of_columns(mode: str) -> None:
    """For r = 1: the longest column of thousands of rows, times the radius."""
    rows = 8000
    found = given(1.0, n=2)
    known = known_lengths(found)
    a = 1 + uniform(rows, 2, seed=13)
    root = 1 + uniform(1, rows, seed=14)
    zero = torch.zeros(rows, dtype=DOUBLE)
    with rounded(mode):
        found._measure(known, Pulled(zero, zero, a, {}), root, ONE)
    radius = Fraction(1 / 3)
    weight = fractions(root)[0]
    columns = fractions(a.T.contiguous())
    for size, column in zip(known.eps[0].tolist(), columns):
        assert Fraction(size) ** 2 >= radius**2 * squares(u * v for u, v in zip(column, weight))
    assert Fraction(float(known.plain)) ** 2 >= radius**2 * max(map(squares, columns))


@pytest.mark.parametrize("mode", MODES)
def test_lengths_of_what_rounding_adds(mode: str) -> None:
    """Shifts and spreads of thousands of rows."""
    rows = 8000
    found = given(1.0, n=2)
    known = known_lengths(found)
    shift = normal(rows, seed=15)
    spread = 1 + uniform(rows, seed=16)
    root = 1 + uniform(1, rows, seed=17)
    zero = torch.zeros(rows, 2, dtype=DOUBLE)
    with rounded(mode):
        found._measure(known, Pulled(shift, spread, zero, {}), root, ONE)
    parts = (shift.abs(), spread, root[0])
    each = [(a + b, c) for a, b, c in zip(*map(fractions, parts))]
    assert Fraction(float(known.rest)) ** 2 >= squares(a * b for a, b in each)
    assert Fraction(float(known.plain)) ** 2 >= squares(a for a, _ in each)


@pytest.mark.parametrize("mode", MODES)
def test_lengths_are_sums(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a norm times the radius, and of links times the lengths before."""
    one = torch.ones(1, dtype=DOUBLE)
    for seed in range(30):
        radius, before, *norms = (1 + uniform(4, seed=seed)).tolist()
        each: Iterator[float] = iter((*norms, *norms))
        monkeypatch.setattr(slope_cones, "matrix_norms", lambda a, each=each: one * next(each))
        found = given(2.0, radius)
        found.layers[2] = SimpleNamespace(eps=one[:, None] * before)  # type: ignore[assignment]
        known = known_lengths(found)
        pulled = Pulled(0 * one, 0 * one, one[:, None], {2: one[:, None]})
        with rounded(mode):
            found._measure(known, pulled, one[:, None], ONE)
        exact = Fraction(norms[0]) * Fraction(radius) + Fraction(norms[1]) * Fraction(before)
        assert Fraction(float(known.eps)) >= exact
        assert Fraction(float(known.plain)) >= exact


def layer_of(root: Tensor, mid: Tensor, direct: bool, **more: Any) -> Layer:
    bent = SimpleNamespace(root=root, mid=mid)
    parts = {"eps": torch.full((1, 1), 1e9, dtype=DOUBLE), "links": {}, "rest": NONE, **more}
    return Layer(bent=bent, direct=torch.tensor([direct]), **parts)  # type: ignore[arg-type]


def test_lengths_along_a_row_know_that_rows_are_rounded() -> None:
    """A direction along which a matrix moves nothing, and the rows in float32 do."""
    n = 1024
    for seed in range(10):
        weight = torch.zeros(1, n, dtype=DOUBLE)
        weight[0, :2] = 1 + uniform(2, seed=seed)
        graph = perceptron(
            [weight, torch.ones(2, 1).double()], [torch.zeros(k).double() for k in (1, 2)]
        )
        x = torch.zeros(1, n, dtype=DOUBLE)
        sweep = Sweep(graph, Balls.make(x, torch.ones(1, dtype=DOUBLE), 2.0, None)).run()
        found = sweep.cones
        assert found is not None and found.kind.dtype == SINGLE and found.layers[2].direct.all()
        a = torch.zeros(1, n, dtype=DOUBLE)
        a[0, 0], a[0, 1] = weight[0, 1], -weight[0, 0]
        assert float(weight @ a[0]) == 0
        length = Fraction(float(found._along(a, ONE)[2]))
        layer = found.layers[2]
        row = fractions(found.pull_units(1, ONE, ONE).a[0, :2])
        way = fractions(a[0, :2])
        moved = abs(row[0] * way[0] + row[1] * way[1]) * Fraction(float(layer.bent.root))
        more = length - Fraction(float(layer.rest))
        assert more > 0 and more**2 * squares(way) >= moved**2


@pytest.mark.parametrize("mode", MODES)
def test_lengths_along_a_row_of_many_entries(mode: str) -> None:
    """Its own length is that of one entry and of very many small ones."""
    n = 2**18
    node = Node((0,), (1,), "", Affine(Pick(torch.tensor([0]), (n,), (1,))))
    act = Node((1,), (1,), "", Relu(torch.tensor(0.0, dtype=DOUBLE)))
    graph = Graph((Node((), (n,), "the input"), node, act))
    one = torch.ones(1, 1, dtype=DOUBLE)
    found = given(2.0, 1.0, n, graph=graph, sizes={1: 0.0})
    found.kind = SimpleNamespace(floors={1: NONE})  # type: ignore[assignment]
    found.exact = Arithmetic(graph, DOUBLE)
    found.layers[2] = layer_of(one, one, True)
    a = torch.full((1, n), 2.0**-30, dtype=DOUBLE)
    a[0, 0] = 1.0
    with rounded(mode):
        length = Fraction(float(found._along(a, ONE)[2]))
    assert length**2 * (1 + (n - 1) * Fraction(2) ** -60) >= 1


@pytest.mark.parametrize("mode", MODES)
def test_lengths_along_a_row_are_sums(mode: str) -> None:
    """Of links times the lengths before, and what rounding adds."""
    zero = torch.zeros(1, 1, dtype=DOUBLE)
    graph = perceptron([zero, zero, zero], [NONE] * 3)
    one = zero + 1
    for seed in range(30):
        norm, eps, rest = (1 + uniform(3, seed=seed)).tolist()
        found = given(2.0, 1.0, 1, graph=graph, sizes={1: 0.0, 3: 0.0})
        found.kind = SimpleNamespace(floors={1: NONE, 3: NONE})  # type: ignore[assignment]
        found.exact = Arithmetic(graph, DOUBLE)
        found.layers[2] = layer_of(one, one, False, eps=one * eps)
        links = {2: NONE + norm}
        found.layers[4] = layer_of(one, one, True, links=links, rest=NONE + rest)
        with rounded(mode):
            length = Fraction(float(found._along(one, ONE)[4]))
        assert length >= Fraction(norm) * Fraction(eps) + Fraction(rest)


@pytest.mark.parametrize("mode", MODES)
def test_what_two_maps_lose(mode: str) -> None:
    """The loss of the first times the norm of the second, and its own."""
    for seed in range(20):
        weight = normal(1, 1, seed=seed)
        nodes = [Node((), (1,), "the input")]
        nodes += [Node((k,), (1,), "", Affine(Matrix(weight))) for k in range(2)]
        lost = {k + 1: v[None] for k, v in enumerate(1 + uniform(2, seed=seed))}
        reach = SimpleNamespace(radius={0: NONE}, lost=lost)
        found = given(2.0, 1.0, 1, graph=Graph(tuple(nodes)), reach=reach)
        norm = Fraction(map_norm(Matrix(weight), 2.0, (1,), (1,)))
        with rounded(mode):
            first, both = (found._off(k) for k in (1, 2))
        assert first is not None and both is not None
        exact = Fraction(float(first)) * norm + Fraction(float(lost[2]))
        assert Fraction(float(both)) >= exact


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_lengths_by_the_norms_of_layers(
    norm: float, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest root times the radius, and times what rounding adds; and neurons keep the errors
    of their inputs.
    """
    n = 50
    shape = shape_of(n)
    for seed in range(20):
        radius, off = ((1 + uniform(1, seed=seed + k)) / 50 for k in (0, 20))
        reach = SimpleNamespace(radius={0: radius})
        found = given(norm, float(radius), n, reach=reach, kind=Precision(DOUBLE, 8))
        found._known = {1: Lengths.nothing(shape.c == shape.c, found.inputs)}
        monkeypatch.setattr(SlopeCones, "_off", lambda self, j, off=off: off)
        error = torch.full_like(shape.c, 1e-3)
        with rounded(mode):
            found.add(1, shape, error)
        layer = found.layers[1]
        root = Fraction(float(layer.bent.root.amax()))
        assert Fraction(float(layer.eps[0, 0])) >= root * Fraction(float(radius))
        assert norm == 1 or Fraction(float(layer.rest)) >= root * Fraction(float(off))
        assert (layer.bent.far >= 0.999e-3 * layer.bent.mid.abs()).all()


def test_layers_keep_the_errors_of_the_sweep() -> None:
    """Weights that may be wrong: an error of the inputs of neurons, times their slopes."""
    off = 1e-6
    weight = 1 + uniform(8, 3, seed=27)
    biases = [torch.full((8,), -3.0, dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)]
    graph = replace(perceptron([weight, normal(2, 8, seed=28)], biases), rounding=off)
    x = torch.full((1, 3), 2 / 3, dtype=DOUBLE)
    sweep = Sweep(graph, Balls.make(x, torch.ones(1, dtype=DOUBLE), 2.0, None)).run()
    assert sweep.cones is not None
    bent = sweep.cones.layers[2].bent
    assert (bent.root > 0).all()
    assert (bent.far >= off * bent.mid * (weight @ x[0] + 3)).all()


@pytest.mark.parametrize("mode", MODES)
def test_rows_pay_for_the_sum_of_their_parts(mode: str) -> None:
    """What is fixed, and what every layer adds: large parts of both signs."""
    n = 100
    shift = 1e6 * normal(n, seed=18)
    spread = shift.abs() * (1 + 1e-6 * uniform(n, seed=19))
    own = 1e6 * uniform(n, seed=20)
    rate = uniform(n, seed=21)
    eps = 1 + uniform(1, 1, seed=22)
    found = given(1.0)
    layer = SimpleNamespace(reach=lambda *rest: (own, rate), eps=eps)
    found.layers[2] = layer  # type: ignore[assignment]
    zero = torch.zeros(n, 3, dtype=DOUBLE)
    for sign in (1.0, -1.0):
        with rounded(mode):
            pulled = Pulled(shift, spread, zero, {2: zero})
            bound = found.upper(pulled, zero, zero[:, 0], ONE, sign, {}, {})
        parts = (sign * shift, spread, own, rate, bound.constant, bound.together)
        length = Fraction(float(eps))
        for a, b, c, d, constant, together in zip(*map(fractions, parts)):
            assert constant >= a + b + c + d * length
            assert together >= a + b + c + d * length


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, 2.0])
def test_rows_and_layers_together(norm: float, mode: str) -> None:
    """A row and what the layers add to it, in the worst direction: a corner, or a square root."""
    rows = 20
    n = 2000 if norm == 2 else 1
    a = 1 + uniform(rows, n, seed=23)
    rate = 10 * (1 + uniform(rows, seed=24))
    eps = 1 + uniform(1, 1, seed=25)
    along = 10 * (1 + uniform(rows, seed=26))
    found = given(norm, n=n)
    none = torch.zeros(rows, dtype=DOUBLE)
    layer = SimpleNamespace(reach=lambda *rest: (none, rate), eps=eps)
    found.layers[2] = layer  # type: ignore[assignment]
    with rounded(mode):
        across = torch.full_like(none, 1e9)  # no wall
        pulled = Pulled(none, none, a, {2: none[:, None]})
        bound = found.upper(pulled, a, across, ONE, 1.0, {2: along}, {})
    radius = Fraction(1 / 3)
    length = Fraction(float(eps))
    for row, slope, ahead, top in zip(*map(fractions, (a, rate, along, bound.together))):
        if norm == 1:
            assert top >= row[0] * radius + slope * length
            continue
        # With `p = ||a|| radius + slope ahead` and `q = slope length`: `top^2 >= p^2 + q^2`.
        left = top**2 - (slope * length) ** 2 - (slope * ahead) ** 2
        whole = squares(row) * radius**2
        rest = left - whole
        assert rest >= 0 and rest**2 >= 4 * whole * (slope * ahead) ** 2


# --- Gram matrices of convolutions -------------------------------------------------------------


def gram_of(rows: Tensor, weight: Tensor, dtype: torch.dtype) -> Gram:
    """`A A^T` of one row, that of a convolution with a single window."""
    size = weight.shape[-1]
    layer = nn.Conv2d(1, 1, size, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(weight.double()[None, None])
    graph = read(nn.Sequential(layer, nn.Flatten()), (1, size, size))
    j = next(i for i, node in enumerate(graph.nodes) if node.inputs == (0,))
    cones = SimpleNamespace(
        graph=graph,
        layers={},
        balls=SimpleNamespace(norm=2.0),
        exact=SimpleNamespace(maps={j: graph.nodes[j].map}),
        together=lambda _: 8,
        kind=Precision(dtype, 8),
    )
    place = torch.zeros(1, 1, dtype=torch.int64)
    found = SlopeCones._gram(cones, j, rows, place)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_gram_matrices_of_convolutions_pay_for_their_sums(dtype: torch.dtype, mode: str) -> None:
    """Rows in float32 beside weights in float64, and sums of 900 terms of one sign."""
    weight = uniform(30, 30, seed=4) + 0.5
    rows = weight.to(dtype).reshape(1, -1)
    with rounded(mode):
        found = gram_of(rows, weight, dtype)
    value, scale = Fraction(found.values.item()), Fraction(found.scale.item())
    true = squares(fractions(rows)[0]) / scale**2
    assert abs(value - true) <= Fraction(found.off) * value


def test_rows_that_may_have_underflowed_have_no_gram_matrix() -> None:
    rows = torch.full((1, 9), slope_cones.LEAST_SCALE / 2, dtype=SINGLE)
    found = gram_of(rows, torch.ones(3, 3, dtype=DOUBLE), SINGLE)
    assert torch.isnan(found.values).all()
