"""Choices between numbers that may be equal up to rounding: a tolerance and a fixed side, in one
place.

Two processors, two thread counts or two batch sizes sum in another order, so equal numbers differ
in their last bits. A choice between them (a slope, a split, an order of work) would then differ by
chance, and the bounds with it, by far more than rounding. Here numbers within `BAND` of each other
count as equal, and the first of them is taken.

No tolerance is needed where both sides of a choice meet: the better of two bounds, the best of
several steps, a neuron whose span ends at 0 (its two lines are the same there), the multiplier that
fills a ball. Nor where a number is compared with one that it equals by chance only: whether a
margin is above 0 at a radius, since radii are tried a third of the tolerance off the place where
the margin is expected to meet 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BAND = 2.0**-30  # relative: far above the noise of float64, far below what a choice can gain
COARSE = 2.0**-13  # the same for float32
LOGITS = (
    2.0**-18
)  # of the largest logit of a sample, whatever their type: rivals that near are equal
NOISE = {torch.float32: 2.0**-18, torch.float64: 2.0**-36}  # of the largest coefficient of a row
TRIANGLE = 2.0**-16  # of a span's width: spans may carry the noise of float32


def steep_below(low: Tensor, high: Tensor) -> Tensor:
    """Whether the line below a ReLU on `[low, high]` has slope 1: CROWN's rule, the smaller
    triangle wins, a tie is flat.

    Spans are often symmetric up to rounding: `b + relu(a - b)` over a box, where biases cancel.
    """
    return high + low > TRIANGLE * (high - low)


def quiet(pulls: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients `(R, ...)` of one function of each row, with what is noise set to 0.

    Adam takes steps of one size whatever the gradient's: where that is 0 but for rounding, chance
    would choose the side.
    """
    sizes = [None if g is None else g.abs() for g in pulls]
    known = [
        size if size.ndim == 1 else size.amax(tuple(range(1, size.ndim)))
        for size in sizes
        if size is not None and size.shape[1:].numel()
    ]
    if not known:
        return list(pulls)
    most = torch.stack(known).amax(0)

    def cleaned(g: Tensor, size: Tensor) -> Tensor:
        least = (BAND if g.dtype == torch.float64 else COARSE) * most
        return torch.where(size > least.reshape(-1, *[1] * (g.ndim - 1)), g, 0.0)

    return [
        None if g is None or size is None else cleaned(g, size) for g, size in zip(pulls, sizes)
    ]


def firm(rows: Tensor) -> Tensor:
    """Coefficients `(R, ...)` with the same values; no gradient goes through those that are 0 but
    for rounding.

    A neuron's line depends on the sign of its coefficient, so the gradient jumps there, and chance
    would choose the side.
    """
    if not rows.requires_grad or not rows.shape[1:].numel():
        return rows
    size = rows.detach().abs()
    most = size.flatten(1).amax(1).reshape(-1, *[1] * (rows.ndim - 1))
    return torch.where(size > NOISE[rows.dtype] * most, rows, rows.detach())


def loud(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Which coefficients `(R, n)` are positive and which negative, 1 or 0 in their own type;
    neither where they are 0 but for rounding (see `firm`).

    By arithmetic, which is much faster here than comparing.
    """
    size = rows.abs()
    most = size.amax(1, keepdim=True) if rows.shape[1] else size.new_zeros(len(rows), 1)
    heard = (size - NOISE[rows.dtype] * most).clamp(min=0).sign()
    positive = heard * rows.clamp(min=0).sign()
    return positive, heard - positive


def _levels(values: Tensor, dim: int, band: float | None = None) -> Tensor:
    """The values as whole multiples of `BAND` times the largest finite one along `dim`."""
    if band is None:
        band = BAND if values.dtype == torch.float64 else COARSE
    size = torch.where(torch.isfinite(values), values.abs(), 0.0)
    scale = band * size.amax(dim, keepdim=True)
    return torch.where(scale > 0, (values / torch.where(scale > 0, scale, 1.0)).round(), values)


def first_largest(values: Tensor, dim: int = -1) -> Tensor:
    """`argmax`, the first of those that are equal up to rounding."""
    return _levels(values, dim).argmax(dim)


def in_order(
    values: Tensor, dim: int = -1, descending: bool = False, band: float | None = None
) -> Tensor:
    """`argsort`, where values that are equal up to rounding keep their order; band: what counts
    as equal, if not the usual.
    """
    if not values.numel():
        return values.argsort(dim=dim, descending=descending, stable=True)
    return _levels(values, dim, band).argsort(dim=dim, descending=descending, stable=True)


def largest(values: Tensor, count: int, dim: int = -1, band: float | None = None) -> Tensor:
    """The places of the `count` largest, as `topk` gives them."""
    return in_order(values, dim, descending=True, band=band).narrow(dim, 0, count)
