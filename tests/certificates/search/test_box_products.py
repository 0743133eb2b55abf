"""Products taken together: sound at every point and in every rounding, and exact where they curve
the right way.
"""

from __future__ import annotations

import itertools
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, rounded
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.crown import Sweep, margins
from wassail.certificates.search import products
from wassail.certificates.search.boxes import box_balls
from wassail.certificates.search.products import ProductSweep, highest


class Quadratic(nn.Module):
    """`(0, -x'Px + <q, relu(Wx)> x'c)` with P positive definite."""

    def __init__(self, seed: int, bent: bool, equation: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        root = torch.randn(3, 3)
        self.p = nn.Parameter((root.T @ root + 0.1 * torch.eye(3)).double())
        self.hidden = nn.Linear(3, 4).double()
        self.out = nn.Linear(4, 1).double()
        self.c = nn.Parameter(torch.randn(1, 3).double())
        self.bent = bent
        self.equation = equation

    def forward(self, x: Tensor) -> Tensor:
        moved = nn.functional.linear(x, self.p)
        if self.equation:
            value = -torch.einsum("bi,bi->b", x, moved)[:, None]
        else:
            value = -(x * moved).sum(1, keepdim=True)
        if self.bent:
            more = self.out(torch.relu(self.hidden(x))) * nn.functional.linear(x, self.c)
            value = value + more
        return torch.cat([0 * x[:, :1], value], 1)


def boxes(seed: int, width: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    low = torch.randn(8, 3, generator=generator).double()
    return low, low + width * torch.rand(8, 3, generator=generator).double()


@pytest.mark.few(4)
@pytest.mark.parametrize("width", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("seed", range(3))
def test_no_point_of_a_box_is_beyond_its_bounds(seed: int, width: float) -> None:
    model = Quadratic(seed, bent=True).eval()
    graph = read(model, (3,), smooth=True)
    low, high = boxes(seed, width)
    label = torch.zeros(8, dtype=torch.int64)
    lower, base, a = (
        v[:, 1] for v in margins(ProductSweep(graph, box_balls(low, high)).run(), label, "none")
    )
    plain = margins(Sweep(graph, box_balls(low, high)).run(), label, "none")[0][:, 1]
    x = low + (high - low) / 2
    share = torch.rand(2000, 1, 3, generator=torch.Generator().manual_seed(seed)).double()
    share = torch.cat([share, share.round()])
    points = low + share * (high - low)
    with torch.no_grad():
        found = -model(points.reshape(-1, 3))[:, 1].reshape(-1, 8)
    assert (found >= lower - 1e-12).all()
    assert (found >= base + (a * (points - x)).sum(2) - 1e-12).all()
    assert (lower >= plain - 1e-12).all()
    assert (lower > plain + 1e-6 * width**2).any()


@pytest.mark.parametrize("equation", [False, True])
def test_a_form_that_curves_the_right_way_loses_nothing_in_the_middle(equation: bool) -> None:
    model = Quadratic(0, bent=False, equation=equation).eval()
    graph = read(model, (3,), smooth=True)
    low, high = boxes(0, 1.0)
    label = torch.zeros(8, dtype=torch.int64)
    x = low + (high - low) / 2
    with torch.no_grad():
        here = -model(x)[:, 1]
    together, apart = (
        here - margins(kind(graph, box_balls(low, high)).run(), label, "none")[1][:, 1]
        for kind in (ProductSweep, Sweep)
    )
    # What is left are factors that are bounded in float32.
    assert (together < 1e-5 * apart).all() and (apart > 1e-2).all()


@pytest.mark.parametrize("mode", MODES)
def test_rounding_leaves_the_highest_value_above_every_corner(mode: str) -> None:
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(60, 3, 3, generator=generator).double()
    signs = torch.tensor([1.0, 1.0, -1.0]).double()
    mixed = root @ torch.diag(signs) @ root.transpose(1, 2)
    single = root[:, :, :1] * root[:, None, :, 0]  # of rank 1: the most is at a corner
    matrix = torch.cat([mixed, single, -single, single * 1e-200])
    matrix = (matrix + matrix.transpose(1, 2)) / 2
    with rounded(mode):
        top, lost = highest(matrix)
    corners = list(itertools.product((-1, 1), repeat=3))
    for one, most in zip(matrix.tolist(), zip(top.tolist(), lost.tolist())):
        claimed = Fraction(most[0]) + Fraction(most[1])
        for z in corners:
            value = sum(Fraction(one[i][j]) * z[i] * z[j] for i in range(3) for j in range(3))
            assert value <= claimed


@pytest.mark.parametrize("equation", ["i,i->i", "ik,kj->ij", "i,j->ij", "ki,k->i", ",->"])
def test_entries_of_a_product(equation: str) -> None:
    curve = Product(equation)
    sizes = {"i": 2, "j": 3, "k": 4}
    shapes = [tuple(sizes[k] for k in part) for part in equation.split("->")[0].split(",")]
    first, second = (torch.randn(1, *shape).double() for shape in shapes)
    a, b, out = curve.entries(*shapes)
    value = curve.value(first, second).flatten()
    found = torch.zeros_like(value).index_add(0, out, first.flatten()[a] * second.flatten()[b])
    assert torch.allclose(found, value)


def remainders(w: Tensor, factors: list[tuple[Tensor, Tensor, Tensor]], mode: str) -> list[float]:
    """What rows with coefficients `w` `(R, T)` are charged; one box for each row."""
    rows, terms = w.shape
    made = tuple(products._Factor(*(part.double() for part in parts)) for parts in factors)
    node: Any = SimpleNamespace(output=torch.arange(terms), factors=made)
    sweep: Any = SimpleNamespace(
        balls=SimpleNamespace(x=w[:, :1]), graph=SimpleNamespace(inputs=1), terms={0: node}
    )
    with rounded(mode):
        found = ProductSweep._remainders(sweep, {0: w}, torch.arange(rows), rows)
    return found.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_products_that_cancel_pay_for_every_rounding(mode: str) -> None:
    """At both ends of one input, with the rests at theirs: `u v - u' v'` that are nearly equal."""
    draw = torch.Generator().manual_seed(0)
    a = 1 + torch.rand(300, 2, 1, generator=draw).double()
    b = 1 + torch.rand(300, 2, 1, generator=draw).double()
    b[:, 1, 0] = a[:, 0, 0] * b[:, 0, 0] / a[:, 1, 0]
    w = torch.tensor([[1.0, -1.0]]).double().expand(300, 2).contiguous()
    rest = 1e-17 * torch.rand(300, 2, generator=draw).double()
    rest[:150] = 0
    wide = torch.full((300, 2), 1e6, dtype=torch.float64)
    found = remainders(w, [(a, rest, wide), (b, rest, wide)], mode)
    for k, claimed in enumerate(found):
        values = []
        for z in (-1, 1):
            total = Fraction(0)
            for t, sign in ((0, 1), (1, -1)):
                u, v, r = (Fraction(float(part)) for part in (a[k, t, 0], b[k, t, 0], rest[k, t]))
                ends = [(u * z + e) * (v * z + f) for e in (-r, r) for f in (-r, r)]
                total += max(sign * end for end in ends)
            values.append(total)
        assert max(values) <= Fraction(claimed)


@pytest.mark.parametrize("mode", MODES)
def test_products_apart_and_those_that_underflow(mode: str) -> None:
    draw = torch.Generator().manual_seed(1)
    w, first, second = (torch.rand(100, 3, generator=draw).double() + 0.5 for _ in range(3))
    first[50:] *= 1e-170
    second[50:] *= 1e-170
    none = torch.full((100, 3, 1), torch.inf, dtype=torch.float64)  # nothing is known together
    zero = torch.zeros(100, 3, dtype=torch.float64)
    found = remainders(w, [(none, zero, first), (none, zero, second)], mode)
    for row, claimed in zip(zip(w.tolist(), first.tolist(), second.tolist()), found):
        exact = sum(Fraction(c) * Fraction(u) * Fraction(v) for c, u, v in zip(*row))
        assert exact <= Fraction(claimed)
    small = torch.full((1, 1, 1), 1e-170, dtype=torch.float64)
    one = torch.ones(1, 1, dtype=torch.float64)
    together = remainders(one, [(small, 0 * one, one), (small, 0 * one, one)], mode)
    assert Fraction(1e-170) ** 2 <= Fraction(together[0])


@pytest.mark.parametrize("mode", MODES)
def test_a_factor_pays_for_its_middle(mode: str) -> None:
    draw = torch.Generator().manual_seed(2)
    low = torch.randn(200, 2, generator=draw).double()
    high = low + torch.rand(200, 2, generator=draw).double()
    low[:9], high[:9] = -3.0, 1e-17  # the half width has more digits than a number holds
    shift = low + (high - low) * torch.rand(200, 2, generator=draw).double()
    spread = SimpleNamespace(
        shift=shift, a=torch.zeros(200, 2, 1).double(), rest=1e-3 * (high - low).abs()
    )
    one = torch.ones(200, 1, dtype=torch.float64)
    sweep: Any = SimpleNamespace(
        spreads={0: spread}, spans={0: (low, high)}, inputs=SimpleNamespace(box=(-one, one))
    )
    with rounded(mode):
        factor = products._Factor.of(sweep, 0, torch.arange(2))
        middles = (low + high) / 2
    for k, t in itertools.product(range(200), range(2)):
        bottom, top, at, rest = (Fraction(float(v[k, t])) for v in (low, high, shift, spread.rest))
        middle = (bottom + top) / 2
        assert rest + abs(at - middle) <= Fraction(float(factor.rest[k, t]))
        taken = Fraction(float(middles[k, t]))
        assert max(top - taken, taken - bottom) <= Fraction(float(factor.width[k, t]))


@pytest.mark.parametrize("mode", MODES)
def test_the_sizes_of_a_product_are_summed_upward(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = read(Quadratic(0, bent=True).eval(), (3,), smooth=True)
    told = []

    class Noted:
        @staticmethod
        def make(*given: Any) -> Any:
            told.append((given[1], given[-2], given[-1]))
            return make(*given)

    make = products.Planes.make
    monkeypatch.setattr(products, "Planes", Noted)
    low, high = boxes(0, 1.0)
    with rounded(mode):
        sweep = ProductSweep(graph, box_balls(low, high)).run()
    assert told
    for node, reach, much in told:
        sides = [torch.maximum(-sweep.spans[j][0], sweep.spans[j][1]) for j in node.inputs]
        for k in range(8):
            parts = [v for side in (*sides, reach) for v in side[k].flatten().tolist()]
            assert sum(map(Fraction, parts)) <= Fraction(float(much.flatten()[k]))
