"""Planes around curves and the intervals they are made of, against exact values.

A part that is exact but for rounding has to pay for its own rounding, in every rounding mode.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from types import SimpleNamespace

import mpmath  # comes with torch, through sympy
import pytest
import torch
from torch import Tensor

from support.rounding import MODES, fractions, rounded, serial
from wassail.certificates.graph import planes
from wassail.certificates.graph.operators import normalise, softmax
from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.planes import Plane, Span

DOUBLE = torch.float64
DIGITS = 60  # of the exact values


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def row(*values: float) -> Tensor:
    return torch.tensor([values], dtype=DOUBLE)


def test_products_of_intervals_that_underflow() -> None:
    """The product of 1e-200 and -1e-200 is below 0, and that of two negative ones above it."""
    small = torch.full((1,), 1e-200, dtype=DOUBLE)
    assert planes.interval_product((small, small), (-small, -small))[0] < 0
    assert planes.interval_product((-small, -small), (-small, -small))[1] > 0


@pytest.mark.parametrize("mode", MODES)
def test_sums_of_products_of_intervals(mode: str) -> None:
    """Points, so that the sum is one number; intervals of one sign, so that its ends are two."""
    product = Product("k,k->")
    for n in (1, 30):
        a = 1 + uniform(20, n, seed=n)
        b = (1 + uniform(20, n, seed=n + 1)) * torch.where(uniform(20, n, seed=3) > 0.5, 1.0, -1.0)
        more = a * 1.25
        with rounded(mode):
            points = product.span((a, a), (b, b))
            ends = product.span((a, more), (a, more))
        for u, v, low, high in zip(fractions(a), fractions(b), *(s.tolist() for s in points)):
            exact = sum(p * q for p, q in zip(u, v))
            assert Fraction(low) <= exact <= Fraction(high)
        for u, v, low, high in zip(fractions(a), fractions(more), *(s.tolist() for s in ends)):
            assert Fraction(low) <= sum(p * p for p in u) and Fraction(high) >= sum(
                p * p for p in v
            )


def jensens(p: Sequence[float], e: Sequence[float]) -> mpmath.mpf:
    """`log E exp(e - E e)` under weights p."""
    total = mpmath.fsum(map(mpmath.mpf, p))
    mean = mpmath.fsum(mpmath.mpf(a) * b for a, b in zip(p, e)) / total
    return mpmath.log(
        mpmath.fsum(mpmath.mpf(a) * mpmath.exp(b - mean) for a, b in zip(p, e)) / total
    )


def test_the_gap_of_two_equal_weights() -> None:
    """Entry 0 has no weight, the others have half of it each: `log cosh r`, up to rounding."""
    r = 2.0 ** -torch.arange(30, 50).double() * (1 + uniform(20, seed=4))
    width = torch.stack([0 * r, r, r], 1)
    p = row(0.0, 0.5, 0.5).expand_as(width)
    found = planes.jensen(p, planes.all_but_own(p), width)[:, 0]
    with mpmath.workdps(DIGITS):
        for bound, size in zip(found.tolist(), r.tolist()):
            assert bound >= mpmath.log(mpmath.cosh(mpmath.mpf(size)))


def test_the_gap_of_the_worst_distribution() -> None:
    """Two points whose weights are the worst for their distance: the bound by the range is exact.

    By what has to be proved: `g(x) = log((exp x - 1) / x) - 1 + x / (exp x - 1)`.
    """
    x = 0.1 + 0.4 * uniform(200, seed=5)
    r = x / 2
    with mpmath.workdps(DIGITS):
        share = [float(1 / mpmath.mpf(v) - 1 / mpmath.expm1(v)) for v in (2 * r).tolist()]
    high = torch.tensor(share, dtype=DOUBLE)
    p = torch.stack([0 * r, 1 - high, high], 1)
    found = planes.jensen(p, torch.ones_like(p), torch.stack([0 * r, r, r], 1))[:, 0]
    with mpmath.workdps(DIGITS):
        for bound, size, (_, a, b) in zip(found.tolist(), r.tolist(), p.tolist()):
            assert bound >= jensens([a, b], [-size, size])


def test_the_gap_of_a_light_weight() -> None:
    """One entry of weight 1e-17 moves: `p (exp r - 1 - r)` is exact to 17 digits."""
    r = 0.01 + 0.01 * uniform(200, seed=6)
    p = row(0.0, 1.0, 1e-17).expand(200, 3)
    found = planes.jensen(p, planes.all_but_own(p), torch.stack([0 * r, 0 * r, r], 1))[:, 0]
    with mpmath.workdps(DIGITS):
        for bound, size in zip(found.tolist(), r.tolist()):
            assert bound >= jensens([1.0, 1e-17], [0.0, size])


def test_the_gap_of_a_weight_that_underflows() -> None:
    """`exp(-800)` is 0 in float64; it moves by 400, so it does count."""
    p = torch.softmax(row(-900.0, 0.0, -800.0), 1)
    assert p[0, 2] == 0
    found = planes.jensen(p, planes.all_but_own(p), row(0.0, 0.0, 400.0))[0, 0]
    with mpmath.workdps(400):
        exact = jensens([1, mpmath.exp(-800)], [0.0, 400.0])
        assert float(found) >= exact > 0


def test_planes_in_float32_are_off_by_the_rounding_of_their_numbers() -> None:
    """No number of a plane is so small that float32 has less digits for it, whatever c is."""
    c = 10.0 ** -torch.linspace(1, 60, 60).double()[None]
    zero = torch.zeros_like(c)
    found = Product("k,k->k").plane((c, c), ((zero, zero), (zero, zero)))
    d = [torch.eye(60, dtype=DOUBLE)[:, None], torch.zeros(60, 1, 60, dtype=DOUBLE)]
    for at in range(60):
        exact, single = (
            plane.transpose(d[0][at].to(kind), torch.zeros(1).long())[0].double()
            for plane, kind in ((found, DOUBLE), (found.to(torch.float32), torch.float32))
        )
        reach = found.reach(d[0][at], d[1][at]).abs().sum()
        assert float((exact - single).abs().sum()) <= 2.01 * 2.0**-24 * float(reach)


Exact = Callable[..., list[mpmath.mpf]]


def holds(
    plane: Plane, here: Tensor, exact: Exact, c: Sequence[Tensor], d: Sequence[Tensor]
) -> None:
    """`exact(c + d) - here` lies within `J d + off +- far`: one sample, vectors `(1, n)`."""
    owner = torch.zeros(1).long()
    eye = torch.eye(here.numel(), dtype=DOUBLE).reshape(-1, *here.shape[1:])
    columns = [plane.transpose(w[None], owner) for w in eye]
    with mpmath.workdps(DIGITS):
        points = [
            [
                mpmath.mpf(a) + mpmath.mpf(b)
                for a, b in zip(u.flatten().tolist(), v.flatten().tolist())
            ]
            for u, v in zip(c, d)
        ]
        value = exact(*points)
        for i, (off, far, start) in enumerate(
            zip(*(v.flatten().tolist() for v in (plane.off, plane.far, here)))
        ):
            linear = mpmath.fsum(
                mpmath.mpf(a) * b
                for part, step in zip(columns[i], d)
                for a, b in zip(part.flatten().tolist(), step.flatten().tolist())
            )
            assert abs(value[i] - start - linear - off) <= far, i


def dot(a: list[mpmath.mpf], b: list[mpmath.mpf]) -> list[mpmath.mpf]:
    return [mpmath.fsum(u * v for u, v in zip(a, b))]


@pytest.mark.parametrize("mode", MODES)
def test_planes_of_products_pay_for_the_value_at_the_sample(mode: str) -> None:
    product = Product("k,k->")
    a = 1 + uniform(1, 30, seed=7)
    b = 1 + uniform(1, 30, seed=8)
    none = (torch.zeros_like(a), torch.zeros_like(a))
    with rounded(mode), serial():
        plane = product.plane((a, b), (none, none))
        here = product.value(a, b)
    holds(plane, here, dot, (a, b), (none[0], none[0]))


@pytest.mark.parametrize("mode", MODES)
def test_planes_of_products_pay_for_the_sum_of_the_rest(mode: str) -> None:
    """Around 0 there is no linear part: the product of the half widths is all there is."""
    product = Product("k,k->")
    r = [1 + uniform(1, 80, seed=seed) for seed in (9, 10)]
    zero = torch.zeros_like(r[0])
    with rounded(mode):
        plane = product.plane((zero, zero), [(-v, v) for v in r])
    holds(plane, torch.zeros(1, dtype=DOUBLE), dot, (zero, zero), r)


def test_planes_of_products_pay_for_what_is_dropped_and_underflows() -> None:
    product = Product("k,k->k")

    def each(a: list[mpmath.mpf], b: list[mpmath.mpf]) -> list[mpmath.mpf]:
        return [u * v for u, v in zip(a, b)]

    zero = row(0.0)
    thin = row(1e-40)
    one = row(1.0)
    low = row(0.9e-30)  # is dropped from the plane
    plane = product.plane((low, zero), ((-thin, thin), (-one, one)))
    assert float(plane.far) < 1e-29
    holds(plane, zero, each, (low, zero), (thin, one))
    tiny = row(1e-200)
    plane = product.plane((tiny, tiny), ((zero, zero), (zero, zero)))
    holds(plane, product.value(tiny, tiny), each, (tiny, tiny), (zero, zero))


def normalised(eps: float) -> Exact:
    def value(c: list[mpmath.mpf]) -> list[mpmath.mpf]:
        rho = 1 / mpmath.sqrt(mpmath.fsum(v * v for v in c) / len(c) + mpmath.mpf(eps))
        return [v * rho for v in c]

    return value


@pytest.fixture
def chained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Means add their terms one after the other, as a kernel may."""

    def mean(values: Tensor, dim: int, keepdim: bool = False) -> Tensor:
        total = values.cumsum(dim).select(dim, -1) / values.shape[dim]
        return total.unsqueeze(dim) if keepdim else total

    monkeypatch.setattr(Tensor, "mean", mean)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("chained")
def test_planes_of_normalised_points(mode: str) -> None:
    """A box of one point: what is left is rounding."""
    for n in (1, 2, 40):
        c = uniform(1, n, seed=n) - 0.3
        none = torch.zeros_like(c)
        curve = Normalise(1e-5)
        with rounded(mode):
            plane = curve.plane((c,), ((none, none),))
            here = curve.value(c)
        assert float(plane.far.max()) < 1e-12
        holds(plane, here, normalised(1e-5), (c,), (none,))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("chained")
def test_planes_of_normalised_values_whose_length_is_known(mode: str) -> None:
    """One entry moves around 0, the others not at all: `<z, d>` is 0, so the length is known to
    all digits. The mean of 400 squares is not.
    """
    n = 400
    c = 0.5 + uniform(1, n, seed=11)
    c[0, 0] = 0.0
    high = torch.zeros_like(c)
    high[0, 0] = 1e-9
    nothing = torch.zeros(1, 1, dtype=DOUBLE)
    curve = Normalise(1e-5)
    with rounded(mode):
        plane = curve.plane((c,), ((-high, high),), (nothing, nothing))
        here = curve.value(c)
    assert float(plane.far[0, 0]) < 1e-9 * 1e-10
    holds(plane, here, normalised(1e-5), (c,), (high,))


def test_planes_of_normalised_values_that_are_dropped_or_underflow() -> None:
    curve = Normalise(1e-5)
    c = row(1e-32, 1.0, 1.0)  # the coefficients of the first row are below 1e-30
    high = row(0.0, 0.1, 0.1)
    holds(curve.plane((c,), ((-high, high),)), curve.value(c), normalised(1e-5), (c,), (high,))
    for k in range(1, 20):
        c = row(k * 5e-324)
        none = torch.zeros_like(c)
        plane = curve.plane((c,), ((none, none),))
        holds(plane, curve.value(c), normalised(1e-5), (c,), (none,))


@pytest.mark.parametrize("mode", MODES)
def test_planes_of_normalised_values_that_are_flat(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide box on one side of the sample, which is 0: one end is far below the other."""
    monkeypatch.setattr(normalise, "end_points", lambda c, low, high: (c + low, c + high))  # exact
    curve = Normalise(1e-5)
    for k in range(40):
        near = 1e-8 * (1 + float(uniform(1, seed=k)))
        c = row(0.0, 0.0)
        low = row(-near, 0.0)
        high = row(5.0 + k, 3.0)
        with rounded(mode):
            plane = curve.plane((c,), ((low, high),))
        assert not plane.reach(high).any()
        for d in (low, row(5.0 + k, 0.0)):
            holds(plane, curve.value(c), normalised(1e-5), (c,), (d,))


def plain(a: Span, b: Span) -> Span:
    """The product of intervals as it is computed."""
    parts = [u * v for u in a for v in b]
    found = torch.stack(torch.broadcast_tensors(*parts))
    return found.amin(0), found.amax(0)


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_normalised_values_pay_for_their_parts(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`(1 - y_i^2 / n) g_i` for one g that is not 0, with the numbers before and after it exact."""
    n = 3
    y = 2.0 ** -torch.arange(12).double().reshape(4, n)
    one = torch.ones(4, 1, dtype=DOUBLE)
    monkeypatch.setattr(normalise, "interval_product", plain)
    monkeypatch.setattr(Normalise, "span", lambda self, span: (y, y))
    monkeypatch.setattr(Normalise, "_rates", lambda self, *q: (one, one))
    for i in range(n):
        g = torch.zeros(4, 1, n, dtype=DOUBLE)
        g[..., i] = 1.0
        with rounded(mode):
            ((low, high),) = Normalise(1e-5).adjoint((g, g), ((y, y),))
        for k in range(4):
            exact = 1 - Fraction(float(y[k, i])) ** 2 / n
            assert Fraction(float(low[k, 0, i])) <= exact <= Fraction(float(high[k, 0, i]))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_normalised_values_are_at_most_their_length(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing else is known. The squares of 1e-200 underflow."""
    monkeypatch.setattr(normalise, "sum_of_others", lambda s: (s[0] - math.inf, s[1] + math.inf))
    one = torch.ones(1, 1, dtype=DOUBLE)
    monkeypatch.setattr(Normalise, "_rates", lambda self, *q: (one, one))
    for n in (1, 2, 400):
        y = torch.ones(1, n, dtype=DOUBLE)
        for size in (1.0, 1e-200):
            g = size * (1 + uniform(1, 1, n, seed=n))
            with rounded(mode):
                ((low, high),) = Normalise(1e-5).adjoint((g, g), ((y, y),))
            exact = sum(v * v for v in fractions(g)[0][0])
            for end in (low, high):
                assert all(v * v >= exact for v in fractions(end.abs())[0][0])
            assert size < 1 or float(high.max()) < math.sqrt(exact) * (1 + 1e-9)


def gradient(c: Sequence[float], g: Sequence[float], eps: float) -> list[mpmath.mpf]:
    """`J^T g` of the normalisation at a point."""
    n = len(c)
    square = mpmath.fsum(mpmath.mpf(v) ** 2 for v in c) / n + mpmath.mpf(eps)
    along = mpmath.fsum(mpmath.mpf(u) * v for u, v in zip(c, g)) / n / square
    return [(v - u * along) / mpmath.sqrt(square) for u, v in zip(c, g)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.usefixtures("chained")
def test_gradients_of_normalised_points(mode: str) -> None:
    """Random ones, those that cancel, and those that are nearly one entry."""
    for n in (1, 2, 3, 40):
        c = uniform(6, n, seed=n) - 0.3
        g = torch.stack(
            [uniform(6, n, seed=n + 1) - 0.5, c, torch.eye(n, dtype=DOUBLE)[:1].expand(6, n)], 1
        )
        with rounded(mode):
            ((low, high),) = Normalise(1e-5).adjoint((g, g), ((c, c),))
        assert float((high - low).max()) < 1e-9
        with mpmath.workdps(DIGITS):
            for i in range(6):
                for k in range(3):
                    exact = gradient(c[i].tolist(), g[i, k].tolist(), 1e-5)
                    for v, bottom, top in zip(exact, low[i, k].tolist(), high[i, k].tolist()):
                        assert bottom <= v <= top


def shares(s: list[mpmath.mpf]) -> list[mpmath.mpf]:
    top = max(s)
    parts = [mpmath.exp(v - top) for v in s]
    return [v / mpmath.fsum(parts) for v in parts]


def test_shares_that_underflow_are_not_nothing() -> None:
    s = row(0.0, -800.0)
    high = Softmax().span((s, s))[1]
    with mpmath.workdps(DIGITS):
        assert float(high[0, 1]) >= mpmath.exp(-800)


@pytest.mark.parametrize("mode", MODES)
def test_planes_of_shares_at_a_point(mode: str) -> None:
    """A box of one point: what is left is rounding."""
    for n, spread in ((1, 1.0), (2, 1.0), (5, 10.0), (5, 600.0), (40, 3.0)):
        s = spread * uniform(1, n, seed=n)
        none = torch.zeros_like(s)
        with rounded(mode):
            plane = Softmax().plane((s,), ((none, none),))
            here = Softmax().value(s)
        assert float(plane.far.max()) < 1e-10
        holds(plane, here, shares, (s,), (none,))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_shares_at_a_point(mode: str) -> None:
    for n in (1, 2, 3, 40):
        s = 3 * uniform(6, n, seed=n)
        g = torch.stack([uniform(6, n, seed=n + 1) - 0.5, 1 + 1e-9 * uniform(6, n, seed=n + 2)], 1)
        with rounded(mode):
            ((low, high),) = Softmax().adjoint((g, g), ((s, s),))
        assert float((high - low).max()) < 1e-9
        with mpmath.workdps(DIGITS):
            for i in range(6):
                p = shares(list(map(mpmath.mpf, s[i].tolist())))
                for k in range(2):
                    mean = mpmath.fsum(a * b for a, b in zip(p, g[i, k].tolist()))
                    exact = [a * (b - mean) for a, b in zip(p, g[i, k].tolist())]
                    for v, bottom, top in zip(exact, low[i, k].tolist(), high[i, k].tolist()):
                        assert bottom <= v <= top


def exactly(share: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The values of a softmax are given, and products of intervals are not rounded outward."""
    monkeypatch.setattr(softmax, "interval_product", plain)
    monkeypatch.setattr(Softmax, "span", lambda self, span: (share, share))


def gradient_of_shares(p: Tensor, g: Tensor) -> list[Fraction]:
    """`p_j (g_j - <p, g>)`."""
    mean = sum(a * b for a, b in zip(fractions(p), fractions(g)))
    return [a * (b - mean) for a, b in zip(fractions(p), fractions(g))]


def test_gradients_of_shares_pay_for_their_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that add up to 1, all bits told: `1 - p_j` of the smallest one is rounded."""
    p = row(0.5, 0.5 - 2.0**-54, 2.0**-54 - 2.0**-60, 2.0**-60)
    assert sum(fractions(p)[0]) == 1
    exactly(p, monkeypatch)
    for sign in (1.0, -1.0):
        g = row(0.0, 0.0, 0.0, sign)[None]
        ((low, high),) = Softmax().adjoint((g, g), ((p, p),))
        exact = gradient_of_shares(p[0], g[0, 0])[-1]
        assert Fraction(float(low[0, 0, -1])) <= exact <= Fraction(float(high[0, 0, -1]))


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_two_shares_are_exact(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`p (1 - p)` times the difference of the g's, where nothing else is known."""
    monkeypatch.setattr(softmax, "sum_of_others", lambda s: (s[0] - math.inf, s[1] + math.inf))
    first = 0.1 + 0.8 * uniform(50, seed=20)
    p = torch.stack([first, 1 - first], 1)
    exactly(p, monkeypatch)
    g = row(1.0, 0.0)[None].expand(50, 1, 2)
    with rounded(mode):
        ((low, high),) = Softmax().adjoint((g, g), ((p, p),))
    for k in range(50):
        share = Fraction(float(p[k, 1]))  # 1 - p up to its last bit
        up = Fraction(float(p[k, 0])) * (1 - Fraction(float(p[k, 0])))
        down = -share * (1 - share)
        assert Fraction(float(high[k, 0, 0])) >= up and Fraction(float(low[k, 0, 1])) <= down


def test_shares_close_to_1() -> None:
    """Odds say little there: it is the logistic function that is rounded."""
    s = torch.stack([5 + 60 * uniform(300, seed=21), torch.zeros(300, dtype=DOUBLE)], 1)
    low, high = Softmax().span((s, s))
    with mpmath.workdps(DIGITS):
        for v, bottom, top in zip(s[:, 0].tolist(), low[:, 0].tolist(), high[:, 0].tolist()):
            assert bottom <= 1 / (1 + mpmath.exp(-mpmath.mpf(v))) <= top


@pytest.mark.parametrize("mode", MODES)
def test_planes_of_shares_pay_for_their_sums(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The odds of two are their difference; here the logistic function says nothing of its
    rounding.
    """
    s = torch.stack([8 * uniform(50, seed=23) - 4, torch.zeros(50, dtype=DOUBLE)], 1)
    odds = torch.stack([s[:, 0], -s[:, 0]], 1)
    zero = torch.zeros_like(s)
    sigmoid = softmax.ACTIVATIONS["sigmoid"]
    bare = SimpleNamespace(
        value=torch.sigmoid,
        chord=sigmoid.chord,
        derivative=sigmoid.derivative,
        touch=lambda slope, low, high, above: (low, torch.zeros_like(low)),
    )
    monkeypatch.setattr(softmax, "odds", lambda *box: (odds, odds))
    monkeypatch.setattr(softmax, "ACTIVATIONS", {"sigmoid": bare})
    with rounded(mode):
        plane = Softmax().plane((s,), ((zero, zero),))
        here = Softmax().value(s)
    with mpmath.workdps(DIGITS):
        for v, *found in zip(*(t[:, 0].tolist() for t in (s, here, plane.off, plane.far))):
            start, off, far = map(mpmath.mpf, found)
            assert abs(1 / (1 + mpmath.exp(-mpmath.mpf(v))) - start - off) <= far


@pytest.mark.parametrize("mode", MODES)
def test_planes_of_shares_that_are_flat(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range is given: its ends are hit, also where one is far below the last digit of the
    other.
    """
    s = torch.stack([-37 - uniform(60, seed=22), torch.zeros(60, dtype=DOUBLE)], 1)
    least = torch.softmax(s, 1)
    most = torch.full_like(least, 0.7)
    monkeypatch.setattr(softmax, "odds", lambda *box: (most - math.inf, most + math.inf))
    monkeypatch.setattr(Softmax, "span", lambda self, span: (least, most))
    zero = torch.zeros_like(s)
    with rounded(mode):
        plane = Softmax().plane((s,), ((zero, zero),))
        here = Softmax().value(s)
    for found in zip(*(v[:, 0].tolist() for v in (here, plane.off, plane.far, least, most))):
        start, off, far, low, high = map(Fraction, found)
        assert start + off - far <= low and start + off + far >= high
