"""Splits of the input: nothing unsafe is cut away."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, rounded
from wassail.certificates import clock
from wassail.certificates.graph.reader import read
from wassail.certificates.search import boxes as boxes_module
from wassail.certificates.search.boxes import Boxes, BoxSearch, HalfSpaces, box_balls


def search(seed: int, level: float) -> tuple[nn.Module, BoxSearch]:
    """One clause, `f_1 >= -level` and `f_2 >= -level`, and one more, `f_3 >= -level`."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 4)).double().eval()
    with torch.no_grad():
        net[2].weight[0] = 0
        net[2].bias[0] = 0
        net[2].bias[1:] += level
    low, high = torch.full((1, 3), -1.0).double(), torch.full((1, 3), 1.0).double()
    graph = read(net, (3,))
    return net, BoxSearch(graph, low, high, [[1, 2], [3]], lambda points: None)


@pytest.mark.parametrize("seed", range(5))
def test_every_unsafe_point_stays_in_an_open_box(seed: int) -> None:
    x = torch.rand(20000, 3, generator=torch.Generator().manual_seed(seed)).double() * 2 - 1
    z = search(seed, 0.0)[0](x).detach()
    worst = torch.maximum(torch.minimum(z[:, 1], z[:, 2]), z[:, 3])
    net, boxes = search(seed, -float(worst.quantile(0.9)))
    z = net(x).detach()
    unsafe = x[((z[:, 1] >= 0) & (z[:, 2] >= 0)) | (z[:, 3] >= 0)]
    assert len(unsafe)
    boxes.begin()
    for _ in range(8):
        if len(boxes.open):
            boxes.step()
    rows = boxes.open.everything()
    inside = (rows.low[:, None] <= unsafe) & (unsafe <= rows.high[:, None])
    assert inside.all(2).any(0).all()
    volume = (rows.high - rows.low).prod(1).sum()
    assert volume < 8.0  # something was cut away


def test_what_a_box_costs_beside_its_passes_is_counted() -> None:
    """On a network of a few dozen operations nearly all of the time goes there."""
    work = 0.2 * clock.SECOND
    _, boxes = search(0, 0.0)
    with clock.limited(work=work):
        boxes.begin()
        boxes.proceed()
        assert clock.late() and not boxes.done
    nodes = len(boxes.graph.nodes)
    assert 0.1 * work < nodes * boxes_module.EACH * boxes.count < 1.1 * work


def test_a_cut_box_is_bounded_again_and_not_halved() -> None:
    _, boxes = search(0, 0.0)
    low, high = torch.zeros(2, 3).double(), torch.ones(2, 3).double()
    again = torch.tensor([True, False])
    rows = Boxes(low, high, torch.zeros(2).double(), torch.tensor([0, 1]), again)
    below, above = boxes._parts(rows)
    assert below.tolist() == [[0, 0, 0], [0, 0.5, 0], [0, 0, 0]]
    assert above.tolist() == [[1, 0.5, 1], [1, 1, 1], [1, 1, 1]]


def test_a_box_without_width_is_given_up_and_nothing_is_claimed() -> None:
    _, boxes = search(0, 10.0)  # unsafe everywhere, and no point is accepted
    point, whole = torch.zeros(1, 3).double(), torch.tensor([False])
    rows = Boxes(point, point, torch.zeros(1).double(), torch.tensor([0]), whole)
    boxes.roots = [part[:0] for part in boxes.roots]
    boxes.open.add(rows)
    boxes.step()
    assert boxes.stuck and not len(boxes.open) and not boxes.done


def test_proofs_and_counterexamples_end_it() -> None:
    _, boxes = search(1, -50.0)
    boxes.begin()
    assert boxes.done and boxes.count == 1
    _, boxes = search(1, 50.0)
    boxes.accept = lambda points: points[0]
    boxes.begin()
    assert boxes.found is not None and boxes.over and not boxes.done


def test_steps_on_the_slopes_of_relus_save_boxes() -> None:
    torch.manual_seed(3)
    sizes = [3, 24, 24, 2]
    layers = [m for pair in pairwise(sizes) for m in (nn.Linear(*pair), nn.ReLU())]
    net = nn.Sequential(*layers[:-1]).double().eval()
    low, high = torch.full((1, 3), -4.0).double(), torch.full((1, 3), 4.0).double()
    with torch.no_grad():
        net[4].weight[0], net[4].bias[0] = 0, 0
        x = low + torch.rand(4096, 3).double() * (high - low)
        net[4].bias[1] -= float(net(x)[:, 1].max()) + 0.1
    counts = []
    for polish in (None, "none"):
        boxes = BoxSearch(read(net, (3,)), low, high, [[1]], lambda points: None)
        assert boxes.polish == "open"
        boxes.polish = polish or boxes.polish
        boxes.begin()
        boxes.proceed()
        assert boxes.done
        counts.append(boxes.count)
    assert counts[0] < counts[1]


@pytest.mark.parametrize("mode", MODES)
def test_rounding_cuts_nothing_that_exact_arithmetic_keeps(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boxes_module, "ROUNDS", 1)
    monkeypatch.setattr(boxes_module, "PAIRED", 0)
    _, boxes = search(0, 0.0)
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(300, 3, generator=generator).double() * 100
    high = low + torch.rand(300, 3, generator=generator).double()
    low[0], high[0] = 0.0, 2.0**-1060  # a quotient that underflows
    a = torch.randn(300, 3, 3, generator=generator).double()
    lower = -torch.rand(300, 3, generator=generator).double() * a.abs().amin(2) * 0.5
    lower[0] *= 2.0**-1060
    with rounded(mode):
        x = low + (high - low) / 2
        found = boxes.clipped(low, high, HalfSpaces.of(x, low, high, lower, lower, a))
    whole = 0
    for k in range(300):
        kept = [
            ends for clause in ((0, 1), (2,)) if (ends := exact_cut(low, high, lower, a, k, clause))
        ]
        whole += len(kept)
        for ends in kept:
            for i, (bottom, top) in enumerate(ends):
                assert float(found[0][k, i]) <= bottom
                assert float(found[1][k, i]) >= top
    assert whole > 300


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("inputs", [1, 3])
def test_rounding_keeps_a_point_where_every_plane_is_zero(mode: str, inputs: int) -> None:
    # Planes through a point of the box, but for the last digit: the point stays, in every round,
    # and what is claimed of each plane and of each pair holds at it.
    generator = torch.Generator().manual_seed(inputs)
    count = 400
    low = torch.randn(count, inputs, generator=generator).double() * 10
    high = low + torch.rand(count, inputs, generator=generator).double()
    x = low + (high - low) / 2
    point = low + torch.rand(count, inputs, generator=generator).double() * (high - low)
    ends = torch.rand(count, inputs, generator=generator)
    point = torch.where(ends < 0.3, low, torch.where(ends > 0.7, high, point))
    a = torch.randn(count, 3, inputs, generator=generator).double()
    base = torch.empty(count, 3).double()
    for k in range(count):
        d = [Fraction(p) - Fraction(c) for p, c in zip(point[k].tolist(), x[k].tolist())]
        for m in range(3):
            value = -sum(Fraction(s) * e for s, e in zip(a[k, m].tolist(), d))
            near = float(value)
            base[k, m] = near if Fraction(near) <= value else math.nextafter(near, -math.inf)
    with rounded(mode):
        planes = HalfSpaces.of(x, low, high, torch.full_like(base, -math.inf), base, a)
        bottom, top = planes.clipped(low, high)
        lower, slopes = planes._paired(low, high, planes._least(low, high))
    assert ((bottom <= point) & (point <= top)).all()
    assert (top - bottom < high - low).any()
    least = torch.where(slopes > 0, low[:, None], high[:, None])
    for k in range(count):
        for m in range(slopes.shape[1]):
            moved = sum(
                Fraction(s) * (Fraction(p) - Fraction(q))
                for s, p, q in zip(slopes[k, m].tolist(), point[k].tolist(), least[k, m].tolist())
            )
            assert moved <= -Fraction(float(lower[k, m]))


def test_two_inequalities_together_exclude_a_box_that_neither_does() -> None:
    # d0 + d1 <= -0.1 and -d0 - d1 <= -0.1 on a square: only their sum says no.
    low, high = -torch.ones(1, 2).double(), torch.ones(1, 2).double()
    a = torch.tensor([[[1.0, 1.0], [-1.0, -1.0]]]).double()
    base = torch.full((1, 2), 0.1).double()
    planes = HalfSpaces.of(torch.zeros(1, 2).double(), low, high, base - 2, base, a)
    bottom, top = planes.clipped(low, high)
    assert (bottom > top).all()


def test_an_overflow_cuts_nothing() -> None:
    low, high = -torch.ones(1, 2).double(), torch.ones(1, 2).double()
    a = torch.tensor([[[math.inf, 1.0], [math.nan, -1.0]]]).double()
    least = torch.full((1, 2), -math.inf).double()
    planes = HalfSpaces.of(torch.zeros(1, 2).double(), low, high, least, least, a)
    bottom, top = planes.clipped(low, high)
    assert torch.equal(bottom, low) and torch.equal(top, high)


def exact_cut(
    low: Tensor, high: Tensor, lower: Tensor, a: Tensor, k: int, clause: tuple[int, ...]
) -> list[tuple[Fraction, Fraction]]:
    """What the inequalities of a clause leave of a box, side by side; nothing if it is empty."""
    ends = []
    for i in range(low.shape[1]):
        bottom, top = Fraction(float(low[k, i])), Fraction(float(high[k, i]))
        for m in clause:
            slope = Fraction(float(a[k, m, i]))
            reach = -Fraction(float(lower[k, m])) / abs(slope)
            if slope > 0:
                top = min(top, Fraction(float(low[k, i])) + reach)
            else:
                bottom = max(bottom, Fraction(float(high[k, i])) - reach)
        ends.append((bottom, top))
    return ends if all(bottom <= top for bottom, top in ends) else []


@pytest.mark.parametrize("mode", MODES)
def test_rounding_leaves_boxes_whole(mode: str) -> None:
    generator = torch.Generator().manual_seed(2)
    low = -torch.rand(500, 3, generator=generator).double() / 3
    high = torch.rand(500, 3, generator=generator).double() * 1e3 / 7
    with rounded(mode):
        balls = box_balls(low, high)
    parts = (balls.x, balls.below, balls.above, low, high)
    for x, below, above, bottom, top in zip(*(v.flatten().tolist() for v in parts)):
        assert Fraction(x) - Fraction(below) <= Fraction(bottom)
        assert Fraction(x) + Fraction(above) >= Fraction(top)
