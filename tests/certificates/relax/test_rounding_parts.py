"""The parts that linear bounds are made of, each held to what it promises, in every rounding mode.

A part is given numbers, which are exact as they stand, and has to answer for its own rounding
alone. So a missing rounding term shows here even where the terms of other parts would hide it in a
whole network.
"""

import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import ClassVar

import mpmath  # comes with torch, through sympy
import numpy as np
import pytest
import torch
from torch import Tensor

from support.exact import normal, perceptron, scattered, uniform, values
from support.rounding import MODES, fractions, long, rounded, serial
from wassail.certificates.exact.flip_problem import Relaxed
from wassail.certificates.exact.nearest_flip import nearest_flip
from wassail.certificates.graph.activations import ACTIVATIONS, Activation, _Gated, rounded_up
from wassail.certificates.graph.graph import Affine, Graph, Node, Relu, Smooth
from wassail.certificates.graph.maps import Matrix
from wassail.certificates.graph.planes import end_points
from wassail.certificates.relax.backward import unit_rows
from wassail.certificates.relax.balls import Balls, CutBalls
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.relax.lines import (
    Arithmetic,
    Lines,
    Shape,
    Slopes,
    Spread,
    rounding_of,
)
from wassail.certificates.relax.rows import Span, chunks_of
from wassail.certificates.relax.slope_cones import Bounded
from wassail.certificates.search.intervals import Forms, Intervals
from wassail.certificates.search.margins import Tree
from wassail.certificates.search.subproblems import Cuts, Rows
from wassail.rounding import TINY

INF = math.inf
SINGLE = torch.float32
DOUBLE = torch.float64


def spans(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centres and deviations around them, `(1, count)` each; half of the centres nearly cancel
    one end.
    """
    low = -scattered(1, count, seed=seed).abs()
    high = scattered(1, count, seed=seed + 1).abs()
    near = -torch.where(torch.arange(count) % 4 == 0, low, high) * (
        1 + 1e-9 * normal(1, count, seed=seed + 3)
    )
    return (
        torch.where(torch.arange(count) % 2 == 0, near, scattered(1, count, seed=seed + 2)),
        low,
        high,
    )


@pytest.mark.parametrize("mode", MODES)
def test_the_ends_of_a_span(mode: str) -> None:
    c, low, high = spans(200, 1)
    with rounded(mode):
        bottom, top = end_points(c, low, high)
    assert (long(bottom) <= long(c) + long(low)).all() and (long(top) >= long(c) + long(high)).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_room_to_the_walls(mode: str) -> None:
    x = torch.cat([uniform(1, 50, seed=3), 2.0**-30 * uniform(1, 50, seed=4)], 1)
    with rounded(mode):
        balls = Balls.make(x, torch.ones(1), INF, (-1 / 3, 1.0))
    assert (long(balls.above) >= 1 - long(x)).all() and (
        long(balls.below) >= long(x) - np.longdouble(-1 / 3)
    ).all()


def test_screening_survives_squares_that_underflow() -> None:
    """In float32 the squares of 1e-30 are 0; the length of the row is not."""
    balls = Balls.make(torch.full((1, 3), 0.5).double(), torch.ones(1), 2.0, None)
    for size in (1e-30, 1e-22, 3e-20):
        a = torch.tensor([[size, -size, size]], dtype=SINGLE)
        middle, spread = balls.across(a, torch.tensor([0]))
        assert float(middle + spread) >= float(a.double().norm())


def squared_length(a: Tensor) -> Fraction:
    """Of one row, exactly."""
    return sum((value * value for value in fractions(a)[0]), Fraction(0))


@pytest.mark.parametrize("mode", MODES)
def test_screening_pays_for_sums_of_many_squares(mode: str) -> None:
    a = (uniform(1, 1000, seed=7) + 0.5).float()
    with rounded(mode), serial():
        balls = Balls.make(torch.zeros(1, 1000), torch.ones(1), 2.0, None)
        middle, spread = balls.across(a, torch.tensor([0]))
    assert (Fraction(middle.item()) + Fraction(spread.item())) ** 2 >= squared_length(a)


@pytest.mark.parametrize("mode", MODES)
def test_balls_with_walls_survive_squares_that_underflow(mode: str) -> None:
    a = torch.full((1, 4), 1.2 * 2.0**-537, dtype=DOUBLE)
    room = torch.full((1, 4), INF, dtype=DOUBLE)
    with rounded(mode):
        balls = CutBalls.make(room, room, torch.ones(1, dtype=DOUBLE))
        found = balls.upper(a, torch.tensor([0]))
    assert Fraction(found.item()) ** 2 >= squared_length(a)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_the_shifts_of_a_relu(slope: float, mode: str) -> None:
    """`f(c + d) - f(c) <= s d + shift` at the ends of the span and at the kink, and the span of
    the output.
    """
    c, low, high = spans(400, 5)
    shape = Shape(Node((0,), (400,), "", Relu(torch.tensor(slope, dtype=DOUBLE))), c, low, high)

    def f(v: np.ndarray) -> np.ndarray:
        return np.where(v > 0, v, v * np.longdouble(slope))

    here = f(long(c))
    ends = [long(low), long(high), np.clip(-long(c), long(low), long(high))]
    for tilt in (
        uniform(1, 400, seed=6),
        torch.zeros(1, 400, dtype=DOUBLE),
        torch.ones(1, 400, dtype=DOUBLE),
    ):
        with rounded(mode):
            above = shape.shift(tilt, True)
            below = shape.shift(tilt, False)
        for d in ends:
            assert (f(long(c) + d) - here <= long(tilt) * d + long(above)).all()
            assert (f(long(c) + d) - here >= long(tilt) * d + long(below)).all()
    with rounded(mode):
        value, (least, most) = shape.output()
    for d in ends:  # of the value as it was computed
        assert (f(long(c) + d) >= long(value) + long(least)).all() and (
            f(long(c) + d) <= long(value) + long(most)
        ).all()


@pytest.mark.parametrize("mode", MODES)
def test_the_shifts_of_a_smooth_activation(mode: str) -> None:
    """Tanh in 64 bits: the shift pays for the errors of the function, of the tangent and of the
    sums.
    """
    c, low, high = (v / 8 for v in spans(200, 7))
    shape = Shape(Node((0,), (200,), "", Smooth("tanh")), c, low, high)
    here = np.tanh(long(c))
    f = ACTIVATIONS["tanh"]
    for tilt in (f.derivative(c), 0.5 * uniform(1, 200, seed=8)):
        with rounded(mode):
            above = shape.shift(tilt, True)
            below = shape.shift(tilt, False)
        for share in np.linspace(0, 1, 9):
            d = long(low) + (long(high) - long(low)) * np.longdouble(share)
            value = np.tanh(long(c) + d) - here
            assert (value <= long(tilt) * d + long(above)).all() and (
                value >= long(tilt) * d + long(below)
            ).all()
    with rounded(mode):
        centre, (least, most) = shape.output()
    for d in (long(low), long(high)):
        assert (np.tanh(long(c) + d) >= long(centre) + long(least)).all()
        assert (np.tanh(long(c) + d) <= long(centre) + long(most)).all()


@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_lines_pay_for_the_products_with_them(dtype: torch.dtype) -> None:
    """For every coefficient vector w: `<w, f(c + d) - f(c)>` is below the line, its sums taken in
    the type of the pass.

    error: the deviation that enters may be off by so much. A width of one makes the sums short and
    the term for it small.
    """
    for width in (1, 64):
        c, low, high = spans(width, 9 + width)
        node = Node((0,), (width,), "", Relu(torch.tensor(0.0, dtype=DOUBLE)))
        shape = Shape(node, c, low, high)
        graph = SimpleNamespace(nodes=(node,))
        kind = Arithmetic(graph, dtype)  # type: ignore[arg-type]
        up, down = shape.slopes()
        error = 1e-6 * scattered(1, width, seed=10).abs()
        own = (
            1.01 * kind.tiny * 9 * torch.maximum(-low, high)
        )  # of the coefficients, as a sweep counts it
        lines = shape.lines(up, down, error + own, kind)
        w = scattered(300, width, seed=11).to(dtype)
        total = (w @ lines.off[0]).double() + (w.abs() @ lines.far[0]).double()
        slope = torch.addcmul(w * lines.mid, w.abs(), lines.rad)
        best = np.full(300, -np.inf, dtype=np.longdouble)
        here = np.maximum(long(c), 0)
        for d in (long(low), long(high), np.clip(-long(c), long(low), long(high))):
            # The worst deviation of each neuron on its own, and the worst that `error` can make of
            # it.
            gain = (
                long(w) * (np.maximum(long(c) + d, 0) - here)
                - long(slope) * d
                + np.abs(long(slope)) * long(error)
            )
            best = gain if best.ndim == 1 else np.maximum(best, gain)
        assert (long(total) >= best.sum(1)).all()


@pytest.mark.parametrize("mode", MODES)
def test_margins_pay_for_their_own_sums(mode: str) -> None:
    """Logits, constants and reaches given: the margin is at least their exact difference."""
    n = 60
    k = 4
    z = scattered(n, k, seed=12)
    rivals = n * (k - 1)
    constant = scattered(rivals, seed=13).abs()
    reach = scattered(rivals, seed=14).abs()
    constant = torch.where(torch.arange(rivals) % 4 == 0, 0.0, constant)
    y = torch.arange(n) % k
    owners = torch.arange(n).repeat_interleave(k - 1)
    sweep = SimpleNamespace(
        graph=SimpleNamespace(nodes=(SimpleNamespace(size=k),), outputs=k, inputs=1),
        centre={0: z},
        steps=0,
        bound=lambda last, rows, owner: (
            constant,
            torch.zeros(len(rows), 1, dtype=DOUBLE),
            owner,
        ),
        climbed=lambda last, rows, owner, steps, constant, a: (constant, a),
        inputs=SimpleNamespace(upper=lambda a, owner: reach),
        balls=SimpleNamespace(targets=None),
        cones=None,
    )
    assert torch.equal(
        owners, next(chunks_of(torch.ones(n, k - 1, dtype=torch.bool), 2**19 // k))[0]
    )
    with rounded(mode):
        lower, base, _ = margins(sweep, y)  # type: ignore[arg-type]
    here = np.take_along_axis(long(z), y.numpy()[:, None], 1) - long(z)
    others = np.arange(k) != y.numpy()[:, None]
    assert (long(base)[others] <= here[others] - long(constant)).all()
    assert (long(lower)[others] <= here[others] - long(constant) - long(reach)).all()


@pytest.mark.parametrize("mode", MODES)
def test_margins_pay_for_what_rows_are_together(mode: str) -> None:
    """Logits and bounds of rows given: the margin is at least their exact difference."""
    n = 100
    z = scattered(n, 2, seed=15)
    together = scattered(n, seed=16)
    nothing = torch.full((n,), INF, dtype=DOUBLE)
    none = torch.zeros(n, 1, dtype=DOUBLE)
    bounded = Bounded(nothing, together)
    sweep = SimpleNamespace(
        graph=SimpleNamespace(nodes=(SimpleNamespace(size=2),), outputs=2, inputs=1),
        centre={0: z},
        bound=lambda last, rows, owner: (nothing, none, owner),
        inputs=SimpleNamespace(upper=lambda a, owner: none[:, 0]),
        balls=SimpleNamespace(targets=None),
        cones=SimpleNamespace(known=True, bound=lambda *rest: (bounded, none, none[:, 0])),
    )
    with rounded(mode):
        y = torch.zeros(n, dtype=torch.int64)
        lower = margins(sweep, y, "none")[0][:, 1]  # type: ignore[arg-type]
    assert (long(lower) <= long(z)[:, 0] - long(z)[:, 1] - long(together)).all()


@pytest.mark.parametrize("mode", MODES)
def test_slopes_pay_for_the_sum_of_their_shifts(mode: str) -> None:
    """The line above and the line below have `off + far` and `off - far`."""
    off = scattered(1, 100, seed=17)
    far = scattered(1, 100, seed=18).abs()
    zero = torch.zeros_like(off)
    with rounded(mode):
        kind = Arithmetic(SimpleNamespace(nodes=()), DOUBLE)  # type: ignore[arg-type]
        found = Slopes.of(Lines(zero, zero, off, far), None, kind)
    assert (long(found.above) >= long(off) + long(far)).all()
    assert (long(found.drop) >= long(far) - long(off)).all()


@pytest.mark.parametrize("mode", MODES)
def test_slopes_of_their_own_pay_for_long_sums(mode: str) -> None:
    """Coefficients below 0 of thousands of undecided neurons: each is at least `a v`."""
    n = 8000
    c = 1 + uniform(1, n, seed=19)
    zero = torch.zeros_like(c)
    shape = Shape(Node((0,), (n,), "", Relu(torch.tensor(0.0, dtype=DOUBLE))), c, -2 * c, 2 * c)
    bend = SimpleNamespace(shape=shape, error=zero, crossing=zero == 0)
    w = -1 - uniform(1, n, seed=20)
    a = uniform(1, n, seed=21) / 2
    with rounded(mode):
        kind = Arithmetic(SimpleNamespace(nodes=()), DOUBLE)  # type: ignore[arg-type]
        slopes = Slopes.of(Lines(zero, zero, zero, zero), bend, kind)  # type: ignore[arg-type]
        _, constant = slopes.pull(w, a)
    exact = (long(w) * (long(a) * long(c) - long(c))).sum()
    assert long(constant)[0] >= exact


@pytest.mark.parametrize("mode", MODES)
def test_what_is_proved_serves_smaller_balls(mode: str) -> None:
    """`proved` gives ranges of the values; a later sweep turns them back into deviations from
    another centre.
    """
    first = normal(6, 3, seed=1)
    x = uniform(1, 3, seed=5)
    bias = (
        1e-4 * normal(6, seed=3) - first @ x[0]
    )  # centres much smaller than what is known of them
    graph = perceptron([first, normal(2, 6, seed=2)], [bias, normal(2, seed=4)])
    balls = Balls.make(x, torch.full((1,), 0.2), INF, None)
    sweep = Sweep(graph, balls).run()
    c, (low, high) = sweep.centre[1], sweep.spans[1]
    with rounded(mode):
        bottom, top = sweep.proved()[1]
    assert (long(bottom) <= long(c) + long(low)).all() and (long(top) >= long(c) + long(high)).all()
    # Ranges that say more than intervals do: they alone decide. Next to the smaller ones the
    # centres are large.
    for scale in (1.0, 1e-6):
        tight = {
            1: (
                scale * (-1e-3 * uniform(1, 6, seed=6) - 1e-3),
                scale * (1e-3 * uniform(1, 6, seed=7) + 1e-3),
            )
        }
        with rounded(mode):
            again = Sweep(graph, balls, known=tight).run()
        low, high = again.spans[1]
        assert (long(again.centre[1]) + long(low) <= long(tight[1][0])).all()
        assert (long(again.centre[1]) + long(high) >= long(tight[1][1])).all()


@pytest.mark.parametrize("mode", MODES)
def test_two_bounds_become_one_linear_function_and_a_rest(mode: str) -> None:
    count = 50
    n = 6
    above = scattered(count, seed=15)
    below = scattered(count, seed=16)
    up = scattered(count, n, seed=17)
    down = scattered(count, n, seed=18)
    down[::2] = -up[::2] * (1 + 1e-15)
    radius = torch.tensor([1 / 3], dtype=DOUBLE)
    balls = Balls.make(torch.zeros(1, n).double(), radius, INF, None)
    spread = Spread(*(torch.zeros(1, count, *more, dtype=DOUBLE) for more in ((n,), (), ())))
    with rounded(mode):
        spread.put(
            torch.zeros(count).long(),
            torch.arange(count),
            torch.cat([above, below]),
            torch.cat([up, down]),
            balls,
        )
    for sign in (1, -1):  # the corner of the box where one side says most
        for rows, constant in ((up, above), (down, below)):
            d = sign * np.sign(long(rows)) * long(radius)
            side = 1 if rows is up else -1
            most = long(constant) + (long(rows) * d).sum(1)
            ours = (long(spread.a)[0] * d).sum(1) + long(spread.shift)[0]
            assert (side * ours + long(spread.rest)[0] >= most).all()


def to_the_end(steps: Generator[Tensor, Tensor | None, Span]) -> Span:
    """What a screening returns if no row is dropped on the way."""
    try:
        rows = next(steps)
        while True:
            rows = steps.send(torch.arange(len(rows)))
    except StopIteration as end:
        return end.value


def chain(factor: float, depth: int, last: float) -> Graph:
    """Neurons one after the other, each with the same weight, the last one with a bias; its
    output is the second logit.
    """
    weights = [torch.full((1, 1), factor, dtype=DOUBLE) for _ in range(depth)] + [
        torch.tensor([[0.0], [1.0]], dtype=DOUBLE)
    ]
    biases = [torch.zeros(1, dtype=DOUBLE) for _ in range(depth - 1)]
    return perceptron(
        weights, [*biases, torch.tensor([last], dtype=DOUBLE), torch.zeros(2, dtype=DOUBLE)]
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_a_chain_of_forty_layers_loses_the_same_half_ulp_in_each(
    dtype: torch.dtype, mode: str
) -> None:
    """Weights `1 + 0.99 2^-24` are 1 in float32, so that forty products are too small by forty half
    ulps, all one way.

    All neurons but the last are active, so that nothing else is rounded; the last one is near 0. In
    float64 the mode does it.
    """
    if dtype == SINGLE and mode != "nearest":
        return  # float32 counts 2^-24 an operation, which is for rounding to nearest
    factor = 1 + 0.99 * 2.0**-24
    depth = 40
    graph = chain(factor, depth, -1.0)
    x = torch.ones(1, 1, dtype=DOUBLE)
    radius = torch.full((1,), 0.5, dtype=DOUBLE)
    ends = [values(graph, np.full(1, v, dtype=np.longdouble)) for v in (0.5, 1.5)]
    last = 2 * depth - 1
    owner = torch.zeros(1).long()
    with rounded(mode):
        sweep = Sweep(graph, Balls.make(x, radius, INF, None)).run()
        kind = sweep.fast if dtype == SINGLE else sweep.exact
        constant, a, owners = sweep.substitute(
            kind, last, torch.ones(1, 1, dtype=dtype), owner, True
        )
        top = constant + sweep.inputs.upper(a.double(), owners)
        low, high = (
            to_the_end(sweep._screen(last, owner, owner)) if dtype == SINGLE else sweep.spans[last]
        )
        rows = torch.tensor([[-1.0, 1.0]], dtype=DOUBLE)
        polished = [sweep.bound(2 * depth + 1, rows, owner, steps) for steps in (0, 3)]
        logits = [constant + sweep.inputs.upper(a, owners) for constant, a, owners in polished]
        lower = margins(sweep, torch.zeros(1).long())[0]
    centre = long(sweep.centre[last])[0, 0]
    assert long(top)[0] >= ends[1][last][0] - centre and long(top)[1] >= centre - ends[0][last][0]
    assert (
        long(high).max() >= ends[1][last][0] - centre
        and long(low).min() <= ends[0][last][0] - centre
    )
    here = long(sweep.centre[2 * depth + 1])[0, 1]
    assert all(long(v)[0] >= ends[1][-1][1] - here for v in logits)
    assert long(lower)[0, 1] <= -ends[1][-1][1]


def test_rounding_is_relative_to_the_sum_of_a_node() -> None:
    """`rounding_of`: a sum of `size` products is off by at most that, in either type."""
    for dtype in (SINGLE, DOUBLE):
        kind = SimpleNamespace(tiny=TINY[dtype], sums=8)
        for size in (1, 10, 1000):
            node = Node((0,), (size,), "", Affine(Matrix(torch.ones(size, 1, dtype=DOUBLE))))
            error = rounding_of(node, kind)  # type: ignore[arg-type]
            assert error >= size * torch.finfo(dtype).eps / 2
    assert replace(Node((0,), (1,), ""), shape=(2,)).size == 2


@pytest.mark.parametrize("mode", MODES)
def test_split_neurons_pay_for_their_sums(mode: str) -> None:
    """A relaxed neuron lies below its line; one with a chosen sign is a line, and its
    multiplier adds to it.
    """
    count = 200
    c, low, high = (v[0] for v in spans(count, 21))
    shape = Shape(
        Node((0,), (count,), "", Relu(torch.tensor(0.0, dtype=DOUBLE))),
        c[None],
        low[None],
        high[None],
    )
    up = shape.slopes()[0][0]
    above = shape.shift(shape.slopes()[0], True)[0]
    here = c.clamp(min=0)
    most = torch.maximum(-low, high)
    error = 2.0**-48 * most + 1e-7 * scattered(count, seed=22).abs()
    columns = {
        "up": up,
        "above": above,
        "c": c,
        "here": here,
        "error": error,
        "slope": torch.zeros_like(c),
        "most": most,
    }
    known = tuple(column[None] for column in columns.values())
    graph = SimpleNamespace(nodes=[shape.node])
    tree = SimpleNamespace(sweep=SimpleNamespace(graph=graph), known=lambda *_: known)
    w = scattered(5, count, seed=23)
    alpha = uniform(5, count, seed=24)
    beta = uniform(5, count, seed=25)
    kept = long(error) - 2.0**-48 * long(most)
    for sign in (0.0, 1.0, -1.0):
        chosen = torch.full((5, count), sign, dtype=DOUBLE)
        with rounded(mode):
            given = (w, None, 0, chosen, alpha, beta, True)
            coefficient, added, _ = Tree._neurons(tree, *given)  # type: ignore[arg-type]
        for d in (long(low), long(high), np.clip(-long(c), long(low), long(high))):
            v = long(c) + d
            inside = np.ones(count, dtype=bool) if sign == 0 else sign * v >= 0
            value = long(w) * (np.maximum(v, 0) - long(here)) + (
                sign * long(beta) * v if sign else 0
            )
            room = long(coefficient) * d + long(added) - np.abs(long(coefficient)) * kept - value
            assert (room >= 0)[:, inside].all()


@pytest.mark.parametrize("mode", MODES)
def test_split_intervals_pay_for_their_sums(mode: str) -> None:
    """A cut neuron's two lines and its multipliers, at the ends of its interval."""
    count = 200
    c, low, high = (v[0] for v in spans(count, 121))
    most = torch.maximum(-low, high)
    error = 2.0**-48 * most + 1e-7 * scattered(count, seed=122).abs()
    ends = (c + low, c + high)
    w = scattered(5, count, seed=123)
    up, down, above, below = (scattered(5, count, seed=124 + k) for k in range(4))
    under, over = (uniform(5, count, seed=128 + k) for k in range(2))
    under[0] = (w[0].clamp(max=0) * -down[0]).clamp(min=0)  # cancels the coefficient
    sweep = SimpleNamespace(exact=None)
    table = SimpleNamespace(sweep=sweep)
    held = SimpleNamespace(c=c, error=error, most=most)
    cuts = SimpleNamespace(low=ends[0], high=ends[1])
    forms = Forms(up, down, above, below, under, over)
    mine = torch.ones(5, count, dtype=torch.bool)
    with rounded(mode):
        given = (None, w, mine, held, cuts, forms, count)
        coefficient, added = Intervals._neurons(table, *given)  # type: ignore[arg-type]
    kept = long(error) - 2.0**-48 * long(most)
    plus = np.maximum(long(w), 0)
    minus = np.minimum(long(w), 0)
    for d in (long(ends[0]) - long(c), long(ends[1]) - long(c)):
        v = long(c) + d
        value = plus * (long(up) * d + long(above)) + minus * (long(down) * d + long(below))
        value = value + long(under) * (v - long(ends[0])) + long(over) * (long(ends[1]) - v)
        room = long(coefficient) * d + long(added) - np.abs(long(coefficient)) * kept - value
        assert (room >= 0).all()


def test_split_intervals_keep_the_errors_of_the_sweep() -> None:
    """Weights that may be wrong: cut neurons have the error of their inputs, and lines pay for it
    where the interval is too short to bend.
    """
    nodes = (
        Node((), (3,), "the input"),
        Node((0,), (4,), "", Affine(Matrix(1 + uniform(4, 3, seed=205)))),
        Node((1,), (4,), "", Smooth("tanh")),
    )
    x = uniform(1, 3, seed=206)
    balls = Balls.make(x, torch.full((1,), 1e-9, dtype=DOUBLE), INF, None)
    sweep = Sweep(replace(Graph(nodes), rounding=1e-6), balls).run()
    own = torch.tensor([0])
    table = Intervals(sweep, own)
    assert (table.error >= 1e-7).all()
    table.tilt(own, lambda lines: -lines[2].far.sum(1))
    line = table.lines[DOUBLE][2]
    assert (line.far >= (line.mid.abs() + line.rad.abs()) * table.error).all()
    column = torch.arange(4)[None]
    zero = torch.zeros(1, 4, dtype=DOUBLE)
    cuts = Cuts(column, table.low, table.high, zero, zero, zero, zero)
    assert torch.equal(table.held(own, own, cuts, False).error, table.error)


@pytest.mark.parametrize("mode", MODES)
def test_split_margins_pay_for_their_own_sums(mode: str) -> None:
    """Logits and what a bound takes from them given: the margin is at least their exact
    difference.
    """
    z = scattered(1, 6, seed=26)
    total = scattered(5, seed=27).abs()
    total[::2] = z[0, 0] - z[0, 1::2][:3] * (1 - 1e-15)
    graph = SimpleNamespace(nodes=(SimpleNamespace(),), outputs=6)
    kind = SimpleNamespace(dtype=DOUBLE, floors={0: torch.zeros(1, dtype=DOUBLE)})
    inputs = SimpleNamespace(upper=lambda a, owner: total)
    sweep = SimpleNamespace(graph=graph, centre={0: z}, inputs=inputs, exact=kind)
    tree = SimpleNamespace(sweep=sweep, y=torch.tensor([0]), intervals=None)
    own = torch.tensor([0])
    rows = SimpleNamespace(own=own, owner=own, rival=torch.arange(1, 6))
    one = total[:, None]
    with rounded(mode):
        given = (kind, rows, None, one, one, one, Cuts.none(5, own.device))
        lower = Tree._margin(tree, *given).value  # type: ignore[arg-type]
    assert (long(lower) <= long(z)[0, 0] - long(z)[0, 1:] - long(total)).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_distances_to_planes(norm: float, mode: str) -> None:
    """From the origin, without walls: `b / ||a||_s` and never more."""
    a = scattered(40, 7, seed=28)
    b = scattered(40, seed=29).abs()
    far = torch.full((7,), 1e3, dtype=DOUBLE)
    net = SimpleNamespace(
        x=torch.zeros(7, dtype=DOUBLE), norm=norm, domain=None, below=far, above=far
    )
    with rounded(mode):
        reach = Relaxed.reach(net, SimpleNamespace(a=a, b=b))  # type: ignore[arg-type]
    size = np.abs(long(a))
    length = size.max(1) if norm == 1 else size.sum(1) if norm == INF else np.sqrt((size**2).sum(1))
    assert (long(reach) <= long(b) / length * (1 + np.longdouble(2) ** -60)).all()
    assert (long(reach) > long(b) / length - 1e-9).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, INF])
def test_distances_of_linear_networks_whose_logits_cancel(norm: float, mode: str) -> None:
    """Inputs of 1e5 and margins of 1e-2: the logits have ten digits less than their terms."""
    weight = torch.cat([normal(2, 12, seed=30), torch.zeros(0, 12, dtype=DOUBLE)])
    for seed in range(4):
        x = 1e5 * uniform(1, 12, seed=31 + seed)
        gap = weight[0] - weight[1]
        bias = torch.stack([0.01 - gap @ x[0], torch.zeros((), dtype=DOUBLE)])
        graph = perceptron([weight], [bias])
        slope = [Fraction(p) - Fraction(q) for p, q in weight.T.tolist()]
        margin = sum(s * Fraction(v) for s, v in zip(slope, x[0].tolist())) + Fraction(
            float(bias[0])
        )
        truth = margin / (max(map(abs, slope)) if norm == 1 else sum(map(abs, slope)))
        with rounded(mode):
            found = nearest_flip(graph, x, torch.tensor([0]), norm, None, time_limit=5.0)
        assert truth > 0 and Fraction(float(found.lower)) <= truth


@pytest.mark.parametrize("mode", MODES)
def test_room_of_a_relaxed_network(mode: str) -> None:
    graph = perceptron(
        [normal(4, 3, seed=40), normal(2, 4, seed=41)], [normal(4, seed=42), normal(2, seed=43)]
    )
    x = torch.tensor([1 / 3, 0.7, 1e-3], dtype=DOUBLE)
    with rounded(mode):
        net = Relaxed(graph, x, 0, 2.0, INF, (-1.0, 1.0))
    for room, wall in ((net.below, long(x) + 1), (net.above, 1 - long(x))):
        assert (long(room) >= wall).all()


@pytest.mark.parametrize("mode", MODES)
def test_distances_from_spans_of_chosen_sides_that_cancel(mode: str) -> None:
    """Two active neurons that nearly cancel in a third: its span, given their sides, has few
    digits.
    """
    for seed in range(6):
        near = 1 + 1e-9 * float(normal(1, seed=seed))
        gain = 1 + float(uniform(1, seed=seed + 50))
        first = torch.tensor([[gain], [gain * near]], dtype=DOUBLE)
        ratio = float(uniform(1, seed=seed + 60)) + 0.5
        second = torch.tensor([[1e6 * near * ratio, -1e6 * ratio]], dtype=DOUBLE)
        zero = torch.zeros(2, dtype=DOUBLE)
        graph = perceptron([first, second, torch.ones(2, 1, dtype=DOUBLE)], [zero, zero[:1], zero])
        net = Relaxed(graph, torch.zeros(1, dtype=DOUBLE), 0, 1 / 3, INF, None)
        root = net.roots()
        assert root.side.shape == (1, 3)
        side = root.side.clone()
        low = root.low.clone()
        high = root.high.clone()
        side[:, :2], side[:, 2], low[:, 2], high[:, 2] = 1, -1, -1.0, 1.0
        with rounded(mode):
            tight = net.tighten(replace(root, side=side, low=low, high=high))
        slope = sum(
            Fraction(a) * Fraction(b) for a, b in zip(first[:, 0].tolist(), second[0].tolist())
        )
        end = slope * Fraction(1 / 3)  # at x = 1/3, where both are active
        assert Fraction(float(tight.low[0, 2])) <= end <= Fraction(float(tight.high[0, 2]))


@pytest.mark.parametrize("mode", MODES)
def test_distances_from_spans_behind_a_wide_layer(mode: str) -> None:
    """Six thousand active neurons vanish in the condensed network: its one coefficient and its
    bias are long sums.
    """
    width = 6000
    first = 1 + uniform(width, 1, seed=70)
    second = uniform(1, width, seed=71)
    whole = second @ first
    bias = -whole[0]
    graph = perceptron(
        [first, second, torch.ones(2, 1, dtype=DOUBLE)],
        [torch.zeros(width, dtype=DOUBLE), bias, torch.zeros(2, dtype=DOUBLE)],
    )
    with rounded(mode):
        net = Relaxed(graph, torch.ones(1, dtype=DOUBLE), 0, 2.0**-40, INF, None)
    assert len(net.low) == 1
    slope = sum(Fraction(a) * Fraction(b) for a, b in zip(first[:, 0].tolist(), second[0].tolist()))
    low, high = (
        slope * (1 + Fraction(step)) + Fraction(float(bias)) for step in (-(2.0**-40), 2.0**-40)
    )
    assert Fraction(float(net.low)) <= low and Fraction(float(net.high)) >= high


def test_distances_that_are_proved_are_not_reached() -> None:
    """A proved radius that equals the distance of the flip: the bracket stays open."""
    graph = perceptron(
        [torch.tensor([[-1.0], [0.0]], dtype=DOUBLE)], [torch.tensor([1.0, 0.0], dtype=DOUBLE)]
    )
    task = graph, torch.zeros(1, 1, dtype=DOUBLE), torch.tensor([0]), INF, None
    found = nearest_flip(*task, lower=nearest_flip(*task).upper)
    assert 1 - 1e-12 < float(found.lower) < float(found.upper)


@dataclass(frozen=True, eq=False)
class Kinked(Activation):
    """A concave function whose derivative is computed as 0 where it is `0.99 2^-50`, the error that
    is allowed.

    It rises (falls, mirrored) up to the kink and drops after it.
    """

    side: float = 1.0
    rise: ClassVar[float] = 0.99 * 2.0**-50
    kink: ClassVar[float] = 2.0**20

    def value(self, v: Tensor) -> Tensor:
        v = self.side * v
        return torch.where(v < self.kink, self.rise * v, self.rise * self.kink - (v - self.kink))

    def derivative(self, v: Tensor) -> Tensor:
        return torch.where(self.side * v < self.kink, 0.0, -self.side)

    def _ends(self, slope: Tensor, above: bool) -> tuple[Tensor, Tensor]:
        return slope.new_full((), -INF), slope.new_full((), INF)

    def _where(self, slope: Tensor, above: bool) -> Tensor:
        return torch.zeros_like(slope)

    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


@pytest.mark.parametrize("side", [1.0, -1.0])
def test_shifts_pay_for_the_error_of_a_derivative(side: float) -> None:
    """A flat line that seems to touch in 0 has to clear the kink, which is a million away, just
    before the end.
    """
    f = Kinked("kinked", 0.0, -INF, INF, side)
    low, high = torch.tensor(sorted([-side, side * (f.kink + 2.0**-29)]), dtype=DOUBLE)
    v, slack = f.touch(torch.zeros((), dtype=DOUBLE), low, high, True)
    assert float(f.value(v) + slack) >= float(f.value(torch.tensor(side * f.kink, dtype=DOUBLE)))


@pytest.mark.parametrize("name", ["gelu", "silu", "tanh", "softplus"])
def test_shifts_of_one_point(name: str) -> None:
    """An interval of one number: lines and ranges have to clear the exact value there, and the
    exact derivative.
    """
    exact = {
        "gelu": lambda v: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2,
        "silu": lambda v: v / (1 + mpmath.exp(-v)),
        "tanh": mpmath.tanh,
        "softplus": lambda v: mpmath.log1p(mpmath.exp(v)),
    }[name]
    f = ACTIVATIONS[name]
    v = 3 * normal(60, seed=120)
    slope = normal(60, seed=121)
    ranges = torch.stack(f.span(v, v))
    steep = torch.stack(f.derivative_range(v, v))
    with mpmath.workdps(40):
        for point, (least, most), (flat, steepest) in zip(
            v.tolist(), ranges.T.tolist(), steep.T.tolist()
        ):
            assert least <= exact(mpmath.mpf(point)) <= most
            assert (
                flat <= mpmath.diff(exact, mpmath.mpf(point), h=mpmath.mpf(10) ** -15) <= steepest
            )
    for above, sign in ((True, 1), (False, -1)):
        place, slack = f.touch(slope, v, v, above)
        assert torch.equal(place, v)
        line = f.value(v) - slope * v + sign * slack
        with mpmath.workdps(40):
            for point, tilt, found in zip(v.tolist(), slope.tolist(), line.tolist()):
                assert sign * (found - (exact(mpmath.mpf(point)) - mpmath.mpf(tilt) * point)) >= 0


def test_shifts_of_gated_activations_to_a_relu() -> None:
    """The distance is the depth of the dip, exactly computed, and no less."""
    with mpmath.workdps(40):
        truth = {
            "gelu": lambda v: v * mpmath.erfc(-v / mpmath.sqrt(2)) / 2,
            "gelu_tanh": lambda v: (
                v
                / (
                    1
                    + mpmath.exp(
                        -2 * mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)
                    )
                )
            ),
            "silu": lambda v: v / (1 + mpmath.exp(-v)),
        }
        for name, function in truth.items():
            lowest = mpmath.findroot(
                lambda v, function=function: mpmath.diff(function, v), ACTIVATIONS[name].lowest
            )
            again = _Gated.make(name, ACTIVATIONS[name].gate)
            assert again.distance_to_relu >= -function(lowest)
        assert rounded_up(math.log(2)) >= mpmath.log(2)
    for size in (0.0, 1e-30, 1 / 3, 1e5):
        assert rounded_up(size) - size >= 2.0**-50 * (size + 1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [1.0, 2.0, INF])
def test_spans_of_an_affine_map(norm: float, mode: str) -> None:
    """In balls so small that the centre's own rounding is all there is, and in larger ones up
    to their rim.
    """
    n = 40
    weight = normal(12, n, seed=140)
    bias = normal(12, seed=141)
    x = 1 + uniform(1, n, seed=142)
    value = (long(weight) * long(x)).sum(1) + long(bias)
    for radius in (2.0**-100, 1 / 3):
        with rounded(mode):
            sweep = Sweep(
                perceptron([weight], [bias]),
                Balls.make(x, torch.full((1,), radius).double(), norm, None),
            ).run()
        size = np.abs(long(weight))
        length = (
            size.max(1) if norm == 1 else size.sum(1) if norm == INF else np.sqrt((size**2).sum(1))
        )
        far = length * long(sweep.balls.radius) * (1 - np.longdouble(2) ** -60)
        centre, (low, high) = long(sweep.centre[1])[0], sweep.spans[1]
        room = np.longdouble(2) ** -57  # what 64 bits lose in the sum of forty
        assert (centre + long(high)[0] >= value + far - room).all() and (
            centre + long(low)[0] <= value - far + room
        ).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [SINGLE, DOUBLE])
def test_coefficients_pay_for_the_sums_they_are(dtype: torch.dtype, mode: str) -> None:
    """Rows `w` of 60 entries through a map to one input: `<w, W d>` is a long sum, taken in the
    type of the pass.
    """
    if dtype == SINGLE and mode != "nearest":
        return  # float32 counts 2^-24 an operation, which is for rounding to nearest
    width = 60
    radius = 1 / 3
    weight = normal(width, 1, seed=150)
    w = normal(200, width, seed=151).to(dtype)
    owner = torch.zeros(len(w)).long()
    with rounded(mode):
        balls = Balls.make(
            torch.zeros(1, 1, dtype=DOUBLE), torch.full((1,), radius, dtype=DOUBLE), INF, None
        )
        sweep = Sweep(perceptron([weight], [torch.zeros(width, dtype=DOUBLE)]), balls).run()
        constant, a, owners = sweep.substitute(
            sweep.fast if dtype == SINGLE else sweep.exact, 1, w, owner, True
        )
        top = constant + sweep.inputs.upper(a.double(), owners)
    most = np.abs((long(w) * long(weight)[:, 0]).sum(1)) * long(balls.radius)[0]
    assert (long(top)[: len(w)] >= most - np.longdouble(2) ** -57).all() and (
        long(top)[len(w) :] >= most - 2.0**-57
    ).all()


def test_split_neurons_keep_the_errors_of_the_sweep() -> None:
    """What rounding adds to the input of a neuron is nine operations at least, of a number as
    large as its span.
    """
    graph = perceptron(
        [normal(8, 3, seed=200), normal(2, 8, seed=201)],
        [torch.zeros(8).double(), torch.zeros(2).double()],
    )
    sweep = Sweep(
        graph, Balls.make(torch.zeros(1, 3, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE), INF, None)
    ).run()
    tree = Tree(sweep, [0], [0])
    assert (
        tree.error.shape == (1, 8)
        and (tree.error >= 9 * 2.0**-53 * tree.most).all()
        and (tree.most > 0).all()
    )
    own = torch.tensor([0])
    known = tree.known(DOUBLE, next(iter(tree.parts)), Rows(own, own, own))
    assert torch.equal(known[4], tree.error)


def test_sweeps_hand_on_the_errors_of_nodes() -> None:
    """Weights that may be wrong: smooth neurons have the error of their inputs, and unit vectors
    that of the node where they start.
    """
    off = 1e-6
    first = 1 + uniform(4, 3, seed=202)
    second = 1 + uniform(2, 4, seed=203)
    nodes = (
        Node((), (3,), "the input"),
        Node((0,), (4,), "", Affine(Matrix(first))),
        Node((1,), (4,), "", Smooth("tanh")),
        Node((2,), (2,), "", Affine(Matrix(second))),
    )
    x = uniform(1, 3, seed=204)
    balls = Balls.make(x, torch.full((1,), 0.1, dtype=DOUBLE), INF, None)
    sweep = Sweep(replace(Graph(nodes), rounding=off), balls).run()
    assert (sweep.smooth[2][1] >= off * (x @ first.T)).all()
    place = torch.arange(2)
    for kind in (sweep.exact, sweep.fast):
        _, constant = unit_rows(sweep.graph, kind, 3, place, torch.zeros_like(place))
        assert (constant >= off * (sweep.centre[2][0] @ second.T)).all()
