"""Margins by balls and boxes together, from a sweep of their own."""

import torch
from torch import Tensor

from wassail.certificates.bounds.ball_margins import ASCENT_STEPS, DEPTH, BallEffort, raised_margins
from wassail.certificates.bounds.balls import Balls
from wassail.certificates.bounds.crown import Sweep, margins
from wassail.certificates.bounds.rows import Length
from wassail.certificates.graph.graph import Graph
from wassail.threat import Domain


def ball_margins(
    graph: Graph,
    x: Tensor,
    y: Tensor,
    radius: Tensor | float,
    norm: float,
    domain: Domain,
    steps: int = ASCENT_STEPS,
    depth: int = DEPTH,
    inner: bool = True,
) -> Tensor:
    """Lower bounds on `theta_y - theta_j` over each sample's ball cut by the box, `(N, K)`:
    CROWN's, or those with balls in every layer where they are better. depth, inner: as in
    `BallEffort`.
    """
    x = x.to(graph.device)
    y = y.to(graph.device)
    radius = torch.as_tensor(radius, dtype=torch.float64).expand(len(x))
    moved: dict[int, Length] = {}
    sweep = Sweep(graph, Balls.make(x, radius, norm, domain), 0, None, moved).run()
    lower = margins(sweep, y)[0]
    return raised_margins(sweep, moved, y, lower, BallEffort(depth, inner=inner), steps)[0]
