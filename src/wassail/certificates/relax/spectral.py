"""Norms of matrices that are made on the way, proved in floating point."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.rounding import UNIT

POWER_STEPS = 16  # of a power iteration
FACTORS = (1 + 1e-9, 1.001, 1.01, 1.1, 1.5)  # of its result, of which a Cholesky factor proves one


def matrix_norms(a: Tensor) -> Tensor:
    """`||A||_2` of matrices `(N, m, n)` in float64, from above, `(N,)`; NaN after an overflow.

    By a Cholesky factor of `mu - A A^T`, which proves that mu is enough; the host does not wait for
    it. The slack is that of all roundings, in units of the trace.
    """
    if not a.numel():
        return a.new_zeros(len(a))
    # Squares of numbers near 1 do not underflow, and the trace is that of the scaled matrix.
    largest = a.abs().amax((1, 2))
    scale = largest.clamp(min=2.0**-1000)
    a = a / scale[:, None, None]
    a = a if a.shape[1] <= a.shape[2] else a.mT
    m, n = a.shape[1:]
    clock.look()
    gram = a @ a.mT
    gram = (gram + gram.mT) / 2
    trace = gram.diagonal(dim1=1, dim2=2).sum(1)
    known = torch.isfinite(trace)
    gram = torch.where(known[:, None, None], gram, 0.0)
    slack = (m + n + 64) * 4 * UNIT * trace
    top = _top(gram, trace)
    found: Tensor = (top.clamp(min=0) + slack).sqrt() * scale * (1 + 16 * UNIT)
    # Entries that are smaller than that are as long as this together.
    found = found + (largest < scale).double() * (math.sqrt(m * n) * 2.0**-1000)
    return torch.where(known, found, math.nan)


def _top(gram: Tensor, trace: Tensor) -> Tensor:
    """The largest eigenvalue of each Gram matrix, from above up to rounding: `(N,)`."""
    m = gram.shape[1]
    v = gram.diagonal(dim1=1, dim2=2).sqrt()[:, :, None]
    for _ in range(POWER_STEPS):
        v = gram @ v
        v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True).clamp(min=1e-300)
    guess = (v * (gram @ v)).sum((1, 2))
    eye = torch.eye(m, dtype=gram.dtype, device=gram.device)
    found = trace
    for factor in reversed(FACTORS):
        clock.look()
        mu = factor * guess
        failed = torch.linalg.cholesky_ex(mu[:, None, None] * eye - gram)[1]
        # Its own roundings: those of a factor of a matrix with the trace m mu.
        proved = mu * (1 + 4 * m * (m + 8) * UNIT)
        found = torch.where(failed == 0, torch.minimum(found, proved), found)
    return found
