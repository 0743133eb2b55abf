"""The one relaxation of a network in dense form, and the one back-substitution through it.

A neuron `z = max(v, slope v)` on `[low, high]` lies between a line through 0 and its chord (CROWN,
Zhang et al. 2018). Substituting backward, layer by layer, leaves a linear function of the input:

    sum_h z_h met_h + <x, input>  <=  sum_h shift_h max(met_h, 0) + <x', input> + <through, c>

for an upper bound; for a lower one the two lines change places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from wassail.ties import firm, steep_below


class Triangle(NamedTuple):
    """`lower v <= z <= upper v + shift` for every neuron, `(..., H)` each."""

    lower: Tensor
    upper: Tensor
    shift: Tensor


def triangle(
    low: Tensor, high: Tensor, slope: Tensor | float = 0.0, state: Tensor | None = None
) -> Triangle:
    """The lines of neurons between low and high.

    Args:
        low: `(..., H)`.
        high: `(..., H)`.
        slope: of each neuron where it is negative, `(H,)`.
        state: 1 where a neuron is on, 0 where it is off, -1 where it is free; default None, free.
    """
    slope = torch.as_tensor(slope, dtype=low.dtype)
    state = torch.full_like(low, -1.0) if state is None else state
    free = state < 0
    below = low.clamp(max=0)
    above = high.clamp(min=0)
    width = torch.where(above > below, above - below, 1.0)
    side = torch.where(state == 1, 1.0, slope)
    upper = torch.where(free, (above - slope * below) / width, side)
    shift = torch.where(free, (slope - upper) * below, 0.0)
    return Triangle(torch.where(free & steep_below(low, high), 1.0, side), upper, shift)


class Substituted(NamedTuple):
    """x `(..., n)`: coefficients of the input; met `(..., H')`: of the neurons' outputs; through
    `(..., H')`: of their inputs.
    """

    x: Tensor
    met: Tensor
    through: Tensor


def substitute(
    blocks: Sequence[slice],
    weights: tuple[Tensor, Tensor],
    x: Tensor,
    z: Tensor,
    lines: tuple[Tensor, Tensor],
    extra: Tensor | None = None,
) -> Substituted:
    """Back-substitute `<z, neurons> + <x, input>` through the layers.

    Args:
        blocks: the layers of all H neurons.
        weights: A `(..., H, n)` and B `(..., H, H)`.
        x: `(..., n)`.
        z: `(..., H')`, of the first H' neurons: whole layers.
        lines: what a neuron is replaced by where its coefficient is positive, and where it is
            not: slopes `(..., H')` each.
        extra: added to the coefficients of the neurons' inputs; default None, nothing.
    """
    a, b = weights
    met = through = z[..., :0]
    for rows in reversed([rows for rows in blocks if rows.stop <= z.shape[-1]]):
        w = firm(z[..., rows])
        v = w * torch.where(w > 0, lines[0][..., rows], lines[1][..., rows])
        v = v if extra is None else v + extra[..., rows]
        z = z[..., : rows.start] + v @ b[..., rows, : rows.start]
        met = torch.cat([w, met], -1)
        through = torch.cat([v, through], -1)
    return Substituted(x + through @ a[..., : through.shape[-1], :], met, through)
