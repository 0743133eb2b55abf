"""Operator norms of matrices, rounded up."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.geometry import operator_norm
from wassail.rounding import UNIT, length

FEW_SIGNS = 14  # the NP-hard norms are enumerated up to here
# Room for the rounding errors of sums and of singular values, which are backward stable to about
# n 2^-52.
UP = 1 + 1e-12


def matrix_norm(matrix: Tensor, norm_in: float, norm_out: float) -> float:
    """An upper bound on `||A||_{r -> s}`, exact up to rounding but for the NP-hard pairs of large
    matrices.

    Those are bounded by the norm of `|A|`, attained by ones, and by the spectral norm times the
    cost of changing norms.
    """
    m, n = matrix.shape
    hard = norm_in != 1 and norm_out != math.inf and not norm_in == norm_out == 2
    signs = m if norm_out == 1 and (norm_in == 2 or m <= n) else n
    up = 1 + (m + n + 16) * 4 * UNIT
    if not hard or signs <= FEW_SIGNS:
        return float(operator_norm(matrix, norm_in, norm_out)) * up
    spectral = float(torch.linalg.matrix_norm(matrix, 2))
    spectral = spectral * change(n, norm_in, 2) * change(m, 2, norm_out)
    return min(positive_norm(matrix.abs(), norm_in, norm_out), spectral) * up


def positive_norm(matrix: Tensor, norm_in: float, norm_out: float) -> float:
    """`||M||_{r -> s}` of a matrix with entries >= 0, hence an upper bound for every matrix
    whose entries are no larger.
    """
    return float(positive_norms(matrix, norm_in, norm_out))


def positive_norms(matrix: Tensor, norm_in: float, norm_out: float) -> Tensor:
    """The same for many matrices, `(..., m, n) -> (...)`."""
    if norm_in == 1:
        return length(matrix, norm_out, -2).amax(-1)
    if norm_in == math.inf:  # attained at the vector of ones
        return length(matrix.sum(-1), norm_out, -1)
    if norm_out == 2:
        return torch.linalg.matrix_norm(matrix, 2)  # type: ignore[no-any-return]
    if norm_out == math.inf:
        return length(matrix, 2, -1).amax(-1)
    return length(matrix.sum(-2), 2, -1)


def change(n: int, norm_in: float, norm_out: float) -> float:
    """`max ||u||_s / ||u||_r` over R^n: `n^(1/s - 1/r)` if that is above 1."""
    return float(n ** max(0.0, 1 / norm_out - 1 / norm_in))
