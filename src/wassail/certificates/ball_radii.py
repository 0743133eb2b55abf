"""Radii by balls and boxes together (`bounds.spheres`): a search on top of what CROWN proved."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bounds.ball_margins import DEPTH, ball_margins, has_inner
from wassail.certificates.graph.graph import Graph
from wassail.threat import Domain

ROUNDS = 14  # of the search for a radius
INNER_ROUNDS = 3  # more of them, with narrower inner boxes, which cost several times as much
FIRST_FACTOR = 1.3  # of a radius in the first of these
TOGETHER = 8  # samples in one batch


def proved_by_balls(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    radius: Tensor,
    norm: float,
    domain: Domain,
    depth: int = DEPTH,
    inner: bool = True,
) -> Tensor:
    """Which samples are proved at their radii, bool `(N,)` on the CPU.

    Args:
        graph: the network.
        x: samples `(N, *shape)`.
        y: labels `(N,)`.
        radius: float64 `(N,)`, on the CPU.
        norm: ground norm.
        domain: the box, or None.
        depth: of the splits for samples that are nearly proved.
        inner: whether samples that are left get narrower inner boxes; default True.
    """
    found = torch.zeros(len(x), dtype=torch.bool)
    for part in torch.split(torch.arange(len(x)), TOGETHER):
        some = part.to(x.device)
        where = (x[some], y[some], radius[part], norm, domain)
        lower = ball_margins(graph, *where, depth=depth, inner=inner)
        least = lower.scatter(1, y[some][:, None], math.inf).amin(1)
        found[part] = (least > 0).cpu()
    return found


def enlarged(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: Domain,
    lower: Tensor,
    upper: Tensor,
    tolerance: float,
) -> tuple[Tensor, bool]:
    """Radii that are at least `lower`, and whether the clock stopped the search.

    Twice the radius as long as that is proved, then bisection. Then a few larger ones with narrower
    inner boxes. What was proved before a limit is kept.

    Args:
        graph: the network.
        x: samples `(N, *shape)`, classified rightly.
        y: labels `(N,)`.
        norm: ground norm.
        domain: the box, or None.
        lower: radii that are proved, float64 `(N,)`, on the CPU.
        upper: distances beyond which no radius is sought, likewise, inf where none is known.
        tolerance: relative precision of the search.
    """
    lower = lower.clone()
    bound = upper.clone()
    start = 0.01 * math.prod(x.shape[1:]) ** (1 / norm)
    try:
        for _ in range(ROUNDS):
            left = (bound > lower * (1 + tolerance)).nonzero()[:, 0]
            if not len(left):
                break
            low = lower[left]
            high = bound[left]
            double = torch.where(low > 0, 2 * low, start)
            trial = torch.where(torch.isfinite(high), (low + high) / 2, double)
            trial = torch.minimum(trial, torch.where(low > 0, 2 * low, trial))
            some = left.to(x.device)
            good = proved_by_balls(graph, x[some], y[some], trial, norm, domain, 0, inner=False)
            lower[left] = torch.where(good, trial, low)
            bound[left] = torch.where(good, high, trial)
        factor = torch.full_like(lower, FIRST_FACTOR)
        for _ in range(INNER_ROUNDS if has_inner(graph, norm) else 0):
            left = ((lower > 0) & (upper > lower * (1 + tolerance))).nonzero()[:, 0]
            if not len(left):
                break
            low = lower[left]
            trial = torch.minimum(low * factor[left], (low + upper[left]) / 2)
            some = left.to(x.device)
            good = proved_by_balls(graph, x[some], y[some], trial, norm, domain, 0)
            lower[left] = torch.where(good, trial, low)
            factor[left] = torch.where(good, factor[left], factor[left].sqrt())
    except clock.Late:
        return lower, True
    return lower, False
