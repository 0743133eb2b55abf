"""What bounds on smooth networks are made of, each part held to what it promises, in every rounding
mode.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from types import SimpleNamespace

import mpmath  # comes with torch, through sympy
import numpy as np
import pytest
import torch
from torch import Tensor

from support.exact import normal, scattered, uniform
from support.rounding import MODES, long, rounded, serial
from wassail.certificates.graph.graph import Affine, Curved, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Matrix, Scale, Sum
from wassail.certificates.graph.operators import normalise, products, softmax
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.planes import Curve, Plane, Span
from wassail.certificates.graph.region import Region
from wassail.certificates.graph.tangent import EntrywiseTangent
from wassail.certificates.relax import jacobian, ranges
from wassail.certificates.relax.crown import Sweep
from wassail.certificates.relax.ranges import Bounds
from wassail.paper import attention_bounds as attention
from wassail.paper import transformer_constants
from wassail.paper.attention_bounds import castin

INF = math.inf
DOUBLE = torch.float64
LEAKY = torch.tensor(0.1, dtype=DOUBLE)


@pytest.mark.parametrize("mode", MODES)
def test_regions_have_room_around_their_centre(mode: str) -> None:
    centre = scattered(50, seed=1)
    low = centre - scattered(50, seed=2).abs()
    high = centre + scattered(50, seed=3).abs()
    with rounded(mode):
        found = ranges.one_region(Region(low, high, centre))
    assert (long(found.below) >= long(centre) - long(low)).all()
    assert (long(found.above) >= long(high) - long(centre)).all()


@pytest.mark.parametrize("mode", MODES)
def test_ranges_of_inputs_that_a_relu_reads(mode: str) -> None:
    """With an infinite side, by intervals; without, from the centre of a sweep."""
    x = 2.0**-20 * scattered(3, 40, seed=4)
    below = scattered(3, 40, seed=5).abs()
    above = scattered(3, 40, seed=6).abs()
    below[:, 0] = INF
    graph = Graph((Node((), (40,), ""), Node((0,), (40,), "", Relu(LEAKY))))
    with rounded(mode):
        low, high = ranges.ranges(graph, ranges.boxed(x, below, above))[0]
    assert (low[:, 0] == -INF).all()
    assert (long(low)[:, 1:] <= long(x)[:, 1:] - long(below)[:, 1:]).all()
    assert (long(high) >= long(x) + long(above)).all()
    swept = SimpleNamespace(graph=graph, centre={0: x}, spans={0: (-above, above)})
    with rounded(mode):
        low, high = Sweep.proved(swept)[0]  # type: ignore[arg-type]
    assert (long(low) <= long(x) - long(above)).all()
    assert (long(high) >= long(x) + long(above)).all()


@pytest.mark.parametrize("mode", MODES)
def test_rays_and_their_parts(mode: str) -> None:
    """`x = origin + t u` and `x / t`, at the start of the rays, where both are tight."""
    count = 60
    n = 8
    origin = scattered(n, seed=7)
    far = torch.full((n,), INF, dtype=DOUBLE)
    least = scattered(count, n, seed=8)
    top = least + 2.0**-9 * scattered(count, n, seed=9).abs()
    start = 1 + scattered(count, seed=10).abs()
    rays = ranges.Rays(origin, -far, far, start, (least, top))
    v = scattered(count, n, seed=11)
    none = torch.full_like(v, INF)
    with rounded(mode):
        (low, high), (bottom, end) = rays.scaled()
        (value_low, value_high), _ = rays.meet((-none, none), (least, top))
        _, (part_low, part_high) = rays.meet((v, v), (-none, none))
    t = long(start)[:, None]
    ups = (least >= 0).numpy()
    downs = (top <= 0).numpy()
    assert (long(low) <= long(origin) + long(least) * t)[ups].all()
    assert (long(high) >= long(origin) + long(top) * t)[downs].all()
    room = np.longdouble(2) ** -62 * (np.abs(long(origin)) / t + np.abs(long(least)))
    share = long(origin) / t
    assert (long(bottom) <= long(least) + np.minimum(share, 0) + room).all()
    assert (long(end) >= long(top) + np.maximum(share, 0) - room).all()
    assert (long(value_low) <= long(least) * t)[ups].all()
    assert (long(value_high) >= long(top) * t)[downs].all()
    exact = long(v) / t
    room = np.longdouble(2) ** -62 * np.abs(exact)
    assert (long(part_low) <= np.minimum(exact, 0) + room).all()
    assert (long(part_high) >= np.maximum(exact, 0) - room).all()


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_nodes_far_out(mode: str) -> None:
    """`v / t` of an affine node whose weights are known up to a relative error, and of a smooth
    one at any size.
    """
    off = 1e-7
    weight = 2.0**-20 * scattered(200, 1, seed=12)
    weight = torch.cat([weight, -weight * (1 + 1e-9)], 1)  # they cancel
    weight[:100] = 2.0**-20 * scattered(100, 2, seed=112)
    bias = scattered(200, seed=13)
    bias[150:] = 0
    q = torch.full((1, 2), 1 / 3, dtype=DOUBLE)
    t = torch.tensor([[1 + 1 / 3]], dtype=DOUBLE)
    node = Node((0,), (200,), "", Affine(Matrix(weight), bias))
    nodes = (Node((), (2,), ""), node)
    for relative in (0.0, off):
        graph = Graph(nodes, relative)
        for sign in (1, -1):  # the first weight and the bias are larger, the second one smaller
            one = np.longdouble(relative) * sign
            factor = 1 + one
            with rounded(mode):
                found = ranges._far_part(graph, node, [(q, q)], t)
            assert found is not None
            terms = long(weight) * long(q)
            moved = terms[:, 0] * (1 + one) + terms[:, 1] * (1 - one)
            share = long(bias) * factor / long(t)[0]
            room = np.longdouble(2) ** -62 * np.abs(share)
            assert (long(found[0])[0] <= moved + np.minimum(share, 0) + room).all()
            assert (long(found[1])[0] >= moved + np.maximum(share, 0) - room).all()
        step = node.span([(q, q)], relative)
        for sign in (-1, 1):
            value = (long(weight) @ long(q)[0] + long(bias)) * (1 + sign * np.longdouble(relative))
            assert (long(step[0])[0] <= value).all() and (long(step[1])[0] >= value).all()
    smooth = Node((0,), (80,), "", Smooth("softplus"))
    sizes = torch.cat([scattered(1, 40, seed=15), 2.0**60 * scattered(1, 40, seed=16)], 1)
    away = long(Smooth("softplus").function.distance_to_relu)
    for start in (1 + uniform(1, 1, seed=17), 2.0**-60 * (1 + uniform(1, 1, seed=18))):
        with rounded(mode):
            found = ranges._far_part(Graph(nodes), smooth, [(sizes, sizes)], start)
        assert found is not None
        relu = np.maximum(long(sizes), 0)
        share = away / long(start)
        room = np.longdouble(2) ** -61 * (relu + share)
        assert (long(found[0]) <= relu).all()  # softplus lies above the ReLU
        assert (long(found[0]) <= relu - share + room).all()
        assert (long(found[1]) >= relu + share - room).all()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_that_meet_at_a_node(mode: str) -> None:
    """Two leaky ReLUs read the input, and their gradients are added there."""
    n = 300
    low = -1 - uniform(1, n, seed=19)
    g = scattered(1, 1, n, seed=20)
    h = scattered(1, 1, n, seed=21)
    curve = SimpleNamespace(adjoint=lambda *_: ((g, g), (h, h)))
    graph = Graph(
        (
            Node((), (n,), ""),
            Node((0,), (n,), "", Relu(LEAKY)),
            Node((0,), (n,), "", Relu(LEAKY)),
            Node((1, 2), (n,), "", Curved(curve)),  # type: ignore[arg-type]
        )
    )
    span = {0: (low, low), 1: (low, low), 2: (low, low)}
    with rounded(mode):
        bottom, top = jacobian.adjoint(graph, span, torch.ones(1, n, dtype=DOUBLE))
    exact = (long(g) + long(h)) * long(LEAKY)
    assert (long(bottom) <= exact).all() and (long(top) >= exact).all()


def test_norms_of_very_many_entries() -> None:
    """Sums of a hundred thousand terms, one after the other: what they lose is beyond 1e-12."""
    entries = 0.5 + uniform(1, 1, 100000, seed=22) / 2
    exact = long(entries).sum()
    with rounded("down"), serial():
        found = jacobian.entry_norms(entries, entries, INF, INF)
    assert long(found)[0] >= exact


@pytest.mark.parametrize("mode", MODES)
def test_secants_are_as_steep_as_the_activation(mode: str) -> None:
    graph = Graph((Node((), (60,), ""), Node((0,), (60,), "", Smooth("tanh"))), 1e-7)
    low = normal(60, seed=23)
    high = low + uniform(60, seed=24)
    region = Region(low, high, low)
    with rounded(mode):
        bounds = Bounds(graph, region, {1: (low, high)})
        found = jacobian.secants(bounds)
        least, top = bounds.derivative(1)
    (scale,) = (n.map for n in found.graph.nodes if n.map is not None and n.inputs == (1,))
    width = scale.factor
    assert (long(least) + long(width) >= long(top)).all()
    assert found.graph.rounding == 1e-7


@pytest.mark.parametrize("mode", MODES)
def test_tangents_of_activations(mode: str) -> None:
    """The derivative lies in middle +- radius, and a gradient that is off by so much moves by
    at most `spread`.
    """
    low = scattered(1, 200, seed=25)
    high = low + scattered(1, 200, seed=26).abs()
    g = scattered(1, 2, 200, seed=27)
    error = scattered(1, 2, 200, seed=28).abs()
    with rounded(mode):
        by = EntrywiseTangent.make((low, high))
        spread = by.spread(g, error)[0]
    assert (long(by.middle) + long(by.radius) >= long(high)[:, None]).all()
    assert (long(by.middle) - long(by.radius) <= long(low)[:, None]).all()
    most = long(by.radius) * (np.abs(long(g)) + long(error))
    assert (long(spread) >= most * (1 - 1e-15)).all()


def test_tangents_of_products_with_an_error() -> None:
    node = Product("a,a->a")
    a = scattered(1, 30, seed=29)
    b = scattered(1, 30, seed=30)
    wide = 0.1
    by = products._ProductTangent.make(node, ((a - wide, a + wide), (b - wide, b + wide)))
    g = scattered(1, 1, 30, seed=31)
    error = scattered(1, 1, 30, seed=32).abs()
    worst = wide * (g.abs() + error)
    for found in by.spread(g, error):
        assert (found >= worst * (1 - 1e-12)).all()


def softmax_of(p: Tensor, width: Tensor, terms: int) -> softmax._SoftmaxTangent:
    shape = (1, 1, len(p))
    return softmax._SoftmaxTangent(
        p.reshape(shape), width.reshape(shape), (p + width).reshape(shape), terms
    )


def test_tangents_of_a_softmax_with_an_error() -> None:
    """Two tokens, one of them unlikely: the derivative of its entry moves by twice the error."""
    p = torch.tensor([1e-3, 1 - 1e-3], dtype=DOUBLE)
    w = 1e-3
    by = softmax_of(p, torch.full((2,), w, dtype=DOUBLE), 10)
    nothing = torch.zeros(1, 1, 2, dtype=DOUBLE)
    found = by.spread(nothing, nothing + 1)[0][0, 0]
    h = torch.tensor([1.0, -1.0], dtype=DOUBLE)
    there = p + torch.tensor([w, -w], dtype=DOUBLE)
    moved = there * (h - (there * h).sum()) - p * (h - (p * h).sum())
    assert bool((found >= moved.abs()).all())


def test_tangents_of_a_softmax_that_does_not_add_up_to_one() -> None:
    """By three times the rounding of its sum: a constant gradient is no longer sent to 0."""
    terms = 12
    exact = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=DOUBLE)
    off = 3 * terms * 2.0**-52
    p = exact * (1 + off)
    one = torch.ones(1, 1, 4, dtype=DOUBLE)
    found = softmax_of(p, exact * off, terms).spread(one, 0 * one)[0]
    assert (long(found)[0, 0] >= long(p) * np.abs(1 - long(p).sum())).all()


@pytest.mark.parametrize("mode", MODES)
def test_tangents_of_a_softmax_hold_its_range(mode: str) -> None:
    least = scattered(3, 200, seed=33)
    top = least + scattered(3, 200, seed=34).abs()
    p = (least + top) / 2
    curve = SimpleNamespace(value=lambda _: p, span=lambda _: (least, top))
    with rounded(mode):
        by = softmax._SoftmaxTangent.make(curve, ((least, top),))  # type: ignore[arg-type]
    assert (long(by.p[:, 0]) + long(by.width[:, 0]) >= long(top)).all()
    assert (long(by.p[:, 0]) - long(by.width[:, 0]) <= long(least)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("eps", [1e-5, 100.0])
def test_tangents_of_a_normalisation_hold_its_range(eps: float, mode: str) -> None:
    """Of its rate at both ends, and of its values, as they were found.

    Where eps is large the rate bends the other way, and its lower end is the one that counts.
    """
    for n, seed in ((3, 35), (40, 36), (3000, 37)):
        low = 1 + uniform(5, n, seed=seed)
        high = low + uniform(5, n, seed=seed + 10)
        least = scattered(5, n, seed=seed + 20)
        top = least + scattered(5, n, seed=seed + 30).abs()
        curve = SimpleNamespace(eps=eps, span=lambda _, ends=(least, top): ends)
        with rounded(mode):
            by = normalise._NormaliseTangent.make(curve, ((low, high),))  # type: ignore[arg-type]
        for end in (low, high):
            rate = 1 / np.sqrt((long(end) ** 2).mean(1, keepdims=True) + np.longdouble(eps))
            room = np.longdouble(2) ** -60 * rate
            assert (np.abs(rate - long(by.rho)[:, 0]) - room <= long(by.rho_width)[:, 0]).all()
        assert (long(by.y[:, 0]) + long(by.y_width[:, 0]) >= long(top)).all()
        assert (long(by.y[:, 0]) - long(by.y_width[:, 0]) <= long(least)).all()


def normalise_of(y: Tensor, width: Tensor, turn: float = 0.0) -> normalise._NormaliseTangent:
    one = torch.ones(1, 1, 1, dtype=DOUBLE)
    return normalise._NormaliseTangent(
        one, y[None, None], turn * one, width[None, None], len(y) + 8
    )


def test_tangents_of_a_normalisation_with_an_error() -> None:
    """Two entries, and the corner of the error where each part of it counts most."""
    one = torch.ones(2, dtype=DOUBLE)
    nothing = torch.zeros(1, 1, 2, dtype=DOUBLE)
    found = normalise_of(0 * one, 0 * one, 0.25).spread(nothing, nothing + 1)[0]
    assert bool((found >= 0.25).all())
    for d in (0.5 * one, 0.5 * torch.tensor([1.0, -1.0], dtype=DOUBLE)):
        found = normalise_of(one, d.abs()).spread(nothing, nothing + 1)[0][0, 0]
        h = d.sign()
        moved = (d * ((one + d) * h).sum() + one * (d * h).sum()) / 2
        assert bool((found >= moved.abs() * (1 - 1e-12)).all())


def test_tangents_of_a_normalisation_whose_product_is_rounded() -> None:
    """`<y, g>` is 2^-54, and seems to be 0."""
    y = torch.tensor([1.0, 1 / 3, 1.0], dtype=DOUBLE)
    g = torch.tensor([0.0, 3.0, -1.0], dtype=DOUBLE)
    wide = torch.tensor([0.25, 0.0, 0.0], dtype=DOUBLE)
    exact = np.abs((long(y) * long(g)).sum())
    assert float((y * g).sum()) == 0 < exact
    found = normalise_of(y, wide).spread(g[None, None], 0 * g[None, None])[0]
    assert long(found)[0, 0, 0] >= exact / 4 / 3


@pytest.mark.parametrize("mode", MODES)
def test_tangents_of_wide_layers_and_of_nodes_with_many_readers(mode: str) -> None:
    """Gradients that are one number: what their sums lose is within the radius."""
    weights = [uniform(400, 3, seed=40), uniform(400, 400, seed=41), uniform(2, 400, seed=42)]
    nodes = [Node((), (3,), "")]
    for weight in weights:
        nodes.append(Node((len(nodes) - 1,), (len(weight),), "", Affine(Matrix(weight))))
    many = [Node((), (1,), "")]  # a thousand readers, added up in three steps
    factors = uniform(1000, 1, 1, seed=43)
    many += [Node((0,), (1,), "", Affine(Matrix(factor))) for factor in factors]
    left = list(range(1, 1001))
    while len(left) > 1:
        groups = [tuple(left[k : k + 10]) for k in range(0, len(left), 10)]
        left = [len(many) + k for k in range(len(groups))]
        many += [Node(group, (1,), "", Affine(Sum(10))) for group in groups]
    for graph, exact in (
        (Graph(tuple(nodes)), long(weights[2]) @ (long(weights[1]) @ long(weights[0]))),
        (Graph(tuple(many)), long(factors).sum(0)),
    )[: 2 if mode == "down" else 1]:  # the second takes a second
        with rounded(mode):
            eye = torch.eye(graph.outputs, dtype=DOUBLE)
            low, high = jacobian.centred(graph, {}, eye)
        assert (long(low)[0] <= exact).all() and (long(high)[0] >= exact).all()


@pytest.mark.parametrize("mode", MODES)
def test_tangents_carry_errors_to_the_input(mode: str) -> None:
    weight = uniform(2000, 1, seed=44)
    error = uniform(1, 1, 2000, seed=45)
    node = Node((0,), (2000,), "", Affine(Matrix(weight)))
    graph = Graph((Node((), (1,), ""), node))
    rest = {0: torch.zeros(1, 1, 1, dtype=DOUBLE), 1: error}
    with rounded(mode):
        maps = {1: node.tangent([], 0.0)}
        found = jacobian._carried(graph, maps, rest, 0, torch.tensor([0]))
    assert long(found)[0, 0, 0] >= (long(weight)[:, 0] * long(error)[0, 0]).sum()


def test_tangents_add_up_the_errors_of_several_ways() -> None:
    """`tanh(x + x)` as two ways to one sum: both carry half of the error of the derivative."""
    one = torch.ones((), dtype=DOUBLE)
    nodes = (
        Node((), (1,), "the input"),
        Node((0,), (1,), "", Affine(Scale(one))),
        Node((0,), (1,), "", Affine(Scale(one))),
        Node((1, 2), (1,), "", Affine(Sum(2))),
        Node((3,), (1,), "", Smooth("tanh")),
    )
    end = torch.ones(1, 1, dtype=DOUBLE)
    low, high = jacobian.centred(Graph(nodes), {3: (0 * end, end)}, end)
    for x in (0.0, 0.5):
        slope = 2 * (1 - math.tanh(2 * x) ** 2)
        assert float(low) <= slope + 1e-15 and float(high) >= slope - 1e-15


class Itself(Curve):
    """The identity, of which nothing is told but the range of its gradients."""

    def value(self, *v: Tensor) -> Tensor:
        return v[0]

    def span(self, *spans: Span) -> Span:
        return spans[0]

    def plane(self, centres: Sequence[Tensor], spans: Sequence[Span]) -> Plane:
        raise NotImplementedError

    def adjoint(self, g: Span, spans: Sequence[Span]) -> tuple[Span, ...]:
        return (g,)


@pytest.mark.parametrize("mode", MODES)
def test_tangents_of_a_curve_by_the_range_of_its_gradients(mode: str) -> None:
    """M is 0, so that all of a gradient and of its error is spread."""
    g = scattered(1, 2, 200, seed=60)
    error = scattered(1, 2, 200, seed=61).abs()
    span = (torch.zeros(1, 200, dtype=DOUBLE), torch.ones(1, 200, dtype=DOUBLE))
    with rounded(mode):
        by = Itself().tangent([span])
        (spread,) = by.spread(g, error)
    assert not by.transpose(g)[0].any() and not by.reach(g.abs())[0].any()
    exact = [
        abs(Fraction(float(a))) + Fraction(float(b)) for a, b in zip(g.flatten(), error.flatten())
    ]
    assert all(Fraction(float(v)) >= size for v, size in zip(spread.flatten(), exact))


def spectral_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of matrices that are numbers: no rounding of their own."""
    monkeypatch.setattr(attention, "spectral", lambda m: m.abs().amax((-2, -1)))


@pytest.mark.parametrize("mode", MODES)
def test_attention_on_balls_is_rounded_up(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas of `castin` and of the bound on a ball, with many digits."""
    spectral_is(monkeypatch)
    for k in range(40):
        a, v, radius, shift = (0.2 + uniform(4, seed=50 + k)).tolist()
        n = 2 + k
        keys, values = (torch.tensor([[value]], dtype=DOUBLE) for value in (a, v))
        with rounded(mode):
            paper = castin(n, keys, values, radius)
            ours = attention._global(n, a, v, radius, shift, None)
            most = attention._likeliest(n, a, None)
        with mpmath.workdps(40):
            first = mpmath.mpf(a) * mpmath.mpf(radius) ** 2
            inner = first**2 * (4 * n + 1) + n
            assert mpmath.mpf(paper) >= mpmath.sqrt(3) * mpmath.mpf(v) * mpmath.sqrt(inner)
            b = (mpmath.mpf(a) * radius + shift) * radius
            top = 1 / (1 + (n - 1) * mpmath.exp(-2 * b))
            assert mpmath.mpf(most) >= 1 / (1 + (n - 1) * mpmath.exp(-2 * mpmath.mpf(a)))
            share = min(max(1 / (1 + b * b), mpmath.mpf(0.5)), top)
            rest = min(1 - share, top) if top > 0.5 else top
            h = mpmath.sqrt(share) + b * mpmath.sqrt(rest)
            exact = mpmath.mpf(v) * (mpmath.sqrt(n) * h + first)
            assert mpmath.mpf(ours) >= exact and ours < float(exact) * (1 + 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_attention_to_the_likeliest_token_behind_a_mask(mode: str) -> None:
    """Two tokens, and forty thousand: the mask's own softmax is a long sum."""
    for n in (2, 40000):
        mask = normal(1, n, seed=60)
        for b in (0.1, 1.0):
            with rounded(mode):
                found = attention._likeliest(n, b, mask)
            weights = np.exp(long(mask))
            share = weights.max() / weights.sum()
            exact = 1 / (1 + (1 - share) / share * np.exp(np.longdouble(-2 * b)))
            assert np.longdouble(found) >= exact * (1 - np.longdouble(2) ** -58)


@pytest.mark.parametrize("mode", MODES)
def test_attention_by_lengths_and_products(mode: str) -> None:
    """Long vectors, and matrices that cancel in their product: also the query bias, and the
    projection after the heads.
    """
    for n in (3, 5000):
        values = uniform(2, n, seed=61)
        with rounded(mode):
            found = attention._length(values)
        exact = np.sqrt((long(values) ** 2).sum(1))
        assert (long(found) >= exact * (1 - np.longdouble(2) ** -60)).all()
    left = scattered(1, 60, seed=62)
    right = scattered(60, 1, seed=63)
    right[-1] = -(left[:, :-1] @ right[:-1]) / left[0, -1]
    exact = np.abs((long(left)[0] * long(right)[:, 0]).sum())
    much = float(left.norm() * right.norm())
    with rounded(mode):
        product = left @ right
        sizes = attention._sizes(product, product, product[0], (much, much, much))
        out = attention.heads([INF], [1.0], product, much)
    assert all(np.longdouble(float(size)) >= exact for size in (*sizes, out))


@pytest.mark.parametrize("mode", MODES)
def test_attention_of_several_heads_is_rounded_up(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spectral_is(monkeypatch)
    one = torch.ones(1, 1, dtype=DOUBLE)
    for k in range(20):
        values = (1 + uniform(5, seed=64 + k)).tolist()
        with rounded(mode):
            added = attention.heads(values, [INF], one)
            joined = attention.heads([INF], values, one / 3)
        exact = [np.longdouble(v) for v in values]
        assert np.longdouble(added) >= sum(exact)
        length = np.sqrt(sum(v**2 for v in exact)) * long(one / 3)[0, 0]
        assert np.longdouble(joined) >= length


@pytest.mark.parametrize("mode", MODES)
def test_attention_probabilities_when_scores_move(mode: str) -> None:
    """Both ends, from logarithms that are exact as they stand."""
    n = 6
    slack = (n + 8) * 2.0**-50
    for scale in (1.0, 20.0):
        log = torch.log_softmax(scale * normal(40, n, seed=90), -1)
        for e in (2.0**-60 * uniform(40, n, seed=91), uniform(40, n, seed=92) * scale / 2):
            with rounded(mode):
                least, most = attention._probabilities(log, e, slack)
            for j in range(n):
                others = np.arange(n) != j
                up = long(log) + long(e)
                down = long(log) - long(e)
                high = 1 / (1 + np.exp(down[:, others] - up[:, j : j + 1]).sum(1))
                low = 1 / (1 + np.exp(up[:, others] - down[:, j : j + 1]).sum(1))
                room = np.longdouble(2) ** -58
                assert (long(most)[:, j] >= high * (1 - room)).all()
                assert (long(least)[:, j] <= low * (1 + room)).all()


@pytest.mark.parametrize("mode", MODES)
def test_attention_probabilities_of_large_scores(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scores of a million that differ by one: the stored probabilities have ten digits, and the
    others are accounted for.
    """
    real = attention._moves
    taken: list[float] = []
    n = 5
    d = 3
    x = 1 + 1e-6 * normal(n, d, seed=93)
    a = 1e6 * torch.eye(d, dtype=DOUBLE) + 1e5 * normal(d, d, seed=94)
    with rounded(mode):
        at = attention._State.make(x, a, None, None)
        slack = (n + d + 8) * 2.0**-50 * (1 + float(x.norm(dim=1).max()) ** 2 * float(a.norm()))
        move = attention._moves(at, 0 * x, a, slack)
    y = long(x) @ long(a).T
    scores = y @ long(x).T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    exact = weights / weights.sum(1, keepdims=True)
    monkeypatch.setattr(attention, "_moves", lambda *given: taken.append(given[3]) or real(*given))
    with rounded(mode):
        attention.region_bound(x, x, a, a)
    assert (np.abs(exact / long(at.p) - 1) <= np.longdouble(taken[0])).all()
    assert np.abs(exact / long(at.p) - 1).max() > 1e-11
    assert (np.abs(exact - long(at.p)) <= long(move.p)).all()
    assert (exact <= long(move.most)).all()


@pytest.mark.parametrize("mode", MODES)
def test_attention_in_a_box_pays_for_its_sums(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The middle is less than the truth by what its sums may lose; then four large parts of it
    are added up.
    """
    n = 4
    d = 3
    x = 0.5 + uniform(n, d, seed=95)
    a = 1e4 * torch.eye(d, dtype=DOUBLE)
    v = torch.eye(d, dtype=DOUBLE)
    score = float(x.norm(dim=1).max()) ** 2 * float(a.norm())
    lost = (n + d) * 2.0**-52 * float(v.norm()) * (math.sqrt(n) + (math.sqrt(n) + 1) * score)
    zero = torch.zeros((), dtype=DOUBLE)
    monkeypatch.setattr(attention, "_middle", lambda *_: torch.tensor(1.0 - lost, dtype=DOUBLE))
    monkeypatch.setattr(attention, "_drift", lambda *_: (zero, zero, zero[None]))
    with rounded(mode):
        assert float(attention.region_bound(x, x, a, v)) >= 1
    parts = 1e9 * (1 + uniform(4, seed=96))
    drift = parts[1], parts[2], parts[3:]
    monkeypatch.setattr(attention, "_middle", lambda *_: parts[0])
    monkeypatch.setattr(attention, "_drift", lambda *_: drift)
    monkeypatch.setattr(
        attention, "spectral", lambda m: torch.full(m.shape[:-2], 1e12, dtype=DOUBLE)
    )
    monkeypatch.setattr(attention, "_global_balls", lambda *_: INF)
    with rounded(mode):
        found = attention.region_bound(x, x, 1e-4 * a, v)
    assert long(found) >= long(parts).sum()


@pytest.mark.parametrize("mode", MODES)
def test_attention_on_a_ball_around_the_middle(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias there is a sum that cancels; and the scores of tokens that move are rounded up."""
    d = 40
    c = scattered(d, seed=97)
    a = scattered(d, d, seed=98)
    taken: list[float] = []
    monkeypatch.setattr(attention, "_global", lambda *given: taken.append(given[4]) or 1.0)
    shift = -(a @ c)
    r = uniform(2, d, seed=99)
    with rounded(mode):
        attention._global_balls(c.expand(2, d), r, a, 1.0, 1.0, shift, 0.0, None, INF)
        at = attention._State.make(c.expand(2, d) / 64, a / 64, None, None)
        move = attention._moves(at, r, a, 1e-12)
    exact = long(shift) + long(a) @ long(c)
    assert np.longdouble(taken[1]) >= np.sqrt((exact**2).sum())
    assert (long(move.y) >= long(r) @ np.abs(long(a)).T).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_walk_starts_from_a_box_that_is_rounded_outward(mode: str) -> None:
    centre = scattered(50, seed=100)
    region = Region(
        centre * 0 - INF, centre * 0 + INF, centre, 1 / 3, 2.0
    )  # a ball, whose box is a rounded sum
    graph = Graph((Node((), (50,), ""),))
    with rounded(mode):
        low, high = transformer_constants.everywhere(graph, region, {})[0]
    assert (long(low)[0] <= long(centre) - np.longdouble(1 / 3)).all()
    assert (long(high)[0] >= long(centre) + np.longdouble(1 / 3)).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_walk_over_many_steps_adds_up_their_logarithms(mode: str) -> None:
    """Factors one after the other, whose product is exact in fractions."""
    factors = 1 + uniform(12, seed=101)
    nodes = [Node((), (1,), "")]
    for factor in factors:
        nodes.append(Node((len(nodes) - 1,), (1,), "", Affine(Scale(factor.reshape(1)))))
    exact = math.prod(map(Fraction, factors.tolist()))
    for close in (False, True):
        walk = transformer_constants.TransformerConstants(Graph(tuple(nodes)), {}, {}, close)
        with rounded(mode):
            found = walk.stretch(0, len(nodes) - 1)
        with mpmath.workdps(40):
            truth = mpmath.log(exact.numerator) - mpmath.log(exact.denominator)
            assert mpmath.mpf(found) >= truth and found < float(truth) + 1e-8


@pytest.mark.parametrize("mode", MODES)
def test_a_walk_over_an_activation_holds_its_derivatives(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = scattered(1, 60, seed=102)
    high = low + scattered(1, 60, seed=103).abs()
    monkeypatch.setattr(Smooth, "derivative_range", lambda *_: (low, high))
    graph = Graph((Node((), (60, 1), ""), Node((0,), (60, 1), "", Smooth("tanh"))))
    walk = transformer_constants.TransformerConstants(graph, {0: (low, high)}, {}, True)
    one = transformer_constants._Tokens.start(0, graph.nodes[0])
    with rounded(mode):
        found = walk._carry(1, [one])
    assert found is not None
    for side in (low, high):
        gap = np.abs(long(side)[0] - long(found.centre)[:, 0, 0])
        assert (gap <= long(found.radius)[:, 0, 0]).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_walk_over_a_normalisation_holds_its_derivatives(mode: str) -> None:
    """`rho (I - y y^T / d)` at both ends of the rate, y being one number; d is large, so that
    the mean of the squares is a long sum.
    """
    eps = 1e-5
    d = 2000
    for share in (0.0, 1e-3):
        low = 1 + uniform(1, d, seed=104)
        high = low * (1 + share)
        y = torch.zeros(1, d, dtype=DOUBLE)
        node = Node((0,), (1, d), "", Curved(Normalise(eps)))
        graph = Graph((Node((), (1, d), ""), node))
        walk = transformer_constants.TransformerConstants(
            graph, {0: (low, high), 1: (y, y)}, {}, True
        )
        one = transformer_constants._Tokens(
            0, torch.eye(d, 1, dtype=DOUBLE)[None], torch.zeros(1, d, 1, dtype=DOUBLE)
        )
        with rounded(mode), serial():
            found = walk._normalise(1, one)
        for end in (low, high):
            rate = 1 / np.sqrt((long(end) ** 2).mean() + np.longdouble(eps))
            gap = np.abs(rate - long(found.centre)[0, 0, 0])
            assert gap <= long(found.radius)[0, 0, 0] + np.longdouble(2) ** -62
