import math
from fractions import Fraction

import cvxpy
import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import Tensor

from wassail.certificates.graph.region import Ball, Region, Where
from wassail.errors import InputError
from wassail.geometry import steepest

NORMS = [1.0, 2.0, math.inf]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def cut(norm: float, n: int = 5, radius: float = 0.6) -> Ball:
    """A ball whose box cuts it on several sides."""
    return Ball(
        torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)),
        radius,
        norm,
        (0.0, 1.0),
    )


def exact(values: Tensor) -> list[Fraction]:
    return [Fraction(float(v)) for v in values.flatten()]


def test_the_support_of_a_box_in_exact_arithmetic_and_by_a_linear_program() -> None:
    low = -draw(7, seed=1).abs()
    high = 3 * draw(7, seed=2).abs()
    region = Region.make((low, high), 7)
    for a in draw(20, 7):
        truth = sum(max(x * u, x * v) for x, u, v in zip(exact(a), exact(low), exact(high)))
        assert truth <= Fraction(float(region.upper(a[None]))) <= truth + Fraction(1, 10**12)
    a = draw(7, seed=3)
    lp = linprog(-a.numpy(), bounds=np.stack([low.numpy(), high.numpy()], 1))
    assert float(region.upper(a)) == pytest.approx(-lp.fun, rel=1e-12)


@pytest.mark.parametrize("norm", NORMS)
def test_the_support_of_a_ball_is_the_dual_norm_never_rounded_below(norm: float) -> None:
    centre = draw(6, seed=4)
    region = Region.make(Ball(centre, 0.3, norm), 6)
    assert region.bounded
    for a in draw(50, 6, seed=5):
        got = Fraction(float(region.upper(a[None]))) - sum(
            x * c for x, c in zip(exact(a), exact(centre))
        )
        size = [abs(x) for x in exact(a)]
        radius = Fraction(0.3)
        if norm == 2:
            square = radius**2 * sum(x * x for x in size)
            assert square <= got**2 <= square * (1 + Fraction(1, 10**11)) and got > 0
        else:
            truth = radius * (max(size) if norm == 1 else sum(size))
            assert truth <= got <= truth * (1 + Fraction(1, 10**11))


@pytest.mark.parametrize("norm", NORMS)
def test_a_ball_cut_by_a_box_is_bounded_from_above(norm: float) -> None:
    ball = cut(norm)
    region = Region.make(ball, 5)
    a = draw(12, 5, seed=6)
    upper = region.upper(a)
    x = region.sample(4000, torch.Generator().manual_seed(7))
    assert region.contains(x, 1e-12).all()
    assert ((x @ a.T).amax(0) <= upper).all()
    point = cvxpy.Variable(5)
    limits = [point >= 0, point <= 1, cvxpy.norm(point - ball.centre.numpy(), norm) <= ball.radius]
    for row, bound in zip(a, upper):
        problem = cvxpy.Problem(cvxpy.Maximize(row.numpy() @ point), limits)
        truth = problem.solve(solver=cvxpy.CLARABEL)
        assert truth <= float(bound) + 1e-7
        if norm == math.inf:
            assert truth == pytest.approx(float(bound), abs=1e-7)
    for part in (Ball(ball.centre, ball.radius, norm), (0.0, 1.0)):  # the better of the two
        assert (upper <= Region.make(part, 5).upper(a) * (1 + 1e-12) + 1e-12).all()
    low, high = region.box
    assert (
        (low >= 0).all()
        and (high <= 1).all()
        and (x >= low - 1e-15).all()
        and (x <= high + 1e-15).all()
    )


def test_shapes_and_batches_of_rows() -> None:
    region = Region.make((0.0, 2.0), 3)
    a = draw(2, 4, 3)
    assert region.upper(a).shape == (2, 4)
    assert torch.allclose(region.upper(a), 2 * a.clamp(min=0).sum(-1))
    assert region.upper(torch.zeros(3, dtype=torch.float64)).shape == ()


def test_all_of_space_bounds_nothing_but_constants() -> None:
    region = Region.make(None, 3)
    assert not region.bounded and str(region) == "R^n"
    assert region.upper(
        torch.tensor([[0.0, 0, 0], [0, 1e-300, 0]], dtype=torch.float64)
    ).tolist() == [0.0, math.inf]
    x = region.sample(2000, torch.Generator().manual_seed(0), spread=10.0)
    assert region.contains(x).all() and 9 < float(x.std()) < 11


@pytest.mark.parametrize(
    "where",
    [
        (1.0, math.inf),
        (-math.inf, -2.0),
        (torch.tensor([0.0, -math.inf]), torch.tensor([1.0, 5.0])),
    ],
)
def test_half_bounded_boxes(where: Where) -> None:
    region = Region.make(where() if callable(where) else where, 2)
    assert not region.bounded and "R^n" not in str(region)
    assert region.contains(region.sample(100, torch.Generator().manual_seed(0))).all()
    assert region.upper(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double()).max() == math.inf


@pytest.mark.parametrize(
    "where",
    [
        (-1.0, 1.0),
        (torch.zeros(4), torch.linspace(0, 1, 4)),
        *(cut(norm, 4) for norm in NORMS),
        Ball(torch.zeros(4), 0),
    ],
)
def test_samples_lie_inside_and_are_the_same_for_the_same_seed(where: Where) -> None:
    region = Region.make(where, 4)
    x, again = (region.sample(500, torch.Generator().manual_seed(3)) for _ in range(2))
    assert x.dtype == torch.float64 and x.shape == (500, 4) and torch.equal(x, again)
    assert region.contains(x, 1e-15).all()
    assert region.contains(region.centre[None]).all()


def test_what_is_inside() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.51], [-0.1, 0.0]]).double()
    zero = torch.zeros(2)
    assert Region.make(Ball(zero, 1, 1, (0, 1)), 2).contains(x).tolist() == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert Region.make(Ball(zero, 0.5, math.inf), 2).contains(x).tolist() == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert Region.make(Ball(zero, 0.5, math.inf), 2).contains(x, 0.02).tolist() == [
        True,
        False,
        True,
        True,
        True,
    ]
    assert Region.make((0, 1), 2).contains(x).tolist() == [True, True, True, True, False]


def test_a_ball_of_the_maximum_norm_is_a_box_rounded_outward() -> None:
    centre = draw(50, seed=8)
    radius = float(draw(1, seed=9).abs())
    region = Region.make(Ball(centre, radius, math.inf), 50)
    for c, low, high in zip(exact(centre), exact(region.low), exact(region.high)):
        assert low <= c - Fraction(radius) and high >= c + Fraction(radius)
    assert region.radius == math.inf and region.bounded


def test_numbers_as_people_write_them_and_names() -> None:
    assert Region.make(Ball(torch.zeros(1, 2, 2), "8/255", "2"), 4).radius == 8 / 255
    assert str(Region.make(Ball(torch.zeros(4), 0.5, 1), 4)) == "l1 ball of radius 0.5"
    assert str(Region.make((0, 1), 4)) == "box [0, 1]"
    assert str(Region.make((torch.zeros(2), torch.arange(2)), 2)) == "box"


@pytest.mark.parametrize(
    ("where", "part"),
    [
        ((1.0, 0.0), "empty"),
        ((0.0, math.nan), "empty"),
        ((math.inf, math.inf), "empty"),
        ((0.0,), "not a box"),
        ((0.0, 0.5, 1.0), "not a box"),
        (0.5, "not a box"),
        (("a", "b"), "not a box"),
        ((torch.zeros(3), torch.ones(3)), "not a box"),
        (Ball(torch.zeros(3), 1.0), "3 entries"),
        (lambda: Ball(torch.zeros(2), -1.0), "radius"),
        (lambda: Ball(torch.zeros(2), math.inf), "radius"),
        (lambda: Ball(torch.zeros(2), "wide"), "radius"),
        (lambda: Ball(torch.zeros(2), 1.0, 3), "norm"),
        (lambda: Ball(torch.tensor([0.0, math.nan]), 1.0), "NaN"),
        (Ball(torch.tensor([0.0, 1.1]), 1.0, 2, (0, 1)), "outside"),
    ],
)
def test_bad_regions_are_refused_in_one_sentence(where: Where, part: str) -> None:
    with pytest.raises(InputError, match=part) as error:
        Region.make(where() if callable(where) else where, 2)
    text = str(error.value)
    assert text.endswith(".") and ". " not in text and "\n" not in text


@pytest.mark.parametrize("norm", [1.0, 2.0])
@pytest.mark.parametrize("radius", [0.0, 0.05, 0.4, 1.5, 40.0])
def test_a_cut_ball_is_met_exactly(norm: float, radius: float) -> None:
    """The dual value equals the primal one, which `geometry.steepest` finds by another route."""
    generator = torch.Generator().manual_seed(int(10 * radius) + int(norm))
    centre = torch.rand(40, dtype=torch.float64, generator=generator)
    centre = torch.where(torch.rand(40, generator=generator) < 0.25, centre.round(), centre)
    rows = torch.randn(30, 40, dtype=torch.float64, generator=generator)
    rows[0], rows[1, 5:] = 0.0, 0.0
    moved = steepest(centre.expand(30, -1), rows, norm, radius, (0.0, 1.0))
    value = rows @ centre + (rows * moved).sum(1)
    upper = Region.make(Ball(centre, radius, norm, (0.0, 1.0)), 40).upper(rows)
    assert (upper >= value).all()
    assert torch.allclose(upper, value, rtol=1e-9, atol=1e-11)
