"""Masses, costs and bounds in exact fractions: what a checker computes and trusts.

Only powers and Euclidean lengths are rounded, each to the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

ULP = 2.0**-52
FAINT = 1e-300  # below it powers lose digits
LARGE = 10**300  # at least, of what overflows
NEAR = 1e-12  # relative: which of the largest coordinates are compared exactly


def shares_of(weights: Sequence[float]) -> list[Fraction]:
    """Weights that sum to one, exactly.

    weights: numbers >= 0, not all zero.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact, Fraction(0))
    return [weight / total for weight in exact]


def distance_above(point: NDArray[np.float64], sample: NDArray[np.float64], norm: float) -> float:
    """How far a point is from a sample, at most; exact at linf where float64 holds it.

    norm: 1, 2 or inf.
    """
    gap = np.abs(point - sample)
    if not gap.any():
        return 0.0
    if norm == 1:
        return math.fsum(gap.tolist()) * (1 + 4 * ULP)
    if norm == 2:
        top = float(gap.max())
        return top * math.sqrt(math.fsum(((gap / top) ** 2).tolist())) * (1 + 16 * ULP)
    largest = (gap >= gap.max() * (1 - NEAR)).nonzero()[0].tolist()
    exact = max(abs(Fraction(float(point[k])) - Fraction(float(sample[k]))) for k in largest)
    return float_above(exact)


def float_above(value: Fraction) -> float:
    """The least float64 that is not below a fraction."""
    found = float(value)
    return found if Fraction(found) >= value else math.nextafter(found, math.inf)


def price_above(price: float, eps: float, order: float) -> Fraction | None:
    """`(price / eps)^order` at most, for finite orders; None where it is too large to matter.

    price: of a move, an upper bound; order: Wasserstein order p, finite.
    """
    if price == 0:
        return Fraction(0)
    if order == 1:
        return Fraction(price) / Fraction(eps) if price < math.inf else None
    try:
        found = (price / eps) ** order * (1 + (4 * order + 8) * ULP)
    except OverflowError:
        return None
    return Fraction(max(found, FAINT)) if found < math.inf else None


def price_below(price: float, eps: float, order: float) -> Fraction:
    """`(price / eps)^order` at least, for finite orders and a finite price."""
    if order == 1:
        return Fraction(price) / Fraction(eps)
    lost = max(1 - (4 * order + 8) * ULP, 0.0)
    try:
        found = (price / eps) ** order * lost
        return Fraction(found) if FAINT < found < math.inf else Fraction(0 if found < 1 else LARGE)
    except OverflowError:
        return Fraction(LARGE)


def worst_mean(values: Sequence[Fraction], mu: Sequence[Fraction], share: Fraction) -> Fraction:
    """The largest mean over weights `q_i <= mu_i / share` of sum one.

    mu: their weights, of sum one; share: alpha, in (0, 1].
    """
    left = share
    total = Fraction(0)
    for value, weight in sorted(zip(values, mu), reverse=True):
        taken = min(weight, left)
        total += taken * value
        left -= taken
        if not left:
            break
    return total / share


def error_peaks(
    radii: Sequence[float], multiplier: float, eps: float, order: float, label_cost: float
) -> list[Fraction]:
    """What each sample can add to the dual of the error at most: `(1 - lam (D / eps)^p)_+` with
    `D = min(radius, label_cost)`; order inf: whether it can be wrong within eps (THEORY 12).

    radii: certified, >= 0, inf where nothing is wrong anywhere; multiplier: lam >= 0, in units of
    the budget; label_cost: price of a changed label, inf for none.
    """
    none, whole = Fraction(0), Fraction(1)
    if order == math.inf:
        return [none if radius >= eps and label_cost > eps else whole for radius in radii]
    found = []
    for radius in radii:
        price = min(radius, label_cost)
        if radius == 0:  # wrong already
            found.append(whole)
        elif price == math.inf:
            found.append(none)
        else:
            kept = whole - Fraction(multiplier) * price_below(price, eps, order)
            found.append(max(kept, none))
    return found
