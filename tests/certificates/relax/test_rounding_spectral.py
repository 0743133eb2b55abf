"""Norms of matrices that are made on the way: each term of their rounding is needed."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from support.rounding import MODES, fractions, rounded
from wassail.certificates.relax import norms
from wassail.certificates.relax.norms import Gram, _top, matrix_norms

DOUBLE = torch.float64


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", MODES)
def test_one_row_is_as_long_as_the_root_of_its_squares(mode: str) -> None:
    """The trace is its norm: all of its roundings show."""
    for k in range(6):
        row = 1 + uniform(1, 1, 3000, seed=k)
        with rounded(mode):
            found = Fraction(float(matrix_norms(row)))
        exact = sum(v * v for v in fractions(row)[0][0])
        assert exact <= found**2 <= exact * (1 + Fraction(1, 10**8))


@pytest.mark.parametrize("mode", MODES)
def test_a_factor_of_a_matrix_that_is_nearly_singular_proves_little(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`a + b` on the diagonal and b elsewhere has the norm `a + m b`. Of numbers near it some below
    have a Cholesky factor all the same, by rounding, and the least that has one is taken.
    """
    near = tuple(1 + k * 2.0**-52 for k in range(-60, 61, 2))
    monkeypatch.setattr(norms, "FACTORS", near)
    tight = 0
    for k in range(60):
        m = 2 + k % 9
        a, b = (float(v) for v in uniform(2, seed=k))
        gram = torch.full((1, m, m), b, dtype=DOUBLE) + a * torch.eye(m, dtype=DOUBLE)
        whole = Fraction(float(gram[0, 0, 0])) + (m - 1) * Fraction(b)
        trace = gram.diagonal(dim1=1, dim2=2).sum(1)
        with rounded(mode):
            found = Fraction(float(_top(gram, trace)))
        assert found >= whole
        tight += found < whole * (1 + Fraction(1, 10**9))
    assert tight > 5


def test_matrices_without_and_with_next_to_nothing() -> None:
    """Zeros; and entries of the smallest number, whose length is between two of them."""
    assert float(matrix_norms(torch.zeros(1, 3, 4, dtype=DOUBLE))) < 1e-290
    least = torch.full((1, 1, 2), 2.0**-1074, dtype=DOUBLE)
    exact = 2 * Fraction(2) ** -2148
    assert Fraction(float(matrix_norms(least))) ** 2 >= exact
    assert math.isnan(float(matrix_norms(torch.full((1, 2, 2), math.inf, dtype=DOUBLE))))


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_rows_may_be_as_small_as_they_like(mode: str) -> None:
    """Once the products of two rows are known they are those of the rows times their weights,
    also where those vanish.
    """
    for k in range(6):
        a = 1 + uniform(1, 2, 3000, seed=k)
        a[:, 0] *= 2.0**-600
        weight = torch.tensor([[1.0, 2.0**-600]], dtype=DOUBLE)
        with rounded(mode):
            found = Fraction(float(Gram.of(a).norms(weight)))
        rows = (a * weight[:, :, None])[0]
        assert found**2 >= max(sum(v * v for v in row) for row in fractions(rows))
        usual = Gram.of(a).norms(torch.tensor([[0.25, 0.75]], dtype=DOUBLE))
        exact = sum((v * Fraction(3, 4)) ** 2 for v in fractions(a)[0][1])
        assert exact <= Fraction(float(usual)) ** 2 <= exact * (1 + Fraction(1, 10**8))


@pytest.mark.parametrize(
    "shape", [(1, 33, 40), (2, 32, 32), (3, 70, 100), (2, 90, 64), (1, 96, 96)]
)
def test_products_of_blocks_are_all_products(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are 0 in most columns, as those of a convolution, in and out of order."""
    monkeypatch.setattr(norms, "PLAIN_UP_TO", 0)
    a = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    far = torch.arange(shape[1])[:, None] - torch.arange(shape[2])
    for rows in (a, torch.where(far.abs() < 9, a, 0.0), torch.where(far % 7 == 0, a, 0.0)):
        assert torch.allclose(norms._products(rows), rows @ rows.mT, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 3, 20, 60])
def test_both_ways_to_an_eigenvalue_agree(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eigenvalues of a small matrix, and Lanczos' method for the largest of a large one."""
    a = uniform(4, rows, 80, seed=rows)
    whole = norms.gram_norms(a @ a.mT, 1e-14)
    monkeypatch.setattr(norms, "EIGENVALUES_UP_TO_ROWS", 0)
    assert torch.allclose(norms.gram_norms(a @ a.mT, 1e-14), whole, rtol=2e-3, atol=0)
    assert torch.all(whole >= torch.linalg.matrix_norm(a, 2) * (1 - 1e-12))
