"""What floating point may lose, in one place.

A sum of products is off by a unit of the last place of its magnitudes for each term (relative), and
by the smallest normal number for each product that underflows, flushed to zero or not (absolute).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Relative, what one operation in float64 is charged for: twice its error, so that the error term
# may be rounded too. Sums are charged for each of their terms.
UNIT = 2.0**-52
TINY = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}  # relative error of one operation
FLOOR = {
    torch.float32: 2.0**-126,
    torch.float64: 2.0**-1022,
}  # absolute error of one that underflows
LOST_SQUARE = 2.0**-511  # a square that underflows in float64 is of a number below this
# No magnitude that a relative error is relative to is below this, unless it is 0. Then 2^-52 of it,
# the least that such an error adds, exceeds what underflow takes (2^-1022 for an operation) by
# 2^670, and three of them can be multiplied.
FAINT = 2.0**-300


def outward(low: Tensor, high: Tensor, terms: int = 1) -> tuple[Tensor, Tensor]:
    """An interval widened by what sums of so many terms lose, relative to its own ends; infinite
    ends stay as they are.
    """
    return low - terms * UNIT * finite_size(low), high + terms * UNIT * finite_size(high)


def finite_size(values: Tensor) -> Tensor:
    """Magnitudes, 0 for what is not finite."""
    return torch.where(torch.isfinite(values), values.abs(), 0.0)


def up(values: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Bounds >= 0 from above in another type, rounded up; at least the smallest normal number,
    which no kernel flushes.
    """
    values = values.to(dtype)
    return torch.nextafter(values, torch.full_like(values, math.inf)).clamp(min=FLOOR[dtype])


def sized(values: Tensor) -> Tensor:
    """Magnitudes >= 0, at least `FAINT` where they are not 0."""
    return torch.where(values > 0, values.clamp(min=FAINT), values)


def times(a: float, b: float) -> float:
    """A product of two bounds >= 0, up to relative errors: not 0 unless one of them is."""
    return max(a * b, FLOOR[torch.float64]) if a > 0 and b > 0 else a * b


def length(values: Tensor, s: float, dim: int) -> Tensor:
    """`||values||_s` along an axis in float64 from above, up to relative errors: squares that
    underflow are added.
    """
    found: Tensor = torch.linalg.vector_norm(values, s, dim=dim)
    if s != 2:
        return found
    return found + math.sqrt(values.shape[dim]) * values.abs().amax(dim).clamp(max=LOST_SQUARE)


def shifted(values: Tensor, exponent: int) -> Tensor:
    """`values 2^exponent`, also for exponents beyond those of one float64."""
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)
