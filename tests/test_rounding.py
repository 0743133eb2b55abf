"""What one operation loses, and the helpers that allow for it."""

import math
from fractions import Fraction

import pytest
import torch

from support.exact import scattered
from support.rounding import MODES, rounded, serial
from wassail import rounding

DTYPES = (torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_operation_loses_no_more_than_is_charged(dtype: torch.dtype) -> None:
    """To nearest: a part of the result, and an absolute amount where it underflows."""
    a = (1 + scattered(200, seed=1).abs()).to(dtype)
    b = (1 + scattered(200, seed=2).abs()).to(dtype)
    least = torch.finfo(dtype).tiny
    small = a * least
    for left, right in ((a, b), (small, 1 / b)):
        found = (left * right).tolist()
        for x, y, z in zip(left.tolist(), right.tolist(), found):
            exact = Fraction(x) * Fraction(y)
            lost = abs(Fraction(z) - exact)
            assert lost <= Fraction(rounding.TINY[dtype]) * exact + Fraction(rounding.FLOOR[dtype])
            if exact >= Fraction(least):
                assert lost <= Fraction(rounding.TINY[dtype]) * exact
    # Nothing is left of this product, and that is no more than is charged.
    lost = Fraction(float(a[0])) * Fraction(least) ** 2
    assert a[0] * least * least == 0 and lost <= Fraction(rounding.FLOOR[dtype])
    assert rounding.FLOOR[dtype] == least


@pytest.mark.parametrize("mode", MODES)
def test_intervals_are_widened_by_what_their_sums_lose(mode: str) -> None:
    terms = scattered(50, 300, seed=3).abs()
    for sign in (1, -1):
        with rounded(mode), serial():
            total = (sign * terms).sum(1)
            low, high = rounding.outward(total, total, terms=300)
        for row, below, above in zip(terms.tolist(), low.tolist(), high.tolist()):
            assert Fraction(below) <= sign * sum(map(Fraction, row)) <= Fraction(above)
    ends = torch.tensor([math.inf, -math.inf], dtype=torch.float64)
    assert torch.equal(rounding.outward(ends, ends)[0], ends)


def test_lengths_of_vectors_whose_squares_underflow() -> None:
    for exponent in (-1000, -540, -530, -515, -511, -500):
        values = scattered(5, 7, seed=5) * 2.0**exponent
        found = rounding.length(values, 2.0, 1)
        for row, length in zip(values.tolist(), found.tolist()):
            square = sum(Fraction(v) ** 2 for v in row)
            assert (Fraction(length) * (1 + Fraction(1, 2**48))) ** 2 >= square


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_are_rounded_up_into_another_type(dtype: torch.dtype) -> None:
    values = scattered(100, seed=6).abs()
    values[0] = 0.0
    values[1] = 1e-320
    found = rounding.up(values, dtype).tolist()
    assert all(a <= b for a, b in zip(values.tolist(), found))
    assert min(found) >= torch.finfo(dtype).tiny
