"""APGD bisected to a nearest flip: `climb` raises a loss inside a ball, `apgd_engine` bisects
its radius, per sample.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wassail.attacks.apgd import climb
from wassail.attacks.minimal.tracker import Tracker
from wassail.attacks.pointwise import Objective
from wassail.attacks.walk import top_rivals
from wassail.device import take
from wassail.errors import InputError, unknown
from wassail.geometry import column, project, steepest, vector_norm, wide_norm
from wassail.losses import ASCENTS, strongest_rival, targeted_dlr_ascent
from wassail.progress import Tick
from wassail.threat import Domain, dual

LOSSES = ("dlr", "margin", "targeted")
# bisections of a flip: after the round that found it, and at the end
QUICK = 5
SEARCH = 10


def apgd_engine(
    tracker: Tracker,
    tick: Tick,
    *,
    rounds: int = 10,
    steps: int = 20,
    loss: str = "dlr",
    rank: int = 2,
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
    if math.isfinite(tracker.passes):
        steps = min(steps, max(int(tracker.passes) // (2 * rounds), 2))
    # The `rank`-th class, or the weakest if there are not that many.
    target = top_rivals(tracker.clean, tracker.y, rank - 1)[:, -1] if loss == "targeted" else None
    goal = _goal(tracker, loss, target)
    rows = tracker.rows
    rows = rows[tracker.affordable(rows, 2)]  # a gradient without a pass to use it would be wasted
    if not len(rows):
        tracker.execute_gradients(1, 2)
        return
    rows, gradient, radius, limit = _first_radii(tracker, rows, target)
    x = tracker.x[rows]
    tried = torch.zeros_like(limit)
    low = torch.zeros_like(limit)
    best = x
    for turn in range(rounds):
        rows, x, gradient, limit, radius, tried, low, best = take(
            tracker.affordable(rows, 1), rows, x, gradient, limit, radius, tried, low, best
        )
        if not len(rows):
            break
        box = tracker.box(rows)
        known = torch.isfinite(tracker.distance[rows])
        fresh = x + steepest(x, gradient, tracker.norm, radius, box)
        start = torch.where(column(radius > tried, x), fresh, best)
        start = torch.where(column(known, x), tracker.points[rows], start)
        start = project(start, x, tracker.norm, radius, box)
        best, flipped = climb(tracker, rows, start, radius, steps, goal)
        tracker.shorten(rows[flipped.nonzero()[:, 0]], QUICK)
        high = tracker.distance[rows]
        tried = radius
        # A radius that failed before the first flip says little: that round had no flip to start
        # from.
        low = torch.where(known & ~flipped, radius, low)
        # A flip nearer than a radius that failed: look below it.
        low = torch.where(low < high, low, 0.9 * high)
        wider = torch.minimum(2 * radius, limit)
        radius = torch.where(torch.isfinite(high), (low + high) / 2, wider)
        tick((turn + 1) / rounds)
    tracker.shorten(tracker.rows, SEARCH)


def _first_radii(
    tracker: Tracker, rows: Tensor, target: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of the rows whose gradient is not zero, `(m,)`, that gradient, the first radius, and
    the largest one that makes sense. 1 B.
    """
    z = tracker.clean[rows]
    y = tracker.y[rows]
    rival = _rival(tracker, rows, z, target)[:, None]
    gradient = tracker.start.gradients(y, rival, rows)[:, 0]
    gap = (z.gather(1, y[:, None]) - z.gather(1, rival))[:, 0]
    slope = wide_norm(gradient.flatten(1), dual(tracker.norm))
    radius = ((1.5 * gap).to(slope) / slope).to(tracker.x)
    some = torch.isfinite(radius).nonzero()[:, 0]
    rows, gradient = rows[some], gradient[some]
    limit = _reach(tracker.x[rows], tracker.norm, tracker.box(rows))
    radius = torch.minimum(radius[some], limit)
    # The search may begin with flips.
    known = tracker.distance[rows]
    return rows, gradient, torch.where(radius < known, radius, known / 2), limit


def _rival(tracker: Tracker, rows: Tensor, z: Tensor, target: Tensor | None) -> Tensor:
    return strongest_rival(z, tracker.y[rows])[1] if target is None else target[rows]


def _goal(tracker: Tracker, loss: str, target: Tensor | None) -> Objective:
    """The loss, and the gradient of the logit difference alone: DLR's normaliser, taken as
    constant, only ranks the points.
    """

    def goal(z: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y = tracker.y[rows]
        rival = _rival(tracker, rows, z, target)
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
