"""Splits of the input: nothing unsafe is cut away."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, rounded
from wassail.certificates.graph.reader import read
from wassail.certificates.search.boxes import AGAIN, Boxes, BoxSearch, box_balls


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


def test_a_cut_box_is_bounded_again_and_not_halved() -> None:
    _, boxes = search(0, 0.0)
    low, high = torch.zeros(2, 3).double(), torch.ones(2, 3).double()
    rows = Boxes(low, high, torch.zeros(2).double(), torch.tensor([AGAIN, 1]))
    below, above = boxes._halves(rows)
    assert below.tolist() == [[0, 0, 0], [0, 0.5, 0], [0, 0, 0]]
    assert above.tolist() == [[1, 0.5, 1], [1, 1, 1], [1, 1, 1]]


def test_a_box_without_width_is_given_up_and_nothing_is_claimed() -> None:
    _, boxes = search(0, 10.0)  # unsafe everywhere, and no point is accepted
    rows = Boxes(*(torch.zeros(1, 3).double(),) * 2, torch.zeros(1).double(), torch.tensor([0]))
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


@pytest.mark.parametrize("mode", MODES)
def test_rounding_cuts_nothing_that_exact_arithmetic_keeps(mode: str) -> None:
    _, boxes = search(0, 0.0)
    generator = torch.Generator().manual_seed(1)
    low = torch.randn(300, 3, generator=generator).double() * 100
    high = low + torch.rand(300, 3, generator=generator).double()
    low[0], high[0] = 0.0, 2.0**-1060  # a quotient that underflows
    a = torch.randn(300, 3, 3, generator=generator).double()
    lower = -torch.rand(300, 3, generator=generator).double() * a.abs().amin(2) * 0.5
    lower[0] *= 2.0**-1060
    with rounded(mode):
        found = boxes.clipped(low, high, lower, a)
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
