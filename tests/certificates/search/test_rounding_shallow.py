"""One layer of ReLUs: each rounding term on exact numbers, in directed rounding, against fractions.

Boxes are widened by a few units of their middles, which hides small errors. Where a test needs one
that is seen, it is in a bias, or in the sum of many inputs, and a small weight makes it large.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.exact import uniform
from support.rounding import MODES, rounded
from wassail.certificates import clock
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.executed import arithmetic_of
from wassail.certificates.search.shallow import (
    Domains,
    Shallow,
    ShallowSearch,
    _cut,
    _halves,
    shallow_of,
)

DOUBLE = torch.float64
SMALL = 2.0**-30


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=DOUBLE)


def search(
    w: Tensor, b: Tensor, low: Tensor, high: Tensor, c: Tensor | None = None
) -> ShallowSearch:
    """The search for `c relu(w x + b)`, c = -1 unless given."""
    c = (-torch.ones(len(b), dtype=DOUBLE) if c is None else c)[None]
    zero = torch.zeros(1, dtype=DOUBLE)
    return ShallowSearch(Shallow(w, b, c, zero, c.abs(), zero, 0), low, high, lambda _: None)


def domain(task: ShallowSearch, **parts: Tensor) -> Domains:
    """The whole box, and nothing that is known of z."""
    far = torch.full((1, len(task.c)), math.inf, dtype=DOUBLE)
    none = torch.zeros_like(far)
    known: dict[str, Any] = {
        "left": task.low[None],
        "right": task.high[None],
        "sign": none,
        "low": -far,
        "high": far,
        "tilt": none,
        "bound": none[:, 0],
    }
    return Domains(**{**known, **parts})


def image(w: float, b: float, low: float, high: float) -> tuple[Fraction, Fraction]:
    """What `w x + b` can be on an interval."""
    ends = [Fraction(w) * Fraction(x) + Fraction(b) for x in (low, high)]
    return min(ends), max(ends)


@pytest.mark.parametrize("mode", MODES)
def test_boxes_around_middles_hold_boxes(mode: str) -> None:
    ends = uniform(200, 2, seed=1)
    ends[:, 0] *= 2.0**-10 / 3  # with other last places
    ends = ends.sort(1).values
    with rounded(mode):
        middle, half = _halves(ends[:, 0], ends[:, 1])
    for (low, high), m, h in zip(ends.tolist(), middle.tolist(), half.tolist()):
        assert Fraction(m) - Fraction(h) <= low and high <= Fraction(m) + Fraction(h)
        assert h <= (high - low) / 2 + 1e-14


@pytest.mark.parametrize("mode", MODES)
def test_cuts_are_rounded_outward(mode: str) -> None:
    left = uniform(200, 1, seed=2)
    right = left + 2
    row = 0.5 + uniform(200, 1, seed=3)
    room = uniform(200, seed=4)
    with rounded(mode):
        top = _cut(left, right, row, room)[1]
        bottom = _cut(left, right, -row, room)[0]
    for k in range(200):
        reach = Fraction(float(room[k])) / Fraction(float(row[k]))
        assert Fraction(float(left[k])) + reach <= float(top[k]) < float(right[k])
        assert float(bottom[k]) <= Fraction(float(right[k])) - reach
        assert float(bottom[k]) > float(left[k])


@pytest.mark.parametrize("mode", MODES)
def test_ranges_hold_what_large_biases_round(mode: str) -> None:
    """Of the root, and of boxes."""
    w, b = uniform(100, 1, seed=5) - 0.5, 1 + uniform(100, seed=6)
    low, high = column(SMALL / 3), column(SMALL)
    with rounded(mode):
        task = search(w, b, low, high)
        part = task._ranged(domain(task))
    for k in range(100):
        least, most = image(float(w[k]), float(b[k]), float(low), float(high))
        for bottom, top in ((task.root_low, task.root_high), (part.low[0], part.high[0])):
            assert float(bottom[k]) <= least and most <= float(top[k])
            assert top[k] - bottom[k] < SMALL


@pytest.mark.parametrize("mode", MODES)
def test_ranges_hold_what_underflows(mode: str) -> None:
    small = column(2.0**-600)
    with rounded(mode):
        task = search(small[:, None], column(0), small, 3 * small)
        none = search(0 * small[:, None], column(0), small, 3 * small)
    assert Fraction(float(task.root_high)) >= 3 * Fraction(2) ** -1200
    assert task.root_high[0] < 1e-90
    assert none.root_low[0] == none.root_high[0] == 0  # nothing to split


@pytest.mark.parametrize("mode", MODES)
def test_table_holds_what_large_biases_round(mode: str) -> None:
    """`x >= t` and `x <= t`, and the range of `x + b` there for large b."""
    for seed in range(20):
        t, large = (0.3 + 0.4 * uniform(2, seed=seed)).tolist()
        large *= 2.0**14
        for b in (large, -large):
            with rounded(mode), clock.limited(None):
                task = search(column(1, 1)[:, None], column(-t, b), column(0), column(1))
                task.fill_table(torch.tensor([0]))
            for place, (low, high) in enumerate(((t, 1.0), (0.0, t))):
                least, most = image(1.0, b, low, high)
                bottom, top = task.table_low[place, 0, 1], task.table_high[place, 0, 1]
                assert float(bottom) <= least and most <= float(top)
                assert top - bottom < 0.8


@pytest.mark.parametrize("mode", MODES)
def test_table_holds_what_sums_of_a_half_space_lose(mode: str) -> None:
    """`SMALL x_0 + x_1 + ... + b >= 0`, the others fixed, and the range of x_0 there."""
    n = 1 << 10
    for seed in range(3):
        fixed = uniform(n, seed=seed)
        total = sum(map(Fraction, fixed.tolist()))
        b = -float(total)
        root = -(total + Fraction(b)) / Fraction(SMALL)
        assert abs(root) < 1
        w = torch.zeros(2, n + 1, dtype=DOUBLE)
        w[0, 1:] = 1
        w[:, 0] = column(SMALL, 1)
        ends = torch.cat([column(1), fixed])
        with rounded(mode), clock.limited(None):
            task = search(w, column(b, 0), torch.cat([column(-1), fixed]), ends)
            task.fill_table(torch.tensor([0]))
        assert float(task.table_low[0, 0, 1]) <= root <= float(task.table_high[1, 0, 1])


@pytest.mark.parametrize("mode", MODES)
def test_large_multipliers_are_charged_for_their_rounding(mode: str) -> None:
    """`v t_0` with `a t_0 + c t_1 <= room`, a small: largest where `t_1 = -1`."""
    for seed in range(20):
        v, a, c, share = (0.5 + 0.4 * uniform(4, seed=seed)).tolist()
        a *= SMALL
        room = -c + share * a
        with rounded(mode):
            found = ShallowSearch._highest(None, column(v, 0)[None], column(a, c), room)  # type: ignore[arg-type]
        truth = Fraction(v) * (Fraction(room) + Fraction(c)) / Fraction(a)
        assert truth <= Fraction(float(found)) + Fraction(2) ** -48
        assert float(found) < v + 1e-6


def test_multipliers_that_overflow_say_nothing() -> None:
    """An infinite one times 0, or less an infinite one, is no number: no range is empty for it."""
    for a, room in ((column(2.0**-1060, 0, 1), 0.5), (column(2.0**-1060, -1, 1), -0.5)):
        found = ShallowSearch._highest(None, column(1, 0, 1)[None], a, room)  # type: ignore[arg-type]
        assert 1 <= float(found) <= 2


@pytest.mark.parametrize("mode", MODES)
def test_boxes_of_children_hold_their_half_spaces(mode: str) -> None:
    """`w x_0 + x_1 + b`, w small and x_1 fixed, is 0 within the box: where x_0 is cut."""
    w = SMALL / 3
    for seed in range(20):
        fixed, share = (0.1 + 0.8 * uniform(2, seed=seed)).tolist()
        b = -(fixed + w * share)
        root = -(Fraction(fixed) + Fraction(b)) / Fraction(w)
        with rounded(mode), clock.limited(None):
            task = search(column(w, 1)[None], column(b), column(-1, fixed), column(1, fixed))
            known = {"low": task.root_low[None], "high": task.root_high[None]}
            found = task._children(domain(task, **known))
        assert found.sign.tolist() == [[1], [-1]]
        assert float(found.left[0, 0]) <= root <= float(found.right[1, 0])


@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_charged_for_large_multipliers(mode: str) -> None:
    """A half-space that is chosen: its multiplier may be much larger than the coefficients."""
    for seed in range(20):
        b, factor = (1 + uniform(2, seed=seed)).tolist()
        low, high = column(SMALL / 3), column(SMALL)
        with rounded(mode), clock.limited(None):
            task = search(column(1)[None], column(b), low, high)
            parts = {"sign": column(1)[None], "tilt": column(-(2.0**20) * factor)[None]}
            parts["low"], parts["high"] = task.root_low[None], task.root_high[None]
            found = task._bounded(domain(task, **parts), 0)
        kept = Fraction(float(found.tilt))
        assert kept == -(2**20) * Fraction(factor)
        assert float(found.bound) <= kept * (Fraction(float(high)) + Fraction(b))


@pytest.mark.parametrize("mode", MODES)
def test_bounds_are_charged_for_the_rounding_of_coefficients(mode: str) -> None:
    """Two outputs that nearly cancel in a sum of both: in the neuron, and in the constant."""
    for seed in range(20):
        c, factor = (0.5 + uniform(2, seed=seed)).tolist()
        other = -c * factor
        for place in range(2):
            parts = column(c, other)[:, None], torch.zeros(2, dtype=DOUBLE)
            rows, constants = parts if place else (0 * parts[0], parts[0][:, 0])
            with rounded(mode), clock.limited(None):
                net = Shallow(
                    column(1)[None], column(0), rows, constants, rows.abs(), constants.abs(), 0
                ).combined(column(factor, 1))
                task = ShallowSearch(net, column(1), column(2), lambda _: None)
                known = {"low": task.root_low[None], "high": task.root_high[None]}
                found = task._bounded(domain(task, **known), 0)
            rest = Fraction(c) * Fraction(factor) + Fraction(other)
            truth = min(rest, 2 * rest) if place else rest
            assert float(found.bound) <= truth
            assert float(found.bound) > -1e-12


def test_bounds_know_coefficients_that_underflow() -> None:
    """A coefficient of an input that is smaller than all numbers, times a large input; and one of
    a neuron that is, times a large weight.
    """
    tiny, large = 2.0**-540, 2.0**1000
    with clock.limited(None):
        task = search(
            column(tiny)[None], column(0), column(large), column(2 * large), column(-tiny)
        )
        known = {"low": task.root_low[None], "high": task.root_high[None]}
        found = task._bounded(domain(task, tilt=column(-tiny)[None], **known), 0)
    assert float(found.bound) <= -Fraction(tiny) * Fraction(tiny) * Fraction(2 * large)
    rows = column(tiny)[:, None]
    net = Shallow(column(large)[None], column(0), rows, column(0), rows, column(0), 0)
    with clock.limited(None):
        task = ShallowSearch(net.combined(column(-tiny)), column(1), column(2), lambda _: None)
        known = {"low": task.root_low[None], "high": task.root_high[None]}
        found = task._bounded(domain(task, **known), 0)
    assert float(found.bound) <= -Fraction(tiny) * Fraction(tiny) * Fraction(2 * large)


def test_magnitudes_of_products_that_underflow_are_not_lost() -> None:
    """Matrices after the ReLUs: two small ones, then a large one."""
    layers = [nn.Linear(1, 1, dtype=DOUBLE) for _ in range(4)]
    for layer, weight in zip(layers, (1.0, 2.0**-540, 2.0**-540, 2.0**1000)):
        nn.init.constant_(layer.weight, weight)
        nn.init.zeros_(layer.bias)
    nn.init.constant_(layers[1].bias, 2.0**-540)
    model = nn.Sequential(layers[0], nn.ReLU(), *layers[1:])
    net = shallow_of(arithmetic_of(read(model, (1,)), "exact", DOUBLE))
    assert net is not None and net.c[0, 0] == net.c0[0] == 0
    truth = 2.0**-80
    assert net.terms * 2.0**-52 * net.size[0, 0] >= truth
    assert net.terms * 2.0**-52 * net.size0[0] >= truth


def test_what_overflows_is_never_excluded() -> None:
    """A range that is no number is not empty: `10 - relu(1e400) - relu(x)` is below 0."""
    w = column(1e200, 0, 0, 1).reshape(2, 2)
    c, c0 = column(-1, -1)[None], column(10)
    net = Shallow(w, column(0, 0), c, c0, c.abs(), c0, 0)
    task = ShallowSearch(net, column(1e200, -1), column(2e200, 1), lambda _: None)
    with clock.limited(None, clock.SECOND):
        task.begin()
        task.proceed()
    assert not task.done


def test_ranges_that_are_no_numbers_are_not_empty() -> None:
    task = search(torch.eye(2, dtype=DOUBLE), column(0, 0), column(-1, -1), column(1, 1))
    some = domain(task, low=column(math.nan, -1)[None], high=column(math.nan, 1)[None])
    with clock.limited(None):
        assert len(task._ranged(some)) == 1
        assert len(task._children(some)) == 2
