import math

import mpmath  # comes with torch, through sympy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from wassail.certificates.graph.activations import ACTIVATIONS, ROUNDING, Activation
from wassail.certificates.graph.operators.hardswish import Hardswish
from wassail.certificates.graph.operators.mish import Mish
from wassail.errors import InputError

NAMES = list(ACTIVATIONS)
KINKS = {"elu": (0.0,), "hardswish": (-3.0, 3.0)}
JUMPS = {"hardswish": (-3.0, 3.0)}  # where the derivative jumps, by 1/2
GATED = ["gelu", "gelu_tanh", "silu"]
TORCH = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda v: F.gelu(v, approximate="tanh"),
    "silu": F.silu,
    "softplus": lambda v: F.softplus(v, threshold=1000),
    "elu": F.elu,
    "hardswish": F.hardswish,
    "mish": F.mish,
}
EXACT = {
    "sigmoid": lambda v: 1 / (1 + mpmath.exp(-v)),
    "tanh": mpmath.tanh,
    "gelu": lambda v: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda v: (
        v / (1 + mpmath.exp(-2 * mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)))
    ),
    "silu": lambda v: v / (1 + mpmath.exp(-v)),
    "softplus": lambda v: mpmath.log1p(mpmath.exp(v)),
    "elu": lambda v: v if v > 0 else mpmath.expm1(v),
    "hardswish": lambda v: v * min(max(v + 3, 0), 6) / 6,
    "mish": lambda v: v * mpmath.tanh(mpmath.log1p(mpmath.exp(v))),
}


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def draw(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Intervals of every size, around every part of the functions, the special ones among them."""
    g = torch.Generator().manual_seed(seed)
    middle = 3 * torch.randn(count, generator=g, dtype=torch.float64)
    half = 10 ** (5 * torch.rand(count, generator=g, dtype=torch.float64) - 3.5)
    special = [
        (-1e6, 1e6),
        (-1e6, -3.0),
        (3.0, 1e6),
        (0.0, 0.0),
        (-2.0, -2.0),
        (-1.0, 1.0),
        (0.0, 4.0),
        (-40.0, -20.0),
    ]
    special += [
        (c, c + w)
        for c in (-2.4, -1.414, -0.75, 0.0, 0.3, 1.414, 2.4, 30.0)
        for w in (1e-12, 1e-9, 1e-6, 1e-4)
    ]
    special += [
        (0.1, 1e6),
        (-1e6, 0.1),
        (-0.1, 50.0),
        (-50.0, 0.1),
        (1.4142, 8.0),
        (-8.0, -1.4142),
        (2.3993, 9.0),
    ]
    low, high = (f64(*side) for side in zip(*special))
    return torch.cat([middle - half, low]), torch.cat([middle + half, high])


def points(low: Tensor, high: Tensor, count: int = 2000) -> Tensor:
    """`(count, ...)` in the intervals, the ends among them."""
    t = torch.linspace(0, 1, count, dtype=torch.float64).reshape(-1, *[1] * low.ndim)
    return (low + t * (high - low)).clamp(low, high)


def trial_slopes(f: Activation, low: Tensor, high: Tensor) -> list[Tensor]:
    """What bound propagation takes, what an optimiser may wander to, and what is critical."""
    g = torch.Generator().manual_seed(7)
    steepest = f.derivative(f64(f.bend))
    free = torch.randn(low.shape, generator=g, dtype=torch.float64)
    edge = [
        torch.full_like(low, float(s))
        for s in (0, 0.5, 1, 1 + 1e-13, steepest, steepest - 1e-13, 1 - steepest)
    ]
    return [
        *f.slopes(low, high),
        free,
        1e-3 * free,
        1 + 1e-3 * free,
        f.derivative(low),
        f.derivative(high),
        *edge,
    ]


@pytest.mark.parametrize("name", NAMES)
def test_values_and_derivatives_have_the_error_that_the_slack_counts_on(name: str) -> None:
    f = ACTIVATIONS[name]
    exact = EXACT[name]
    g = torch.Generator().manual_seed(0)
    v = torch.cat(
        [
            10 * torch.rand(300, generator=g, dtype=torch.float64) - 5,
            60 * torch.rand(100, generator=g).double() - 30,
        ]
    )
    v = torch.cat(
        [v, f64(0.0, 1e-300, -1e-300, 1e-9, -1e-9, 700.0, -700.0, 1e6, -1e6, f.bend, -f.bend)]
    )
    v = v[v.isfinite()]
    value = f.value(v)
    slope = f.derivative(v)
    with mpmath.workdps(50):
        for point, ours, ours_slope in zip(v.tolist(), value.tolist(), slope.tolist()):
            truth = exact(mpmath.mpf(point))
            assert abs(truth - ours) <= 2.0**-50 * (abs(ours) + min(1, abs(point)))
            if abs(point) < 100 and all(
                abs(point - kink) > 1e-10 for kink in KINKS.get(name, ())
            ):  # a difference across the kink is no derivative
                assert (
                    abs(mpmath.diff(exact, mpmath.mpf(point), h=mpmath.mpf(10) ** -15) - ours_slope)
                    <= 2.0**-50
                )
    assert torch.allclose(value, TORCH[name](v), rtol=1e-14, atol=1e-14)


def test_the_classes_of_the_operators_are_in_the_table() -> None:
    assert isinstance(ACTIVATIONS["hardswish"], Hardswish)
    assert isinstance(ACTIVATIONS["mish"], Mish)


def test_mish_bends_twice() -> None:
    f = ACTIVATIONS["mish"]
    assert isinstance(f, Mish)
    v = torch.linspace(-30, 30, 60001, dtype=torch.float64).requires_grad_(True)
    (second,) = torch.autograd.grad(f.derivative(v).sum(), v)
    inside = (v > f.first + 1e-9) & (v < f.bend - 1e-9)
    outside = (v < f.first - 1e-9) | (v > f.bend + 1e-9)
    assert (second[inside] > 0).all() and (second[outside] <= 1e-15).all()


def test_known_points() -> None:
    w = 0.27846454276107374  # W(1/e): the least value of SiLU is -W(1/e), at -1 - W(1/e)
    silu = ACTIVATIONS["silu"]
    assert silu.lowest == pytest.approx(-1 - w, abs=1e-14) and float(
        silu.value(f64(silu.lowest))
    ) == pytest.approx(-w, abs=1e-15)
    assert ACTIVATIONS["gelu"].bend == pytest.approx(math.sqrt(2), abs=1e-14)
    assert ACTIVATIONS["silu"].bend * math.tanh(silu.bend / 2) == pytest.approx(2, abs=1e-14)
    steepest = {
        "gelu": 1.128905,
        "gelu_tanh": 1.128994,
        "silu": 1.099840,
        "tanh": 1.0,
        "sigmoid": 0.25,
        "softplus": 1,
        "elu": 1,
    }
    for name, most in steepest.items():
        for far in (50.0, math.inf):
            least, top = ACTIVATIONS[name].derivative_range(f64(-far), f64(far))
            assert most - 1e-6 < float(top) < most + 1e-14
            assert float(least) == pytest.approx(1 - float(top) if name in GATED else 0, abs=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_far_out_an_activation_is_bounded_or_a_relu(name: str) -> None:
    f = ACTIVATIONS[name]
    far = f64(math.inf)
    assert f.bounded == (name in ("sigmoid", "tanh"))
    for end, limit in ((-1, 0.0), (1, 0.0 if f.bounded else 1.0)):
        assert float(f.derivative(f64(end * 50.0))) == pytest.approx(limit, abs=1e-14)
        least, top = f.derivative_range(*sorted((f64(end * 700.0), end * far)))
        assert float(least) <= limit <= float(top) and float(top - least) < 1e-14
    least, top = f.span(-far, far)
    lowest = {
        "sigmoid": 0,
        "tanh": -1,
        "gelu": -0.169971,
        "gelu_tanh": -0.170041,
        "silu": -0.278465,
        "softplus": 0,
        "elu": -1,
        "hardswish": -0.375,
        "mish": -0.308843,
    }
    assert float(least) == pytest.approx(lowest[name], abs=1e-6)
    assert float(top) == (pytest.approx(1, abs=1e-14) if f.bounded else math.inf)
    v = torch.cat([torch.linspace(-40, 40, 200001, dtype=torch.float64), f64(f.lowest)])
    distance = (f.value(v) - v.relu())[v.isfinite()].abs().amax()
    if f.bounded:
        assert f.distance_to_relu == math.inf
    else:
        assert distance <= f.distance_to_relu <= distance + 1e-14


@pytest.mark.parametrize("name", NAMES)
def test_ranges_over_half_lines_hold_and_are_those_of_long_intervals(name: str) -> None:
    f = ACTIVATIONS[name]
    far = math.inf
    u = torch.cat(
        [torch.linspace(-60, 60, 4001, dtype=torch.float64), f64(-1e6, 1e6, 1e150, -1e150)]
    )
    for c in (-3.0, -1.0, -0.2, 0.0, 0.4, 2.0, 1e120):
        for low, high in ((-far, c), (c, far), (-far, -c)):
            inside = u[(u >= low) & (u <= high) & (u.abs() < 1e100)]
            for function, range_ in ((f.value, f.span), (f.derivative, f.derivative_range)):
                least, top = range_(f64(low), f64(high))
                found = function(inside)
                assert (
                    (found >= least).all()
                    and (found <= top).all()
                    and not (least.isnan() | top.isnan()).any()
                )
                if c < 1e6:
                    long = range_(f64(max(low, -1e6)), f64(min(high, 1e6)))
                    assert float(least) == pytest.approx(float(long[0]), abs=1e-12)
                    assert float(top) == (
                        far if float(long[1]) > 1e5 else pytest.approx(float(long[1]), abs=1e-12)
                    )


def test_lines_in_closed_form() -> None:
    tanh = ACTIVATIONS["tanh"]
    gelu = ACTIVATIONS["gelu"]
    # Slope 3/4 above tanh on [-1/2, 3], below on [-3, 1/2]: the tangents in artanh(1/2) and its
    # mirror image.
    v, slack = tanh.touch(f64(0.75), f64(-0.5), f64(3.0), True)
    assert float(v) == pytest.approx(math.atanh(0.5), abs=1e-15) and 0 < float(slack) < 1e-13
    v, _ = tanh.touch(f64(0.75), f64(-3.0), f64(0.5), False)
    assert float(v) == pytest.approx(-math.atanh(0.5), abs=1e-15)
    # Concave on [1, 3]: the chord below, the tangent in the middle above.
    up, down = tanh.slopes(f64(1.0), f64(3.0))
    assert float(up) == pytest.approx(1 - math.tanh(2) ** 2, abs=1e-14)
    assert float(down) == pytest.approx((math.tanh(3) - math.tanh(1)) / 2, abs=1e-14)
    # GELU is even about v/2: on a symmetric interval both lines have slope 1/2, through the ends
    # and through 0.
    up, down = gelu.slopes(f64(-3.0), f64(3.0))
    assert float(up) == pytest.approx(0.5, abs=1e-15) and float(down) == pytest.approx(
        0.5, abs=1e-7
    )
    v, _ = gelu.touch(f64(0.5), f64(-3.0), f64(3.0), False)
    assert abs(float(v)) < 1e-15
    # Convex on all of R: the chord above, the tangent in the middle below.
    up, down = ACTIVATIONS["elu"].slopes(f64(-2.0), f64(1.0))
    assert float(up) == pytest.approx((2 - math.exp(-2)) / 3, abs=1e-15)
    assert float(down) == pytest.approx(math.exp(-0.5), abs=1e-15)
    v, _ = ACTIVATIONS["softplus"].touch(f64(0.75), f64(-1.0), f64(3.0), False)
    assert float(v) == pytest.approx(math.log(3), abs=1e-15)
    # Where the interval is a point both lines are the tangent.
    for f in ACTIVATIONS.values():
        up, down = f.slopes(f64(0.7), f64(0.7))
        assert up == down == f.derivative(f64(0.7))
        assert f.touch(up, f64(0.7), f64(0.7), True)[0] == 0.7


@pytest.mark.few(4)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("above", [True, False])
def test_lines_of_any_slope_are_above_and_below_everywhere_and_touch(
    name: str, above: bool
) -> None:
    f = ACTIVATIONS[name]
    low, high = draw(250, seed=1)
    u = points(low, high)
    side = 1 if above else -1
    value = f.value(u)
    for slope in trial_slopes(f, low, high):
        v, slack = f.touch(slope, low, high, above)
        assert ((low <= v) & (v <= high) & (slack >= 0)).all()
        shift = f.value(v) - slope * v + side * slack
        assert (side * (shift - (value - slope * u)) >= 0).all()
        # The slack is rounding and nothing else, also where f' = slope has no solution or two that
        # nearly meet.
        assert (slack <= 2.0**-46 * (1 + slope.abs()) * (low.abs() + high.abs()).clamp(min=1)).all()


@pytest.mark.few(14)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("above", [True, False])
@pytest.mark.parametrize("miss", [1e-6, -1e-3, 0.1])
def test_lines_hold_also_where_the_touching_point_is_missed(
    name: str, above: bool, miss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = ACTIVATIONS[name]
    side = 1 if above else -1
    low, high = draw(60, seed=8)
    u = points(low, high, 400)

    def astray(self: Activation, slope: Tensor, v: Tensor) -> Tensor:
        return torch.where(
            v.abs() > self.bend, v * (1 + abs(miss)), v * (1 - miss)
        )  # on the same piece

    monkeypatch.setattr(type(f), "_refine", astray)
    for slope in trial_slopes(f, low, high):
        v, slack = f.touch(slope, low, high, above)
        assert (side * (f.value(v) - slope * v - (f.value(u) - slope * u)) + slack >= 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_touching_points_are_exact_in_higher_precision(name: str) -> None:
    f = ACTIVATIONS[name]
    exact = EXACT[name]
    low, high = draw(40, seed=2)
    up, down = f.slopes(low, high)
    with mpmath.workdps(40):
        for slope, above in ((up, True), (down, False), (up + 0.01, False), (down - 0.02, True)):
            v, slack = f.touch(slope, low, high, above)
            shift = f.value(v) - slope * v + (slack if above else -slack)
            for k in range(len(low)):
                for u in (*points(low[k], high[k], 7).tolist(), float(v[k])):
                    line = mpmath.mpf(float(shift[k])) + mpmath.mpf(float(slope[k])) * u
                    assert (
                        (line >= exact(mpmath.mpf(u))) if above else (line <= exact(mpmath.mpf(u)))
                    )


@pytest.mark.few(6)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("above", [True, False])
def test_no_other_slope_has_a_line_with_less_area(name: str, above: bool) -> None:
    f = ACTIVATIONS[name]
    side = 1 if above else -1
    low, high = draw(120, seed=3)
    middle = (low + high) / 2

    def height(slope: Tensor) -> Tensor:
        v, slack = f.touch(slope, low, high, above)
        return side * (f.value(v) + slope * (middle - v)) + slack

    ours = height(f.slopes(low, high)[0 if above else 1])
    others = height(
        torch.linspace(-0.2, 1.2, 1500, dtype=torch.float64)[:, None].expand(-1, len(low))
    )
    assert (ours <= others.amin(0) + 1e-12 + 1e-9 * (high - low)).all()
    # The same from the other side: the envelope in the middle, over chords between points of a
    # grid. Its error is at most f''/8 times the square of the grid's width, and f'' < 1.
    fine = high - low < 100
    low = low[fine]
    high = high[fine]
    ours = ours[fine]
    u = points(low, high, 401)
    value = side * f.value(u)
    # the middle is number 200
    left = torch.arange(201)
    right = torch.arange(200, 401)
    share = (200.0 - left[:, None].double()) / (right[None] - left[:, None]).clamp(min=1)
    chords = (1 - share[..., None]) * value[left][:, None] + share[..., None] * value[right][None]
    envelope = chords.amax((0, 1))
    assert (ours >= envelope - 1e-13).all()
    wide = (high - low) / 400
    corner = wide / 4 if name in JUMPS else 0.0  # a jump by 1/2 between two points of the grid
    assert (ours - envelope <= wide**2 / 8 + corner + 1e-12).all()


@pytest.mark.parametrize("name", NAMES)
def test_slopes_on_short_intervals_are_the_derivative(name: str) -> None:
    f = ACTIVATIONS[name]
    middle = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    for jump in JUMPS.get(name, ()):
        middle = middle[(middle - jump).abs() > 1e-4]
    for width in (
        0.0,
        1e-15,
        1e-12,
        1e-9,
        1e-7,
        1e-5,
    ):  # a difference of values would lose all its digits
        for slope in f.slopes(middle - width, middle + width):
            assert (slope - f.derivative(middle)).abs().max() <= 1e-9 + width


@pytest.mark.parametrize("name", NAMES)
def test_ranges_of_the_function_and_of_its_derivative(name: str) -> None:
    f = ACTIVATIONS[name]
    low, high = draw(300, seed=4)
    u = points(low, high)
    grid = ((high - low) / 1999) ** 2  # second derivatives of f and f' are below 2
    for function, (least, top) in (
        (f.value, f.span(low, high)),
        (f.derivative, f.derivative_range(low, high)),
    ):
        found = function(u)
        assert (found >= least).all() and (found <= top).all()
        fine = high - low < 100
        for jump in JUMPS.get(name, ()):  # both values belong to it
            fine &= (high < jump) | (low > jump)
        rounding = 4 * ROUNDING * (1 + found.abs().amax(0))
        assert (found.amin(0) - least <= grid + rounding)[fine].all() and (
            top - found.amax(0) <= grid + rounding
        )[fine].all()


@pytest.mark.parametrize("name", NAMES)
def test_the_shift_is_differentiable_in_the_slope(name: str) -> None:
    f = ACTIVATIONS[name]
    low, high = draw(50, seed=5)
    slope = (f.slopes(low, high)[0] + 0.01).requires_grad_(True)
    v, slack = f.touch(slope, low, high, True)
    assert not v.requires_grad and not slack.requires_grad
    (gradient,) = torch.autograd.grad((f.value(v) - slope * v).sum(), slope)
    assert torch.equal(gradient, -v)
    # A subgradient of the shift, which is convex in the slope.
    for step in (-1e-2, 1e-4, 0.3):
        w, more = f.touch(slope + step, low, high, True)
        assert (
            f.value(w) - (slope + step) * w + more + slack >= f.value(v) - slope * v - step * v
        ).all()


@pytest.mark.parametrize("name", NAMES)
def test_any_shape_and_slopes_that_broadcast(name: str) -> None:
    f = ACTIVATIONS[name]
    low, high = (side[:24].reshape(2, 3, 4) for side in draw(24, seed=6))
    slope = torch.linspace(-0.5, 1.5, 5, dtype=torch.float64).reshape(5, 1, 1, 1)
    v, slack = f.touch(slope, low, high, True)
    assert v.shape == slack.shape == (5, 2, 3, 4)
    for k in range(5):
        alone = f.touch(slope[k].expand(2, 3, 4), low, high, True)
        assert torch.equal(v[k], alone[0]) and torch.equal(slack[k], alone[1])
    none = torch.zeros(0, 3, dtype=torch.float64)
    assert (
        f.slopes(none, none)[0].shape
        == f.touch(none, none, none, False)[0].shape
        == f.span(none, none)[0].shape
        == (0, 3)
    )


BENDS = [s * f.bend for f in ACTIVATIONS.values() for s in (1, -1) if f.bend < math.inf]
ends = st.floats(-1e6, 1e6) | st.floats(-5, 5) | st.sampled_from(BENDS)
widths = st.just(0.0) | st.floats(0, 1e-9) | st.floats(0, 10) | st.floats(0, 1e6)


@pytest.mark.slow
@settings(deadline=None, max_examples=150, derandomize=True)
@given(
    st.sampled_from(NAMES),
    st.booleans(),
    ends,
    widths,
    st.none() | st.floats(-3, 3) | st.floats(-1e-9, 1e-9),
)
@example("gelu", True, -1.0, 5e-324, None)
@example("silu", False, 5e-324, 1.0, 5e-324)
@example("tanh", True, -1e6, 2e6, 1e-320)
@example("gelu", True, -1e100, 2e100, 1.0000001)
@example("gelu_tanh", False, -1e100, 2e100, 0.3)
def test_edge_cases(
    name: str, above: bool, start: float, width: float, slope: float | None
) -> None:
    f = ACTIVATIONS[name]
    side = 1 if above else -1
    low = f64(start)
    high = f64(start + width)
    lines = f.slopes(low, high)
    least, most = (float(v) for v in f.derivative_range(f64(-math.inf), f64(math.inf)))
    assert all(torch.isfinite(line).all() for line in lines)
    assert all(least - 1e-3 < float(line) < most + 1e-3 for line in lines)
    s = lines[0 if above else 1] if slope is None else f64(slope)
    v, slack = f.touch(s, low, high, above)
    u = torch.cat([points(low, high, 500), f64(-f.bend, 0.0, f.bend).clamp(low, high)[:, None]])
    assert float(low) <= float(v) <= float(high)
    assert 0 <= float(slack) <= 2.0**-46 * (1 + abs(float(s))) * max(1, abs(start) + width)
    assert (side * (f.value(v) - s * v - (f.value(u) - s * u)) + slack >= 0).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("low", "high"),
    [(-math.inf, 0.0), (0.0, math.inf), (1.0, 0.0), (math.nan, 1.0), (0.0, math.nan), (0.0, 1e200)],
)
def test_bounds_that_are_none_are_refused(name: str, low: float, high: float) -> None:
    f = ACTIVATIONS[name]
    one = f64(1.0)
    unordered = not low <= high  # infinite ends have ranges, but no lines
    ranges = (f.span, f.derivative_range) if unordered else ()
    for use in (f.slopes, *ranges, lambda a, b: f.touch(one, a, b, True)):
        with pytest.raises(InputError) as error:
            use(f64(low), f64(high))
        assert str(error.value).endswith(".") and "\n" not in str(error.value)
