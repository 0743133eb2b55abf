"""Norms of matrices that are made on the way, proved in floating point."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.device import HOST
from wassail.rounding import UNIT

KRYLOV_STEPS = 16  # of Lanczos' method
SQUARINGS = 12  # of a matrix whose largest eigenvalue is to stand out
NOTHING_NEW = 1e-8  # of an image: what is left of it beside the vectors before
# Rows of a Gram matrix that are made together: neighbours in an image share their columns.
BLOCK = 32
# of its result, of which a Cholesky factor proves one
FACTORS = (1 + 1e-9, 1.001, 1.01, 1.03, 1.1, 1.5)


@dataclass(frozen=True, eq=False)
class Gram:
    """`A A^T` of matrices `(N, m, n)`, over the square of scale, `(N, m, m)`; scale: `(N,)`; off:
    what each entry is off by, in units of the lengths of its two rows.
    """

    values: Tensor
    scale: Tensor
    off: float

    @classmethod
    def of(cls, a: Tensor) -> Gram:
        """In float64. Entries below 2^-1000 may be lost."""
        # Squares of numbers near 1 do not underflow, and the trace is that of the scaled matrix.
        scale = a.abs().amax((1, 2)).clamp(min=2.0**-1000)
        clock.look()
        return cls(_products(a / scale[:, None, None]), scale, (sum(a.shape[1:]) + 64) * 4 * UNIT)

    def norms(self, weight: Tensor | None = None) -> Tensor:
        """`||A||_2` from above, `(N,)`, the rows times weights `(N, m)`, which are at most 1; NaN
        after an overflow.
        """
        if weight is None:
            return gram_norms(self.values, self.off) * self.scale
        values = self.values * weight[:, :, None] * weight[:, None, :]
        # Products of weights that underflow are as long as this together.
        lost = weight.shape[1] * 2.0**-500
        return (gram_norms(values, self.off) + lost) * self.scale


def matrix_norms(a: Tensor) -> Tensor:
    """`||A||_2` of matrices `(N, m, n)` in float64, from above, `(N,)`; NaN after an overflow."""
    if not a.numel():
        return a.new_zeros(len(a))
    gram = Gram.of(a if a.shape[1] <= a.shape[2] else a.mT)
    # Entries that were lost are as long as this together.
    lost = (gram.scale <= 2.0**-1000).double() * (math.sqrt(a[0].numel()) * 2.0**-1000)
    return gram.norms() + lost


def _products(a: Tensor) -> Tensor:
    """`A A^T` of matrices `(N, m, n)`. Columns in which a block of rows is 0 are left out of its
    products; a device would have to be asked for them.
    """
    m = a.shape[1]
    if m <= BLOCK or a.device != HOST:
        return a @ a.mT
    gram = a.new_empty(len(a), m, m)
    for own, rows in zip(gram, a):
        columns = rows.T.contiguous()
        for first in range(0, m, BLOCK):
            after = first + BLOCK
            seen = (rows[first:after] != 0).any(0).nonzero()[:, 0]
            some = columns[:, first:].index_select(0, seen)
            own[first:after, first:] = some[:, :BLOCK].T @ some
            own[after:, first:after] = own[first:after, after:].T
    return gram


def gram_norms(gram: Tensor, off: float) -> Tensor:
    """`||A||_2` from `A A^T`, `(N, m, m)`, from above, `(N,)`; NaN after an overflow.

    By a Cholesky factor of `mu - A A^T`, which proves that mu is enough; a device is not asked for
    it. off: of all roundings in the product, in units of the trace.
    """
    gram = (gram + gram.mT) / 2
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)
    known = torch.isfinite(trace)
    gram = torch.where(known[:, None, None], gram, 0.0)
    top = _top(gram, trace)
    found = (top.clamp(min=0) + off * trace).sqrt() * (1 + 16 * UNIT)
    return torch.where(known, found, math.nan)


def _top(gram: Tensor, trace: Tensor) -> Tensor:
    """The largest eigenvalue of each Gram matrix, from above up to rounding: `(N,)`."""
    m = gram.shape[1]
    guess = _guessed(gram)
    eye = torch.eye(m, dtype=gram.dtype, device=gram.device)
    found = trace
    done = torch.zeros_like(found, dtype=torch.bool)
    for factor in FACTORS:
        clock.look()
        mu = factor * guess
        failed = torch.linalg.cholesky_ex(mu[:, None, None] * eye - gram)[1]
        # Its own roundings: those of a factor of a matrix with the trace m mu.
        proved = mu * (1 + 4 * m * (m + 8) * UNIT)
        found = torch.where((failed == 0) & ~done, torch.minimum(found, proved), found)
        done = done | (failed == 0)
        if found.device == HOST and bool(done.all()):
            break
    return found


def _guessed(gram: Tensor) -> Tensor:
    """About the largest eigenvalue of each, `(N,)`, not above it but for rounding: of the vectors
    that Lanczos' method meets, the one that is stretched most.
    """
    v = gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()[:, :, None]
    basis = []
    images = []
    for _ in range(min(KRYLOV_STEPS, gram.shape[1])):
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1e-300)
        basis.append(v)
        images.append(gram @ v)
        v = images[-1]
        long = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        known = torch.cat(basis, 2)
        for _ in range(2):  # once leaves what rounding has made
            v = v - known @ (known.mT @ v)
        # Where nothing new is left but rounding the search is over.
        rest = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        v = torch.where(rest > NOTHING_NEW * long, v, 0.0)
    known = torch.cat(basis, 2)
    small = known.mT @ torch.cat(images, 2)
    v = known @ _leading((small + small.mT) / 2)
    v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1e-300)
    found: Tensor = (v * (gram @ v)).sum((1, 2))
    return found


def _leading(small: Tensor) -> Tensor:
    """About the eigenvector of the largest eigenvalue of each matrix `(N, k, k)`, `(N, k, 1)`.

    On a device, which would be asked whether `eigh` has converged, by squares of the matrix.
    """
    if small.device == HOST:
        vectors: Tensor = torch.linalg.eigh(small)[1]
        return vectors[:, :, -1:]
    for _ in range(SQUARINGS):
        small = small / small.abs().amax((1, 2), keepdim=True).clamp(min=1e-300)
        small = small @ small
    column = small.diagonal(dim1=1, dim2=2).argmax(1)
    return small.gather(2, column[:, None, None].expand(-1, small.shape[1], 1))
