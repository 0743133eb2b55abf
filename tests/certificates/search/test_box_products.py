"""Products taken together: sound at every point and in every rounding, and exact where they curve
the right way.
"""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn

from support.rounding import MODES, rounded
from wassail.certificates.graph.operators.products import Product
from wassail.certificates.graph.reader import read
from wassail.certificates.relax.crown import Sweep, margins
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
