import itertools
import math
from collections.abc import Sequence

import mpmath  # comes with torch, through sympy
import pytest
import torch
from torch import Tensor

from wassail.certificates.graph.operators.normalise import Normalise
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.operators.softmax import Softmax
from wassail.certificates.graph.planes import Curve, Plane, Span, jensen
from wassail.errors import InputError

EPS = 1e-5
SCORES = Product("hik,hjk->hij")
CASES: dict[str, tuple[Curve, list[tuple[int, ...]]]] = {
    "scores": (SCORES, [(2, 3, 2), (2, 2, 2)]),
    "mix": (Product("hij,hjk->hik"), [(1, 2, 3), (1, 3, 2)]),
    "entries": (Product("ik,ik->ik"), [(2, 3), (2, 3)]),
    "softmax": (Softmax(), [(2, 4)]),
    "pair": (Softmax(), [(3, 2)]),
    "normalise": (Normalise(EPS), [(2, 4)]),
    "flat": (Normalise(0.5), [(3,)]),
}
RADII = [1e-6, 1e-4, 1e-2, 0.1, 0.5, 2.0, 10.0]


def f64(*values: float) -> Tensor:
    return torch.tensor([values], dtype=torch.float64)


def boxes(
    shapes: Sequence[tuple[int, ...]], radius: float, seed: int, count: int = 25
) -> tuple[list[Tensor], list[Span]]:
    """Samples of every size, and spans of deviations around them that are not symmetric; some
    sides are 0.
    """
    g = torch.Generator().manual_seed(seed)
    size = 3 * torch.rand(count, generator=g, dtype=torch.float64) + 0.1
    centres = []
    spans = []
    for shape in shapes:
        centres.append(
            size.reshape(-1, *[1] * len(shape))
            * torch.randn(count, *shape, generator=g, dtype=torch.float64)
        )
        low, high = (
            radius * (torch.rand(count, *shape, generator=g).double() * 1.2 - 0.2).clamp(min=0)
            for _ in range(2)
        )
        spans.append((-low, high))
    return centres, spans


def inside(spans: Sequence[Span], seed: int) -> list[Tensor]:
    """Deviations at random, at corners, and on faces."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for low, high in spans:
        t = torch.rand(low.shape, generator=g, dtype=torch.float64)
        if seed % 3:
            t = torch.where(
                torch.rand(low.shape, generator=g) < seed % 3 / 2, (t > 0.5).double(), t
            )
        found.append((low + t * (high - low)).clamp(low, high))
    return found


def jacobian(plane: Plane, shapes: Sequence[tuple[int, ...]], count: int) -> list[Tensor]:
    """J itself, `(N, out, in)` for each input, from its transpose."""
    out = plane.off.shape[1:]
    unit = torch.eye(math.prod(out), dtype=torch.float64).reshape(-1, *out)
    rows = [plane.transpose(unit, torch.full((len(unit),), k)) for k in range(count)]
    return [torch.stack([row[i].flatten(1) for row in rows]) for i in range(len(shapes))]


def slopes(curve: Curve, *points: Tensor) -> list[Tensor]:
    """The Jacobian `(N, out, in)` by automatic differentiation."""
    rows = []
    for x in zip(*points):
        parts = torch.autograd.functional.jacobian(
            lambda *v: curve.value(*(u[None] for u in v))[0], x
        )
        rows.append([part.reshape(-1, u.numel()) for part, u in zip(parts, x)])
    return [torch.stack([row[i] for row in rows]) for i in range(len(points))]


def values(centres: Sequence[Tensor], spans: Sequence[Span]) -> list[Span]:
    return [(c + low, c + high) for c, (low, high) in zip(centres, spans)]


def test_a_product_in_closed_form() -> None:
    product = Product("k,k->k")
    spans = [(f64(-1.0), f64(3.0)), (f64(0.0), f64(2.0))]
    plane = product.plane(
        [f64(2.0), f64(5.0)], spans
    )  # (2 + a)(5 + b) around a = b = 1: 6 a + 3 b - 1 +- 2 * 1
    assert [float(v) for v in plane.transpose(f64(1.0), torch.tensor([0]))] == [6.0, 3.0]
    assert float(plane.off) == -1 and 2 < float(plane.far) < 2 + 1e-13
    assert plane.reach(f64(1.0), f64(1.0)).item() == 9
    low, high = product.span((f64(1.0), f64(5.0)), (f64(5.0), f64(7.0)))
    assert 5 - 1e-12 < float(low) <= 5 and 35 <= float(high) < 35 + 1e-12
    assert product.output((3,), (3,)) == (3,) and SCORES.output((2, 3, 4), (2, 5, 4)) == (2, 3, 5)


def test_a_softmax_in_closed_form() -> None:
    curve = Softmax()
    log3 = math.log(3)
    low, high = curve.span((f64(0.0, -log3), f64(log3, 0.0)))  # the first logit leads by 0 to log 9
    assert low[0].tolist() == pytest.approx([0.5, 0.1], abs=1e-14) and high[
        0
    ].tolist() == pytest.approx([0.9, 0.5], abs=1e-14)
    assert float(low[0, 0]) <= 0.5 <= float(high[0, 1])
    tiny = f64(1e-8, 1e-8)
    plane = curve.plane([f64(log3, 0.0)], [(-tiny, tiny)])
    assert torch.allclose(
        jacobian(plane, [(2,)], 1)[0],
        f64(1.0, -1.0, -1.0, 1.0).reshape(1, 2, 2) * 3 / 16,
        atol=1e-7,
    )
    assert plane.off.abs().max() < 1e-14 and plane.far.max() < 1e-12
    (found,) = curve.adjoint(
        (f64(1.0, 0.0)[:, None], f64(1.0, 0.0)[:, None]), [(f64(log3, 0.0), f64(log3, 0.0))]
    )
    for side in found:
        assert side.flatten().tolist() == pytest.approx([3 / 16, -3 / 16], abs=1e-13)


def test_a_normalisation_in_closed_form() -> None:
    curve = Normalise(0.0)
    assert torch.allclose(curve.value(f64(3.0, 4.0)), f64(3.0, 4.0) / math.sqrt(12.5), atol=1e-15)
    low, high = curve.span((f64(3.0, -4.0), f64(3.0, 4.0)))
    assert low[0].tolist() == pytest.approx([3 / math.sqrt(12.5), -4 / math.sqrt(12.5)], abs=1e-13)
    assert high[0].tolist() == pytest.approx([math.sqrt(2), 4 / math.sqrt(12.5)], abs=1e-13)
    # J = rho (I - y y^T / n) = (I - (9, 12; 12, 16) / 25) / sqrt(12.5)
    tiny = f64(1e-8, 1e-8)
    plane = curve.plane([f64(3.0, 4.0)], [(-tiny, tiny)])
    truth = f64(16.0, -12.0, -12.0, 9.0).reshape(1, 2, 2) / 25 / math.sqrt(12.5)
    assert (
        torch.allclose(jacobian(plane, [(2,)], 1)[0], truth, atol=1e-8) and plane.far.max() < 1e-13
    )


def test_ranges_are_attained_at_corners() -> None:
    for curve, n in ((Softmax(), 4), (Normalise(EPS), 4), (Normalise(0.3), 2)):
        for k, radius in enumerate([0.0, *RADII]):
            (c,), ((low, high),) = boxes([(n,)], radius, k)
            low = c + low
            high = c + high
            zero = (
                torch.zeros_like(c).maximum(low).minimum(high)
            )  # where the square of an entry is least
            picks = torch.tensor(list(itertools.product(range(3), repeat=n)))
            points = torch.stack([low, zero, high])[
                picks[..., None], torch.arange(25), torch.arange(n)[None, :, None]
            ]
            found = curve.value(points.transpose(1, 2).reshape(-1, n)).reshape(-1, 25, n)
            least, top = curve.span((low, high))
            error = 1e-12 * (1 + found.abs().amax(0))
            assert ((found.amin(0) - error <= least) & (least <= found.amin(0))).all()
            assert ((found.amax(0) + error >= top) & (top >= found.amax(0))).all()
    for k, radius in enumerate(RADII):
        product = Product("k,k->k")
        (a, b), spans = boxes([(6,), (6,)], radius, k)
        sides = values([a, b], spans)
        corners = torch.stack([u * v for u in sides[0] for v in sides[1]])
        least, top = product.span(*sides)
        crossing = torch.stack([(low < 0) & (high > 0) for low, high in sides]).all(0)
        assert (least <= corners.amin(0)).all() and (top >= corners.amax(0)).all()
        slack = 1e-12 * (1 + corners.abs().amax(0))  # and no wider, unless both factors cross 0
        assert ((top - corners.amax(0) <= slack) & (corners.amin(0) - least <= slack))[
            ~crossing
        ].all()
        assert (top - least <= 1.5 * (corners.amax(0) - corners.amin(0)) + slack).all()


@pytest.mark.parametrize("name", CASES)
def test_ranges_and_planes_hold_everywhere(name: str) -> None:
    curve, shapes = CASES[name]
    for k, radius in enumerate(RADII):
        centres, spans = boxes(shapes, radius, k)
        here, plane, (least, top) = (
            curve.value(*centres),
            curve.plane(centres, spans),
            curve.span(*values(centres, spans)),
        )
        assert (
            here.shape
            == least.shape
            == plane.off.shape
            == plane.far.shape
            == (25, *curve.output(*shapes))
        )
        maps = jacobian(plane, shapes, 25)
        for seed in range(45):
            d = inside(spans, seed)
            points = [c + v for c, v in zip(centres, d)]
            value = curve.value(*points)
            assert ((least <= value) & (value <= top)).all()
            d = [x - c for x, c in zip(points, centres)]  # as far as the rounded points really are
            line = sum(torch.einsum("noi,ni->no", j, v.flatten(1)) for j, v in zip(maps, d))
            assert isinstance(line, Tensor)
            rounding = 2.0**-48 * (
                value.abs() + here.abs() + plane.reach(*(v.abs() for v in d)) + plane.off.abs()
            )
            assert (
                (value - here - line.reshape(here.shape) - plane.off).abs() <= plane.far + rounding
            ).all()


@pytest.mark.parametrize("name", ["entries", "pair", "softmax", "normalise", "flat"])
def test_planes_hold_in_exact_arithmetic(name: str) -> None:
    curve, shapes = CASES[name]

    def exact(x: list[list[mpmath.mpf]]) -> list[mpmath.mpf]:
        if isinstance(curve, Product):
            return [u * v for u, v in zip(*x)]
        rows = [x[0][i : i + shapes[0][-1]] for i in range(0, len(x[0]), shapes[0][-1])]
        if isinstance(curve, Softmax):
            return [
                mpmath.exp(v) / mpmath.fsum(mpmath.exp(u) for u in row) for row in rows for v in row
            ]
        assert isinstance(curve, Normalise)
        eps = mpmath.mpf(curve.eps)
        return [
            v / mpmath.sqrt(mpmath.fsum(u * u for u in row) / len(row) + eps)
            for row in rows
            for v in row
        ]

    with mpmath.workdps(50):
        for k, radius in enumerate([0.0, 1e-14, 1e-9, 1e-5, 0.03, 1.0]):
            centres, spans = boxes(shapes, radius, k, count=3)
            here, plane = curve.value(*centres), curve.plane(centres, spans)
            maps = jacobian(plane, shapes, 3)
            for seed, n in itertools.product(range(4), range(3)):
                d = [[mpmath.mpf(u) for u in v[n].flatten().tolist()] for v in inside(spans, seed)]
                c = [[mpmath.mpf(u) for u in v[n].flatten().tolist()] for v in centres]
                truth = exact([[u + v for u, v in zip(a, b)] for a, b in zip(c, d)])
                for i, value in enumerate(truth):
                    line = mpmath.fsum(
                        mpmath.mpf(float(j[n, i, m])) * u
                        for j, v in zip(maps, d)
                        for m, u in enumerate(v)
                    )
                    rest = (
                        value
                        - float(here[n].flatten()[i])
                        - line
                        - float(plane.off[n].flatten()[i])
                    )
                    assert abs(rest) <= float(plane.far[n].flatten()[i])


@pytest.mark.parametrize("name", CASES)
def test_near_a_point_the_plane_is_the_tangent(name: str) -> None:
    curve, shapes = CASES[name]
    centres, spans = boxes(shapes, 1e-7, 1)
    spans = [(low - 1e-8, high + 1e-8) for low, high in spans]
    for ours, exact in zip(
        jacobian(curve.plane(centres, spans), shapes, 25), slopes(curve, *centres)
    ):
        assert torch.allclose(ours, exact, atol=1e-5, rtol=1e-5)
    plane = curve.plane(
        centres, [(0 * low, 0 * high) for low, high in spans]
    )  # at a point itself any map will do
    assert (
        plane.far <= 1e-12 * (1 + curve.value(*centres).abs())
    ).all() and plane.off.abs().max() < 1e-13


def test_planes_are_tight() -> None:
    """Far over half the width of the exact range: what a linear bound cannot say."""
    for curve, limits in (
        (Softmax(), {1e-4: 1e-4, 0.1: 0.04, 0.5: 0.17, 1.0: 0.33, 10.0: 1.001}),
        (Normalise(EPS), {1e-4: 4e-4, 0.03: 0.12, 0.1: 0.3, 10.0: 1.001}),
    ):
        for radius, limit in limits.items():
            (c,), ((low, high),) = boxes([(16,)], radius, 3)
            plane = curve.plane([c], [(low, high)])
            least, top = curve.span((c + low, c + high))
            assert (2 * plane.far / (top - least)).mean() < limit
            assert (plane.far <= 1.01 * (top - least) / 2).all()


def test_a_normalisation_may_be_told_how_far_it_goes_along_itself() -> None:
    curve = Normalise(EPS)
    for k, radius in enumerate(RADII[:6]):
        (c,), (span,) = boxes([(2, 6)], radius, k)
        z = curve.direction(c, span)
        assert torch.allclose(z, (c + (span[0] + span[1]) / 2) / 6, atol=1e-14)
        t = (z * (span[0] + span[1]) / 2).sum(-1, keepdim=True)
        wide = (z.abs() * (span[1] - span[0]) / 2).sum(-1, keepdim=True)
        free = curve.plane([c], [span])
        same = curve.plane([c], [span], (t - 1.01 * wide, t + 1.01 * wide))
        for share, off in (
            (0.4, 0.0),
            (0.1, 0.2),
            (0.0, 0.1),
        ):  # a slab of the box, in its middle or beside it
            along = t + (off - share) * wide, t + (off + share) * wide
            plane = curve.plane([c], [span], along)
            (j,) = jacobian(plane, [(2, 6)], 25)
            assert plane.far.mean() < free.far.mean()
            for seed in range(0, 60, 3):
                (d,) = inside([span], seed)
                # Moved towards the middle of the slab until it is in the slab.
                start = t + off * wide
                centre = (span[0] + span[1]) / 2 + off * z.sign() * (span[1] - span[0]) / 2
                gone = (z * d).sum(-1, keepdim=True) - start
                d = centre + (d - centre) * (share * wide / gone.abs().clamp(min=1e-300)).clamp(
                    max=1
                )
                x = c + d
                value = curve.value(x)
                line = torch.einsum("noi,ni->no", j, (x - c).flatten(1)).reshape(c.shape)
                rounding = 2.0**-48 * (value.abs() + plane.reach(d.abs()) + plane.off.abs())
                assert (
                    (value - curve.value(c) - line - plane.off).abs() <= plane.far + rounding
                ).all()
        assert (
            torch.allclose(same.far, free.far, rtol=0.1, atol=1e-12)
            and (same.far <= free.far * (1 + 1e-12)).all()
        )


def test_the_gap_of_a_log_sum_exp() -> None:
    """For two values that are equally uncertain some weight attains the bound; for any others
    it holds.
    """
    for r in (1e-3, 0.04, 0.3, 1.0, 5.0, 40.0):
        q = torch.logspace(-40, 0, 4001, dtype=torch.float64)[:-1]
        p = torch.stack([0 * q + 1e-9, q * (1 - 1e-9), (1 - q) * (1 - 1e-9)], -1)
        gap = torch.log((1 - q) * math.exp(-r) + q * math.exp(r)) - (2 * q - 1) * r
        bound = jensen(p, 1 - p, torch.full_like(p, r))[:, 0]
        assert (gap <= bound + 1e-15 * (1 + r)).all()
        if r >= 0.3:
            assert float(gap.max()) == pytest.approx(float(bound.max()), rel=2e-3)
    g = torch.Generator().manual_seed(3)
    for _ in range(200):
        p = torch.softmax(3 * torch.randn(1, 5, generator=g, dtype=torch.float64), -1)
        size = 10 ** (3 * torch.rand(1, 5, generator=g, dtype=torch.float64) - 2)
        e = size * torch.tensor(list(itertools.product((-1.0, 1.0), repeat=5)), dtype=torch.float64)
        weight = p[0, 1:] / p[0, 1:].sum()
        gap = torch.logsumexp(weight.log() + e[:, 1:], -1) - e[:, 1:] @ weight
        assert gap.max() <= jensen(p, 1 - p, size)[0, 0] * (1 + 1e-12)


def test_a_constant_where_the_box_is_wide() -> None:
    (c,), ((low, high),) = boxes([(8,)], 30.0, 5)
    for curve in (Softmax(), Normalise(EPS)):
        plane = curve.plane([c], [(low, high)])
        (j,) = jacobian(plane, [(8,)], 25)
        flat = j.abs().amax(2) == 0
        least, top = curve.span((c + low, c + high))
        assert flat.double().mean() > 0.8
        assert (
            torch.allclose(plane.off + curve.value(c), (least + top) / 2, atol=1e-12)
            if flat.all()
            else True
        )
        assert torch.allclose(plane.far[flat], ((top - least) / 2)[flat], atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_adjoints_contain_what_they_bound(name: str) -> None:
    curve, shapes = CASES[name]
    g = torch.Generator().manual_seed(2)
    for k, radius in enumerate(RADII):
        centres, spans = boxes(shapes, radius, k, count=6)
        out = curve.output(*shapes)
        rows = torch.randn(6, 3, *out, generator=g, dtype=torch.float64)
        width = radius * torch.rand(rows.shape, generator=g, dtype=torch.float64)
        found = curve.adjoint((rows - width, rows + width), values(centres, spans))
        for seed in range(8):
            points = [c + v for c, v in zip(centres, inside(spans, seed))]
            pull = rows + width * (2 * torch.rand(rows.shape, generator=g, dtype=torch.float64) - 1)
            if seed % 2:
                pull = rows + width * torch.randn(rows.shape, generator=g).sign()
            for (low, high), j in zip(found, slopes(curve, *points)):
                truth = torch.einsum("nmo,noi->nmi", pull.flatten(2), j).reshape(low.shape)
                rounding = 1e-13 * torch.einsum(
                    "nmo,noi->nmi", pull.flatten(2).abs(), j.abs()
                ).reshape(low.shape)
                assert ((low - rounding <= truth) & (truth <= high + rounding)).all()


@pytest.mark.parametrize("name", CASES)
def test_adjoints_of_points_are_gradients(name: str) -> None:
    curve, shapes = CASES[name]
    g = torch.Generator().manual_seed(4)
    centres, _ = boxes(shapes, 0.0, 6)
    rows = torch.randn(25, 2, *curve.output(*shapes), generator=g, dtype=torch.float64)
    for (low, high), j in zip(
        curve.adjoint((rows, rows), [(c, c) for c in centres]), slopes(curve, *centres)
    ):
        truth = torch.einsum("nmo,noi->nmi", rows.flatten(2), j).reshape(low.shape)
        assert (high - low).max() < 1e-11 * (1 + truth.abs().max())
        assert torch.allclose((low + high) / 2, truth, rtol=1e-11, atol=1e-11)


def test_masked_scores_count_for_nothing() -> None:
    curve = Softmax()
    mask = f64(0.0, 0.0, 0.0, -1e5, -1e5)
    (c,), ((low, high),) = boxes([(5,)], 0.4, 7, count=8)
    for width in (1.0, 1e3):  # as wide as the others, or wider
        wide = f64(1.0, 1.0, 1.0, width, width)
        spans = [(low * wide, high * wide)]
        ours = curve.plane([c + mask], spans)
        free = curve.plane([c[:, :3]], [(low[:, :3], high[:, :3])])
        assert (ours.far[:, :3] <= 1.03 * free.far).all()
        assert ours.far[:, 3:].max() < 1e-12 and ours.off[:, 3:].abs().max() < 1e-12
        (j,) = jacobian(ours, [(5,)], 8)
        assert not j[:, 3:].any() and not j[:, :, 3:].any()
        least, top = curve.span((c + mask + spans[0][0], c + mask + spans[0][1]))
        alone = curve.span((c[:, :3] + low[:, :3], c[:, :3] + high[:, :3]))
        assert torch.allclose(least[:, :3], alone[0], atol=1e-12) and torch.allclose(
            top[:, :3], alone[1], atol=1e-12
        )
        assert least[:, 3:].max() == 0 and top[:, 3:].max() < 1e-280


def test_a_mask_that_the_box_undoes() -> None:
    """A weight that underflows in the middle of the box is 1 at its end."""
    curve = Softmax()
    c = f64(0.0, 1.0, -1e5)
    r = f64(0.1, 0.1, 3e5)
    plane = curve.plane([c], [(-r, r)])
    (j,) = jacobian(plane, [(3,)], 1)
    for last in (-3e5, 0.0, 9.9e4, 1e5, 1.00001e5, 3e5):
        for first, second in itertools.product((-0.1, 0.1), repeat=2):
            d = f64(first, second, last)
            rest = curve.value(c + d) - curve.value(c) - j[0] @ d[0] - plane.off
            assert (rest.abs() <= plane.far).all()


def test_a_score_that_takes_all_in_the_middle_only() -> None:
    """What the others weigh is below any number of J, and at the corners of the box it is
    everything.
    """
    curve = Softmax()
    c = f64(200.0, 0.0)
    r = f64(150.0, 150.0)
    plane = curve.plane([c], [(-r, r)])
    (j,) = jacobian(plane, [(2,)], 1)
    for d in (f64(-150.0, 150.0), f64(-100.0, 100.0), f64(150.0, -150.0), f64(-150.0, 0.0)):
        rest = curve.value(c + d) - curve.value(c) - j[0] @ d[0] - plane.off
        assert (rest.abs() <= plane.far).all()
    assert (plane.far < 0.51).all()


def test_one_score_is_always_one() -> None:
    curve = Softmax()
    c = f64(0.3)
    r = f64(2.0)
    plane, (least, top) = curve.plane([c], [(-r, r)]), curve.span((c - r, c + r))
    assert (
        float(plane.far) < 1e-12
        and float(plane.off) == pytest.approx(0, abs=1e-12)
        and not jacobian(plane, [(1,)], 1)[0].any()
    )
    assert float(least) == pytest.approx(1, abs=1e-14) and float(top) == 1
    ((low, high),) = curve.adjoint((r[:, None], r[:, None]), [(c - r, c + r)])
    assert low.abs().max() < 1e-14 and high.abs().max() < 1e-14


def test_infinite_sides() -> None:
    far = math.inf
    low, high = Softmax().span((f64(-far, 0.0, 0.0), f64(far, 0.0, 1.0)))
    assert low[0].tolist() == pytest.approx([0, 0, 0], abs=1e-15)
    assert high[0].tolist() == pytest.approx([1, 0.5, math.e / (1 + math.e)], abs=1e-14)
    low, high = Softmax().span((f64(-far, -far), f64(far, far)))
    assert low[0].tolist() == [0, 0] and high[0].tolist() == [1, 1]
    low, high = Normalise(0.25).span((f64(-far, 1.0, 1.0), f64(2.0, far, 1.0)))
    root = math.sqrt(3)
    assert low[0].tolist() == pytest.approx([-root, 0, 0], abs=1e-13)
    assert high[0].tolist() == pytest.approx(
        [2 / math.sqrt(2.25), root, 1 / math.sqrt(2 / 3 + 0.25)], abs=1e-13
    )
    for sides in ((f64(-far, -far), f64(far, far)), (f64(-1e200, 1e200), f64(-1e180, 1e220))):
        low, high = Normalise(0.25).span(sides)
        assert (low >= -1.4143).all() and (high <= 1.4143).all() and (low <= high).all()
    # Zero times infinity is zero, and anything else may be anything.
    a = (f64(0.0, 1.0, -1.0), f64(0.0, 2.0, 0.0))
    b = (f64(-far, 1.0, 3.0), f64(far, far, far))
    for low, high in (Product("k,k->k").span(a, b), Product("k,k->k").span(b, a)):
        assert low[0, 0].abs() < 1e-280 and high[0, 0].abs() < 1e-280
        assert low[0, 1:].tolist() == [-far, -far] and high[0, 1:].tolist() == [far, far]
    # Gradients are finite all the same: p (1 - p) <= 1/4, and the slope of a normalisation is at
    # most eps^(-1/2).
    g = f64(1.0, 0.0)[:, None], f64(1.0, 0.0)[:, None]
    ((low, high),) = Softmax().adjoint(g, [(f64(-far, -far), f64(far, far))])
    assert high.flatten().tolist() == pytest.approx([0.25, 0], abs=1e-14)
    assert low.flatten().tolist() == pytest.approx([0, -0.25], abs=1e-14)
    ((low, high),) = Normalise(0.25).adjoint(g, [(f64(-far, -far), f64(far, far))])
    assert (
        (high <= 2 + 1e-12).all()
        and (low >= -2 - 1e-12).all()
        and float(high[0, 0, 0]) == pytest.approx(2, abs=1e-12)
    )
    ones = torch.ones(1, 1, 6, dtype=torch.float64)
    wide = torch.full((1, 6), far, dtype=torch.float64)
    ((low, high),) = Normalise(0.25).adjoint((ones, ones), [(-wide, wide)])
    assert torch.allclose(high, 2 * math.sqrt(6) * ones) and torch.allclose(
        low, -2 * math.sqrt(6) * ones
    )
    (low, high), _ = Product("k,k->k").adjoint(
        g, [(f64(0.0, 0.0), f64(1.0, 1.0)), (f64(-far, -far), f64(far, far))]
    )
    assert (
        low[0, 0].tolist()[0] == -far
        and high[0, 0].tolist()[0] == far
        and abs(high[0, 0].tolist()[1]) < 1e-280
    )


@pytest.mark.parametrize("name", CASES)
def test_samples_do_not_see_each_other(name: str) -> None:
    curve, shapes = CASES[name]
    g = torch.Generator().manual_seed(5)
    centres, spans = boxes(shapes, 0.3, 8, count=4)
    plane = curve.plane(centres, spans)
    owner = torch.tensor([2, 0, 3, 3, 1])
    w = torch.randn(5, *curve.output(*shapes), generator=g, dtype=torch.float64)
    mixed = plane.transpose(w, owner)
    for k in range(4):
        alone = curve.plane(
            [c[k : k + 1] for c in centres],
            [(low[k : k + 1], high[k : k + 1]) for low, high in spans],
        )
        assert torch.allclose(alone.off[0], plane.off[k], atol=1e-14) and torch.allclose(
            alone.far[0], plane.far[k], rtol=1e-12
        )
        rows = (owner == k).nonzero().flatten()
        for part, own in zip(
            mixed, alone.transpose(w[rows], torch.zeros(len(rows), dtype=torch.long))
        ):
            assert torch.allclose(part[rows], own, atol=1e-13)


@pytest.mark.parametrize("name", CASES)
def test_float32_is_as_near_as_promised(name: str) -> None:
    curve, shapes = CASES[name]
    g = torch.Generator().manual_seed(6)
    centres, spans = boxes(shapes, 0.3, 9)
    plane = curve.plane(centres, spans)
    small = plane.to(torch.float32)
    assert small.off is plane.off and small.far is plane.far and small.terms == plane.terms
    sizes = [torch.rand(c.shape, generator=g, dtype=torch.float64) for c in centres]
    w = torch.randn(25, *curve.output(*shapes), generator=g)
    rounded = small.transpose(w, torch.arange(25))
    exact = plane.transpose(w.double(), torch.arange(25))
    assert all(part.dtype == torch.float32 for part in rounded)
    off = sum(
        ((a.double() - b).abs() * s).flatten(1).sum(1) for a, b, s in zip(rounded, exact, sizes)
    )
    room = (plane.terms + 4) * 2.0**-24 * (w.abs().double() * plane.reach(*sizes)).flatten(1).sum(1)
    assert isinstance(off, Tensor) and (off <= room).all() and (off > 0).all()
    # The factors alone: rounded once each.
    kept = jacobian(small.to(torch.float64), shapes, 25)
    change = sum(
        (
            torch.einsum("noi,ni->no", (a - b).abs(), s.flatten(1))
            for a, b, s in zip(kept, jacobian(plane, shapes, 25), sizes)
        )
    )
    assert (
        isinstance(change, Tensor)
        and (change <= 2.01 * 2.0**-24 * plane.reach(*sizes).flatten(1)).all()
    )
    size = sum(
        torch.einsum("noi,ni->no", j.abs(), s.flatten(1))
        for j, s in zip(jacobian(plane, shapes, 25), sizes)
    )
    assert isinstance(size, Tensor) and (size <= plane.reach(*sizes).flatten(1) * (1 + 1e-12)).all()


def test_what_cannot_be_bounded_is_refused() -> None:
    curve = Normalise(0.0)
    with pytest.raises(InputError, match="eps=0"):
        curve.span((f64(-1.0, -1.0), f64(1.0, 1.0)))
    with pytest.raises(InputError, match="eps=0"):
        curve.plane([f64(0.5, 0.5)], [(f64(-1.0, -1.0), f64(1.0, 1.0))])
    assert (
        curve.span((f64(-1.0, 1.0), f64(1.0, 2.0)))[1] < 1.5
    ).all()  # one entry is enough to stay away from 0
    for equation in ("ii,i->i", "ij,k->ik", "i,i->j"):
        with pytest.raises(InputError, match="two steps"):
            Product(equation)
