"""Radii by the products of the layers' norms, from the sample and from a ball around it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.prove.problem import BATCH, Problem
from wassail.certificates.relax.norms import pair_products

SHARES = (0.125, 0.25, 0.5)  # of the radius by the products alone: the balls
WORTH = 0.25  # of a radius, which the products alone must give
INSIDE = 1 - 1e-9  # at the radius itself a margin may be 0


def product_radii(problem: Problem, other: Tensor, enough: Tensor | None = None) -> Tensor:
    """Radii by linear bounds on a ball and products of norms beyond it, `(N,)` on the CPU; 0 where
    there are none, or the clock stopped it.

    A point at distance t > rho is t - rho away from one of the ball of radius rho, on the way to
    the sample and so in the box. With margins of at least m there, and L the product of the norms,
    it has at least `m - L (t - rho)`: so `rho + m / L` is a radius, for every rho. Near the sample
    linear bounds lose less than L times the distance.

    Args:
        problem: the samples.
        other: radii that are proved otherwise, or wanted, float64 `(N,)`; where they are far beyond
            the products nothing is tried.
        enough: radii beyond which no larger one is sought, `(N,)`; default None, none.
    """
    found = torch.zeros(len(problem), dtype=torch.float64)
    enough = torch.full_like(found, math.inf) if enough is None else enough
    if problem.graph.curved:  # no product is finite
        return found
    if clock.out_of_time():
        return found
    if not len(problem):
        return found
    try:
        slopes = torch.stack([_slopes(problem, k) for k in problem.labels.tolist()])
    except clock.Late:
        return found
    left = _promising(problem, slopes, other)
    for rows in torch.split(left, BATCH) if len(left) else ():
        best = torch.zeros(len(rows), dtype=torch.float64)
        few = torch.arange(len(rows))
        try:
            for shares in ((0.0,), SHARES):  # the products alone, then beyond balls
                part = problem.take(rows[few])
                balls = [share * best[few] for share in shares]
                lowest = list(map(part.exact.bounds, balls))
                known = (part, balls, lowest, slopes[rows[few]])
                radius = _farthest(*known, 0.0)
                # Less what rounding may take of the margins within it.
                slack = part.slack(radius)
                if slack is not None:
                    radius = torch.minimum(radius, _farthest(*known, slack))
                best[few] = torch.maximum(best[few], radius)
                few = (best < enough[rows]).nonzero()[:, 0]
                if not len(few):
                    break
        except clock.Late:
            break
        found[rows] = best
    return found


def _slopes(problem: Problem, label: int) -> Tensor:
    """The products of norms for the margins of a label, `(K,)`; kept with the graph."""
    graph, norm = problem.graph, problem.norm

    def made() -> Tensor:
        found = pair_products(graph, norm, label)
        clock.look()  # what the clock has cut short is not kept
        return found

    return graph.kept(f"products {norm} {label}", made).clamp(min=1e-300)


def _promising(problem: Problem, steep: Tensor, other: Tensor) -> Tensor:
    """The samples whose products alone give a good part of the other radius, by their logits;
    steep: of the margins, `(N, K)`.
    """
    own = problem.labels[:, None]
    found = [torch.zeros(0, dtype=torch.int64)]
    for rows in torch.split(torch.arange(len(problem)), BATCH):
        part = problem.take(rows)
        outputs = part.outputs(part.x).cpu()
        margin = outputs.gather(1, own[rows]) - outputs
        far = (margin / steep[rows]).scatter(1, own[rows], math.inf).amin(1)
        found.append(rows[far > WORTH * other[rows]])
    return torch.cat(found)


def _farthest(
    problem: Problem,
    balls: list[Tensor],
    lowest: list[Tensor],
    steep: Tensor,
    slack: Tensor | float,
) -> Tensor:
    """The largest `rho + min_j (m_j - slack_j) / L_j` over some balls, `(N,)`; 0 for one with a
    margin that is not above its slack.

    Args:
        problem: the samples.
        balls: their radii rho, `(N,)` each.
        lowest: the margins m there, `(N, K)` each.
        steep: the products L, `(N, K)`.
        slack: how far executed margins may be below exact ones, `(N, K)` or 0.
    """
    own = problem.labels[:, None]
    radii = []
    for ball, margin in zip(balls, lowest):
        spare = margin.cpu() - slack
        above = (spare > 0).scatter(1, own, True).all(1)
        # A row that a sample does not have is infinite, and so may be what it is divided by.
        away = torch.where(spare == math.inf, math.inf, spare / steep)
        radius = ball + away.scatter(1, own, math.inf).amin(1)
        radii.append(torch.where(above, radius * INSIDE, 0.0))
    return torch.stack(radii).amax(0)
