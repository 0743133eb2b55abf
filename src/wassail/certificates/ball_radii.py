"""Radii by balls and boxes together (`bounds.spheres`): a search on top of what CROWN proved."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bounds.ball_margins import DEPTH, ball_margins, has_inner
from wassail.certificates.graph.graph import Graph
from wassail.threat import Domain

ROUNDS = 10  # of the search for a radius
FIRST_FACTOR = 1.25  # of a radius in the first of these
INNER_ROUNDS = 2  # more of them, with narrower inner boxes, which cost several times as much
INNER_FACTOR = 1.1  # of a radius in the first of these
GROWTH = 1.5  # of the logarithm of the factor after a success; it is halved after a failure
FAILURES = 2  # after which a sample is left as it is
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

    Larger ones as long as they are proved, then with narrower inner boxes. What was proved before a
    limit is kept.

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
    try:
        _grow(graph, x, y, norm, domain, lower, upper, tolerance, ROUNDS, FIRST_FACTOR, False)
        if has_inner(graph, norm):
            where = (graph, x, y, norm, domain, lower, upper, tolerance)
            _grow(*where, INNER_ROUNDS, INNER_FACTOR, True)
    except clock.Late:
        return lower, True
    return lower, False


def _grow(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: Domain,
    lower: Tensor,
    upper: Tensor,
    tolerance: float,
    rounds: int,
    first: float,
    inner: bool,
) -> None:
    """Larger radii, in place: by a factor that grows with success and shrinks with failure.

    Args:
        graph: the network.
        x: samples `(N, *shape)`.
        y: labels `(N,)`.
        norm: ground norm.
        domain: the box, or None.
        lower: radii that are proved.
        upper: distances beyond which no radius is sought.
        tolerance: a step below this is none.
        rounds: radii that are tried.
        first: the first factor.
        inner: whether inner boxes are narrowed.
    """
    start = 0.01 * math.prod(x.shape[1:]) ** (1 / norm)
    log = torch.full_like(lower, math.log(first))
    failures = torch.zeros_like(lower)
    for _ in range(rounds):
        more = (upper > lower * (1 + tolerance)) & (failures < FAILURES)
        more = more & (log > math.log1p(tolerance))
        left = more.nonzero()[:, 0]
        if not len(left):
            return
        low = lower[left]
        trial = torch.where(low > 0, low * log[left].exp(), start)
        # Not beyond a flip: half of the way to it.
        trial = torch.minimum(trial, (low + upper[left]) / 2)
        some = left.to(x.device)
        good = proved_by_balls(graph, x[some], y[some], trial, norm, domain, 0, inner=inner)
        lower[left] = torch.where(good, trial, low)
        log[left] = torch.where(good, GROWTH * log[left], log[left] / 2)
        failures[left] = failures[left] + (~good)
