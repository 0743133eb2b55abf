"""Radii by products of norms beyond a ball on which linear bounds hold."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wassail.certificates import clock
from wassail.certificates.bounds.crown import margin_bounds
from wassail.certificates.bounds.norms import pair_products
from wassail.certificates.graph.graph import Graph
from wassail.certificates.radius_search import BATCH, slack_of
from wassail.threat import Domain

SHARES = (0.125, 0.25, 0.5)  # of the radius by the products alone: the smaller balls
WORTH = 0.25  # of a radius, which the products alone must give


def beyond_a_ball(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    norm: float,
    domain: Domain,
    alone: Tensor,
    other: Tensor,
) -> Tensor:
    """Radii by linear bounds on a smaller ball and products of norms beyond it, `(N,)` on the CPU;
    0 where these are hopeless, or the clock stopped it.

    A point at distance t > rho is t - rho away from one of the ball of radius rho, on the way to
    the sample and so in the box. With margins of at least m there, and L the product of the norms,
    it has at least `m - L (t - rho)`: so `rho + m / L` is a radius, for every rho. Near the sample
    linear bounds lose less than L times the distance.

    Args:
        graph: the network.
        x: samples `(N, *shape)`.
        y: labels `(N,)`.
        norm: ground norm.
        domain: the box, or None.
        alone: the radii by the products of norms alone, `(N,)`, on the CPU: the smaller balls are
            shares of these, so that a radius is proved again by the same balls.
        other: radii that are proved otherwise, or wanted, likewise; where they are far beyond the
            products nothing is tried.
    """
    found = torch.zeros(len(x), dtype=torch.float64)
    left = ((alone > WORTH * other) & (other > 0)).nonzero()[:, 0]
    if not len(left):
        return found
    exact = replace(graph, arithmetic="exact")
    steep = {k: pair_products(exact, norm, k).clamp(min=1e-300) for k in sorted(set(y.tolist()))}
    for part in torch.split(left, BATCH):
        a, b = (v[part.to(v.device)] for v in (x, y))
        slopes = torch.stack([steep[k] for k in b.tolist()])
        try:
            found[part] = _beyond(graph, a, b, norm, domain, alone[part], slopes)
        except clock.Late:
            break
    return found


def _beyond(
    graph: Graph, x: Tensor, y: Tensor, norm: float, domain: Domain, alone: Tensor, steep: Tensor
) -> Tensor:
    """The same for one batch; steep: of the margins, `(N, K)`.

    In executed arithmetic the margins of the exact function also lose what rounding may take within
    the radius.
    """
    exact = replace(graph, arithmetic="exact")
    own = y.cpu()[:, None]
    balls = [share * alone for share in SHARES]
    margins = [margin_bounds(exact, x, y, radius, norm, domain).cpu() for radius in balls]

    def best(slack: Tensor | float) -> Tensor:
        radii = []
        for radius, lowest in zip(balls, margins):
            spare = (lowest - slack).scatter(1, own, math.inf)
            each = radius + (spare / steep).amin(1)
            # At the radius itself a margin may be 0: a hair inside.
            radii.append(torch.where((spare > 0).all(1), each * (1 - 1e-9), 0.0))
        return torch.stack(radii).amax(0)

    far = best(0.0)
    slack = slack_of(graph, x, y, far, norm, domain)
    return far if slack is None else torch.minimum(far, best(slack.cpu()))
