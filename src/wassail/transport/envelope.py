"""The best use of a budget when every sample has several points to go to.

Each point has a price and a gain. What a sample gains for its share of the budget is the least
concave function above its points, so the steps of these envelopes are taken in the order of their
slopes until the budget is spent, the last one in part. That solves the whole linear program.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Steps:
    """Steps of concave envelopes, the steepest first, `(S,)` each.

    sample; start and to: the points that it leads from and to (-1: the origin); price: what it
    costs; slope: what it gains for each unit of that.
    """

    sample: Tensor
    start: Tensor
    to: Tensor
    price: Tensor
    slope: Tensor


def envelope(gain: Tensor, price: Tensor, origin: Tensor | None = None) -> Steps:
    """The concave envelopes of N sets of P points and an origin, as steps in order of slope.

    Args:
        gain: `(N, P)`, -inf where there is no point.
        price: `(N, P)`, >= 0.
        origin: `(N,)`, the gain at price 0. Default: 0.
    """
    n = len(gain)
    rows = torch.arange(n)
    paid = torch.zeros(n, dtype=torch.float64)
    gained = torch.zeros(n, dtype=torch.float64) if origin is None else origin.clone()
    at = torch.full((n,), -1)
    slope = torch.full((n,), math.inf, dtype=torch.float64)
    found = []
    while True:
        run = price - paid[:, None]
        rise = gain - gained[:, None]
        open_ = (rise > 0) & (run >= 0) & torch.isfinite(price)
        best = torch.where(open_, rise / run, -math.inf).max(1)
        # Concave, not only up to rounding: each sample's steps stay in order.
        slope = torch.minimum(slope, best.values)
        go = slope > 0
        if not go.any():
            break
        i = rows[go]
        to = best.indices[go]
        found.append((slope[go], i, at[go], to, run[i, to]))
        paid[i] = price[i, to]
        gained[i] = gain[i, to]
        at[i] = to
    if not found:
        none = torch.zeros(0, dtype=torch.int64)
        return Steps(none, none, none, none.double(), none.double())
    slopes, sample, start, to, cost = (torch.cat(c) for c in zip(*found))
    order = slopes.sort(descending=True, stable=True).indices
    return Steps(sample[order], start[order], to[order], cost[order], slopes[order])


def by_sample(root: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The points of each of n samples as a table `(n, P)`: indices, and which of them are real.

    root: the sample of each point, `(M,)`.
    """
    order = root.argsort(stable=True)
    count = torch.bincount(root, minlength=n)
    column = torch.arange(int(count.max()))
    known = column < count[:, None]
    place = torch.where(known, (count.cumsum(0) - count)[:, None] + column, 0)
    return order[place], known
