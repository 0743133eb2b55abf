"""Geometry against a convex solver, brute force and closed forms, none of which share code with
the package.
"""

import itertools
import math
import warnings
from typing import NamedTuple

import cvxpy as cp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from support.second_device import second_device
from wassail import geometry
from wassail.errors import InputError
from wassail.geometry import (
    distances,
    euclidean_step,
    maximiser,
    operator_norm,
    plane_step,
    project,
    pull_inside,
    steepest,
)

INF = math.inf
NORMS = [1.0, 2.0, INF]
BOX = (0.0, 1.0)
DOMAINS = [None, BOX]
DTYPES = [torch.float32, torch.float64]
SHAPES = [(5,), (2, 3), (3, 4, 4)]
DUAL = {1.0: INF, 2.0: 2.0, INF: 1.0}

quick = settings(deadline=None, max_examples=15, derandomize=True)
solver = settings(deadline=None, max_examples=8, derandomize=True)
each_norm = pytest.mark.parametrize("norm", NORMS, ids="l{:g}".format)
each_domain = pytest.mark.parametrize("domain", DOMAINS, ids=["free", "box"])
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "f64"])


# --------------------------------------------------------------------------------------------------
# helpers


def rows(t):
    """A tensor as an `(N, n)` float64 array, read element by element in logical order."""
    return np.array(t.detach().tolist(), dtype=np.float64).reshape(len(t), -1)


def length(t, norm):
    return np.linalg.norm(rows(t), ord=norm, axis=1)


def dot(a, b):
    return (rows(a) * rows(b)).sum(1)


def tol(dtype, single=1e-5, double=1e-9):
    return single if dtype == torch.float32 else double


def tensor(values, dtype=torch.float64):
    return torch.tensor(values, dtype=dtype)


def same(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


class Case(NamedTuple):
    x: torch.Tensor  # (N, *shape), in the box if there is one
    v: torch.Tensor  # (N, *shape), a direction or displacement
    radius: torch.Tensor  # (N,)
    dtype: torch.dtype


def entries(low, high):
    """Round numbers, so that ties and walls are met exactly, and any others; none so small that
    its square vanishes.
    """
    anything = st.floats(low, high, width=32).map(lambda v: v if abs(v) > 1e-4 else 0.0)
    return st.one_of(
        st.sampled_from([low, high, (low + high) / 2, (3 * low + high) / 4, 0.0]), anything
    )


@st.composite
def fields(draw, shape, low, high, dtype):
    """Small tensors entry by entry, large ones from a seed, which is quicker; ties and walls
    occur in both.
    """
    if math.prod(shape) <= 12:
        return tensor(
            draw(hnp.arrays(np.float64, shape, elements=entries(low, high))).tolist(), dtype
        )
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    steps = draw(st.sampled_from([1, 4, 64, 2**20]))
    return tensor(
        (low + (high - low) * generator.integers(0, steps + 1, shape) / steps).tolist(), dtype
    )


@st.composite
def cases(draw, domain, shapes=SHAPES, smallest=0.0):
    """A batch of points, displacements and radii of any dtype and shape."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (draw(st.integers(1, 3)), *draw(st.sampled_from(shapes)))
    low, high = domain or (-2.0, 2.0)
    some = st.one_of(
        st.sampled_from([smallest, 0.25, 0.5, 1.0]), st.floats(max(smallest, 2**-6), 4.0, width=32)
    )
    radius = draw(st.lists(some, min_size=shape[0], max_size=shape[0]))
    return Case(
        draw(fields(shape, low, high, dtype)),
        draw(fields(shape, -2.0, 2.0, dtype)),
        tensor(radius, dtype),
        dtype,
    )


def assert_like(result, given_):
    assert result.shape == given_.shape
    assert result.dtype == given_.dtype
    assert result.isfinite().all()


def assert_feasible(z, center, norm, radius, domain, slack):
    assert (length(z - center, norm) <= np.asarray(radius) + slack).all()
    if domain is not None:
        assert z.min() >= domain[0] - slack
        assert z.max() <= domain[1] + slack


def feasible_point(x, u, norm, radius, domain, share):
    """A point of `{ z in box : ||z - x|| <= radius }`, made by shrinking: the set is convex and
    contains x.
    """
    d = rows(x + u) if domain is None else rows((x + u).clamp(*domain))
    d = d - rows(x)
    size = np.linalg.norm(d, ord=norm, axis=1)
    scale = np.minimum(1, np.asarray(radius) / np.where(size > 0, size, 1)) * share
    return rows(x) + scale[:, None] * d


def solve(objective, constraints):
    problem = cp.Problem(objective, constraints)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem.solve(solver=cp.CLARABEL)
    assert problem.status in {"optimal", "optimal_inaccurate"}
    return problem.value


def walls(variable, domain):
    return [] if domain is None else [variable >= domain[0], variable <= domain[1]]


# -------------------------------------------------------------------------------------------------
# small tools


def test_column_broadcasts_per_sample_numbers():
    like = torch.zeros(3, 2, 4, 4)
    assert geometry.column([1.0, 2.0, 3.0], like).shape == (3, 1, 1, 1)
    assert geometry.column(0.5, like).shape == ()
    assert geometry.column(torch.ones(3, dtype=torch.float64), like).dtype == torch.float32
    assert (like + geometry.column(tensor([1, 2, 3]), like))[1].unique().tolist() == [2.0]


@each_norm
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_vector_norm_and_inner_against_loops(norm, shape):
    a, b = torch.randn(
        2, 4, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    np.testing.assert_allclose(geometry.vector_norm(a, norm).numpy(), length(a, norm), rtol=1e-14)
    np.testing.assert_allclose(geometry.inner(a, b).numpy(), dot(a, b), rtol=1e-12)


def test_room_and_clip():
    x = tensor([[0.25, 0.25, 1.0, 0.0]])
    way = tensor([[1.0, -3.0, 2.0, -1e-9]])
    same(geometry.room(x, way, BOX), tensor([[0.75, 0.25, 0.0, 0.0]]))
    same(geometry.room(x, way, (-1.0, 3.0)), tensor([[2.75, 1.25, 2.0, 1.0]]))
    assert geometry.room(x, way, None).isposinf().all()
    same(geometry.clip(x * 4 - 1, BOX), tensor([[0.0, 0.0, 1.0, 0.0]]))
    assert geometry.clip(x, None) is x


@each_norm
def test_distances_are_float64_on_the_cpu(norm):
    a, b = torch.rand(2, 3, 500, generator=torch.Generator().manual_seed(1))
    b = b / 3 - 2  # so that float32 has to round the difference
    found = distances(a.requires_grad_(), b, norm)
    assert found.dtype == torch.float64
    assert found.device.type == "cpu"
    assert not found.requires_grad
    truth = np.linalg.norm(
        a.detach().numpy().astype(np.float64) - b.numpy().astype(np.float64), ord=norm, axis=1
    )
    np.testing.assert_allclose(found.numpy(), truth, rtol=1e-14)
    assert (
        np.abs(np.linalg.norm((a.detach() - b).numpy(), ord=norm, axis=1) - truth) > 1e-13
    ).any()


# --------------------------------------------------------------------------------------------------
# maximiser


@each_norm
@given(data=st.data())
@quick
def test_maximiser_is_a_unit_vector_that_attains_the_dual_norm(norm, data):
    _, g, _, dtype = data.draw(cases(None))
    u = maximiser(g, norm)
    assert_like(u, g)
    nonzero = length(g, INF) > 0
    np.testing.assert_allclose(length(u, norm), nonzero, atol=tol(dtype, 1e-6, 1e-14))
    np.testing.assert_allclose(dot(g, u), length(g, DUAL[norm]), rtol=tol(dtype, 1e-5, 1e-13))


@each_norm
@each_dtype
def test_maximiser_of_zero_is_zero(norm, dtype):
    g = torch.zeros(2, 3, 4, 4, dtype=dtype)
    g[1, 0, 0, 0] = -2
    u = maximiser(g, norm)
    assert not u[0].any()
    assert u[1].sum() == -1


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_maximiser_does_not_care_about_the_scale_in_float32(scale):
    g = tensor([[3.0, -4.0]], torch.float32) * scale
    same(maximiser(g, 2.0), tensor([[0.6, -0.8]], torch.float32), 1e-6)
    same(maximiser(g, 1.0), tensor([[0.0, -1.0]], torch.float32), 0)
    same(maximiser(g, INF), tensor([[1.0, -1.0]], torch.float32), 0)


def test_maximiser_l1_breaks_ties_with_one_coordinate():
    u = maximiser(tensor([[2.0, -2.0, 2.0], [-1.0, -5.0, 5.0]]), 1.0)
    assert (u != 0).sum(1).tolist() == [1, 1]


# --------------------------------------------------------------------------------------------------
# steepest


@each_norm
@each_domain
@given(data=st.data())
@quick
def test_steepest_is_feasible_and_beats_other_feasible_steps(norm, domain, data):
    x, g, radius, dtype = data.draw(cases(domain))
    d = steepest(x, g, norm, radius, domain)
    assert_like(d, x)
    slack = tol(dtype, 1e-5, 1e-12)
    assert_feasible(x + d, x, norm, radius, domain, slack)
    assert (rows(d) * rows(g) >= 0).all()
    for u in (g, data.draw(fields(x.shape, -2.0, 2.0, dtype)), maximiser(g, norm) * 2):
        z = feasible_point(x, u, norm, radius, domain, 1.0)
        assert (dot(g, d) >= (rows(g) * (z - rows(x))).sum(1) - slack * (1 + length(g, 1))).all()


@each_norm
@each_domain
@given(data=st.data())
@solver
def test_steepest_is_optimal_by_a_convex_solver(norm, domain, data):
    x, g, radius, dtype = data.draw(cases(domain, shapes=[(4,), (2, 2)], smallest=2**-6))
    d = steepest(x, g, norm, radius, domain)
    step = cp.Variable(4)
    best = solve(
        cp.Maximize(rows(g)[0] @ step),
        [cp.norm(step, norm) <= radius[0].item(), *walls(rows(x)[0] + step, domain)],
    )
    assert dot(g, d)[0] == pytest.approx(best, abs=tol(dtype, 1e-4, 1e-6))


@each_norm
@given(data=st.data())
@quick
def test_steepest_without_a_box_is_the_scaled_maximiser(norm, data):
    x, g, radius, _ = data.draw(cases(None))
    per_row = radius.reshape(-1, *[1] * (x.ndim - 1))
    assert torch.equal(steepest(x, g, norm, radius), per_row * maximiser(g, norm))
    assert torch.equal(steepest(x, g, norm, 0.3), 0.3 * maximiser(g, norm))


@each_norm
@each_dtype
def test_steepest_in_a_far_box_is_as_without(norm, dtype):
    x, g = torch.randn(2, 4, 3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(2))
    same(
        steepest(x, g, norm, 0.7, (-100.0, 100.0)),
        steepest(x, g, norm, 0.7),
        tol(dtype, 1e-6, 1e-13),
    )


@each_dtype
def test_a_euclidean_step_far_from_walls_is_the_steepest_one(dtype):
    x, g = torch.randn(2, 4, 3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(3))
    size = torch.linspace(0.1, 2.0, 4, dtype=dtype)
    for domain in (None, (-100.0, 100.0)):
        step = euclidean_step(x, g, size, domain)
        same(step, steepest(x, g, 2.0, size), tol(dtype, 1e-5, 1e-12))


def test_a_euclidean_step_gives_what_walls_cut_off_to_what_moves():
    x = tensor([[1.0, 0.5, 0.5]])
    g = tensor([[3.0, 4.0, 3.0]])
    # The first coordinate stands at its wall: the whole length goes to the two others.
    same(euclidean_step(x, g, tensor([0.1]), BOX), tensor([[0.0, 0.08, 0.06]]))
    same(euclidean_step(1 - x, -g, tensor([0.1]), BOX), tensor([[0.0, -0.08, -0.06]]))
    # A longer one ends outside the box, with the length asked for and in the same direction.
    step = euclidean_step(x, g, tensor([3.0]), BOX)
    assert length(step, 2)[0] == pytest.approx(3.0)
    assert step[0, 0] == 0
    assert (step[0, 1:] > 0.5).all()


@pytest.mark.parametrize("size", [0.0, 0.3])
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e30])
def test_a_euclidean_step_is_finite_where_nothing_can_move(size, scale):
    x = tensor([[1.0, 0.0, 1.0]], torch.float32)
    g = scale * tensor([[1.0, -1.0, 2.0]], torch.float32)
    step = euclidean_step(x, g, tensor([size], torch.float32), BOX)
    assert torch.equal(step, torch.zeros_like(x))


def test_steepest_l1_moves_on_from_a_saturated_pixel():
    x = tensor([[1.0, 0.5, 0.5]])
    g = tensor([[3.0, 2.0, 1.0]])
    same(steepest(x, g, 1.0, 0.3, BOX), tensor([[0.0, 0.3, 0.0]]))
    same(steepest(x, g, 1.0, 0.7, BOX), tensor([[0.0, 0.5, 0.2]]))
    same(steepest(x, g, 1.0, 5.0, BOX), tensor([[0.0, 0.5, 0.5]]))
    same(steepest(1 - x, -g, 1.0, 0.7, BOX), tensor([[0.0, -0.5, -0.2]]))


def test_steepest_l2_passes_the_share_of_a_saturated_pixel_on():
    d = steepest(tensor([[0.9, 0.5, 1.0]]), tensor([[1.0, 1.0, 9.0]]), 2.0, 0.3, BOX)
    same(d, tensor([[0.1, math.sqrt(0.09 - 0.01), 0.0]]))


@each_norm
def test_steepest_zero_gradient_stays(norm):
    x = torch.rand(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    g = torch.zeros_like(x)
    g[1, 2] = -1.0
    d = steepest(x, g, norm, 0.1, BOX)
    assert not d[0].any()
    assert d[1].nonzero().flatten().tolist() == [2]


@each_norm
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_steepest_does_not_care_about_the_scale_in_float32(norm, scale):
    x, g = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(4))
    g = g - 0.5
    same(steepest(x, g * scale, norm, 0.4, BOX), steepest(x, g, norm, 0.4, BOX), 1e-5)


@pytest.mark.parametrize("small", [1e-15, 1e-18, 1e-20, 1e-30, 1e-37])
def test_steepest_l2_keeps_its_length_when_gradients_spread_widely_in_float32(small):
    # The first coordinate meets the wall, all that is left goes to the second, whose square
    # underflows.
    d = steepest(
        tensor([[0.9, 0.0]], torch.float32), tensor([[1.0, small]], torch.float32), 2.0, 0.5, BOX
    )
    assert length(d, 2)[0] <= 0.5 + 1e-6
    same(d, tensor([[0.1, math.sqrt(0.24)]], torch.float32), 1e-5)


# --------------------------------------------------------------------------------------------------
# project


@each_norm
@each_domain
@given(data=st.data())
@quick
def test_project_is_feasible_idempotent_and_satisfies_the_variational_inequality(
    norm, domain, data
):
    x, v, radius, dtype = data.draw(cases(domain))
    p = project(x + v, x, norm, radius, domain)
    assert_like(p, x)
    assert_feasible(p, x, norm, radius, domain, tol(dtype, 1e-5, 1e-12))
    same(project(p, x, norm, radius, domain), p, tol(dtype, 1e-3, 1e-7))
    other = data.draw(fields(x.shape, -2.0, 2.0, dtype))
    for u, share in itertools.product((v, other), (0.0, 0.5, 1.0)):
        z = feasible_point(x, u, norm, radius, domain, share)
        away = ((rows(x + v) - rows(p)) * (z - rows(p))).sum(1)
        assert (away <= tol(dtype, 1e-4, 1e-9) * (1 + length(v, 2))).all()


@each_norm
@each_domain
@given(data=st.data())
@quick
def test_project_is_not_expansive(norm, domain, data):
    x, v, radius, dtype = data.draw(cases(domain))
    u = data.draw(fields(x.shape, -2.0, 2.0, dtype))
    near = x + v + 0.01 * u
    for other in (x + u, near):
        a = project(x + v, x, norm, radius, domain)
        b = project(other, x, norm, radius, domain)
        assert (length(a - b, 2) <= length(x + v - other, 2) + tol(dtype, 1e-3, 1e-7)).all()


@each_norm
@each_domain
@given(data=st.data())
@solver
def test_project_is_optimal_by_a_convex_solver(norm, domain, data):
    x, v, radius, dtype = data.draw(cases(domain, shapes=[(4,), (2, 2)], smallest=2**-6))
    p = project(x + v, x, norm, radius, domain)
    z = cp.Variable(4)
    best = solve(
        cp.Minimize(cp.norm(z - rows(x + v)[0], 2)),
        [cp.norm(z - rows(x)[0], norm) <= radius[0].item(), *walls(z, domain)],
    )
    assert length(p - (x + v), 2)[0] == pytest.approx(best, abs=tol(dtype, 1e-5, 1e-6))


@each_norm
@each_domain
@given(data=st.data())
@quick
def test_project_leaves_inside_points_alone(norm, domain, data):
    x, v, radius, dtype = data.draw(cases(domain))
    inside = tensor(feasible_point(x, v, norm, radius, domain, 0.99).tolist(), dtype).reshape(
        x.shape
    )
    same(project(inside, x, norm, radius, domain), inside, tol(dtype, 1e-6, 1e-14))


@each_norm
@each_domain
@each_dtype
def test_project_with_radius_zero_is_the_center(norm, domain, dtype):
    x, v = torch.rand(2, 3, 2, 3, dtype=dtype, generator=torch.Generator().manual_seed(5))
    same(project(x + v, x, norm, 0.0, domain), x, tol(dtype, 1e-7, 1e-15))
    same(project(x - v, x, norm, torch.zeros(3), domain), x, tol(dtype, 1e-7, 1e-15))


@each_norm
@each_domain
@each_dtype
def test_project_with_one_radius_per_sample(norm, domain, dtype):
    x, v = torch.rand(2, 4, 3, 4, 4, dtype=dtype, generator=torch.Generator().manual_seed(6))
    radii = [0.0, 0.1, 0.5, 100.0]
    p = project(x + v - 0.5, x, norm, tensor(radii), domain)
    d = steepest(x, v - 0.5, norm, tensor(radii), domain)
    for i, radius in enumerate(radii):
        row = slice(i, i + 1)
        same(
            p[row],
            project((x + v - 0.5)[row], x[row], norm, radius, domain),
            tol(dtype, 1e-6, 1e-14),
        )
        same(
            d[row], steepest(x[row], (v - 0.5)[row], norm, radius, domain), tol(dtype, 1e-4, 1e-12)
        )
    assert (
        length(p - x, norm)[:3] == pytest.approx(radii[:3], abs=tol(dtype, 1e-5, 1e-12))
    ) or norm == INF


def test_project_l2_is_closer_than_clip_after_project():
    center = tensor([[0.9, 0.5]])
    point = tensor([[1.9, 1.5]])
    radius = 0.5
    clipped = project(point, center, 2.0, radius).clamp(0, 1)
    exact = project(point, center, 2.0, radius, BOX)
    same(clipped, tensor([[1.0, 0.5 + 0.5 / math.sqrt(2)]]))
    same(exact, tensor([[1.0, 0.5 + math.sqrt(0.25 - 0.01)]]))
    assert length(exact - point, 2)[0] < length(clipped - point, 2)[0] - 0.07
    # Nor is project-after-clip exact.
    assert length(project(point.clamp(0, 1), center, 2.0, radius) - exact, 2)[0] > 1e-3


def test_project_l1_is_closer_than_clip_after_project():
    center = tensor([[0.9, 0.5]])
    point = tensor([[1.9, 1.4]])
    exact = project(point, center, 1.0, 0.5, BOX)
    same(exact, tensor([[1.0, 0.9]]))
    clipped = project(point, center, 1.0, 0.5).clamp(0, 1)
    assert length(exact - point, 2)[0] < length(clipped - point, 2)[0] - 0.1


def test_project_l1_is_a_soft_threshold_and_not_a_rescaling():
    v = tensor([[3.0, -1.0, 0.5]])
    p = project(v, torch.zeros_like(v), 1.0, 2.0)
    same(p, tensor([[2.0, 0.0, 0.0]]))
    rescaled = v * 2 / 4.5
    assert length(p - v, 2)[0] < length(rescaled - v, 2)[0] - 0.2
    same(
        project(tensor([[3.0, -2.0, 0.5]]), torch.zeros_like(v), 1.0, 2.0),
        tensor([[1.5, -0.5, 0.0]]),
    )


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_project_l1_ends_where_a_point_is_not_finite(bad):
    v = tensor([[1.0, 2.0, bad], [3.0, -1.0, 0.5]])
    found = project(v, torch.zeros_like(v), 1.0, 2.0)
    same(found[1:], tensor([[2.0, 0.0, 0.0]]))


def test_project_linf_is_two_clamps():
    x = tensor([[0.1, 0.5, 0.95]])
    v = tensor([[-1.0, 0.2, 1.0]])
    same(project(x + v, x, INF, 0.3, BOX), tensor([[0.0, 0.7, 1.0]]))
    same(project(x + v, x, INF, 0.3), tensor([[-0.2, 0.7, 1.25]]))


@each_norm
def test_project_knows_other_boxes(norm):
    x = tensor([[-0.9, 2.5, 0.0]])
    v = tensor([[-3.0, 3.0, 0.5]])
    p = project(x + v, x, norm, 1.0, (-1.0, 3.0))
    truth = {1.0: [[-1.0, 3.0, 0.4]], 2.0: None, INF: [[-1.0, 3.0, 0.5]]}[norm]
    if (
        truth is None
    ):  # the two walls take 0.01 + 0.25 of the square, there is room for the rest of the third
        truth = [[-1.0, 3.0, 0.5]]
    same(p, tensor(truth))


# ------------------------------------------------------------- walls met exactly, where rounding
# decides who is full


@each_dtype
@pytest.mark.parametrize("small", [1e-2, 1e-4, 1e-6, 1e-8])
def test_budget_that_just_fills_the_walls_is_still_spent(dtype, small):
    # n equal coordinates meet their walls at the very moment the budget ends; one more has almost
    # no weight.
    for n, free in itertools.product(range(1, 6), (0.1, 0.2, 0.3, 0.5, 0.7, 1 / 3)):
        x = tensor([[1 - free] * n + [0.0]], dtype)
        w = tensor([[1.0] * n + [small]], dtype)
        d = steepest(x, w, 2.0, math.sqrt(n) * free, BOX)
        assert dot(w, d)[0] == pytest.approx(n * free, rel=1e-3), ("steepest", n, free)
        p = project(x + 2 * w, x, 2.0, math.sqrt(n) * free, BOX)
        assert dot(w, p - x)[0] == pytest.approx(n * free, rel=1e-3), ("project", n, free)
        for norm in NORMS:
            d = plane_step(x, w, tensor([n * free], dtype), norm, BOX)
            assert dot(w, d)[0] == pytest.approx(n * free, rel=1e-5), ("plane_step", norm, n, free)


@each_norm
@each_dtype
def test_every_coordinate_at_a_wall(norm, dtype):
    x = torch.ones(1, 5, dtype=dtype)
    g = tensor([[1.0, 2.0, 3.0, 1e-3, 1.0]], dtype)
    assert not steepest(x, g, norm, 0.5, BOX).any()
    assert torch.equal(project(x + g, x, norm, 0.5, BOX), x)
    assert not plane_step(x, g, tensor([1.0], dtype), norm, BOX).any()


# ------------------------------------------------------------------------------------------------
# pull_inside


@each_norm
@each_domain
@each_dtype
def test_pull_inside_keeps_the_promise_to_the_last_bit(norm, domain, dtype):
    generator = torch.Generator().manual_seed(7)
    x = torch.rand(400, 3, 4, 4, dtype=dtype, generator=generator)
    if domain is not None:
        x = x * 0.5 + 0.25
    v = torch.randn(400, 3, 4, 4, dtype=dtype, generator=generator)
    radius = 8 / 255 if norm == INF else 0.1
    before = project(x + v, x, norm, radius, domain)
    outside = distances(before, x, norm) > radius
    assert outside.any()  # otherwise there is nothing to see
    after = pull_inside(before, x, norm, radius, domain)
    assert_like(after, x)
    assert (distances(after, x, norm) <= radius).all()
    # Another order of summation may differ in the last bit of float64, which only matters to points
    # stored in float64.
    ulp = 0 if dtype == torch.float32 else 1e-15
    assert (np.linalg.norm(rows(after) - rows(x), ord=norm, axis=1) <= radius * (1 + ulp)).all()
    assert torch.equal(after[~outside], before[~outside])
    assert (after - before).abs().max() <= tol(dtype, 2e-7, 1e-13)
    if domain is not None:
        assert after.min() >= 0
        assert after.max() <= 1


@each_norm
@given(data=st.data())
@quick
def test_pull_inside_any_point(norm, data):
    x, v, radius, dtype = data.draw(cases(BOX))
    point = (x + v).clamp(0, 1)
    after = pull_inside(point, x, norm, radius, BOX)
    assert (distances(after, x, norm) <= radius).all()
    assert 0 <= after.min() <= after.max() <= 1
    inside = distances(point, x, norm) <= radius
    assert torch.equal(after[inside], point[inside])
    # It scales: the direction to the center stays, and no more is lost than rounding takes.
    wanted = feasible_point(x, v, norm, radius, BOX, 1.0)
    np.testing.assert_allclose(rows(after), wanted, atol=tol(dtype, 1e-6, 1e-14))


def test_pull_inside_with_one_radius_per_sample_leaves_the_input_alone():
    x = torch.zeros(3, 2)
    point = torch.ones(3, 2)
    after = pull_inside(point, x, INF, tensor([0.1, 1.0, 0.0]))
    assert (after[0].double() <= 0.1).all()
    same(after, tensor([[0.1, 0.1], [1.0, 1.0], [0.0, 0.0]], torch.float32), 1e-7)
    assert torch.equal(point, torch.ones(3, 2))


# -------------------------------------------------------------------------------------------------
# plane_step


def reach(x, w, sign, domain):
    """The farthest `<w, d>` can go the way `sign` says, and the step there."""
    way = rows(w) * sign[:, None]
    d = np.where(way > 0, domain[1] - rows(x), np.where(way < 0, domain[0] - rows(x), 0.0))
    return np.abs((rows(w) * d).sum(1)), d


@each_norm
@each_domain
@given(data=st.data())
@quick
def test_plane_step_lands_on_the_plane_or_goes_as_far_as_it_can(norm, domain, data):
    x, w, size, dtype = data.draw(cases(domain))
    sign = np.array(
        data.draw(st.lists(st.sampled_from([-1.0, 1.0]), min_size=len(x), max_size=len(x)))
    )
    gap = size * tensor(sign.tolist(), dtype)
    d = plane_step(x, w, gap, norm, domain)
    assert_like(d, x)
    flat = length(w, INF) == 0
    assert not d[torch.from_numpy(flat)].any()
    slack = tol(dtype, 1e-4, 1e-10)
    if domain is None:
        np.testing.assert_allclose(dot(w, d)[~flat], rows(gap)[~flat, 0], atol=slack)
        closed = np.abs(rows(gap)[~flat, 0]) / length(w, DUAL[norm])[~flat]
        np.testing.assert_allclose(length(d, norm)[~flat], closed, rtol=slack, atol=slack)
        return
    assert_feasible(x + d, x, INF, np.inf, domain, tol(dtype, 1e-6, 1e-14))
    far, corner = reach(x, w, sign, domain)
    np.testing.assert_allclose(dot(w, d), sign * np.minimum(rows(size)[:, 0], far), atol=slack)
    short = far < rows(size)[:, 0] * (1 - slack)
    np.testing.assert_allclose(rows(d)[short], corner[short], atol=tol(dtype, 1e-6, 1e-14))


@each_norm
@each_domain
@given(data=st.data())
@solver
def test_plane_step_is_the_shortest_by_a_convex_solver(norm, domain, data):
    x, w, _, dtype = data.draw(cases(domain, shapes=[(4,), (2, 2)]))
    share = data.draw(st.floats(-0.95, 0.95))
    far = reach(x, w, np.full(len(x), np.sign(share)), domain or (-3.0, 3.0))[0]
    gap = tensor((share * far).tolist(), dtype)
    d = plane_step(x, w, gap, norm, domain)
    if far[0] < 0.05 or abs(share) < 0.01:
        return
    step = cp.Variable(4)
    best = solve(
        cp.Minimize(cp.norm(step, norm)),
        [rows(w)[0] @ step == gap[0].item(), *walls(rows(x)[0] + step, domain)],
    )
    assert length(d, norm)[0] == pytest.approx(best, abs=tol(dtype, 1e-4, 1e-6))


@each_norm
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_plane_step_closed_form_without_a_box(norm, dtype, shape):
    x, w = torch.randn(2, 6, *shape, dtype=dtype, generator=torch.Generator().manual_seed(8))
    gap = tensor([-2.0, -0.1, 0.0, 1e-3, 1.0, 30.0], dtype)
    d = plane_step(x, w, gap, norm)
    assert_like(d, x)
    np.testing.assert_allclose(dot(w, d), rows(gap)[:, 0], rtol=tol(dtype, 1e-5, 1e-12), atol=1e-12)
    expected = np.abs(rows(gap)[:, 0]) / length(w, DUAL[norm])
    np.testing.assert_allclose(length(d, norm), expected, rtol=tol(dtype, 1e-5, 1e-12))
    assert not d[2].any()


@each_norm
def test_plane_step_by_hand_in_a_box(norm):
    # The first coordinate has room 0.1 only; 2 * 0.1 of the gap of 0.5 is met there.
    d = plane_step(tensor([[0.9, 0.5]]), tensor([[2.0, 1.0]]), tensor([0.5]), norm, BOX)
    same(d, tensor([[0.1, 0.3]]))
    d = plane_step(tensor([[0.5, 0.5]]), tensor([[2.0, 1.0]]), tensor([-0.5]), norm, BOX)
    same(
        d,
        {1.0: tensor([[-0.25, 0.0]]), 2.0: tensor([[-0.2, -0.1]]), INF: tensor([[-1 / 6, -1 / 6]])}[
            norm
        ],
    )


@each_norm
@each_domain
def test_plane_step_negative_gap_is_the_mirrored_normal(norm, domain):
    x, w = torch.rand(2, 5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    w = w - 0.5
    gap = tensor([0.1, -0.2, 0.3, -5.0, 0.0])
    assert torch.equal(plane_step(x, w, -gap, norm, domain), plane_step(x, -w, gap, norm, domain))
    if domain is None:
        same(plane_step(x, w, -gap, norm), -plane_step(x, w, gap, norm))


@each_norm
@each_domain
def test_plane_step_zero_normal_or_zero_gap_gives_zero(norm, domain):
    x, w = torch.rand(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10))
    assert not plane_step(x, torch.zeros_like(w), tensor([1.0, -1.0, 0.0]), norm, domain).any()
    assert not plane_step(x, w, torch.zeros(3, dtype=torch.float64), norm, domain).any()
    w[:, 1] = 0
    assert not plane_step(x, w, tensor([1.0, -1.0, 5.0]), norm, domain)[:, 1].any()


@each_norm
def test_plane_step_unreachable_goes_to_the_farthest_corner(norm):
    x = tensor([[0.25, 0.25, 0.5], [0.25, 0.25, 0.5]])
    w = tensor([[1.0, -2.0, 0.0], [1e-3, -2.0, 0.0]])
    same(
        plane_step(x, w, tensor([99.0, -99.0]), norm, BOX),
        tensor([[0.75, -0.25, 0.0], [-0.25, 0.75, 0.0]]),
    )


@each_norm
@each_domain
@pytest.mark.parametrize("scale", [1e-30, 1e-24, 1e-20, 1e20, 1e30])
def test_plane_step_does_not_care_about_the_scale_in_float32(norm, domain, scale):
    x, w = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(11))
    w = w - 0.5
    gap = tensor([0.1, -0.2, 0.3], torch.float32)
    same(
        plane_step(x, w * scale, gap * scale, norm, domain),
        plane_step(x, w, gap, norm, domain),
        1e-5,
    )


@each_norm
@each_domain
@each_dtype
def test_plane_step_is_shortest_when_weights_spread_widely(norm, domain, dtype):
    # The first coordinate alone can reach the plane; rounding must not spend the second one's room.
    generator = np.random.default_rng(12)
    big = generator.uniform(1, 10, 200)
    gap = generator.uniform(0.01, 0.9, 200)
    for small in (1e-8, 1e-12, 1e-16, 1e-20):
        w = tensor(np.stack([big, np.full(200, small)], 1).tolist(), dtype)
        d = plane_step(torch.zeros_like(w), w, tensor(gap.tolist(), dtype), norm, domain)
        np.testing.assert_allclose(
            length(d, norm), gap / length(w, DUAL[norm]), rtol=1e-5, err_msg=f"{small:g}"
        )


# ------------------------------------------------------------------- many coordinates, of which few
# or most take part


def deep(dtype):
    """Seven rows of 400 coordinates, whose largest weights meet a wall at once: 0, 3, 31, 32,
    33, 140, 400 of them.
    """
    generator = np.random.default_rng(21)
    x = generator.uniform(0.2, 0.8, (7, 400))
    w = generator.normal(size=(7, 400))
    for i, count in enumerate([0, 3, 31, 32, 33, 140, 400]):
        first = np.argsort(-np.abs(w[i]))[:count]
        x[i, first] = w[i, first] > 0
    return tensor(x.tolist(), dtype), tensor(w.tolist(), dtype)


def loop_greedy(weight, price, cap, budget):
    """Plain: the heaviest first, as much as its cap and the budget allow."""
    amount = [0.0] * len(weight)
    for i in sorted(range(len(weight)), key=lambda i: -weight[i]):
        if price[i] > 0 and budget > 0:
            amount[i] = min(cap[i], budget / price[i])
            budget -= amount[i] * price[i]
    return np.array(amount)


@each_dtype
@pytest.mark.parametrize("budget", [0.0, 0.05, 3.0, 30.0, 1e4])
def test_l1_steps_reach_far_down_the_list(dtype, budget):
    x, w = deep(dtype)
    step = rows(steepest(x, w, 1.0, budget, BOX))
    plane = rows(plane_step(x, w, torch.full((7,), budget, dtype=dtype), 1.0, BOX))
    for i in range(7):
        weight = np.abs(rows(w)[i])
        at = rows(x)[i]
        cap = np.where(rows(w)[i] > 0, 1 - at, at)
        sign = np.sign(rows(w)[i])
        by_length = loop_greedy(weight, np.ones(400), cap, budget)
        np.testing.assert_allclose(step[i], sign * by_length, atol=tol(dtype, 1e-4, 1e-11))
        by_gap = loop_greedy(weight, weight, cap, budget)
        np.testing.assert_allclose(plane[i], sign * by_gap, atol=tol(dtype, 1e-4, 1e-11))


@each_dtype
@each_domain
@pytest.mark.parametrize("radius", [0.05, 3.0, 30.0])
def test_l1_projection_of_sparse_and_dense_steps(dtype, domain, radius):
    x, w = deep(dtype)
    for i, count in enumerate([1, 2, 5, 399, 400, 0, 50]):
        w[i, count:] = 0
    p = project(x + w, x, 1.0, radius, domain)
    v = rows(x + w) - rows(x)
    cap = np.full_like(v, np.inf) if domain is None else np.where(v > 0, 1 - rows(x), rows(x))
    for i in range(7):
        low = 0.0
        high = 10.0
        for _ in range(60):  # bisect the threshold
            tau = (low + high) / 2
            kept = np.minimum(np.maximum(np.abs(v[i]) - tau, 0), cap[i])
            low, high = (tau, high) if kept.sum() > radius else (low, tau)
        kept = np.minimum(np.maximum(np.abs(v[i]) - high * (high > 1e-9), 0), cap[i])
        np.testing.assert_allclose(
            rows(p)[i] - rows(x)[i], np.sign(v[i]) * kept, atol=tol(dtype, 1e-5, 1e-11)
        )


def test_l1_projection_ends_where_the_sum_cannot_settle():
    # Rounding leaves the sums of some of these rows on both sides of the radius for ever.
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        x = (torch.rand(64, 3072, generator=generator) * 1.4 - 0.2).clamp(0, 1)
        v = torch.randn(64, 3072, generator=generator) * 0.02
    found = project(x + v, x, 1.0, 30.0, BOX)
    exact = project((x + v).double(), x.double(), 1.0, 30.0, BOX)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6)
    length = distances(found, x, 1.0)
    torch.testing.assert_close(length, torch.full_like(length, 30.0), rtol=4e-6, atol=0)


@each_dtype
def test_l1_step_to_a_plane_that_the_box_does_not_reach_takes_all_there_is(dtype):
    x, w = deep(dtype)
    w[:, ::3] = 0
    room = torch.where(w > 0, 1 - x, x) * w.sign()
    most = (room * w).sum(1)
    for share in (1.002, 10.0):  # rows of either way to find it
        step = plane_step(x, w, share * most, 1.0, BOX)
        torch.testing.assert_close(step, room, rtol=0, atol=tol(dtype, 1e-6, 1e-14))
    under = plane_step(x, w, 0.9995 * most, 1.0, BOX)
    torch.testing.assert_close((under * w).sum(1), 0.9995 * most, rtol=1e-5, atol=0)


# ---------------------------------------------------------------- every function: layouts, batches,
# and no writing


def gaps(x):
    return torch.linspace(-0.5, 0.6, len(x), dtype=x.dtype)


FUNCTIONS = {
    "maximiser": lambda x, v, norm, box: maximiser(v, norm),
    "room": lambda x, v, norm, box: geometry.room(x, v, box),
    "steepest": lambda x, v, norm, box: steepest(x, v, norm, 0.6, box),
    "project": lambda x, v, norm, box: project(x + v, x, norm, 0.6, box),
    "clip": lambda x, v, norm, box: geometry.clip(x + v, box),
    "pull_inside": lambda x, v, norm, box: pull_inside(
        geometry.clip(x + v, box), x, norm, 0.6, box
    ),
    "plane_step": lambda x, v, norm, box: plane_step(x, v, x.flatten(1)[:, 0] - 0.4, norm, box),
    "vector_norm": lambda x, v, norm, box: geometry.vector_norm(v, norm),
    "distances": lambda x, v, norm, box: distances(x, x + v, norm),
    "inner": lambda x, v, norm, box: geometry.inner(x, v),
}
each_function = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())


def sample(*shape, seed=13):
    x, v = torch.rand(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    x = (x * 1.4 - 0.2).clamp(0, 1)  # some coordinates sit at a wall
    return x, v * 2 - 1


@each_function
@each_norm
@each_domain
def test_memory_layout_changes_nothing(function, norm, domain):
    x, v = sample(4, 3, 5, 6)
    expected = function(x, v, norm, domain)
    last = [t.contiguous(memory_format=torch.channels_last) for t in (x, v)]
    wide = [torch.stack([t, t + 9], -1)[..., 0] for t in (x, v)]
    turned = [t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) for t in (x, v)]
    for a, b in (last, wide, turned, (last[0], v), (x, turned[1])):
        assert torch.equal(a, x)
        assert not (a.is_contiguous() and b.is_contiguous())
        copies = a.clone(), b.clone()
        same(function(a, b, norm, domain), expected)
        assert torch.equal(a, copies[0])
        assert torch.equal(b, copies[1])


@each_function
@each_norm
@each_domain
def test_broadcast_views_are_read_and_not_written(function, norm, domain):
    x, v = sample(1, 2, 3)
    views = x.expand(4, 2, 3), v.expand(4, 2, 3)
    same(
        function(*views, norm, domain), function(x.repeat(4, 1, 1), v.repeat(4, 1, 1), norm, domain)
    )


@each_function
@each_norm
@each_domain
def test_a_row_does_not_depend_on_the_others(function, norm, domain):
    for shape in SHAPES:
        x, v = sample(6, *shape)
        v[2] *= 50
        v[3] = 0
        together = function(x, v, norm, domain)
        alone = torch.cat([function(x[i : i + 1], v[i : i + 1], norm, domain) for i in range(6)])
        assert torch.equal(together, alone)
        order = torch.tensor([3, 0, 5, 1, 4, 2])
        assert torch.equal(function(x[order], v[order], norm, domain), together[order])


@each_function
@each_norm
@each_domain
def test_a_row_does_not_depend_on_how_sparse_the_others_are(function, norm, domain):
    x, v = sample(12, 150)
    for i in range(12):
        v[i, 12 * i + 10 :] = 0
    for way in (v, (4 * v).round() / 4):  # without ties and with many
        together = function(x, way, norm, domain)
        alone = torch.cat([function(x[i : i + 1], way[i : i + 1], norm, domain) for i in range(12)])
        assert torch.equal(together, alone)


@each_norm
@each_domain
def test_coordinates_are_interchangeable(norm, domain):
    x, v = sample(3, 12)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(14))
    for name in ("maximiser", "steepest", "project", "plane_step"):
        if name == "plane_step":
            gap = gaps(x)
            a = plane_step(x, v, gap, norm, domain)
            b = plane_step(x[:, order], v[:, order], gap, norm, domain)
        else:
            a = FUNCTIONS[name](x, v, norm, domain)
            b = FUNCTIONS[name](x[:, order], v[:, order], norm, domain)
        same(a[:, order], b)


@each_norm
@each_domain
def test_the_shape_is_only_bookkeeping(norm, domain):
    x, v = sample(3, 24)
    for name in ("maximiser", "room", "steepest", "project", "pull_inside"):
        flat = FUNCTIONS[name](x, v, norm, domain)
        folded = FUNCTIONS[name](x.reshape(3, 2, 3, 4), v.reshape(3, 2, 3, 4), norm, domain)
        assert torch.equal(folded.reshape(3, 24), flat)


# ----------------------------------------------------------------------------------------------
# operator_norm

PAIRS = list(itertools.product(NORMS, NORMS))
each_pair = pytest.mark.parametrize(("r", "s"), PAIRS, ids=[f"{r:g}-{s:g}" for r, s in PAIRS])


def signs(n):
    return np.array(list(itertools.product([-1.0, 1.0], repeat=n)))


def brute_operator_norm(a, r, s):
    """A convex function peaks at an extreme point of the ball; the 2-ball is searched through
    the dual ball instead.
    """
    m, n = a.shape
    if r == 2:
        if s == 2:
            return math.sqrt(max(np.linalg.eigvalsh(a.T @ a)[-1], 0.0))
        duals = signs(m) if s == 1 else np.eye(m)
        return max(np.linalg.norm(a.T @ y) for y in duals)
    return max(np.linalg.norm(a @ u, ord=s) for u in (signs(n) if r == INF else np.eye(n)))


@each_pair
def test_operator_norm_against_brute_force(r, s):
    generator = np.random.default_rng(15)
    for shape, kind in itertools.product(
        [(3, 5), (5, 3), (4, 4), (1, 5), (5, 1), (1, 1)], range(3)
    ):
        a = [
            generator.normal(size=shape),
            generator.integers(-2, 3, shape).astype(float),
            np.zeros(shape),
        ][kind]
        found = operator_norm(torch.from_numpy(a), r, s)
        assert found.shape == ()
        assert found.item() == pytest.approx(brute_operator_norm(a, r, s), rel=1e-12, abs=1e-12)


@each_pair
def test_operator_norm_against_a_fine_search_of_the_plane(r, s):
    angle = np.linspace(0, math.pi, 20001)
    u = np.stack([np.cos(angle), np.sin(angle)])
    u /= np.linalg.norm(u, ord=r, axis=0)
    for m in (1, 2, 4):
        a = np.random.default_rng(m).normal(size=(m, 2))
        best = np.linalg.norm(a @ u, ord=s, axis=0).max()
        found = operator_norm(torch.from_numpy(a), r, s).item()
        assert best <= found * (1 + 1e-12)
        assert found == pytest.approx(best, rel=1e-3)


@each_pair
@given(data=st.data())
@solver
def test_operator_norm_is_never_exceeded(r, s, data):
    m = data.draw(st.integers(1, 6))
    n = data.draw(st.integers(1, 6))
    a = data.draw(hnp.arrays(np.float64, (m, n), elements=entries(-2.0, 2.0)))
    u = data.draw(hnp.arrays(np.float64, (n, 8), elements=entries(-1.0, 1.0)))
    limit = operator_norm(torch.from_numpy(a), r, s).item()
    lengths = np.linalg.norm(u, ord=r, axis=0)
    assert (np.linalg.norm(a @ u, ord=s, axis=0) <= limit * lengths + 1e-9).all()


@each_pair
def test_operator_norm_of_the_transpose_is_dual(r, s):
    for shape in [(3, 6), (6, 3), (1, 4), (4, 1)]:
        a = torch.randn(2, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(16))
        same(operator_norm(a, r, s), operator_norm(a.mT, DUAL[s], DUAL[r]))


@each_pair
def test_operator_norm_is_batched_and_keeps_the_dtype(r, s):
    a = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(17))
    found = operator_norm(a, r, s)
    assert found.shape == (2, 3)
    assert found.dtype == torch.float32
    each = [[operator_norm(m, r, s).item() for m in block] for block in a]
    same(found, tensor(each, torch.float32), 1e-5)
    same(
        found,
        tensor(
            [[brute_operator_norm(m.double().numpy(), r, s) for m in b] for b in a], torch.float32
        ),
        1e-5,
    )


@pytest.mark.parametrize(
    ("r", "s", "shape"), [(2.0, 1.0, (14, 3)), (INF, 2.0, (3, 14)), (INF, 1.0, (14, 15))], ids=str
)
def test_operator_norm_with_more_signs_than_one_chunk(r, s, shape):
    a = np.random.default_rng(18).normal(size=shape)
    by_columns = signs(14) @ (a if shape[0] == 14 else a.T)
    truth = np.linalg.norm(by_columns, ord=DUAL[r] if shape[0] == 14 else s, axis=1).max()
    assert operator_norm(torch.from_numpy(a), r, s).item() == pytest.approx(truth, rel=1e-12)
    # The best sign vector may sit in any chunk: make each coordinate's sign matter.
    for flip in range(14):
        b = a.copy()
        (b if shape[0] == 14 else b.T)[flip] *= -1
        assert operator_norm(torch.from_numpy(b), r, s).item() == pytest.approx(truth, rel=1e-12)


@pytest.mark.parametrize(
    ("r", "s", "shape"), [(2.0, 1.0, (23, 2)), (INF, 2.0, (2, 23)), (INF, 1.0, (23, 24))], ids=str
)
def test_operator_norm_too_large_to_enumerate(r, s, shape):
    with pytest.raises(InputError, match=f"{shape[0]} x {shape[1]}") as error:
        operator_norm(torch.ones(shape), r, s)
    assert "\n" not in str(error.value)
    assert f"{r:g} -> {s:g}" in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize(
    ("r", "s", "shape"), [(2.0, 1.0, (2, 40)), (INF, 2.0, (40, 2)), (INF, 1.0, (2, 40))], ids=str
)
def test_operator_norm_enumerates_the_smaller_useful_side(r, s, shape):
    truth = {(2.0, 1.0): 2 * math.sqrt(40), (INF, 2.0): 2 * math.sqrt(40), (INF, 1.0): 80.0}[r, s]
    assert operator_norm(torch.ones(shape, dtype=torch.float64), r, s).item() == pytest.approx(
        truth
    )
    if (r, s) == (INF, 1.0):
        assert operator_norm(torch.ones(40, 2, dtype=torch.float64), r, s).item() == pytest.approx(
            truth
        )


@pytest.mark.parametrize("shape", [(2, 60), (60, 2)], ids=str)
@pytest.mark.parametrize(
    ("r", "s"), [(r, s) for r, s in PAIRS if r == 1 or s == INF or r == s == 2]
)
def test_operator_norm_closed_forms_have_no_limit(r, s, shape):
    a = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(19))
    u = maximiser(
        torch.randn(
            200, shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(20)
        ),
        r,
    )
    assert (
        np.linalg.norm((u @ a.T).numpy(), ord=s, axis=1) <= operator_norm(a, r, s).item() + 1e-12
    ).all()


@pytest.mark.parametrize("tail", [(1, 1), (1, 4), (4, 1)], ids=str)
def test_operator_norm_thin_matrices_by_hand(tail):
    a = torch.ones(tail, dtype=torch.float64) * -2
    m, n = tail
    for r, s in PAIRS:
        # ||a 1 1^T||_{r -> s} = |a| ||1_m||_s ||1_n||_{r*}
        truth = 2 * np.linalg.norm(np.ones(m), ord=s) * np.linalg.norm(np.ones(n), ord=DUAL[r])
        assert operator_norm(a, r, s).item() == pytest.approx(truth)


# --------------------------------------------------------------------------------------------------
# on a second device
def _hard_rows(domain):
    """Rows that need different work: inside and outside, zero, tiny, huge, saturated, spread
    widely, many water levels.
    """
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(9, 40, generator=generator)
    g = torch.randn(9, 40, generator=generator)
    x[1] = 0.5
    x[2] = (g[2] > 0).float()  # at the walls that the step pushes against
    g[3] = 0
    g[4] *= 1e-25
    g[5] *= 1e25
    g[6] = torch.logspace(-30, 0, 40)
    x[7] = 1 - torch.logspace(-6, 0, 40)
    g[7] = torch.logspace(-3, 0, 40)
    point = x + g.clamp(-1e4, 1e4) * torch.tensor([1e-3, 1, 1, 1, 1, 1, 1, 0.1, 5.0])[:, None]
    radius = torch.tensor([5.0, 0.1, 0.5, 0.2, 0.3, 0.4, 0.5, 0.9, 0.01])
    gap = torch.tensor([0.5, -1.0, 2.0, 1.0, 1e-3, 1e30, 0.3, 0.8, 0.0])
    return x, g, point, radius, gap


ON_DEVICE = {
    "maximiser": (lambda norm, domain, x, g, point, radius, gap: maximiser(g, norm), 0),
    "steepest": (
        lambda norm, domain, x, g, point, radius, gap: steepest(x, g, norm, radius, domain),
        4,
    ),
    "project": (
        lambda norm, domain, x, g, point, radius, gap: project(point, x, norm, radius, domain),
        2,
    ),
    "plane_step": (
        lambda norm, domain, x, g, point, radius, gap: plane_step(x, g, gap, norm, domain),
        2,
    ),
}


@pytest.mark.device
@pytest.mark.parametrize("float64", [True, False])
@pytest.mark.parametrize("domain", [None, (0.0, 1.0)])
@pytest.mark.parametrize("norm", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_second_device_gives_the_same_and_waits_little(name, norm, domain, float64):
    function, waits = ON_DEVICE[name]
    rows = _hard_rows(domain)
    here = function(norm, domain, *rows)
    with second_device(float64) as second:
        moved = [value.to(second.device) for value in rows]
        second.waits.clear()
        found = function(norm, domain, *moved)
        assert found.device == second.device
        if float64:
            assert second.total <= waits, second.worst()
    assert torch.equal(found.inside, here)
    assert torch.isfinite(here[[0, 1, 2, 3, 4, 6, 7, 8]]).all()
