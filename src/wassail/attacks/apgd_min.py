"""APGD bisected to a nearest flip: `climb` raises a loss inside a ball, `apgd_engine` bisects
its radius, per sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.apgd import climb, pick
from wassail.attacks.hunt import Hunt
from wassail.attacks.pointwise import Objective
from wassail.attacks.walk import top_rivals
from wassail.device import take
from wassail.errors import InputError, unknown
from wassail.geometry import project, steepest, vector_norm, wide_norm
from wassail.losses import ASCENTS, strongest_rival, targeted_dlr_ascent
from wassail.progress import Tick
from wassail.threat import Domain, dual

LOSSES = ("dlr", "margin", "targeted")
# bisections of a flip: after the round that found it, and at the end
QUICK = 5
SEARCH = 10


def apgd_engine(
    hunt: Hunt, tick: Tick, *, rounds: int = 10, steps: int = 20, loss: str = "dlr", rank: int = 2
) -> None:
    """The nearest flip by bisection of APGD's radius, for each sample.

    The radius starts at 1.5 times the first-order estimate `(theta_y - theta_j) / ||grad (theta_y -
    theta_j)||_s` at the sample, doubles until a round flips, then halves the bracket between the
    largest radius that failed and the nearest flip. A round starts at the nearest flip, projected
    onto its ball; before there is one, where the gradient at the sample points (going on from the
    best point of a ball that failed left one sample in six of an MNIST network unflipped). loss:
    "dlr", "margin" or "targeted", whose rival is the class with the `rank`-th largest clean logit
    (2: the runner-up).

    1 B for the estimate, `steps + 1` F and `steps` B a round at most, less where it flips, 5 F
    after a flip and 10 at the end. With few passes the rounds are shortened rather than left out.
    """
    if rounds < 1 or steps < 1 or rank < 2:
        raise InputError(
            f"rounds is {rounds}, steps is {steps}, rank is {rank}: give at least 1, 1 and 2."
        )
    if loss not in LOSSES:
        raise unknown("loss", loss, LOSSES)
    if math.isfinite(hunt.passes):
        steps = min(steps, max(int(hunt.passes) // (2 * rounds), 2))
    # The `rank`-th class, or the weakest if there are not that many.
    target = top_rivals(hunt.clean, hunt.y, rank - 1)[:, -1] if loss == "targeted" else None
    goal = _goal(hunt, loss, target)
    rows = hunt.rows
    rows = rows[hunt.able(rows, 2)]  # a gradient without a pass to use it would be wasted
    if not len(rows):
        hunt.ride(1, 2)
        return
    z = hunt.clean[rows]
    y = hunt.y[rows]
    rival = _rival(hunt, rows, z, target)[:, None]
    gradient = hunt.start.gradients(y, rival, rows)[:, 0]
    gap = (z.gather(1, y[:, None]) - z.gather(1, rival))[:, 0]
    slope = wide_norm(gradient.flatten(1), dual(hunt.norm))
    radius = ((1.5 * gap).to(slope) / slope).to(hunt.x)
    able = torch.isfinite(radius).nonzero()[
        :, 0
    ]  # where the gradient is zero there is no direction to go
    rows, gradient, x = rows[able], gradient[able], hunt.x[rows[able]]
    limit = _reach(x, hunt.norm, hunt.box(rows))
    radius = torch.minimum(radius[able], limit)
    tried = torch.zeros_like(limit)
    low = torch.zeros_like(limit)
    best = x
    radius = torch.where(
        radius < hunt.distance[rows], radius, hunt.distance[rows] / 2
    )  # a hunt may begin with flips
    for turn in range(rounds):
        rows, x, gradient, limit, radius, tried, low, best = take(
            hunt.able(rows, 1), rows, x, gradient, limit, radius, tried, low, best
        )
        if not len(rows):
            break
        known = torch.isfinite(hunt.distance[rows])
        fresh = x + steepest(x, gradient, hunt.norm, radius, hunt.box(rows))
        start = pick(known, hunt.points[rows], pick(radius > tried, fresh, best))
        best, flipped = climb(
            hunt, rows, project(start, x, hunt.norm, radius, hunt.box(rows)), radius, steps, goal
        )
        hunt.shorten(rows[flipped.nonzero()[:, 0]], QUICK)
        high = hunt.distance[rows]
        tried = radius
        # A radius that failed before the first flip says little: that round had no flip to start
        # from.
        low = torch.where(known & ~flipped, radius, low)
        low = torch.where(
            low < high, low, 0.9 * high
        )  # a flip nearer than a radius that failed: look below it
        radius = torch.where(
            torch.isfinite(high), (low + high) / 2, torch.minimum(2 * radius, limit)
        )
        tick((turn + 1) / rounds)
    hunt.shorten(hunt.rows, SEARCH)


def _rival(hunt: Hunt, rows: Tensor, z: Tensor, target: Tensor | None) -> Tensor:
    return strongest_rival(z, hunt.y[rows])[1] if target is None else target[rows]


def _goal(hunt: Hunt, loss: str, target: Tensor | None) -> Objective:
    """The loss, and the gradient of the logit difference alone: DLR's normaliser, taken as
    constant, only ranks the points.
    """

    def goal(z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y = hunt.y[rows]
        rival = _rival(hunt, rows, z, target)
        value = ASCENTS[loss](z, y)[0] if target is None else targeted_dlr_ascent(z, y, rival)[0]
        return value, torch.zeros_like(z).scatter(1, rival[:, None], 1.0).scatter(
            1, y[:, None], -1.0
        )

    return goal


def _reach(x: Tensor, norm: float, domain: Domain) -> Tensor:
    """The distance to the farthest point of the box, `(N,)`: a larger radius changes nothing."""
    if domain is None:
        return torch.full((len(x),), math.inf, dtype=x.dtype, device=x.device)
    return vector_norm(torch.maximum(domain[1] - x, x - domain[0]), norm)
