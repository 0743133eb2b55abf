"""A sum of products in any order: its bound beside exact fractions, on trees and on the worst
orders.
"""

import random
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from wassail.certificates.graph.graph import Affine, Node
from wassail.certificates.graph.maps import Call, Matrix
from wassail.certificates.relax.executed import (
    _by_sign,
    _largest_parts,
    call_error,
    dot_error,
    gamma,
)

SINGLE = torch.float32
DOUBLE = torch.float64


def random_tree(terms: list[Tensor], chance: random.Random) -> Tensor:
    """The sum in float32 in the order of a random tree: any two parts are added next."""
    parts = list(terms)
    while len(parts) > 1:
        first = parts.pop(chance.randrange(len(parts)))
        second = parts.pop(chance.randrange(len(parts)))
        parts.append(first + second)
    return parts[0]


def chain(terms: list[Tensor]) -> Tensor:
    """One after the other."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def fused(weights: Tensor, values: Tensor) -> Tensor:
    """One after the other, each product unrounded until it is added: float64 holds it exactly, and
    the sum of two such numbers up to far less than a rounding of float32.
    """
    total = torch.zeros(())
    for w, v in zip(weights, values):
        total = (total.double() + w.double() * v.double()).float()
    return total


@pytest.mark.parametrize("kind", ["mixed", "positive", "wild", "cancelling"])
def test_no_order_of_summation_loses_more(kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    chance = random.Random(0)
    n = 60
    closest = 0.0
    for _ in range(12):
        w = torch.randn(n, generator=generator)
        v = torch.rand(n, generator=generator)
        if kind == "positive":
            w = w.abs()
        if kind == "wild":
            w = w * 10.0 ** torch.randint(-6, 7, (n,), generator=generator)
        if kind == "cancelling":
            w = torch.cat([w[: n // 2], -w[: n // 2]])
            v = torch.cat([v[: n // 2], v[: n // 2]])
        call = Call(Matrix(w.double()[None]), None, n + 2)
        point = v.double()[None]
        bounds = [
            dot_error(call, point, point, SINGLE),
            dot_error(call, point, point.clone(), SINGLE),
        ]
        assert bounds[0] <= bounds[1] * (1 + 1e-12)  # a point knows more than a range
        assert bounds[1] <= gamma(n + 2, SINGLE) * (w.abs() * v).sum()
        exact = sum(Fraction(float(a)) * Fraction(float(b)) for a, b in zip(w, v))
        products = w * v
        rising = products.argsort()
        orders = [
            rising,
            rising.flip(0),
            products.abs().argsort(descending=True),
            # the largest positive ones, then the negative ones from the smallest on, and the mirror
            torch.cat(
                [rising.flip(0)[: (products > 0).sum()], rising.flip(0)[(products > 0).sum() :]]
            ),
            torch.cat([rising[: (products < 0).sum()], rising[(products < 0).sum() :]]),
        ]
        sums = [chain([products[k] for k in order]) for order in orders]
        sums += [fused(w[order], v[order]) for order in orders]
        sums += [random_tree(list(products), chance) for _ in range(10)]
        for found in sums:
            lost = abs(Fraction(float(found)) - exact)
            assert lost <= Fraction(float(bounds[0]))
            closest = max(closest, float(lost) / float(bounds[0]))
    assert closest > 0.01  # a bound that is a hundred times too large would pass anything


def test_partial_sums_of_every_tree_are_counted() -> None:
    """All trees over five terms, by exact sums: none has larger partial sums in all."""

    def trees(parts: tuple[Fraction, ...]) -> Fraction:
        if len(parts) == 1:
            return Fraction(0)
        best = Fraction(0)
        for i in range(len(parts)):
            for j in range(i + 1, len(parts)):
                rest = tuple(p for k, p in enumerate(parts) if k not in (i, j))
                added = parts[i] + parts[j]
                best = max(best, abs(added) + trees((added, *rest)))
        return best

    generator = torch.Generator().manual_seed(1)
    tight = 0.0
    for _ in range(12):
        terms = torch.randint(-9, 10, (5,), generator=generator).double()
        most = float(trees(tuple(Fraction(int(t)) for t in terms)))
        found = float(_largest_parts(terms))
        # The bound has one more addition, that of a bias.
        last = max(float(terms.clamp(min=0).sum()), float((-terms).clamp(min=0).sum()))
        assert most <= found - last
        tight = max(tight, most / max(found - last, 1.0))
    assert tight > 0.8


def worst_tree(terms: list[int]) -> int:
    """The largest sum of all partial sums in size, over all trees of additions: best split of every
    subset.
    """
    n = len(terms)
    total = [sum(t for k, t in enumerate(terms) if part >> k & 1) for part in range(1 << n)]
    best = [0] * (1 << n)
    for part in range(1, 1 << n):
        if not part & (part - 1):
            continue
        half = (part - 1) & part
        most = 0
        while half:
            most = max(most, best[half] + best[part ^ half])
            half = (half - 1) & part
        best[part] = most + abs(total[part])
    return best[-1]


def signed(terms: list[int]) -> float:
    values = torch.tensor(terms).double()
    above, below = (side.clamp(min=0).sort(descending=True).values for side in (values, -values))
    return float(_by_sign(above, below, (values < 0).sum()))


def test_partial_sums_of_both_signs_are_counted() -> None:
    """All trees over eight terms: balanced, one-sided, with zeros, of wild sizes."""
    chance = random.Random(3)
    tight = 0.0
    for kind in range(48):
        wide = (9, 1, 10**6, 3)[kind % 4]
        terms = [chance.randint(-wide, wide + kind % 3) for _ in range(8)]
        if kind % 5 == 0:
            terms[-1] -= sum(terms)  # they cancel
        if kind % 7 == 0:
            terms = [abs(t) for t in terms[:-1]] + [-abs(terms[-1])]
        most = worst_tree(terms)
        assert most <= signed(terms)
        values = torch.tensor(terms).double()
        last = max(float(values.clamp(min=0).sum()), float((-values).clamp(min=0).sum()))
        assert most <= float(_largest_parts(values)) - last
        tight = max(tight, most / max(signed(terms), 1.0))
    assert tight > 0.8
    # Where both signs weigh the same it is less than by count alone: 7 sums of at most 16 to 27.
    assert signed([9, 7, 6, 5, -9, -7, -6, -5]) < 16 + 22 + 5 * 27


def test_a_sum_loses_the_same_in_any_batch() -> None:
    """Also where the products of all samples are too many to be sorted at once."""
    generator = torch.Generator().manual_seed(4)
    w = torch.randn(300, 1500, generator=generator).double()
    call = Call(Matrix(w), None, 1502)
    v = torch.rand(12, 1500, generator=generator).double()
    together = dot_error(call, v, v, SINGLE)
    for k in (0, 11):
        one = v[k : k + 1]
        assert torch.allclose(dot_error(call, one, one, SINGLE)[0], together[k], rtol=1e-12)
    assert (together < 0.9 * dot_error(call, v, v.clone(), SINGLE)).all()


def test_ranges_cover_all_their_points() -> None:
    """The bound over a range is at least that of its points; a sign that is not known counts for
    both.
    """
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(3, 40, generator=generator).double()
    call = Call(Matrix(w), torch.rand(3, generator=generator).double(), 42)
    low = torch.randn(1, 40, generator=generator).double()
    high = low + torch.rand(1, 40, generator=generator).double()
    whole = dot_error(call, low, high, SINGLE)
    for _ in range(20):
        at = low + (high - low) * torch.rand(1, 40, generator=generator).double()
        assert (dot_error(call, at, at.clone(), SINGLE) <= whole).all()
    node = Node((0,), (3,), "", Affine(Matrix(w)), calls=(call,))
    source = Node((), (40,), "the input")
    size = torch.maximum(low.abs(), high.abs())
    plain = call_error(node, [size], SINGLE, [source])
    known = call_error(node, [size], SINGLE, [source], [(low, high)])
    assert (known <= plain).all() and (known < 0.9 * plain).any()
    # What is not finite is no bound, and leaves the other one.
    endless = torch.full_like(low, torch.inf)
    assert torch.equal(call_error(node, [size], SINGLE, [source], [(-endless, endless)]), plain)
